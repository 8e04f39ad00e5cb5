"""From a target, a start and data to a checkpoint: what ``slipstream distill`` does, without its screen."""

from __future__ import annotations

import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from slipstream.distill.acceptance import TEMPERATURES, Exact, Figures, Kept, figures, gain, predicted, rate
from slipstream.distill.board import Board
from slipstream.distill.costs import measure_costs
from slipstream.distill.job import SETTINGS, Job, check, remember
from slipstream.distill.lens import fit_output_layer
from slipstream.distill.prepare import (
    ANSWERS,
    Data,
    Target,
    check_memory,
    free_disk,
    is_fitted,
    make_rows,
    make_start,
    make_student,
    read_base,
    read_data,
)
from slipstream.distill.schedule import Plan, measure_pace, plan, told
from slipstream.distill.student import (
    Start,
    Student,
    exit_head,
    make_portable,
    merge_adapters,
    save_student,
)
from slipstream.distill.teacher import SIZES, Asking, Keeping, Teacher
from slipstream.distill.tokens import Encoded, Rows
from slipstream.distill.train import Recipe, Step, Trainer
from slipstream.errors import InputError, SlipstreamError
from slipstream.measure.bootstrap import Interval
from slipstream.measure.expectation import Choice, Costs
from slipstream.measure.files import write_whole
from slipstream.models.exit_head import save_exit_head
from slipstream.models.load import load_model, open_draft

_STATE = "state.pt"
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


@dataclass(frozen=True)
class Judge:
    """Holds a draft in training against the target on held-out text."""

    rater: Kept
    costs: Costs
    temperature: int
    """That of the predicted speed-up."""

    def evaluation(self, student: Student, step: int) -> Evaluation:
        """Of the draft as it is after ``step``."""
        overlaps = self.rater.overlaps(along(student), student.output_ids)
        rates = {t: rate(overlaps, t) for t in TEMPERATURES}
        return Evaluation(step, rates, predicted(overlaps, self.temperature, self.costs))


@dataclass
class Run:
    """A job with everything that its steps need."""

    job: Job
    target: Target
    data: Data
    start: Start
    student: Student
    trainer: Trainer
    plan: Plan
    judge: Judge
    course: _Course
    observer: Observer
    board: Board


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
    fresh = not (job.work / SETTINGS).exists()
    _make_work(job)
    try:
        run = _prepared(job, target, observer)
    except BaseException:
        if fresh and not any((job.work / name).exists() for name in (_STATE, ANSWERS)):
            shutil.rmtree(job.work)
        raise
    try:
        _train(run)
    finally:
        run.board.close()
    try:
        result = _finish(run)
    except Refused:
        shutil.rmtree(job.work)
        raise
    shutil.rmtree(job.work)
    return result


def _make_work(job: Job) -> None:
    try:
        job.work.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make {str(job.work)!r}: {error.strerror or error}; choose another --out") from error
    for left in job.work.glob(".*"):  # of a run that was killed while it was writing
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _prepared(job: Job, target: Target, observer: Observer) -> Run:
    observer.phase("reading the data")
    base = read_base(job, target)
    check_memory(job, target, base)
    free_disk(job.work, (sum(t.numel() for t in base.tensors.values()) + base.head.numel()) * 16)
    remember(job.work / SETTINGS, {**job.binding(), "target": target.hash})
    data = read_data(job, target, observer.phase)
    remember(job.work / "data.json", {"data": data.hash})
    start = make_start(job, target, base, data)
    observer.phase("loading the target")
    rows, saved = make_rows(job, data, target), _saved(job)
    rater = Kept(target.model, data.validation)
    observer.phase("measuring what passes cost")
    costs = job.costs or (_costs(saved["costs"]) if saved else _measured(job, target, start, data))
    student = make_student(job, start)
    judge = Judge(rater, costs, job.temperature)
    asking = Asking(target.model, start.output_ids, len(start.head))
    if saved is None and is_fitted(job, start):
        observer.phase("fitting the output layer")
        fit_output_layer(student, asking, rows, job.fit)
    if saved is None:
        chosen, course = _begun(job, judge, Trainer(student, rows, asking, _recipe(job, 1)), observer)
    else:
        chosen, course = Plan(**saved["plan"]), _course(saved["course"])
    rows = rows.first(chosen.rows)
    trainer = Trainer(
        student, rows, _teacher(job, asking, chosen, rows, fresh=saved is None), _recipe(job, chosen.steps)
    )
    if saved is not None:
        trainer.load(saved["trainer"])
    board = Board(job.logs, trainer.step_number)
    return Run(job, target, data, start, student, trainer, chosen, judge, course, observer, board)


