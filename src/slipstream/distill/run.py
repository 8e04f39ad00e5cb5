"""From a target, a start and data to a checkpoint: what ``slipstream distill`` does, without its screen."""

from __future__ import annotations

import math
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.distill.acceptance import Exact, Figures, Kept, figures, gain, predicted, rate
from slipstream.distill.board import Board
from slipstream.distill.costs import measure_costs
from slipstream.distill.job import Job, check, remember, steps_for
from slipstream.distill.lens import fit_output_layer
from slipstream.distill.losses import CROSS_ENTROPY
from slipstream.distill.prepare import (
    Data,
    Target,
    check_memory,
    free_disk,
    is_fitted,
    make_rows,
    make_start,
    make_student,
    read_data,
)
from slipstream.distill.student import (
    Start,
    Student,
    exit_head,
    make_portable,
    merge_adapters,
    save_student,
    scratch_beside,
)
from slipstream.distill.teacher import SIZES, Asking, Keeping, Targets, Teacher
from slipstream.distill.tokens import Encoded, Rows
from slipstream.distill.train import Recipe, Step, Trainer
from slipstream.errors import InputError, SlipstreamError
from slipstream.measure.bootstrap import Interval
from slipstream.measure.expectation import Choice, Costs
from slipstream.measure.files import write_whole
from slipstream.models.exit_head import save_exit_head
from slipstream.models.load import load_model

_STATE = "state.pt"
#: What the target says is kept, so many tokens of it at a position, if there are more than so many epochs.
_KEPT, _EPOCHS = 64, 1.3
#: Documents whose beginnings tell how a portable output layer has to be.
_STATES = 32


@dataclass(frozen=True)
class Evaluation:
    """How a draft in training does on held-out text, by the target's likeliest tokens."""

    step: int
    acceptance: dict[int, float]
    """By temperature."""
    speed_up: Choice
    """Predicted, at the temperature that was chosen."""

    def better_than(self, other: Evaluation | None, temperature: int) -> bool:
        """By predicted speed-up; where nothing gains yet, by acceptance."""
        if other is None:
            return True
        mine, theirs = ((e.speed_up.speed_up, e.acceptance[temperature]) for e in (self, other))
        return mine > theirs


class Observer(Protocol):
    """Is told how it goes."""

    def phase(self, what: str) -> None:
        """What is done next."""
        ...

    def begin(self, steps: int, done: int) -> None:
        """Training begins; ``done`` steps were made before."""
        ...

    def step(self, step: Step) -> None:
        """A step was made."""
        ...

    def evaluation(self, evaluation: Evaluation, best: bool) -> None:
        """The draft was measured."""
        ...


@dataclass(frozen=True)
class Result:
    """What came of it."""

    out: Path
    before: Figures
    after: Figures
    gain: dict[int, Interval]
    """Of the acceptance, by temperature, paired by document."""
    costs: Costs
    steps: int
    stopped_early: bool
    seconds: float
    curve: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


class Interrupted(SlipstreamError):  # noqa: N818 (as KeyboardInterrupt)
    """The run was ended from outside; everything so far is kept."""


class Refused(SlipstreamError):  # noqa: N818
    """A draft was made and found to be no better."""


@dataclass
class _Course:
    """What has happened so far; goes into the state."""

    curve: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    best: Evaluation | None = None
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def since_best(self) -> int:
        """Evaluations after the best one."""
        return sum(self.best is not None and e.step > self.best.step for e in self.evaluations)


@dataclass
class Run:
    """A job with everything that its steps need."""

    job: Job
    target: Target
    data: Data
    start: Start
    student: Student
    trainer: Trainer
    rater: Kept
    costs: Costs
    course: _Course
    observer: Observer
    board: Board

    @property
    def temperature(self) -> int:
        """That of the predicted speed-up."""
        return self.job.temperature


