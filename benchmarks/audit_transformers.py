"""Audits transformers' own ``generate`` with tiny random models, in each of its ways of drafting.

plain and assisted: a Llama, and another one that drafts for it. lookup: drafts from the prompt. early-exit: the
Llama's own first layer drafts. tokenizers: the other Llama has the same words under other ids, and a few of its own;
tokenizers-sorted: the same, with vocabularies that come in the order of their ids. single-position: a Gemma 4 with
the assistant that reads its caches. ensemble: ``assistant_ensemble_weight=0.7``, which is documented to change the
law, so that a fault must be found.

    python benchmarks/audit_transformers.py --minutes 5 --out benchmarks/results/audit_transformers.json

What an installed version does not have is said and left out. The last line of stdout is one JSON document;
docs/audit-findings.md quotes it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import process_time
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from slipstream.audit.engines import TransformersEngine
from slipstream.audit.law import Row
from slipstream.audit.run import prepare, run_controls, single_findings, verdict
from slipstream.audit.suite import Settings
from slipstream.audit.types import EngineError

_EOS = 31
_MODES = (
    "plain",
    "assisted",
    "lookup",
    "early-exit",
    "tokenizers",
    "tokenizers-sorted",
    "single-position",
    "ensemble",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0, help="of processor time, for each mode")
    parser.add_argument("--modes", nargs="*", default=list(_MODES))
    parser.add_argument("--tv", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = Settings(variation=args.tv, seed=args.seed)
    controls = run_controls(settings, lambda *_: None)
    document: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "settings": asdict(settings),
        "controls": [asdict(c) for c in controls],
        "modes": {},
    }
    for mode in args.modes:
        try:
            engine, target = engine_of(mode, args.k)
            document["modes"][mode] = audited(engine, Forward(target), settings, controls, args.minutes)
        except (EngineError, ImportError, TypeError, ValueError, AttributeError, KeyError, RuntimeError) as error:
            print(f"{mode}: failed with {type(error).__name__}: {error}", flush=True)
            document["modes"][mode] = {"verdict": "failed", "why": f"{type(error).__name__}: {error}"}
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


# --- engines ----------------------------------------------------------------------------------------------------------


def engine_of(mode: str, k: int) -> tuple[TransformersEngine, Any]:
    """``generate`` in one mode, and its target."""
    if mode == "single-position":
        target, assistant = tiny_gemmas(k)
        engine = TransformersEngine(target, assistant, k=k, eos=(_EOS,))
        engine.name += ", Gemma 4 and its assistant"
        return engine, target
    target = tiny_llama(0)
    if mode.startswith("tokenizers"):
        return two_tokenizers(target, k, ordered=mode.endswith("sorted")), target
    draft = tiny_llama(1)
    soften(draft, target)
    assistant = draft if mode in ("assisted", "ensemble") else None
    extra: dict[str, Any] = {}
    if mode == "ensemble":
        extra = {"assistant_ensemble_weight": 0.7}
    if mode == "early-exit":
        extra = {"assistant_early_exit": 1, "num_assistant_tokens": k}
    return TransformersEngine(target, assistant, k if mode == "lookup" else 0, k, (_EOS,), **extra), target


def tiny_llama(seed: int, vocab_size: int = 32) -> Any:
    """A random Llama of two layers, in float32, whose laws are neither flat nor sure."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=_EOS,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


def soften(draft: Any, target: Any) -> None:
    """Move the draft towards the target, so that it is right now and then."""
    with torch.no_grad():
        for own, other in zip(draft.parameters(), target.parameters(), strict=True):
            own.mul_(0.4).add_(0.6 * other)


