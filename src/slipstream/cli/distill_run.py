"""What ``slipstream distill`` does: shows how training goes, and what came of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from slipstream.cli.screen import console, is_terminal, note
from slipstream.distill.card import shown
from slipstream.distill.job import Job
from slipstream.distill.plan import read_plan
from slipstream.distill.run import Evaluation, Interrupted, Refused, Result, distill
from slipstream.distill.train import Step
from slipstream.errors import InputError

INTERRUPTED = 130


def run(*, as_json: bool, no_color: bool, **options: Any) -> int:
    """Train, print what came of it; the exit code."""
    job = job_of(**options)
    try:
        with _screen(no_color) as screen:
            result = distill(job, screen)
    except Refused as error:
        click.echo(f"slipstream: {error}", err=True)
        return 1
    except Interrupted as error:
        click.echo(f"slipstream: {error}", err=True)
        return INTERRUPTED
    if as_json:
        click.echo((result.out / "distill.json").read_text(encoding="utf-8"), nl=False)
    else:
        click.echo(summary(result))
    draft = f"early-exit:{job.out}" if job.early_exit is not None else str(job.out)
    note(f"\nNext: slipstream generate {job.target} --draft {draft} --compare --prompt ...")
    return 0


def job_of(*, out: str, capture: str | None, from_plan: str | None, **options: Any) -> Job:
    """The job that the options mean."""
    if from_plan is not None:
        if options["target"] or options["init"]:
            raise InputError("--from-plan tells target and draft; leave TARGET and --init out")
        planned = read_plan(Path(from_plan))
        options |= {"target": planned.target, "init": planned.draft, "must_gain": True}
    if not options["target"]:
        raise InputError("TARGET is missing; name the model whose answers are wanted")
    if capture is not None:
        options["data"] = (*options["data"], capture)
    if not options["data"]:
        raise InputError("there is nothing to learn from; give --data or --capture")
    return Job(out=Path(out), **options)


def summary(result: Result) -> str:
    """Before and after, in a few lines."""
    lines = [f"{result.out}  {result.steps} steps in {result.seconds / 60:.1f} minutes"]
    for t in (0, 1):
        before, after = result.before, result.after
        lines.append(
            f"T = {t}: accepted {shown(before.rate[t])} before, {shown(after.rate[t])} after, gain "
            f"{shown(result.gain[t])}; predicted speed-up {before.speed_up[t].speed_up:.2f} before, "
            f"{after.speed_up[t].speed_up:.2f} after (k = {after.speed_up[t].k})"
        )
    lines.append(f"a draft step costs {result.costs.draft_step:.2f} target steps")
    return "\n".join(lines)


class _Lines:
    """Shows phases and evaluations as lines."""

    def __init__(self) -> None:
        self._steps = 0
        self._loss = 0.0

    def phase(self, what: str) -> None:
        """Say it."""
        click.echo(what, err=True)

    def begin(self, steps: int, done: int) -> None:
        """Say how much there is to do."""
        self._steps = steps
        click.echo(f"training, {steps} steps" + (f", of which {done} are done" if done else ""), err=True)

    def step(self, step: Step) -> None:
        """Remember the loss."""
        self._loss = step.loss

    def evaluation(self, evaluation: Evaluation, best: bool) -> None:
        """Say what was measured."""
        click.echo(self.line(evaluation, best), err=True)

    def line(self, evaluation: Evaluation, best: bool) -> str:
        """An evaluation in words."""
        accepted = evaluation.acceptance
        loss = f"  loss {self._loss:.3f}" if evaluation.step else ""
        return (
            f"step {evaluation.step}/{self._steps}{loss}  accepted {accepted[0]:.3f} (T = 0) "
            f"{accepted[1]:.3f} (T = 1)  predicted speed-up {evaluation.speed_up.speed_up:.2f} at k = "
            f"{evaluation.speed_up.k}{'' if best else '  (not better)'}"
        )


class _Bar(_Lines):
    """Shows a bar besides, on a terminal."""

    def __init__(self, progress: Any) -> None:
        super().__init__()
        self._progress = progress
        self._task: Any = None
        self._told = ""

    def phase(self, what: str) -> None:
        """Say it above the bar."""
        self._progress.console.print(what)

    def begin(self, steps: int, done: int) -> None:
        """Put up the bar."""
        self._steps = steps
        self._task = self._progress.add_task("training", total=steps, completed=done)

    def step(self, step: Step) -> None:
        """Move it."""
        super().step(step)
        self._progress.update(self._task, advance=1, description=f"loss {step.loss:.3f}  {self._told}")

    def evaluation(self, evaluation: Evaluation, best: bool) -> None:
        """Put the latest figures beside the bar."""
        accepted, gain = evaluation.acceptance, evaluation.speed_up.speed_up
        self._told = f"accepted {accepted[0]:.3f} / {accepted[1]:.3f}  speed-up {gain:.2f}"
        self._progress.console.print(self.line(evaluation, best))


@contextmanager
def _screen(no_color: bool) -> Iterator[_Lines]:
    if not is_terminal(sys.stderr):
        yield _Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr, no_color=no_color), transient=True) as progress:
        yield _Bar(progress)