def distill(job: Job, observer: Observer) -> Result:
    """Do it. What an interrupted or failed run has so far stays in ``job.work``.

    Raises:
        InputError: the job cannot be done as asked, or the disk is full.
        Interrupted: by a signal.
    """
    check(job)
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    target = Target(job.target, job.weights, job.device)
    _ = target.description
    fresh = not job.work.exists()
    job.work.mkdir(exist_ok=True)
    try:
        run = _prepared(job, target, observer)
    except BaseException:
        if fresh and not any(f.name in ("settings.json", "answers.jsonl") for f in job.work.iterdir()):
            shutil.rmtree(job.work)
        raise
    _train(run)
    try:
        result = _finish(run)
    except Refused:
        shutil.rmtree(job.work)
        raise
    shutil.rmtree(job.work)
    return result


def _prepared(job: Job, target: Target, observer: Observer) -> Run:
    observer.phase("reading the data")
    data = read_data(job, target)
    start = make_start(job, target, data)
    check_memory(job, target, start)
    numbers = sum(t.numel() for t in start.tensors.values()) + start.head.numel()
    free_disk(job.out.resolve().parent, numbers * 16)
    observer.phase("loading the target")
    student, rows = make_student(job, start), make_rows(job, data, target)
    rater = Kept(target.model, data.validation)
    observer.phase("measuring what passes cost")
    saved = _saved(job)
    costs = job.costs or (_costs(saved["costs"]) if saved else _measured(job, target, student, data))
    asking = Asking(target.model, start.output_ids, len(start.head))
    if saved is None and is_fitted(job, start):
        observer.phase("fitting the output layer")
        fit_output_layer(student, asking, rows, job.fit)
    recipe, kept = _plan(job, saved, student, rows, asking)
    trainer = Trainer(student, rows, kept, recipe)
    remember(job, {"data": data.hash, "target": target.hash})
    course = _Course()
    if saved:
        trainer.load(saved["trainer"])
        course = _course(saved["course"])
    return Run(job, target, data, start, student, trainer, rater, costs, course, observer, Board(job.logs))


def _saved(job: Job) -> dict[str, Any] | None:
    file = job.work / _STATE
    if not file.exists():
        return None
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def _plan(
    job: Job, saved: dict[str, Any] | None, student: Student, rows: Rows, asking: Teacher
) -> tuple[Recipe, Teacher]:
    """How many steps, and whether what the target says is kept."""
    epoch, keep = len(rows) / min(job.batch, len(rows)), job.keep
    if saved is not None:
        steps, keep = saved["steps"], saved["keep"]
    elif job.minutes is None:
        steps = steps_for(job, 0, 0, math.inf)
    else:
        seconds = _trial(job, Trainer(student, rows, asking, _recipe(job, 1)))
        steps = steps_for(job, *seconds, math.inf if keep == 0 else epoch)
    if keep is None:
        keep = _KEPT if steps > _EPOCHS * epoch and job.loss != CROSS_ENTROPY else 0
    if not keep:
        return _recipe(job, steps), asking
    shape = (len(rows), rows.ids.shape[1], min(keep, len(student.head)))
    folder = job.work / "targets"
    if not folder.exists():
        free_disk(job.work, math.prod(shape) * SIZES)
    return _recipe(job, steps), Keeping(asking, folder, shape, fresh=saved is None)


def _recipe(job: Job, steps: int) -> Recipe:
    return Recipe(
        steps=steps,
        loss=job.loss,
        learning_rate=job.learning_rate,
        batch=job.batch,
        accumulate=job.accumulate,
        bf16=job.bf16,
        on_policy=job.on_policy,
        seed=job.seed,
    )