class TwoTokenizers(TransformersEngine):
    """Assisted generation with the tokenizers of both models."""

    def __init__(self, target: Any, draft: Any, k: int, tokenizers: tuple[Any, Any]) -> None:
        call = {"tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}
        super().__init__(target, draft, k=k, eos=(_EOS,), call=call)
        self.name += ", two tokenizers"


def two_tokenizers(target: Any, k: int, *, ordered: bool, seed: int = 2) -> TwoTokenizers:
    """A draft that has the target's words in another order, four of its own, and the target's weights for them."""
    draft = tiny_llama(1, 36)
    words = [f"w{i}" for i in range(31)] + ["end"]
    order = [*words, "x0", "x1", "x2", "x3"]
    random.Random(seed).shuffle(order)
    places = torch.tensor([order.index(word) for word in words])
    with torch.no_grad():
        for (name, own), other in zip(draft.named_parameters(), target.parameters(), strict=True):
            if "embed_tokens" in name or "lm_head" in name:
                own[places] = 0.4 * own[places] + 0.6 * other
            else:
                own.mul_(0.4).add_(0.6 * other)
    kind = Ordered if ordered else PreTrainedTokenizerFast
    return TwoTokenizers(target, draft, k, (word_tokenizer(words, kind), word_tokenizer(order, kind)))


class Ordered(PreTrainedTokenizerFast):
    """Tells its vocabulary in the order of ids, which no tokenizer promises."""

    def get_vocab(self) -> dict[str, int]:
        return dict(sorted(super().get_vocab().items(), key=lambda pair: pair[1]))


def word_tokenizer(words: Sequence[str], kind: Any) -> Any:
    """A word, an id: its place in ``words``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="end"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return kind(tokenizer_object=tokenizer, eos_token="end", clean_up_tokenization_spaces=False)


def tiny_gemmas(k: int) -> tuple[Any, Any]:
    """A random Gemma 4, and a random assistant that works from its caches and hidden states."""
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4ForCausalLM,
        Gemma4TextConfig,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "initializer_range": 0.3,
        "eos_token_id": _EOS,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    target = Gemma4ForCausalLM(Gemma4TextConfig(**sizes)).eval()
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**sizes), backbone_hidden_size=32)
    assistant = Gemma4AssistantForCausalLM(config).eval()
    assistant.generation_config.num_assistant_tokens = k
    return target, assistant


class Forward:
    """The law by one pass of transformers over prompt and answer, without a cache."""

    eos_token_ids = (_EOS,)
    tokenizer = None

    def __init__(self, target: Any) -> None:
        self.name = type(target).__name__
        self.vocab_size = int(target.config.get_text_config().vocab_size)
        self._target = target

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Row:
        """As ``Scorer`` has it."""
        with torch.inference_mode():
            rows = self._target(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        found: Row = rows[len(prompt) - 1 :].double().numpy()
        return found


# --- audits -----------------------------------------------------------------------------------------------------------


def audited(engine: Any, scorer: Any, settings: Settings, controls: Sequence[Any], minutes: float) -> dict[str, Any]:
    """All tests of one engine, but of parameters that it refuses aloud."""
    engine.probe()
    for name, said in engine.unsupported.items():
        print(f"{engine.name}: refuses {name}: {said}", flush=True)
    singles = single_findings(engine, scorer, settings)
    audit = prepare(engine, scorer, settings)
    until = process_time() + 60 * minutes
    while process_time() < until and audit.step():
        pass
    findings = [*singles, *audit.findings()]
    said = verdict(findings, controls)
    print(f"{engine.name}: {said} ({audit.samples} answers)", flush=True)
    for f in findings:
        if f.result == "fault":
            p = "" if f.p_value is None else f", p = {f.p_value:.2g}"
            print(f"  {f.name} ({f.samples}{p}): {f.detail}", flush=True)
            for row in f.table:
                print(f"     {row}", flush=True)
    kept = ("name", "result", "samples", "p_value", "detects", "detail", "table")
    rows = [{name: getattr(f, name) for name in kept} for f in findings]
    told = {"engine": engine.name, "verdict": said, "answers": audit.samples, "refused": engine.unsupported}
    return {**told, "findings": rows}


if __name__ == "__main__":
    main()
