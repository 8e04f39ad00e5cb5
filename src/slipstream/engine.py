"""Many requests at once: they share the passes of the models, and nothing else.

A step has one pass of the target, in which every request has rows: those of its round, or a part of its prompt. Before
it, draft models draft for all requests in lock step. Requests join and leave between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock
from time import perf_counter
from typing import Any

from torch import Tensor

from slipstream.answers import Setting, check_prompt
from slipstream.decode import first
from slipstream.drafters.base import Drafter
from slipstream.errors import InputError
from slipstream.goodput import MOST, Candidate, Goodput
from slipstream.job import Job
from slipstream.lockstep import Passes, together
from slipstream.models.base import Model, forward_each
from slipstream.sampling import validate
from slipstream.seats import Limits, Seats, models_of
from slipstream.types import Draft, Event, Request
from slipstream.verify import RULES

#: k of a seeded sampled request that does not say: it must not depend on what else is going on.
REPEATABLE = 4
#: Rows that are left for reading prompts however many requests are decoding.
_LEAST_READING = 16
#: A draft model that has missed more than this reads it part by part first.
_LITTLE = 16


@dataclass
class _Plan:
    """What the jobs of one step do."""

    deciding: list[Job]
    """Those that have a round."""
    reading: dict[Job, int]
    """Those that read so many more tokens first."""
    catching_up: dict[Job, int] = field(default_factory=dict)
    """Those whose draft models do."""
    asked: dict[Job, int] = field(default_factory=dict)
    """How many tokens each is to draft with passes of its drafter's."""
    drafts: dict[Job, Draft] = field(default_factory=dict)

    def without(self, job: Job) -> None:
        """Leave it out."""
        if job in self.deciding:
            self.deciding.remove(job)
        for jobs in (self.reading, self.catching_up, self.asked, self.drafts):
            jobs.pop(job, None)  # type: ignore[attr-defined]

    def rows(self, job: Job) -> int:
        """How many tokens the target reads for it."""
        drafted = len(self.drafts[job].tokens) if job in self.drafts else self.asked.get(job, 0)
        return self.reading.get(job, 0) or (1 + drafted)