def _trial(job: Job, trainer: Trainer) -> tuple[float, float]:
    """Seconds of a step without the target, and of asking it, from a part of a step."""
    batch = torch.arange(min(-(-job.batch // job.accumulate), len(trainer.rows)))
    asking, timed = trainer.teacher, _Timed(trainer.teacher)
    trainer.teacher = timed
    for _ in range(2):  # the first one pays for what happens only once
        timed.seconds = 0.0
        start = perf_counter()
        trainer.loss_of(batch).backward()
        taken = perf_counter() - start
    trainer.teacher = asking
    trainer.student.zero_grad(set_to_none=True)
    share = min(job.batch, len(trainer.rows)) / len(batch)
    return (taken - timed.seconds) * share, timed.seconds * share


@dataclass
class _Timed:
    """A teacher with a clock."""

    teacher: Teacher
    seconds: float = 0.0

    def targets(self, row: int, ids: Sequence[int], positions: Tensor) -> Targets:
        """The teacher's."""
        start = perf_counter()
        found = self.teacher.targets(row, ids, positions)
        self.seconds += perf_counter() - start
        return found


def _measured(job: Job, target: Target, student: Student, data: Data) -> Costs:
    """Costs with the draft as it is before training: its speed depends on its shape only."""
    with scratch_beside(job.work / "start") as folder:
        save_student(student, Path(folder), torch.float32)
        draft = load_model(folder, weights=job.weights, device=job.device)
        return measure_costs(target.model, draft, data.validation[0].ids)


# --- training ---------------------------------------------------------------------------------------------------------


def _train(run: Run) -> None:
    trainer, course, job = run.trainer, run.course, run.job
    run.observer.begin(trainer.recipe.steps, trainer.step_number)
    saved_at = began = perf_counter()
    before = course.seconds
    with _stopping() as stopped:
        while trainer.step_number < trainer.recipe.steps and course.since_best < job.patience:
            step = trainer.step()
            course.curve.append(step)
            course.seconds = before + perf_counter() - began
            run.observer.step(step)
            run.board.add("loss", step.loss, step.number)
            if step.number % job.evaluate_every == 0 or step.number == trainer.recipe.steps:
                _evaluate(run)
            if stopped():
                _save(run)
                raise Interrupted(f"interrupted after step {step.number}; go on with the same command and --resume")
            if perf_counter() - saved_at >= 60 * job.checkpoint_minutes:
                _save(run)
                saved_at = perf_counter()
    _save(run)


def _evaluate(run: Run) -> None:
    overlaps = run.rater.overlaps(along(run.student), run.start.output_ids)
    found = Evaluation(
        run.trainer.step_number,
        {t: rate(overlaps, t) for t in (0, 1)},
        predicted(overlaps, run.temperature, run.costs),
    )
    course = run.course
    course.evaluations.append(found)
    best = found.better_than(course.best, run.temperature)
    if best:
        course.best = found
        course.best_weights = run.trainer.state()["weights"]
    run.observer.evaluation(found, best)
    for t, value in found.acceptance.items():
        run.board.add(f"acceptance/T={t}", value, found.step)
    run.board.add("predicted speed-up", found.speed_up.speed_up, found.step)


def along(student: Student) -> Callable[[Encoded], Tensor]:
    """A draft in training as what ``acceptance`` asks: log-probabilities along a window."""

    @torch.no_grad()
    def log_probs(window: Encoded) -> Tensor:
        ids, scored = torch.tensor([window.ids[:-1]]), torch.tensor([window.written[1:]])
        return student.log_probs(ids, scored)

    return log_probs


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Turns interrupts into an answer to "shall it stop?", so that no step is torn; a second one ends it at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def ask(number: int, _: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save(run: Run) -> None:
    """Keep everything that a resumed run needs."""
    course = run.course
    state = {
        "steps": run.trainer.recipe.steps,
        "keep": run.trainer.teacher.count if isinstance(run.trainer.teacher, Keeping) else 0,
        "trainer": run.trainer.state(),
        "costs": [run.costs.draft_step, dict(run.costs.verify)],
        "course": {
            "curve": [asdict(s) for s in course.curve],
            "evaluations": [asdict(e) for e in course.evaluations],
            "best": asdict(course.best) if course.best else None,
            "best_weights": course.best_weights,
            "seconds": course.seconds,
        },
    }
    write_kept(run.job.work / _STATE, state)


def write_kept(file: Path, state: Any) -> None:
    """Write a state, wholly or not at all.

    Raises:
        InputError: there is no room for it; what was there before is still there.
    """
    held = BytesIO()
    torch.save(state, held)
    try:
        write_whole(file, lambda partial: partial.write_bytes(held.getbuffer()))
    except SlipstreamError as error:
        raise InputError(f"{error}; make room and go on with --resume, everything up to then is kept") from error


def _costs(saved: Any) -> Costs:
    return Costs(saved[0], saved[1])


def _course(saved: dict[str, Any]) -> _Course:
    def evaluation(values: dict[str, Any]) -> Evaluation:
        return Evaluation(values["step"], values["acceptance"], Choice(**values["speed_up"]))

    return _Course(
        curve=[Step(**s) for s in saved["curve"]],
        evaluations=[evaluation(e) for e in saved["evaluations"]],
        best=evaluation(saved["best"]) if saved["best"] else None,
        best_weights=saved["best_weights"],
        seconds=saved["seconds"],
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def _finish(run: Run) -> Result:
    """Take the best weights, measure them exactly beside the start, write the checkpoint."""
    run.observer.phase("measuring the draft, before and after")
    student, job = run.student, run.job
    own = dict(student.named_parameters())
    with torch.no_grad():
        for name, weight in run.course.best_weights.items():
            own[name].copy_(weight)
    merge_adapters(student)
    if job.full_vocab:
        make_portable(student, [one.ids[: job.length] for one in run.data.training[:_STATES]])
    dtype = torch.float32 if job.early_exit is not None else _dtype(run.start)
    round_to(student, dtype)
    exact = Exact(run.target.model, run.data.validation)
    both = [along(Student(run.start)), along(student)]
    before, after = exact.compare(both, [run.start.output_ids, student.output_ids])
    result = Result(
        out=job.out,
        before=figures(before, run.costs),
        after=figures(after, run.costs),
        gain={t: gain(before, after, t) for t in (0, 1)},
        costs=run.costs,
        steps=run.trainer.step_number,
        stopped_early=run.trainer.step_number < run.trainer.recipe.steps,
        seconds=run.course.seconds,
        curve=run.course.curve,
        evaluations=run.course.evaluations,
    )
    if job.must_gain and result.gain[job.temperature].low <= 0:
        shown = result.gain[job.temperature]
        raise Refused(
            f"the new draft is not better on held-out text: its acceptance at T = {job.temperature} changed by "
            f"{shown.value:+.3f} (95 % interval {shown.low:+.3f} to {shown.high:+.3f}), so it was not written"
        )
    run.observer.phase("writing the draft")
    _write(run, result, dtype)
    return result


def _write(run: Run, result: Result, dtype: torch.dtype) -> None:
    from slipstream.distill.card import write_beside

    try:
        with scratch_beside(run.job.out) as scratch:
            folder = Path(scratch) / run.job.out.name
            folder.mkdir()
            if run.job.early_exit is not None:
                about = {"target": run.job.target, "sha256": run.target.hash}
                save_exit_head(exit_head(run.student), folder, about)
            else:
                save_student(run.student, folder, dtype)
            write_beside(folder, run, result)
            folder.rename(run.job.out)
    except OSError as error:
        raise InputError(
            f"cannot write {str(run.job.out)!r}: {error.strerror or error}; make room and go on with --resume"
        ) from error


def _dtype(start: Start) -> torch.dtype:
    """The kind of numbers that the start's checkpoint holds."""
    return start.head.dtype if start.head.dtype in (torch.bfloat16, torch.float16) else torch.float32


def round_to(student: Student, dtype: torch.dtype) -> None:
    """Make the weights what they are in the file, so that what is measured is what is written."""
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.to(dtype))
