"""Milliseconds for a token of a prompt that is read in passes of so many rows.

    python benchmarks/reading.py TARGET [--rows 6,12,24,48,96] [--tokens 192] [--turns 3] [--weights fp16] [--out FILE]

All numbers of rows are in each other's turns. Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

from output import publish

from slipstream.measure.machine import describe_machine
from slipstream.measure.spread import spread
from slipstream.models.base import Model, feed
from slipstream.models.load import load_model


def read(model: Model, tokens: Sequence[int], rows: int) -> float:
    """Milliseconds a token."""
    cache, start = model.new_cache(), perf_counter()
    for at in range(0, len(tokens), rows):
        feed(model, tokens[at : at + rows], cache, 1)
    return 1e3 * (perf_counter() - start) / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--rows", default="6,12,24,48,96")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    model = load_model(given.target, weights=given.weights)
    tokens = [i * 7919 % min(model.vocab_size, 32_000) for i in range(given.tokens)]
    found: dict[int, list[float]] = {int(rows): [] for rows in given.rows.split(",")}
    read(model, tokens, given.tokens)  # warm up
    for _ in range(given.turns):
        for rows, times in found.items():
            times.append(read(model, tokens, rows))
    for rows, times in found.items():
        one = spread(times)
        print(f"{rows:4} rows: {one.median:.1f} ms a token [{one.low:.1f}-{one.high:.1f}]")
    document = {
        "target": Path(given.target).name,
        "tokens": given.tokens,
        "turns": given.turns,
        "machine": asdict(describe_machine(model.device)),
        "milliseconds": {str(rows): spread(times) for rows, times in found.items()},
    }
    publish(document, given.out)


if __name__ == "__main__":
    main()
