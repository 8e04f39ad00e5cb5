"""How many rows of the data, how many steps, how often measured: decided together, before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from slipstream.distill.job import Job
from slipstream.distill.losses import CROSS_ENTROPY
from slipstream.distill.teacher import Targets, Teacher
from slipstream.distill.tokens import Rows
from slipstream.distill.train import Trainer

#: Steps of a run that says neither how many nor how long.
_STEPS = 2000
#: Of what the target says so many tokens at a position are kept, if rows are seen again.
_KEPT = 64
#: Rows seen again teach nearly as much as new ones for so many times (Muennighoff et al. 2023, arXiv 2305.16264).
_PASSES = 4
#: Measured every so many steps, but in no more than such a share of the time, or so often where steps are few.
_EVERY, _MEASURING, _TIMES = 200, 0.1, 5
#: No draft sees more text in a minute than that, and the ids of a reduced vocabulary are counted in that at least.
_TOKENS_A_MINUTE, _TOKENS = 200_000, 1_000_000
#: Held-out tokens to measure at: so many, and of a short run so many for each minute but no fewer than the last.
VALIDATION, _VALIDATION_A_MINUTE, _VALIDATION_LEAST = 8192, 1024, 2048


@dataclass(frozen=True)
class Pace:
    """Seconds on this machine."""

    step: float
    """Of a step without asking the target."""
    target: float = 0.0
    """Of asking it about a step's rows."""
    drawn: float = 0.0
    """Of a step on text that the draft writes, with all that belongs to it."""
    evaluation: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a run does."""

    steps: int
    rows: int
    """Of the data so many, the first ones."""
    every: int
    """Steps between evaluations."""
    keep: int
    """So many tokens of each of the target's distributions are kept; 0: it is asked anew each time."""


def tokens_of_use(job: Job) -> int:
    """More than so many tokens of training text need not be read, since no step would see them."""
    if job.minutes is not None:
        return max(_TOKENS, round(_TOKENS_A_MINUTE * job.minutes))
    return max(_TOKENS, (job.steps or _STEPS) * job.batch * job.length + 1)


def tokens_to_measure_at(job: Job) -> int:
    """Positions of held-out text."""
    if job.validation_tokens is not None:
        return job.validation_tokens
    if job.minutes is None:
        return VALIDATION
    return min(VALIDATION, max(_VALIDATION_LEAST, round(_VALIDATION_A_MINUTE * job.minutes)))


def plan(job: Job, rows: int, pace: Pace | None) -> Plan:
    """Rows and steps that fit each other, and the minutes if there is a limit.

    Args:
        job: says how many steps, or how many minutes.
        rows: there are.
        pace: None if steps are given.
    """
    size = min(job.batch, rows)
    if pace is None or job.minutes is None:
        steps = job.steps or _STEPS
        every = max(1, min(_EVERY, steps // _TIMES))
    else:
        steps, rows, every = _within(60 * job.minutes, job, pace, rows)
    rows = min(rows, steps * size)
    keep = job.keep
    if keep is None:
        keep = _KEPT if steps * size > rows else 0
    return Plan(steps, rows, job.evaluate_every or every, 0 if job.loss == CROSS_ENTROPY else keep)


def _within(budget: float, job: Job, pace: Pace, rows: int) -> tuple[int, int, int]:
    """Steps, rows, and steps between evaluations, for so many seconds."""
    size = min(job.batch, rows)
    step, target = _costs_of_a_step(job, pace)
    every = job.evaluate_every or max(_EVERY, math.ceil(pace.evaluation / (_MEASURING * (step + target))))
    few = not job.evaluate_every and budget < _TIMES * every * (step + target)
    if few:
        budget = max(budget / 2, budget - _TIMES * pace.evaluation)
    else:
        step += pace.evaluation / every
    # as many passes over each row as make asking about it no dearer than learning from it
    passes = 1 if job.keep == 0 else min(_PASSES, max(1, round(1 + target / step)))
    steps = max(1, int(budget * passes / (target + passes * step)))
    wanted = max(size, math.ceil(steps * size / passes))
    if wanted > rows and job.keep != 0:
        steps = max(1, int((budget - rows / size * target) / step))
    return steps, min(wanted, rows), max(1, steps // _TIMES) if few else every


def _costs_of_a_step(job: Job, pace: Pace) -> tuple[float, float]:
    """Seconds of learning, and of asking the target, on average over steps of either kind."""
    asked = 1 - job.on_policy
    target = 0.0 if job.loss == CROSS_ENTROPY else asked * pace.target
    return asked * pace.step + job.on_policy * pace.drawn, target


def told(plan: Plan, job: Job, rows: Rows, pace: Pace | None) -> str:
    """The plan in words."""
    size, length = min(job.batch, plan.rows), rows.ids.shape[1]
    passes = plan.steps * size / plan.rows
    seen = "each once at most" if passes <= 1 else f"each {passes:.1f} times"
    whole = "all" if plan.rows == len(rows) else f"{plan.rows:,} of {len(rows):,}"
    time = ""
    if pace is not None:
        time = f", about {seconds_of(plan, job, pace) / 60:.1f} minutes"
    return (
        f"plan: {plan.steps:,} steps of {size} rows{time}; {whole} rows of {length} tokens, {seen}; "
        f"measured every {plan.every} steps"
    )


def seconds_of(plan: Plan, job: Job, pace: Pace) -> float:
    """What training is expected to take, with asking the target and measuring."""
    step, target = _costs_of_a_step(job, pace)
    times = plan.rows / min(job.batch, plan.rows) if plan.keep else plan.steps
    return plan.steps * step + times * target + plan.steps / plan.every * pace.evaluation


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_pace(job: Job, trainer: Trainer, evaluation: float) -> Pace:
    """Of parts of steps that change nothing; ``evaluation``: seconds that one took."""
    count = min(-(-job.batch // job.accumulate), len(trainer.rows))
    batch, share = torch.arange(count), min(job.batch, len(trainer.rows)) / count
    asking, timed = trainer.teacher, _Timed(trainer.teacher)
    trainer.teacher = timed
    _clocked(lambda: trainer.loss_of(batch[:1]))  # pays for what happens only once
    found = []
    for _ in range(2):  # something else may have come between one of them
        timed.seconds = 0.0
        found.append((_clocked(lambda: trainer.loss_of(batch)), timed.seconds))
    drawn = _clocked(lambda: trainer.loss_of(batch, on_policy=True)) if job.on_policy else 0.0
    trainer.teacher = asking
    trainer.student.zero_grad(set_to_none=True)
    whole, target = min(found)
    return Pace((whole - target) * share, target * share, drawn * share, evaluation)


def _clocked(loss: Callable[[], Tensor]) -> float:
    start = perf_counter()
    loss().backward()
    return perf_counter() - start


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
