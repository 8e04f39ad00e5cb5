"""What forward passes cost: several kinds of weights of one target, and a draft, in the same turns.

    python benchmarks/passes.py TARGET --draft DRAFT [--weights fp16,int8] [--out benchmarks/results/passes.json]

Every turn times each pass once and reads the memory bandwidth; ratios are taken within a turn. Prints tables and, as
the last line, one JSON document.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from output import publish
from rich.console import Console
from rich.table import Table

from slipstream import SpeculativeDecoding, load_model
from slipstream.measure.bandwidth import Bandwidth, weight_bytes
from slipstream.measure.costs import ROWS, make_probes, pass_costs, run_probes
from slipstream.measure.machine import describe_machine
from slipstream.measure.spread import spread


def load(given: argparse.Namespace) -> dict[str, Any]:
    """The models as decoding uses them, by what tables call them."""
    targets = {f"target {w}": load_model(given.target, weights=w) for w in given.weights.split(",")}
    if given.draft is None:
        return targets
    draft = load_model(given.draft, weights=given.draft_weights)
    spec = SpeculativeDecoding(next(iter(targets.values())), draft)
    return {**targets, f"draft {given.draft_weights}": spec.drafter.model}  # type: ignore[attr-defined]


def measure(models: dict[str, Any], context: int, count: int) -> dict[str, Any]:
    """Passes of all models over each number of tokens, v(n), shares of the limit, and ratios between the targets."""
    tokens = [1 + i % 97 for i in range(context + max(ROWS))]
    probes = {name: make_probes(model, tokens, context) for name, model in models.items()}
    memory = Bandwidth(torch.device("cpu"))
    turns, bandwidth = [], []
    for turn in run_probes([p for some in probes.values() for p in some], count):
        turns.append(turn)
        bandwidth.append(memory.once())
    found: dict[str, Any] = {"bytes_per_second": spread(bandwidth), "models": {}, "ratios": {}}
    columns: dict[tuple[str, int], list[float]] = {}
    at = 0
    for name, some in probes.items():
        own = [turn[at : at + len(some)] for turn in turns]
        at += len(some)
        columns |= {(name, len(p.tokens)): [turn[i] for turn in own] for i, p in enumerate(some)}
        size = weight_bytes(models[name])
        least = [size / b for b in bandwidth]
        found["models"][name] = {
            "weight_bytes": size,
            "passes": pass_costs(some, own),
            "share_of_limit": spread(a / turn[0] for a, turn in zip(least, own, strict=True)),
            "over_limit": spread(turn[0] / a for a, turn in zip(least, own, strict=True)),
        }
    first, *others = [name for name in models if name.startswith("target")]
    for other in others:
        for rows in (1, 5):
            pairs = zip(columns[first, rows], columns[other, rows], strict=True)
            found["ratios"][f"{first} / {other}, {rows} tokens"] = spread(a / b for a, b in pairs)
    return found


def show(found: dict[str, Any]) -> None:
    console = Console(width=140)
    console.print(f"memory reads {found['bytes_per_second'].median / 1e9:.1f} GB/s")
    for name, model in found["models"].items():
        table = Table("n", *(str(p.rows) for p in model["passes"]))
        table.add_row("ms", *(f"{1000 * p.seconds.median:.1f}" for p in model["passes"]))
        table.add_row("v(n)", *(f"{p.v.median:.2f}" for p in model["passes"]))
        share = model["share_of_limit"]
        console.print(
            f"\n{name}: {model['weight_bytes'] / 1e6:,.0f} MB, a pass over one token reaches {share.median:.0%} "
            f"[{share.low:.0%}-{share.high:.0%}] of the limit"
        )
        console.print(table)
    for name, ratio in found["ratios"].items():
        console.print(f"{name}: {ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--weights", default="fp16,int8")
    parser.add_argument("--draft-weights", default="int8")
    parser.add_argument("--context", type=int, default=384)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    found = measure(load(given), given.context, given.turns)
    show(found)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    document = {"settings": settings, "machine": describe_machine(torch.device("cpu")), **found}
    publish(document, given.out)


if __name__ == "__main__":
    main()