class Engine:
    """Answers requests with ``target``, drafts by ``drafter``.

    With the native kernels, all requests' tokens are rows of one pass, and what a request is answered has the same bits
    alone and in any company. Other models run one request after the other within a step.

    Args:
        target: any model.
        drafter: what ``make_drafter`` returns.
        tokenizer: for text and stop strings; None for the target's.
        rule: accept rule.
        coupled: random numbers belong to positions, see ``SpeculativeDecoding(bit_exact=True)``.
        limits: of memory and of work in a step.

    ``add`` and ``abort`` may be called from any thread, ``step`` by one at a time.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        *,
        tokenizer: Any | None = None,
        rule: str = RULES[0],
        coupled: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.setting = Setting(target, drafter, MOST, tokenizer or target.tokenizer, rule, coupled)
        self.seats = Seats(target, models_of(drafter), self.limits)
        self._goodput = Goodput()
        self._lock, self._stepping = Lock(), Lock()
        self._added: deque[Job] = deque()
        self._aborted: set[int] = set()
        self._open: set[int] = set()
        self._count = 0
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    # --- from outside -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request; its id.

        Raises:
            InputError: it cannot be answered, or never within the memory.
        """
        validate(request.params, self.setting.target.vocab_size)
        check_prompt(request.prompt, self.setting.target)
        if request.k is not None and (type(request.k) is not int or request.k < 0):
            raise InputError(f"k={request.k!r} is not a number of draft tokens; use None, 0 or a positive integer")
        decoder, answer = self.setting.start(tuple(request.prompt), request.params, request.index)
        if decoder.max_length > self.seats.positions:
            raise InputError(
                f"prompt and answer of up to {decoder.max_length} tokens do not fit the {self.seats.positions} that "
                "memory= has room for; lower max_new_tokens or raise memory="
            )
        sampler = decoder.sampler
        repeatable = request.params.seed is not None and not (sampler.greedy or sampler.coupled)
        adapts = request.k is None and not repeatable
        k = request.k if request.k is not None else REPEATABLE if repeatable else MOST
        progress = decoder.begin(request.prompt, answer.push, None)
        with self._lock:
            self._count += 1
            acceptance = self._goodput.start()
            self._added.append(
                Job(self._count, request, replace(decoder, k=k), answer, acceptance, adapts, progress)
            )
            self._open.add(self._count)
            return self._count

    def abort(self, request: int) -> bool:
        """End a request with the next step; False if it is over already."""
        with self._lock:
            if request not in self._open:
                return False
            self._aborted.add(request)
            return True

    @property
    def unfinished(self) -> int:
        """How many requests have not had their last event."""
        with self._lock:
            return len(self._open)

    def step(self) -> list[Event]:
        """One round of everything; what it brought."""
        with self._stepping:
            events = self._take_in()
            self._admit()
            plan = self._planned()
            self._ask(plan)
            self._fit(plan)
            events += self._draft(plan)
            return events + self._read(plan)

    # --- joining and leaving ------------------------------------------------------------------------------------------

    def _take_in(self) -> list[Event]:
        """Queue what was added; let go of what was aborted, or needs no round at all."""
        with self._lock:
            self._waiting += self._added
            self._added.clear()
            aborted, self._aborted = self._aborted, set()
        over = [job for job in [*self._running, *self._waiting] if job.id in aborted or job.answer.over]
        return [self._end(job) for job in over]

    def _admit(self) -> None:
        """Give those who wait a place, in their order; who had better wait lets others go first."""
        for job in list(self._waiting):
            if len(self._running) >= self.limits.requests:
                return
            if self.seats.better_waits(job, self._running):
                continue
            if not self.seats.take(job):
                return
            self._waiting.remove(job)
            self._running.append(job)

    def _preempt(self, job: Job, plan: _Plan) -> None:
        """Back to the head of the queue; what it had read is read again later."""
        self.seats.leave(job)
        self._running.remove(job)
        self._waiting.appendleft(job)
        plan.without(job)

    def _end(self, job: Job, error: Exception | None = None) -> Event:
        """It is over, or failed."""
        try:
            job.decoder.close(job.progress)
            job.answer.flush()
        except Exception as problem:
            error = error or problem
        self.seats.leave(job, keep=error is None)
        for place in (self._running, self._waiting):
            if job in place:
                place.remove(job)
        with self._lock:
            self._open.discard(job.id)
            self._aborted.discard(job.id)
        return Event(job.id, output=job.answer.output, error=error)

    # --- planning -----------------------------------------------------------------------------------------------------

    def _planned(self) -> _Plan:
        """Who reads how much of what it has missed, the shortest first; who has missed nothing has a round."""
        missing = {job: job.missing for job in self._running}
        plan = _Plan([job for job in self._running if missing[job] <= 0], {})
        readers = sorted((job for job in self._running if missing[job] > 0), key=lambda job: missing[job])
        left = max(self.limits.rows - len(plan.deciding), _LEAST_READING)
        for done, job in enumerate(readers):
            count = min(missing[job], max(1, left // (len(readers) - done)))
            plan.reading[job] = count
            left -= count
            if not job.adapts or self._goodput.pays:
                plan.catching_up[job] = count
        return plan

    def _ask(self, plan: _Plan) -> None:
        """Decide on k for those who have a round. If its draft model has missed much, that comes first."""
        adapting: dict[Job, Candidate] = {}
        for job in list(plan.deciding):
            if not job.adapts:
                plan.asked[job] = job.room
            elif room := job.room:
                copied = self._copied(job, min(room, MOST), plan) if job.copies else None
                if job in plan.deciding:
                    adapting[job] = Candidate(job.acceptance, room, job.rounds_without, copied)
        others = sum(plan.reading.values()) + len(plan.deciding) - len(adapting)
        for (job, one), k in zip(adapting.items(), self._goodput.ks(list(adapting.values()), others), strict=True):
            if one.copied is not None:
                plan.drafts[job] = first(one.copied, k, "controller")
            else:
                plan.asked[job] = k
        behind = [job for job, k in plan.asked.items() if k and job.draft_behind() > _LITTLE]
        for job in behind:
            plan.asked[job] = 0
            plan.catching_up[job] = max(_LEAST_READING, self.limits.rows // len(behind))
            if not job.adapts:  # it has to draft, lest what it answers depend on when others came
                plan.deciding.remove(job)

    def _copied(self, job: Job, k: int, plan: _Plan) -> Draft:
        start = perf_counter()
        draft = Draft()
        try:
            draft = job.decoder.usable(job.decoder.session.draft(job.tokens, k), k)
        except Exception as error:
            self._failed[job] = error
            plan.without(job)
        job.draft_seconds += perf_counter() - start
        return draft

    def _fit(self, plan: _Plan) -> None:
        """Make room for what each will read, the oldest first; for that, the youngest may lose their places."""
        for job in list(self._running):
            while job in self._running and not self.seats.grow(job, job.cache.length + plan.rows(job)):
                self._preempt(self._running[-1], plan)
