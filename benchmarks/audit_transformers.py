"""Audits transformers' own ``generate`` with tiny random Llama models: plain, assisted, prompt lookup.

The mode ``ensemble`` is assisted generation with ``assistant_ensemble_weight=0.7``, which is documented to change the
law: a fault must be found there.

    python benchmarks/audit_transformers.py --minutes 5 --out benchmarks/results/audit_transformers.json

The last line of stdout is one JSON document; docs/audit-findings.md quotes it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import process_time
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.audit.engines import TransformersEngine
from slipstream.audit.law import ModelScorer
from slipstream.audit.run import prepare, single_findings, verdict
from slipstream.audit.suite import Settings
from slipstream.models.huggingface import HuggingFaceModel

_EOS = 31


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=5.0, help="of processor time, for each mode")
    parser.add_argument("--modes", nargs="*", default=["plain", "assisted", "lookup", "ensemble"])
    parser.add_argument("--tv", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target, draft = tiny_llama(0), tiny_llama(1)
    soften(draft, target)
    scorer = ModelScorer(HuggingFaceModel(target))
    settings = Settings(variation=args.tv, seed=args.seed)
    document: dict[str, Any] = {"transformers": transformers.__version__, "torch": torch.__version__, "modes": {}}
    for mode in args.modes:
        assistant = draft if mode in ("assisted", "ensemble") else None
        lookup = args.k if mode == "lookup" else 0
        mixed = {"assistant_ensemble_weight": 0.7} if mode == "ensemble" else {}
        engine = TransformersEngine(target, assistant, lookup, args.k, (_EOS,), **mixed)
        document["modes"][mode] = audited(engine, scorer, settings, args.minutes)
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


def tiny_llama(seed: int) -> Any:
    """A random Llama of two layers over 32 ids, in float32, whose laws are neither flat nor sure."""
    config = LlamaConfig(
        vocab_size=32,
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


def audited(engine: Any, scorer: Any, settings: Settings, minutes: float) -> dict[str, Any]:
    """All tests of one engine."""
    singles = single_findings(engine, scorer, settings)
    audit = prepare(engine, scorer, settings)
    until = process_time() + 60 * minutes
    while process_time() < until and audit.step():
        pass
    findings = [*singles, *audit.findings()]
    said = verdict(findings, [])
    print(f"{engine.name}: {said} ({audit.samples} answers)", flush=True)
    for f in findings:
        p = "" if f.p_value is None else f", p = {f.p_value:.2g}"
        print(f"  {f.result:9} {f.name} ({f.samples}{p}): {f.detail} {f.detects or ''}", flush=True)
        if f.result == "fault":
            for row in f.table:
                print(f"     {row}", flush=True)
    rows = [
        {
            "name": f.name,
            "result": f.result,
            "samples": f.samples,
            "p": f.p_value,
            "detects": f.detects,
            "detail": f.detail,
            "table": f.table,
        }
        for f in findings
    ]
    return {"engine": engine.name, "verdict": said, "answers": audit.samples, "findings": rows}


if __name__ == "__main__":
    main()
