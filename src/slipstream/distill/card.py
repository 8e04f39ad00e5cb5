"""What is written beside the weights: the model card, the record of the run, a picture."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.distill.acceptance import TEMPERATURES, Figures
from slipstream.distill.picture import save_picture
from slipstream.measure.bootstrap import Interval
from slipstream.measure.document import tidy
from slipstream.models.version import version_of

if TYPE_CHECKING:
    from slipstream.distill.run import Result, Run

FORMAT = 1
#: Fewer documents than that tell nothing of how much others would differ.
_FEW = 5


def write_beside(folder: Path, run: Run, result: Result) -> None:
    """README.md, distill.json, and acceptance.png if matplotlib is here."""
    found = record(run, result)
    (folder / "distill.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    drawn = save_picture(folder / "acceptance.png", result, f"{run.job.out.name} for {Path(run.job.target).name}")
    (folder / "README.md").write_text(card(run, result, drawn), encoding="utf-8")


def record(run: Run, result: Result) -> dict[str, Any]:
    """The run as a JSON document: what it was made from and by, and what it measured."""
    job = run.job
    document = {
        "format": FORMAT,
        "command": job.command,
        "argv": sys.argv,
        "versions": versions(),
        "target": {"name": job.target, "sha256": run.target.hash, "version": version_of(run.target.description.path)},
        "start": {"init": job.init, "source": str(run.start.source)},
        "data": {"sources": job.data, "documents": run.data.documents, "sha256": run.data.hash},
        "settings": job.binding(),
        "plan": run.plan,
        "steps": result.steps,
        "stopped_early": result.stopped_early,
        "seconds": result.seconds,
        "costs": result.costs,
        "before": result.before,
        "after": result.after,
        "gain": result.gain,
        "evaluations": result.evaluations,
        "loss": [step.loss for step in result.curve],
    }
    tidied: dict[str, Any] = tidy(document)
    return tidied


def versions() -> dict[str, str | None]:
    """Of everything that the outcome may depend on; None if a package is not installed as one."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("slipstream", "torch", "transformers", "tokenizers", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def card(run: Run, result: Result, drawn: bool) -> str:
    """README.md; ``drawn``: there is a picture beside it."""
    job, after = run.job, result.after
    ids, exits = run.student.output_ids, job.early_exit is not None
    reduced = "" if ids is None else f" Its output layer has rows for {len(ids):,} ids (`d2t`): Slipstream reads this."
    kind = "an exit head" if exits else "a draft model"
    origin = f"layers 0 to {job.early_exit} of the target" if exits else f"`{job.init}`"
    lines = [
        "---",
        "library_name: transformers",
        "tags: [speculative-decoding, draft-model]",
        "---",
        f"# {job.out.name}: {kind} for {Path(job.target).name}",
        "",
        f"Made by `slipstream distill` from {origin}; it proposes tokens that the target verifies.{reduced}",
        "",
        f"Acceptance on {after.tokens:,} tokens of {after.documents} held-out documents. T = 0: both models have the",
        "same likeliest token; T = 1: sum of min(P, q). With 95 % intervals over documents (bootstrap), where there",
        f"are {_FEW} or more of them.",
        "",
        "| | documents | T = 0 before | after | T = 1 before | after |",
        "|---|---|---|---|---|---|",
        *_rows(result.before, after),
        "",
        "Given that the tokens before were accepted, by position in the draft:",
        "",
        "| position | T = 0 before | after | T = 1 before | after |",
        "|---|---|---|---|---|",
        *_positions(result.before, after),
        "",
        *(_speed(t, result) for t in TEMPERATURES),
        "",
        *(["![acceptance](acceptance.png)", ""] if drawn else []),
        f"Training: {result.steps} steps in {result.seconds / 60:.1f} minutes. `distill.json` has the rest.",
        "",
    ]
    return "\n".join(lines)


def _speed(temperature: int, result: Result) -> str:
    before, after = (f.speed_up[temperature] for f in (result.before, result.after))
    return (
        f"- Predicted speed-up at T = {temperature}: {before.speed_up:.2f} (k = {before.k}) before, "
        f"{after.speed_up:.2f} (k = {after.k}) after; a draft step costs {result.costs.draft_step:.2f} target steps."
    )


def _rows(before: Figures, after: Figures) -> list[str]:
    rows = [_row("all", after.documents, before.rate, after.rate)]
    for name, found in after.categories.items() if len(after.categories) > 1 else ():
        rows.append(_row(name, after.sizes[name], before.categories[name], found))
    return rows


def _row(name: str, documents: int, before: Mapping[int, Interval], after: Mapping[int, Interval]) -> str:
    told = [
        shown(side[t]) if documents >= _FEW else f"{side[t].value:.3f}"
        for t in TEMPERATURES
        for side in (before, after)
    ]
    return f"| {name} | {documents} | " + " | ".join(told) + " |"


def _positions(before: Figures, after: Figures) -> list[str]:
    sides = [figures.positions[t] for t in TEMPERATURES for figures in (before, after)]
    rows = zip_longest(*sides)
    return [
        f"| {j} | " + " | ".join("-" if one is None else shown(one) for one in row) + " |"
        for j, row in enumerate(rows, start=1)
    ]


def shown(interval: Interval) -> str:
    """A figure and its interval."""
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
