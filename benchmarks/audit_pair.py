"""Writes a tiny target and a draft like it, as folders and as GGUF files, for audits of other engines.

    python benchmarks/audit_pair.py DIR

DIR then has target/ and draft/, and of each a GGUF file with F32, F16 and Q8_0 weights. They are random Llamas of two
layers over 300 tokens: an answer takes milliseconds, laws are neither flat nor sure, and prompts are short and repeat
themselves, so that there is something to copy.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gguf_files import tiny_model, tokenizer_metadata, write_gguf
from tokenizers_of_tests import gpt2_like

#: How much of the target the draft is.
_LIKENESS = 0.92
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    tokenizer = gpt2_like(300)
    tokenizer.pad_token = tokenizer.bos_token = tokenizer.eos_token
    tokenizer.chat_template = _TEMPLATE
    target, draft = (_model(seed, tokenizer) for seed in (0, 1))
    with torch.no_grad():
        for own, other in zip(draft.parameters(), target.parameters(), strict=True):
            own.mul_(1 - _LIKENESS).add_(_LIKENESS * other)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        for kind in ("F32", "F16", "Q8_0"):
            path = folder / f"{name}-{kind.lower()}.gguf"
            write_gguf(path, model, kind=GGMLQuantizationType[kind], metadata=_metadata(tokenizer, kind))
    _tell(target, draft)


def _metadata(tokenizer: Any, kind: str) -> dict[str, Any]:
    return {
        **tokenizer_metadata(tokenizer),
        "general.name": "tiny",
        "general.file_type": {"F32": 0, "F16": 1, "Q8_0": 7}[kind],
        "llama.rope.dimension_count": 32,
        "llama.vocab_size": 300,
        "tokenizer.ggml.add_bos_token": False,
    }


def _model(seed: int, tokenizer: Any) -> Any:
    """Heads of 32, which vLLM's attention wants at least, and no end but the tokenizer's."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
    eos = tokenizer.eos_token_id
    return tiny_model("llama", seed=seed, **sizes, eos_token_id=eos, bos_token_id=eos, pad_token_id=eos)


def _tell(target: Any, draft: Any) -> None:
    ids = torch.randint(2, 200, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p, q = (model(ids).logits[0].softmax(-1) for model in (target, draft))
    print(f"mean over 64 random tokens of sum min(P, q): {torch.minimum(p, q).sum(-1).mean():.2f}")
    print(f"mean largest probability of the target: {p.max(-1).values.mean():.2f}")


if __name__ == "__main__":
    main()
