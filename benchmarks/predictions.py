"""Predictions of ``slipstream plan`` against measurements: a point for each draft, k and category.

    python benchmarks/predictions.py TARGET --drafts A,suffix,suffix+A [-k 1,2,4,8] [--prompts FILE] [--each 2] \\
        [-n 128] [-t 0] [--repeats 2] [--out FILE] [--plot docs/predictions.svg]
    python benchmarks/predictions.py --from FILE [--plot FILE]       # draw what was saved

Everything is predicted from plain answers, one pass of each model over them, and timed rounds. Each draft with each k
really answers the same prompts, in turn with plain decoding. Rounds are timed before, between and after these answers,
since a shared machine has slow and fast minutes. Prints a table and, as the last line, one JSON document. An
interrupted run goes on where it was if it is called again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream import SamplingParams
from slipstream.cli.pairs import Pairs, Wanted, load, parse_drafts
from slipstream.cli.plan_run import open_ledger
from slipstream.cli.progress import follow
from slipstream.fields import from_json, to_json
from slipstream.measure import planning
from slipstream.measure.files import check_writable
from slipstream.measure.ledger import Ledger, write_text
from slipstream.measure.machine import describe_machine
from slipstream.measure.plan_build import checked
from slipstream.measure.planning import Gathered, Point, RealRun, Subject
from slipstream.measure.plot import check_plot
from slipstream.measure.prediction import predict
from slipstream.measure.prompts import BenchPrompt, read_prompts

#: By draft and k.
Measured = dict[tuple[str, int], list[Point]]


def chosen(source: str | None, each: int) -> list[BenchPrompt]:
    """The first ``each`` prompts of every category."""
    taken: dict[str, int] = {}
    found = []
    for prompt in read_prompts(source):
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if taken[prompt.category] <= each:
            found.append(prompt)
    return found


def gathered(subject: Subject, ledger: Ledger, into: Gathered) -> Iterator[str]:
    """What predictions need."""
    yield from planning.gather_texts(subject, ledger, into)
    yield from planning.gather_trails(subject, ledger, into)
    yield from planning.gather_rounds(subject, ledger, into)


def measured(subject: Subject, ks: Sequence[int], repeats: int, ledger: Ledger, found: Gathered) -> Measured:
    """Real answers, by draft and k, each beside plain decoding; rounds are timed again behind each repeat."""
    points: Measured = {}
    for repeat in range(repeats):
        for draft in subject.drafters:
            name = f"measured {draft} {ks} {repeat}"
            if name not in ledger:
                into: dict[int, list[Point]] = {}
                real = RealRun(draft, tuple(ks), subject.prompts, 1)
                other = replace(subject, params=replace(subject.params, seed=repeat))
                follow(planning.run_for_real(other, real, into), real.steps)
                ledger.put(name, {str(k): to_json(some) for k, some in into.items()})
            for k, some in ledger[name].items():
                points.setdefault((draft, int(k)), []).extend(from_json(Point, one, name) for one in some)
        follow(planning.gather_rounds(subject, ledger, found, again=repeat + 1), planning.round_steps(subject))
    return points


def compared(subject: Subject, found: Gathered, real: Measured) -> list[dict[str, Any]]:
    """Predicted and measured speed-up after the first token, for each draft, k and category."""
    rows = []
    for (draft, k), points in real.items():
        cases, at = planning.cases(subject, found, draft), planning.costs_at(found, subject.drafters[draft])
        for category in dict.fromkeys(p.category for p in points):
            own = [p for p in points if p.category == category]
            mine = [c for c in cases if c.category == category]
            if mine:
                one = checked(category, predict(mine, k, at).speed_up, own)
                rows.append({"draft": named(draft), "k": k, **to_json(one)})
    return rows


def named(draft: str) -> str:
    """A draft without the folders of this machine."""
    return ",".join(Path(part).name if Path(part).exists() else part for part in draft.split(","))


def plan(given: argparse.Namespace) -> tuple[Subject, Pairs]:
    params = SamplingParams(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=0)
    wanted = Wanted(given.target, parse_drafts(given.drafts), given.weights, given.draft_weights, threads=given.threads)
    pairs = load(wanted, chosen(given.prompts, given.each))
    return Subject(pairs.target, pairs.drafters, pairs.prompts, params), pairs


def run(given: argparse.Namespace) -> dict[str, Any]:
    subject, pairs = plan(given)
    ledger, found = open_ledger(subject, pairs, given.fresh), Gathered()
    steps = planning.text_steps(subject) + len(subject.prompts) + planning.round_steps(subject)
    follow(gathered(subject, ledger, found), steps)
    usable = {name: d for name, d in subject.drafters.items() if name not in found.failed}
    subject = replace(subject, drafters=usable)
    ks = [int(k) for k in given.k.split(",")]
    real = measured(subject, ks, given.repeats, ledger, found)
    rows = compared(subject, found, real)
    ledger.done()
    return {
        "target": named(given.target),
        "weights": {"target": pairs.target_weights, **{named(n): kind for n, kind in pairs.weights.items()}},
        "temperature": given.temperature,
        "max_new_tokens": given.max_new_tokens,
        "prompts": len(subject.prompts),
        "repeats": given.repeats,
        "machine": asdict(describe_machine(subject.target.device)),
        "points": rows,
        "errors": errors(rows),
    }


def errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of predicted / measured - 1."""
    sizes = [abs(row["error"]) for row in rows]
    return {"points": len(rows), "median": median(sizes), "worst": max(sizes), "how": "measured here"}


