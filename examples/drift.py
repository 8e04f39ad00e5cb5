"""A target changes under its draft: acceptance falls, and retraining on new traffic brings it back. With a picture.

    python examples/drift.py [FOLDER]

The target is a small Llama that this script trains on Python code. A draft is distilled from it. Then the target is
replaced by itself, fine-tuned (LoRA) on licence text, and traffic follows: its answers are captured as ``slipstream
serve --capture`` does. The draft is distilled once more, from that traffic, and taken only if it is surely better. The
answers are the target's own all the time; only their speed depends on the draft. Minutes on two cores.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

from slipstream import SpeculativeDecoding, load_model
from slipstream.distill.documents import Document
from slipstream.distill.job import Job
from slipstream.distill.run import Evaluation, distill
from slipstream.distill.tokens import encode_documents, pack
from slipstream.distill.train import Step

PROMPTS, ANSWER, LENGTH = 48, 64, 128


@dataclass(frozen=True)
class Size:
    """How much of everything; smaller for a quick look."""

    vocabulary: int = 1024
    width: int = 128
    layers: int = 6
    steps: int = 250
    draft_steps: int = 200
    prompts: int = PROMPTS


class Silent:
    """Shows of a training run only where it ends up."""

    def phase(self, what: str) -> None: ...

    def begin(self, steps: int, done: int) -> None: ...

    def step(self, step: Step) -> None: ...

    def evaluation(self, evaluation: Evaluation, best: bool) -> None:
        print(f"  step {evaluation.step}: accepted {evaluation.acceptance[1]:.2f}")


def main(folder: str = "drift", size: Size | None = None) -> dict[str, list[float]]:
    size, work = size or Size(), Path(folder)
    work.mkdir(parents=True, exist_ok=True)
    code, licence = documents_of_code(), documents_of_licences()
    print("training a target on code")
    target = train_target(work / "target", code, size)
    (work / "code.jsonl").write_text("".join(json.dumps({"text": d.text}) + "\n" for d in code))
    print("distilling a draft from it")
    draft = distilled(str(target), "prune:2", work / "code.jsonl", work / "draft", size)
    rates = {"code, target and draft": ask(target, draft, code, size)}
    print("the target is replaced by itself, fine-tuned on licences")
    changed = fine_tune(target, work / "changed", licence, size)
    rates["licences, target replaced"] = ask(changed, draft, licence, size, work / "traffic.jsonl")
    print("retraining on the captured traffic")
    newer = distilled(str(changed), str(draft), work / "traffic.jsonl", work / "newer-draft", size, must_gain=True)
    rates["licences, draft retrained"] = ask(changed, newer, licence, size)
    for phase, values in rates.items():
        print(f"{phase}: accepted {sum(values) / len(values):.2f}")
    draw(rates, work / "drift.png")
    return rates


# --- texts ------------------------------------------------------------------------------------------------------------


def documents_of_code(count: int = 120) -> list[Document]:
    """Modules of Python's standard library, a few thousand characters of each."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:count]
    return [Document(f.name, "code", f.name, text=f.read_text("utf-8", "replace")[:6000]) for f in files]


def documents_of_licences() -> list[Document]:
    """Paragraphs of licences that come with Python packages and the system."""
    places = [*Path("/usr/share/common-licenses").glob("*"), *Path(sysconfig.get_path("purelib")).glob("*/LICENSE*")]
    places += Path(sysconfig.get_path("purelib")).glob("*/licenses/*")
    texts = {f.read_text("utf-8", "replace") for f in sorted(places) if f.is_file() and not f.is_symlink()}
    parts = dict.fromkeys(t[at : at + 1500] for t in sorted(texts) for at in range(0, min(len(t), 24000), 1500))
    return [Document(f"licence {i}", "licence", str(i), text=t) for i, t in enumerate(p for p in parts if len(p) > 400)]


# --- models -----------------------------------------------------------------------------------------------------------


def train_target(out: Path, documents: Sequence[Document], size: Size) -> Path:
    """A small Llama and its tokenizer, trained on ``documents``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer([d.text for d in [*documents, *documents_of_licences()]], size.vocabulary)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": size.width, "intermediate_size": 3 * size.width}
    config = LlamaConfig(
        **sizes,
        vocab_size=len(tokenizer),
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    learn(model, documents, tokenizer, size.steps, 3e-3)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def make_tokenizer(texts: Sequence[str], size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>")


def learn(model: Any, documents: Sequence[Document], tokenizer: Any, steps: int, rate: float) -> None:
    """Plain training on the texts' tokens."""
    rows = pack(encode_documents(documents, tokenizer, len(tokenizer), "target"), LENGTH, 0)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=rate)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        batch = torch.randint(len(rows), (16,), generator=generator)
        logits = model(rows.ids[batch], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[rows.scored[batch]], rows.labels[batch][rows.scored[batch]])
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            print(f"  step {step + 1}: loss {float(loss.detach()):.2f}")


def fine_tune(source: Path, out: Path, documents: Sequence[Document], size: Size) -> Path:
    """The model in ``source``, tuned to another style with LoRA."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    torch.manual_seed(0)
    warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers in ways that it is giving up
    tuned = get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"))
    learn(tuned, documents, tokenizer, size.steps, 3e-3)
    tuned.merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def distilled(target: str, init: str, data: Path, out: Path, size: Size, must_gain: bool = False) -> Path:
    """What ``slipstream distill`` does."""
    settings: dict[str, Any] = {"length": LENGTH, "batch": 16, "steps": size.draft_steps, "evaluate_every": 50}
    job = Job(target=target, out=out, init=init, data=(str(data),), must_gain=must_gain, temperature=1, **settings)
    distill(job, Silent())
    return out


# --- traffic ----------------------------------------------------------------------------------------------------------


def ask(
    target: Path, draft: Path, documents: Sequence[Document], size: Size, capture: Path | None = None
) -> list[float]:
    """Acceptance of each answer to the beginnings of documents; prompts and answers go to ``capture``."""
    model = load_model(target)
    decoding = SpeculativeDecoding(
        model, load_model(draft), k=4, temperature=1.0, max_new_tokens=ANSWER, ignore_eos=True
    )
    prompts = [d.text[:200] for d in documents[:: max(1, len(documents) // size.prompts)][: size.prompts]]
    outputs = decoding.complete(prompts, seed=0)
    if capture is not None:
        rows = [{"prompt": p, "answer": o.text} for p, o in zip(prompts, outputs, strict=True)]
        more = decoding.complete([d.text[:200] for d in documents], seed=1)
        rows += [{"prompt": d.text[:200], "answer": o.text} for d, o in zip(documents, more, strict=True)]
        capture.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [o.stats.acceptance_rate for o in outputs]


def draw(rates: dict[str, list[float]], file: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    start = 0
    for colour, (phase, values) in zip(("#0072b2", "#d55e00", "#009e73"), rates.items(), strict=True):
        axes.plot(range(start, start + len(values)), values, ".", color=colour, label=phase)
        mean = sum(values) / len(values)
        axes.hlines(mean, start, start + len(values) - 1, color=colour)
        start += len(values)
    axes.set(xlabel="request", ylabel="accepted draft tokens", ylim=(0, 1))
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    print(file)


if __name__ == "__main__":
    main(*sys.argv[1:2])
