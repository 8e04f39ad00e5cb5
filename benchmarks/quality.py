"""What reduced weights cost: perplexity and greedy agreement against float32, on fixed texts.

    python benchmarks/quality.py MODEL [--weights fp16,int8] [--out benchmarks/results/quality-NAME.json]

Prints a table and, as the last line, one JSON document. Needs memory for the float32 weights.
"""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slipstream import load_model

HERE = Path(__file__).parent
TEXTS = {
    "code": Path(textwrap.__file__),
    "prose": HERE / "texts" / "prose.txt",
    "licence": HERE.parent / "LICENSE",
}
MOST_TOKENS = 512


def score(model: Any, ids: list[int]) -> tuple[float, torch.Tensor]:
    """Mean negative log-likelihood a token, and the likeliest next id at each position."""
    logits = model.forward(ids, model.new_cache(), len(ids)).float()
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]))
    return float(losses), logits[:-1].argmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", default="fp16,int8")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    rows: list[dict[str, Any]] = []
    reference: dict[str, tuple[float, torch.Tensor]] = {}
    for weights in ["fp32", *args.weights.split(",")]:
        model: Any = load_model(args.model, weights=weights)
        for name, file in TEXTS.items():
            ids = model.tokenizer(file.read_text(encoding="utf-8"))["input_ids"][:MOST_TOKENS]
            loss, best = score(model, ids)
            base_loss, base_best = reference.setdefault(name, (loss, best))
            rows.append(
                {
                    "weights": weights,
                    "text": name,
                    "tokens": len(ids),
                    "perplexity": math.exp(loss),
                    "change_percent": 100 * (math.exp(loss - base_loss) - 1),
                    "greedy_agreement": float((best == base_best).float().mean()),
                }
            )
        del model

    table = Table("weights", "text", "tokens", "perplexity", "change", "same argmax", title=Path(args.model).name)
    for r in rows:
        change, agreement = f"{r['change_percent']:+.2f} %", f"{r['greedy_agreement']:.3f}"
        table.add_row(r["weights"], r["text"], str(r["tokens"]), f"{r['perplexity']:.3f}", change, agreement)
    Console().print(table)
    document = json.dumps({"model": Path(args.model).name, "rows": rows})
    if args.out:
        args.out.write_text(document + "\n", encoding="utf-8")
    print(document)


if __name__ == "__main__":
    main()