def draw(document: dict[str, Any], file: str) -> None:
    """Predicted against measured, with the diagonal and 10 % to both sides."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 5), layout="constrained")
    axes = figure.subplots()
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
    rows = document["points"]
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    for number, draft in enumerate(drafts):
        own = [row for row in rows if row["draft"] == draft]
        x, y = ([row[side]["value"] for row in own] for side in ("predicted", "measured"))
        axes.plot(x, y, "o", color=colours[number % len(colours)], label=draft, alpha=0.8)
    values = [row[side]["value"] for row in rows for side in ("predicted", "measured")]
    low, high = 0.9 * min(values), 1.1 * max(values)
    axes.plot([low, high], [low, high], color="black", linewidth=1)
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#999999", alpha=0.2)
    axes.set_xlabel("predicted speed-up")
    axes.set_ylabel("measured speed-up")
    found = document["errors"]
    title = (
        f"{found['points']} points (draft, k, category)\nmedian error {found['median']:.1%}, worst {found['worst']:.1%}"
    )
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    with rc_context({"svg.hashsalt": "slipstream"}):
        figure.savefig(file, metadata={"Date": None} if file.endswith(".svg") else None)


def show(document: dict[str, Any]) -> None:
    table = Table(title=f"Speed-up of {document['target']}: predicted and measured")
    for name in ("draft", "k", "category", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("draft", "category") else "right")
    for row in document["points"]:
        values = (row["predicted"]["value"], row["measured"]["value"])
        table.add_row(
            row["draft"], str(row["k"]), row["category"], *(f"{v:.2f}x" for v in values), f"{row['error']:+.1%}"
        )
    Console(stderr=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--drafts", default="suffix,early-exit:20")
    parser.add_argument("-k", default="1,2,4,8")
    parser.add_argument("--prompts")
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("-t", "--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--out")
    parser.add_argument("--plot")
    given = parser.parse_args()
    if given.source is None and given.target is None:
        parser.error("name a TARGET, or --from FILE")
    if given.out:
        check_writable("--out", given.out)
    if given.plot:
        check_writable("--plot", given.plot)
        check_plot(given.plot)
    document = json.loads(given.source.read_text()) if given.source else run(given)
    show(document)
    print(f"median error {document['errors']['median']:.1%}, worst {document['errors']['worst']:.1%}")
    if given.plot:
        draw(document, given.plot)
    if given.out:
        write_text(given.out, json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