def _begun(job: Job, judge: Judge, trial: Trainer, observer: Observer) -> tuple[Plan, _Course]:
    """What is going to be done, and how good the draft is before the first step."""
    began, pace = perf_counter(), None
    first = judge.evaluation(trial.student, 0)
    if job.minutes is not None:
        observer.phase("timing a step")
        pace = measure_pace(job, trial, perf_counter() - began)
    chosen = plan(job, len(trial.rows), pace)
    observer.phase(told(chosen, job, trial.rows, pace))
    return chosen, _Course(evaluations=[first], best=first, best_weights=trial.state()["weights"])


def _saved(job: Job) -> dict[str, Any] | None:
    file = job.work / _STATE
    if not file.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:  # of many kinds
        raise InputError(f"{str(file)!r} is damaged; remove it to start training anew, answers are kept") from error
    return state


def _teacher(job: Job, asking: Asking, chosen: Plan, rows: Rows, *, fresh: bool) -> Teacher:
    """The target, asked anew each time or kept."""
    if not chosen.keep:
        return asking
    shape = (len(rows), rows.ids.shape[1], min(chosen.keep, asking.rows))
    folder = job.work / "targets"
    if not folder.exists():
        free_disk(job.work, math.prod(shape) * SIZES)
    return Keeping(asking, folder, shape, fresh=fresh)


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


def _measured(job: Job, target: Target, start: Start, data: Data) -> Costs:
    """Costs with the draft as it is before training: its speed depends on the shape only that it will be written in."""
    if job.full_vocab:
        table = start.tensors["model.embed_tokens.weight"]
        start = replace(start, head=torch.zeros_like(table), output_ids=None)
    with _written_in(job) as folder:
        save_student(Student(start), folder, torch.float32)
        if job.early_exit is not None:  # it drafts with the target's own weights
            draft = load_model(folder, weights=job.weights, device=job.device)
        else:
            draft = open_draft(folder, weights=job.weights, device=job.device).load()
        return measure_costs(target.model, draft, data.validation[0].ids)


# --- training ---------------------------------------------------------------------------------------------------------


def _train(run: Run) -> None:
    trainer, course, job = run.trainer, run.course, run.job
    run.observer.begin(trainer.recipe.steps, trainer.step_number)
    if trainer.step_number == 0:
        _tell(run, course.evaluations[0], best=True)
    saved, saved_at = trainer.step_number, perf_counter()
    before, began = course.seconds, saved_at
    with _stopping() as stopped:
        while trainer.step_number < trainer.recipe.steps and course.since_best < job.patience:
            step = trainer.step()
            course.curve.append(step)
            course.seconds = before + perf_counter() - began
            run.observer.step(step)
            run.board.add("loss", step.loss, step.number)
            if step.number % run.plan.every == 0 or step.number == trainer.recipe.steps:
                _evaluate(run)
            if stopped():
                _save(run)
                raise Interrupted(f"interrupted after step {step.number}; go on with the same command and --resume")
            if perf_counter() - saved_at >= 60 * job.checkpoint_minutes:
                _save(run)
                saved, saved_at = step.number, perf_counter()
    if trainer.step_number > saved:
        _save(run)


def _evaluate(run: Run) -> None:
    found, course = run.judge.evaluation(run.student, run.trainer.step_number), run.course
    course.evaluations.append(found)
    best = found.better_than(course.best, run.judge.temperature)
    if best:
        course.best = found
        course.best_weights = run.trainer.state()["weights"]
    _tell(run, found, best)


def _tell(run: Run, found: Evaluation, best: bool) -> None:
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
        "plan": asdict(run.plan),
        "trainer": run.trainer.state(),
        "costs": [run.judge.costs.draft_step, dict(run.judge.costs.verify)],
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
        before=figures(before, run.judge.costs),
        after=figures(after, run.judge.costs),
        gain={t: gain(before, after, t) for t in TEMPERATURES},
        costs=run.judge.costs,
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

    with _written_in(run.job) as folder:
        if run.job.early_exit is not None:
            about = {"target": run.job.target, "sha256": run.target.hash}
            save_exit_head(exit_head(run.student), folder, about)
        else:
            save_student(run.student, folder, dtype)
        write_beside(folder, run, result)
        folder.chmod(0o755)
        folder.rename(run.job.out)


@contextmanager
def _written_in(job: Job) -> Iterator[Path]:
    """A folder within the unfinished run, for what is complete or of no use.

    Raises:
        InputError: there is no room; nothing of it is left.
    """
    folder = Path(tempfile.mkdtemp(prefix=".", dir=job.work))
    try:
        yield folder
    except (OSError, SafetensorError) as error:
        said = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"cannot write {str(job.out)!r}: {said}; make room and go on with --resume") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _dtype(start: Start) -> torch.dtype:
    """The kind of numbers that the start's checkpoint holds."""
    return start.head.dtype if start.head.dtype in (torch.bfloat16, torch.float16) else torch.float32


def round_to(student: Student, dtype: torch.dtype) -> None:
    """Make the weights what they are in the file, so that what is measured is what is written."""
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.copy_(parameter.to(dtype))
