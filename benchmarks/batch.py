"""Tokens per second of several requests at once, plain and speculative.

    python benchmarks/batch.py TARGET --draft DRAFT [--requests 1,2,4,8,16,32] [--out benchmarks/results/batch.json]

In every turn each number of requests is answered plainly and with drafts, in turn; ratios are taken within a turn.
Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from output import publish
from rich.console import Console
from rich.table import Table

from slipstream import SamplingParams, load_model
from slipstream.answers import Setting
from slipstream.drafters import make_drafter
from slipstream.engine import Engine
from slipstream.goodput import Goodput
from slipstream.measure.machine import describe_machine
from slipstream.measure.prompts import encoded, read_prompts
from slipstream.measure.spread import spread
from slipstream.seats import Limits
from slipstream.types import Output, Request


def answer(setting: Setting, requests: Sequence[Request]) -> tuple[list[Output], float]:
    """The answers to all requests at once, and the seconds that they took; no prefixes are kept."""
    engine = Engine(setting, Limits(requests=len(requests), rows=64, prefix=0))
    start = perf_counter()
    outputs = engine.answers(requests)
    return outputs, perf_counter() - start


def measure(
    settings: dict[str, Setting], prompts: list[tuple[int, ...]], given: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of the table."""
    params = SamplingParams(temperature=given.temperature, max_new_tokens=given.new, ignore_eos=True)
    found: dict[tuple[int, str], list[tuple[float, float, float]]] = {}
    for turn in range(given.turns):
        for count in given.requests:
            requests = [Request(prompts[(turn + i) % len(prompts)], params) for i in range(count)]
            for way, setting in settings.items():
                outputs, seconds = answer(setting, requests)
                tokens = sum(len(o.tokens) for o in outputs)
                drafted, rounds = sum(o.stats.drafted for o in outputs), sum(o.stats.rounds for o in outputs)
                found.setdefault((count, way), []).append((tokens / seconds, drafted / rounds, tokens / rounds))
    rows = []
    for count in given.requests:
        plain, fast = found[count, "plain"], found[count, "speculative"]
        rows.append(
            {
                "requests": count,
                "plain": spread(a[0] for a in plain),
                "speculative": spread(b[0] for b in fast),
                "speed_up": spread(b[0] / a[0] for a, b in zip(plain, fast, strict=True)),
                "drafted_a_round": spread(b[1] for b in fast),
                "tokens_a_round": spread(b[2] for b in fast),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    names = {"plain": "plain tok/s", "speculative": "speculative tok/s", "speed_up": "speed-up"}
    names |= {"drafted_a_round": "k", "tokens_a_round": "tokens a round"}
    table = Table("requests", *names.values())
    for row in rows:
        table.add_row(
            str(row["requests"]), *(f"{row[n].median:.2f} [{row[n].low:.2f}-{row[n].high:.2f}]" for n in names)
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--weights", default="fp16")
    parser.add_argument("--draft-weights", default="int8")
    parser.add_argument("--requests", default="1,2,4,8,16,32")
    parser.add_argument("--prompts", help="as of slipstream bench")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.requests = [int(n) for n in given.requests.split(",")]
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    target = load_model(given.target, weights=given.weights)
    draft = given.draft if given.draft == "suffix" else load_model(given.draft, weights=given.draft_weights)
    settings = {
        way: Setting(target, make_drafter(one, target), Goodput(), target.tokenizer, "block", coupled=False)
        for way, one in (("plain", None), ("speculative", draft))
    }
    prompts = [p.ids for p in encoded(read_prompts(given.prompts), target.tokenizer, target.name)]
    rows = measure(settings, prompts, given)
    show(rows)
    document = {
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
    }
    publish(document, given.out)


if __name__ == "__main__":
    main()
