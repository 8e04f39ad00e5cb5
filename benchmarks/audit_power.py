"""How often an audit catches each published fault, and how often it blames a correct decoder.

    python benchmarks/audit_power.py --repeats 100 --out benchmarks/results/audit_power.json

Each repetition has prompts and random numbers of its own. The target is the toy one that every audit's controls use.
The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from slipstream.audit.reference import FAULTS
from slipstream.audit.run import run_control
from slipstream.audit.suite import Settings

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--faults", nargs="*", default=["correct", *FAULTS])
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0, help="at most, for one repetition")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: dict[str, Row] = {}
    for fault in args.faults:
        rows[fault] = repeated(fault, range(args.first_seed, args.first_seed + args.repeats), args.seconds)
        print(line(fault, rows[fault]), flush=True)
        document = {"benchmark": "audit_power", "repeats": args.repeats, "rows": rows}
        if args.out:
            args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


def repeated(fault: str, seeds: range, seconds: float) -> Row:
    """One control, once for each seed."""
    times, controls = [], []
    for seed in seeds:
        start = perf_counter()
        controls.append(run_control(None if fault == "correct" else fault, Settings(seed=seed), seconds))
        times.append(perf_counter() - start)
    by: dict[str, int] = {}
    for control in controls:
        by[control.found_by] = by.get(control.found_by, 0) + 1
    return {
        "as_it_must": sum(c.as_it_must for c in controls),
        "of": len(controls),
        "median_answers": median(c.samples for c in controls),
        "most_answers": max(c.samples for c in controls),
        "longest_seconds": round(max(times), 1),
        "found_by": dict(sorted(by.items(), key=lambda pair: -pair[1])[:4]),
    }


def line(fault: str, row: Row) -> str:
    what = "passed" if fault == "correct" else "caught"
    return (
        f"{fault:20} {what} {row['as_it_must']:3} of {row['of']:3}   answers {row['median_answers']:6.0f} (median) "
        f"{row['most_answers']:6} (most)   {next(iter(row['found_by']))}"
    )


if __name__ == "__main__":
    main()
