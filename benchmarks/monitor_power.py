"""How soon the monitor tells a fall of acceptance, against how often it cries wolf, on simulated services.

    python benchmarks/monitor_power.py --out benchmarks/results/monitor_power.json --plot docs/monitor.svg

Twenty services (1 to 32 answers at a time, k of 3 to 6, answers and stretches of uneven acceptance) run at 68 % for
``--tokens`` draft tokens each, then at 41 %. Each row is one setting of the stated rate of false alarms; *naive* is the
same test with the variance of independent tokens, *mixed* are services whose answers differ much more (a spread of
log-odds of 0.8). The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.monitor.drift import Detector, Settings, start, step
from slipstream.monitor.simulation import Service, services, simulate

LOOK = 100
USUAL, FALLEN = 0.68, 0.41
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=200_000, help="stationary draft tokens of each service")
    parser.add_argument("--falls", type=int, default=10, help="falls of each service")
    parser.add_argument("--stated", type=float, nargs="*", default=[1e5, 1e6, 1e7, 1e8, 1e9])
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    usual = services(20, USUAL)
    mixed = [replace(s, of_answers=0.8) for s in usual]
    rows = []
    for stated in args.stated:
        rows.append(measured("usual", usual, Settings(false_alarm_every=stated), args))
        print(line(rows[-1]), flush=True)
    rows.append(measured("mixed", mixed, Settings(), args))
    print(line(rows[-1]), flush=True)
    rows.append(measured("naive", usual, Settings(tolerance=0.0), args))
    print(line(rows[-1]), flush=True)
    document = {"benchmark": "monitor_power", "tokens": args.tokens, "seed": args.seed, "rows": rows}
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plot(args.plot, rows)
    print(json.dumps(document))


def measured(name: str, some: Sequence[Service], settings: Settings, args: argparse.Namespace) -> Row:
    """Alarms where nothing changed, and delays where something did."""
    alarms, delays, tokens = 0, [], 0
    for number, service in enumerate(some):
        looks, size = seen(service, args.tokens, args.seed + number)
        test = start(settings)
        for accepted in looks:
            before = test.fallen
            test = step(naive(test) if name == "naive" else test, float(accepted), size)
            alarms += test.fallen and not before
        tokens += len(looks) * size
        for fall in range(args.falls):
            below = replace(service, acceptance=FALLEN)
            delays.append(delay(test, *seen(below, 20_000, args.seed + 1000 * (fall + 1) + number)))
    found = np.array(delays)
    return {
        "services": name,
        "stated_tokens_to_a_false_alarm": settings.false_alarm_every,
        "false_alarms": alarms,
        "of_tokens": tokens,
        "median_delay": float(np.median(found)),
        "delay_95": float(np.percentile(found, 95)),
        "within_2000": float((found <= 2000).mean()),
    }


def seen(service: Service, drafted: int, seed: int) -> tuple[np.ndarray, int]:
    """Accepted tokens of each look, and draft tokens of a look."""
    each = service.k * service.concurrent
    steps = max(1, LOOK // each)
    accepted = simulate(service, drafted, np.random.default_rng(seed))
    whole = accepted[: len(accepted) // steps * steps]
    return whole.reshape(-1, steps).sum(axis=1), each * steps


def naive(test: Detector) -> Detector:
    """With the variance of independent tokens."""
    if test.learned is None:
        return test
    rate = test.learned.rate
    return replace(test, learned=replace(test.learned, variance=rate * (1 - rate)))


def delay(test: Detector, looks: np.ndarray, size: int) -> float:
    """Draft tokens until the alarm."""
    test = replace(test, fallen=False)
    for number, accepted in enumerate(looks, start=1):
        test = step(test, float(accepted), size)
        if test.fallen:
            return float(number * size)
    return float(len(looks) * size)


def line(row: Row) -> str:
    stated = row["stated_tokens_to_a_false_alarm"]
    return (
        f"{row['services']:6} stated {stated:.0e}: {row['false_alarms']:5} false alarms in "
        f"{row['of_tokens']:,} tokens; delay {row['median_delay']:,.0f} (median), {row['delay_95']:,.0f} (95 %), "
        f"within 2,000: {row['within_2000']:.0%}"
    )


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Delay against the stated rate, with the false alarms that there were."""
    from matplotlib.figure import Figure

    usual = [r for r in rows if r["services"] == "usual"]
    x = [r["stated_tokens_to_a_false_alarm"] for r in usual]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(x, [r["median_delay"] for r in usual], marker="o", color="#0072b2", label="delay, median")
    axes.plot(x, [r["delay_95"] for r in usual], marker="s", color="#d55e00", label="delay, 95 %")
    axes.axhline(2000, linestyle=":", color="black", linewidth=1)
    for r in usual:
        text = f"{r['false_alarms']} in {r['of_tokens'] / 1e6:.0f} M"
        axes.annotate(
            text, (r["stated_tokens_to_a_false_alarm"], r["median_delay"]), (0, -16), textcoords="offset points"
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("stated: draft tokens to a false alarm, at least on average")
    axes.set_ylabel("draft tokens to the alarm, 68 % to 41 %")
    axes.legend(frameon=False)
    figure.savefig(
        path, format=path.suffix.removeprefix("."), metadata={"Date": None} if path.suffix == ".svg" else None
    )


if __name__ == "__main__":
    main()
