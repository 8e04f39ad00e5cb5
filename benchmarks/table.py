"""The figures that README and docs quote, as a Markdown table, from results of ``slipstream bench`` and ``passes.py``.

python benchmarks/table.py benchmarks/results/*.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = tuple[str, str]


def figure(value: dict[str, Any] | None, form: str = "{:.2f}x") -> str:
    """Median and quartiles."""
    if value is None:
        return "-"
    return f"{form.format(value['median'])} ({form.format(value['low'])} to {form.format(value['high'])})"


def rows(found: dict[str, Any]) -> Iterator[Row]:
    """What one result says, as (figure, value)."""
    best, overall = found["best"], found["overall"]
    for name, limit in found["limits"].items():
        yield f"{name}: step, share of the memory-bandwidth limit", figure(limit["share"], "{:.0%}")
    yield from (
        (f"v({p['rows']})", figure(p["v"], "{:.2f}")) for p in found["passes"].get("target", []) if p["rows"] == 5
    )
    if best is None:
        return
    yield f"best, {best}, over plain: time per token", figure(overall[best]["speed_up"])
    yield f"best, {best}, over plain: whole answers", figure(overall[best]["whole_answer_speed_up"])
    for peer, against in found["peers"].items():
        yield f"plain over {peer}: whole answers", figure(against["plain"]["whole_answer"])
        yield f"best, {best}, over {peer}: whole answers", figure(against[best]["whole_answer"])
        yield f"best, {best}, over {peer}: first token", figure(against[best]["first_token"])
    yield "outside forward passes", figure(overall[best]["outside_share"], "{:.1%}")
    yield "prompts answered exactly as plain", f"{overall[best]['identical_share']:.0%}"
    if found["splits"]:
        yield "largest top-2 logit gap at a split", f"{max(s['top2_gap'] for s in found['splits']):.4f}"
    yield from categories(found)


def pass_rows(found: dict[str, Any]) -> Iterator[Row]:
    """The same of a result of ``passes.py``."""
    for name, model in found["models"].items():
        yield (
            f"{name}: a pass over one token, share of the memory-bandwidth limit",
            figure(model["share_of_limit"], "{:.0%}"),
        )
        yield f"{name}: a pass over one token, times the limit", figure(model["over_limit"])
        yield from ((f"{name}: v(5)", figure(p["v"], "{:.2f}")) for p in model["passes"] if p["rows"] == 5)
    yield from ((name, figure(ratio)) for name, ratio in found["ratios"].items())


def categories(found: dict[str, Any]) -> Iterator[Row]:
    """The best setting of each category, plain included."""
    own = [c["name"] for c in found["contenders"] if c["kind"] == "slipstream"]
    if len(found["categories"]) < 2:
        return
    for category, figures in found["categories"].items():
        speeds = {n: figures[n]["speed_up"] for n in own if n in figures and figures[n]["speed_up"]}
        if speeds:
            name = max(speeds, key=lambda n: speeds[n]["median"])
            yield f"{category}: {name} over plain", figure(speeds[name])


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("| result | figure | median (quartiles) |\n|---|---|---|")
    for file in map(Path, sys.argv[1:]):
        found = json.loads(file.read_text(encoding="utf-8"))
        known = rows(found) if "contenders" in found else pass_rows(found) if "ratios" in found else ()
        for name, value in known:
            print(f"| {file.stem} | {name} | {value} |")


if __name__ == "__main__":
    main()
