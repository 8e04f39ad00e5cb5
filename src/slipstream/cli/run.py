"""What ``generate`` and ``demo`` do: check, load, answer (twice to compare), report."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from slipstream.cli.drafts import is_model, members
from slipstream.cli.prompt import Prompt
from slipstream.cli.screen import Screen, console, is_terminal, legend, working
from slipstream.errors import InputError
from slipstream.measure import memory
from slipstream.measure.files import check_writable
from slipstream.plan import RULES

if TYPE_CHECKING:
    from slipstream.cli.answer import Answer
    from slipstream.cli.report import Report
    from slipstream.models.base import Model
    from slipstream.models.load import Checkpoint
    from slipstream.types import SamplingParams

INTERRUPTED = 130
#: Far more than any machine has use for; PyTorch crashes when the system gives it no more.
MOST_THREADS = 1024


@dataclass(frozen=True)
class Task:
    """One call of ``generate``, as the user put it."""

    model: str
    prompt: Prompt
    params: SamplingParams
    draft: str = "suffix"
    k: int | str = "adaptive"
    rule: str = RULES[0]
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    compare: bool = False
    as_json: bool = False
    no_color: bool = False
    svg: str | None = None
    plot: str | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.draft == "none" or self.k == 0

    @property
    def drafts_by_model(self) -> bool:
        """Whether ``draft`` names a model to load."""
        return bool(self.draft_models)

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Those that ``draft`` names."""
        return () if self.plain else tuple(filter(is_model, members(self.draft)))


def run(task: Task) -> int:
    """Do it; the exit code.

    Raises:
        InputError: before anything is loaded if it can be known by then.
    """
    check(task)
    if task.threads is not None:
        import torch

        torch.set_num_threads(task.threads)
    target, drafts = open_all(task)
    ids = task.prompt.ids(target.tokenizer, task.model)
    _check_fits(ids, target)
    models = load_all(task, target, drafts)
    _check_fits(ids, models.target)  # again: some say their limit only now
    report = _answers(task, models, ids)
    _show(report, task)
    return INTERRUPTED if report.interrupted else 0


def check(task: Task) -> None:
    """Refuse what cannot work, before anything is loaded."""
    if isinstance(task.k, int) and task.k < 0:
        raise InputError(f"-k {task.k} is no number of draft tokens; use 0 (plain decoding) or more")
    if task.compare and task.plain:
        raise InputError("--compare needs a draft; give --draft suffix or a model, and -k 1 or more")
    members(task.draft)
    check_threads(task.threads)
    if task.svg is not None:
        check_writable("--svg", task.svg)
    if task.plot is not None:
        from slipstream.measure.plot import check_plot

        check_plot(task.plot)
        check_writable("--plot", task.plot)


def check_threads(threads: int | None) -> None:
    """Refuse a number that PyTorch would not survive.

    Raises:
        InputError: below 1, or far too many.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"--threads {threads} is no number of threads; use 1 to {MOST_THREADS}")


def open_all(task: Task) -> tuple[Checkpoint, dict[str, Checkpoint]]:
    """Target and draft models (by name) with everything checked that can be without reading weights."""
    from slipstream.drafters import check_names
    from slipstream.models.load import Kinds, open_models

    with working(f"Loading {task.model}", task.no_color):
        target, drafts = open_models(
            task.model, task.draft_models, Kinds(task.weights, task.draft_weights, task.device)
        )
    check_names(() if task.plain else members(task.draft), target)
    return target, drafts


def _check_fits(ids: list[int], target: Checkpoint | Model) -> None:
    limit = target.max_positions
    if limit is not None and len(ids) > limit:
        raise InputError(f"the prompt has {len(ids)} tokens, but {target.name} reads at most {limit}; shorten it")


@dataclass(frozen=True)
class Models:
    """What takes part, ready to run."""

    target: Model
    draft: Model | str | list[Model | str] | None
    draft_bytes: int
    """Memory that the draft's weights occupy; plain decoding would not need it."""


def load_all(task: Task, target: Checkpoint, drafts: dict[str, Checkpoint]) -> Models:
    """Read the weights."""
    with working(f"Loading {target.name}", task.no_color):
        loaded = target.load()
    if task.plain:
        return Models(loaded, None, 0)
    before = memory.used_bytes(task.device)
    parts: list[Model | str] = []
    for name in members(task.draft):
        if name not in drafts:
            parts.append(name)
            continue
        with working(f"Loading {name}", task.no_color):
            parts.append(drafts[name].load())
    size = max(0, memory.used_bytes(task.device) - before) if drafts else 0
    return Models(loaded, parts if len(parts) > 1 else parts[0], size)


def _answers(task: Task, models: Models, ids: list[int]) -> Report:
    """Plain first if it is to be compared, then as asked."""
    from slipstream.cli.answer import answer, warm_up
    from slipstream.cli.report import Report
    from slipstream.speculative import SpeculativeDecoding

    greedy = task.params.temperature == 0
    stream = _answer_stream(task)
    spec = SpeculativeDecoding(target_model=models.target, draft_model=models.draft, k=task.k, rule=task.rule)
    plain: Answer | None = None
    if task.compare:
        plainly = SpeculativeDecoding(target_model=models.target, draft_model=None)
        warm_up(plainly, ids, task.params)
        warm_up(spec, ids, task.params)
        click.echo("-- plain", err=True)
        plain = answer(plainly, ids, task.params, Screen(stream, task.no_color, by_origin=False))
        if plain.peak_memory is not None:
            plain = replace(plain, peak_memory=plain.peak_memory - models.draft_bytes)
        if plain.interrupted:
            return Report(task.model, None, 0, greedy, plain)
        click.echo(f"-- speculative, draft: {task.draft}, k = {task.k}", err=True)
    screen = Screen(stream, task.no_color, by_origin=not task.plain)
    fast = answer(spec, ids, task.params, screen)
    report = Report(task.model, None if task.plain else task.draft, 0 if task.plain else task.k, greedy, fast, plain)
    if screen.coloured and stream is not None:
        console(stream, task.no_color).print("\n", legend(report.origins), sep="")
    return report


def _answer_stream(task: Task) -> TextIO | None:
    """With ``--json`` stdout is the document's; the answer then streams to stderr if somebody watches."""
    if not task.as_json:
        return sys.stdout
    return sys.stderr if is_terminal(sys.stderr) else None


def _show(report: Report, task: Task) -> None:
    from slipstream.cli.report import document, save_rounds, save_svg, sentence, table

    err = console(sys.stderr, task.no_color)
    err.print()
    err.print(table(report))
    if said := sentence(report):
        err.print(f"\n{said}")
    if report.interrupted:
        err.print("\nInterrupted; the figures are of what came so far.")
    if task.svg is not None:
        save_svg(report, Path(task.svg))
        err.print(f"\nSaved {task.svg}.")
    if task.plot is not None:
        save_rounds(report, Path(task.plot))
        err.print(f"\nSaved {task.plot}.")
    if task.as_json:
        settings: dict[str, Any] = {
            "rule": None if task.plain else task.rule,
            "weights": task.weights,
            "draft_weights": task.draft_weights if task.drafts_by_model else None,
            "device": task.device,
            "threads": task.threads,
            "sampling": {k: v for k, v in asdict(task.params).items() if k != "logits_processors"},
        }
        sys.stdout.write(json.dumps(document(report, **settings)) + "\n")
        sys.stdout.flush()
