"""Many requests at once: they share the passes of the models, and nothing else.

A step has one pass of the target, in which every request has rows: those of its round, or a part of its prompt. Before
it, draft models draft for all requests in lock step. Requests join and leave between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Lock
from time import perf_counter
from typing import TypeVar, cast

from torch import Tensor

from slipstream.answers import Setting, check_prompt
from slipstream.controller import make_policy
from slipstream.decode import Proposal
from slipstream.drafters.base import Drafter
from slipstream.errors import InputError
from slipstream.goodput import MOST, BatchController, Goodput, Offer
from slipstream.job import Job
from slipstream.lockstep import Passes, together
from slipstream.models.base import ROWS, Item, forward_each
from slipstream.sampling import validate
from slipstream.seats import Limits, Seats, check_limits, models_of
from slipstream.types import Draft, Event, Output, Request

Key = TypeVar("Key", bound=Hashable)

#: Of the rows for prompts, one in so many is for the oldest request that is reading, however many short ones come.
_OLDEST = 3
#: A prompt with no more tokens left is read soon; a longer one is there for many passes, and others come meanwhile.
_SOON = 512
#: A draft model that has missed more than this reads it part by part first.
_LITTLE = 16
#: Tokens that a draft model reads in a step of a draft: its own latest one, and those it has not seen.
_A_FEW = 3


@dataclass
class _Plan:
    """What the jobs of one step do."""

    deciding: list[Job]
    """Those that have a round."""
    reading: dict[Job, int]
    """Those that read so many more tokens first."""
    catching_up: dict[Job, int]
    """Those whose draft models do."""
    copied: dict[Job, Draft] = field(default_factory=dict)
    """What some have copied."""
    asked: dict[Job, int] = field(default_factory=dict)
    """How many tokens each is to draft."""
    proposals: dict[Job, Proposal] = field(default_factory=dict)
    failed: dict[Job, Exception] = field(default_factory=dict)

    def without(self, job: Job) -> None:
        """Leave it out."""
        if job in self.deciding:
            self.deciding.remove(job)
        for jobs in (self.reading, self.catching_up, self.asked):
            jobs.pop(job, None)
        self.proposals.pop(job, None)

    def fail(self, job: Job, error: Exception) -> None:
        """Leave it out for good."""
        self.without(job)
        self.failed[job] = error

    def rows(self, job: Job) -> int:
        """How many tokens the target reads for it at most."""
        if job in self.proposals:
            return 1 + len(self.proposals[job].draft.tokens)
        return self.reading.get(job, 1 + self.asked.get(job, 0))


class Engine:
    """Answers many requests.

    With the native kernels, all requests' tokens are rows of one pass, and what a request is answered has the same bits
    alone and in any company. Other models run one request after the other within a step.

    Args:
        setting: models, drafter, and what else the answers have in common. Of its policies of k, ``Goodput`` chooses
            over the whole batch; others choose for each request by itself.
        limits: of memory and of work in a step.

    ``add`` and ``abort`` may be called from any thread, ``step`` by one at a time.

    Raises:
        InputError: the memory is not enough for anything, or the target cannot roll back.
    """

    def __init__(self, setting: Setting, limits: Limits | None = None) -> None:
        self.setting = setting
        self.limits = limits or Limits()
        check_limits(self.limits)
        self.seats = Seats(setting.target, models_of(setting.drafter), self.limits)
        few, most = getattr(setting.target, "prompt_rows", (ROWS, ROWS))
        self._few_rows, self._most_rows = self.limits.rows or few, self.limits.rows or most
        self._goodput = setting.policy if isinstance(setting.policy, Goodput) else Goodput()
        self._goodput.left = getattr(setting.drafter, "left", 1.0)
        self._lock, self._stepping = Lock(), Lock()
        self._former: set[int] = set()
        """Draft models that were swapped for others, by id."""
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
        if request.params.stop and self.setting.tokenizer is None:
            raise InputError(f"stop={list(request.params.stop)!r} needs text, but the engine has no tokenizer")
        with self._lock:  # so that both are of the same draft
            setting, arenas = self.setting, self.seats.arenas
        setting = self._own(request, setting)
        decoder, answer = setting.start(tuple(request.prompt), request.params, request.index)
        if decoder.max_length > self.seats.positions:
            raise InputError(
                f"prompt and answer of up to {decoder.max_length} tokens do not fit the {self.seats.positions} that "
                "memory= has room for; lower max_new_tokens or raise memory="
            )
        progress = decoder.begin(request.prompt, answer.push, setting.target.new_cache())
        with self._lock:
            self._count += 1
            self._added.append(Job(self._count, request, decoder, answer, progress, arenas))
            self._open.add(self._count)
            return self._count

    def _own(self, request: Request, setting: Setting) -> Setting:
        """What ``request`` changes in it."""
        if request.k is not None:
            setting = replace(setting, policy=make_policy(request.k))
        if request.drafter is None:
            return setting
        known = models_of(setting.drafter)
        foreign = [model for model in models_of(request.drafter) if all(model is not one for one in known)]
        if any(id(model) not in self._former for model in foreign):
            raise InputError("drafter= of a request drafts with a model that the engine has no memory for")
        # One that was made of a draft that has been swapped since: the present one does as well.
        return setting if foreign else replace(setting, drafter=request.drafter)

    def abort(self, request: int) -> bool:
        """End a request with the next step; False if it is over already."""
        with self._lock:
            if request not in self._open:
                return False
            self._aborted.add(request)
            return True

    def swap(self, drafter: Drafter) -> None:
        """Draft with ``drafter`` for the requests that are added from now on; from any thread.

        Those that are here already finish with the drafter that they began with. Until then the caches of both have
        their memory. Whatever drafts, the answers follow the target.
        """
        with self._lock:
            self.seats.renew(models_of(drafter))
            self._former |= set(map(id, models_of(self.setting.drafter)))
            self.setting = replace(self.setting, drafter=drafter)
            self._goodput.forget_drafts()
            self._goodput.left = getattr(drafter, "left", 1.0)

    def answers(self, requests: Sequence[Request]) -> list[Output]:
        """The outputs of ``requests``, in their order; the first failure is raised, and ends everything.

        For an engine that nobody else uses.

        Raises:
            InputError: a request that cannot be answered.
            ModelError: the target broke down.
        """
        ids: list[int] = []
        outputs: dict[int, Output] = {}
        try:
            ids += [self.add(request) for request in requests]
            while not outputs.keys() >= set(ids):
                for event in self.step():
                    if event.error is not None:
                        raise event.error
                    if event.output is not None:
                        outputs[event.id] = event.output
        except BaseException:
            with self._lock:
                self._aborted |= self._open
            self._take_in()
            raise
        return [outputs[one] for one in ids]

    @property
    def unfinished(self) -> int:
        """How many requests have not had their last event."""
        with self._lock:
            return len(self._open)

    @property
    def running(self) -> int:
        """How many requests have a place."""
        return len(self._running)

    def step(self) -> list[Event]:
        """One round of everything; what it brought."""
        with self._stepping:
            events = self._take_in()
            events += self._admit()
            plan = self._planned()
            self._ask(plan)
            self._fit(plan)
            self._draft(plan)
            events += [self._end(job, error) for job, error in plan.failed.items()]
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

    def _admit(self) -> list[Event]:
        """Give those who wait a place, in their order; who had better wait lets others go first."""
        failed: list[Event] = []
        for job in list(self._waiting):
            if len(self._running) >= self.limits.requests:
                break
            if self.seats.better_waits(job, self._running):
                continue
            try:
                if not self.seats.take(job):
                    break
            except Exception as error:
                failed.append(self._end(job, error))
                continue
            self._waiting.remove(job)
            self._running.append(job)
        return failed

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
        output = job.answer.output
        return Event(job.id, output=output, error=error, speed_up=self._goodput.speed_up(output.stats))

    # --- planning -----------------------------------------------------------------------------------------------------

    def _planned(self) -> _Plan:
        """Who reads how much of what it has missed; who has missed nothing has a round."""
        missing = {job: job.missing for job in self._running}
        plan = _Plan([job for job in self._running if missing[job] <= 0], {}, {})
        behind = {job: count for job, count in missing.items() if count > 0}
        plan.reading = shares(behind, self._rows_to_read(behind.values(), len(plan.deciding)))
        readers = [job for job in plan.reading if job.reads_draft]
        pays = any(job.adapts for job in readers) and self._goodput.pays_for(len(self._running))
        plan.catching_up = {job: plan.reading[job] for job in readers if pays or not job.adapts}
        return plan

    def _rows_to_read(self, missing: Collection[int], deciding: int) -> int:
        """Tokens of prompts in this pass: many if all who take part in it wait for a first token that is near.

        Args:
            missing: tokens that each has yet to read.
            deciding: requests that wait for the pass with a round of theirs.
        """
        soon = sum(count <= _SOON for count in missing)
        alone = not deciding and soon == len(missing)
        rows = self._most_rows if alone else min(self._few_rows * max(soon, 1), self._most_rows)
        return max(rows, deciding)

    def _ask(self, plan: _Plan) -> None:
        """Decide on k for those who have a round. If its draft model has missed much, that comes first."""
        rooms = {job: min(job.decoder.room(job.progress), MOST) for job in plan.deciding if job.adapts}
        rooms = {job: room for job, room in rooms.items() if room}
        others = sum(plan.reading.values()) + len(plan.deciding) - len(rooms)
        controllers = [cast(BatchController, job.decoder.controller) for job in rooms]
        offers = [Offer(()) for _ in rooms]
        if rooms and self._goodput.may_pay(len(rooms), others):
            plan.copied = {job: self._copied(job, room, plan) for job, room in rooms.items() if job.copies}
            pairs = zip(controllers, rooms.items(), strict=True)
            offers = [one.offer(room, plan.copied.get(job)) for one, (job, room) in pairs]
        self._goodput.choose(controllers, offers, others, len(self._running) - len(plan.deciding))
        chosen = {job: one.k for job, one in zip(rooms, controllers, strict=True)}
        for job in list(plan.deciding):
            if job in plan.copied and chosen[job] <= len(plan.copied[job].tokens):
                self._propose_copies(job, plan)
                continue
            try:
                if k := job.decoder.ask(job.progress):
                    plan.asked[job] = k
            except Exception as error:
                plan.fail(job, error)
        self._let_catch_up(plan)

    def _let_catch_up(self, plan: _Plan) -> None:
        behind: dict[Job, int] = {}
        for job in list(plan.asked):
            try:
                if (missed := job.draft_behind()) > _LITTLE:
                    behind[job] = missed
            except Exception as error:
                plan.fail(job, error)
        plan.catching_up |= shares(behind, max(self._few_rows, _LITTLE))
        for job in behind:
            del plan.asked[job]
            if job in plan.copied:
                self._propose_copies(job, plan)
            if not job.adapts:  # it has to draft, lest what it answers depend on when others came
                plan.deciding.remove(job)

    def _copied(self, job: Job, room: int, plan: _Plan) -> Draft:
        """What it would copy, if all of it were to be verified."""
        start = perf_counter()
        try:
            return job.copied(room)
        except Exception as error:
            plan.fail(job, error)
            return Draft()
        finally:
            job.draft_seconds += perf_counter() - start

    @staticmethod
    def _propose_copies(job: Job, plan: _Plan) -> None:
        try:
            plan.proposals[job] = job.decoder.cut(plan.copied[job], min(job.decoder.room(job.progress), MOST))
        except Exception as error:
            plan.fail(job, error)

    def _fit(self, plan: _Plan) -> None:
        """Make room for what each will read, the oldest first; for that, the youngest may lose their places."""
        for job in list(self._running):
            while job in self._running and not self.seats.grow(job, job.cache.length + plan.rows(job)):
                self._preempt(self._running[-1], plan)

    # --- working ------------------------------------------------------------------------------------------------------

    def _draft(self, plan: _Plan) -> None:
        """Draft for those who have a round, and let draft models read along."""
        start = perf_counter()
        steps: dict[Job, Passes] = {job: job.draft(k) for job, k in plan.asked.items()}
        steps |= {job: job.catch_up(count) for job, count in plan.catching_up.items() if job not in steps}
        passes: list[float] = []

        def took(requests: int, rows: int, seconds: float) -> None:
            passes.append(seconds)
            if rows <= _A_FEW * requests:  # reading prompts says little of what a step costs
                self._goodput.took_draft(rows, seconds)

        for job, found in together(steps, self.seats.fits, took).items():
            if isinstance(found, Exception):
                plan.fail(job, found)
            elif job in plan.asked and found is not None:
                plan.proposals[job] = found
        taken = perf_counter() - start
        drafted = sum(_drawn(job, plan.proposals[job].whole) for job in plan.asked if job in plan.proposals)
        if drafted:
            self._goodput.took_each(drafted, taken - sum(passes))
        for job in steps:
            job.draft_seconds += taken

    def _read(self, plan: _Plan) -> list[Event]:
        """The target's pass, and what comes of it."""
        items = {job: job.chunk(count) for job, count in plan.reading.items()}
        items |= {job: job.verification(plan.proposals.get(job, Proposal())) for job in plan.deciding}
        if not items:
            return []
        begun = sum(map(_begun, items.values()))
        start = perf_counter()
        logits = forward_each(self.setting.target, list(items.values()))
        taken = perf_counter() - start
        self._goodput.took(sum(len(item.tokens) for item in items.values()), taken, begun=begun)
        events: list[Event] = []
        for (job, item), rows in zip(items.items(), logits, strict=True):
            job.read_seconds += taken
            if isinstance(rows, Exception):
                events.append(self._end(job, rows))
                continue
            if job in plan.reading:
                self.seats.keep(job)
            if item.num_logits and not self._is_aborted(job):
                events.append(self._settled(job, plan.proposals.get(job, Proposal()), rows))
        return events

    def _is_aborted(self, job: Job) -> bool:
        with self._lock:
            return job.id in self._aborted

    def _settled(self, job: Job, proposal: Proposal, logits: Tensor) -> Event:
        try:
            done = job.settle(proposal, logits)
        except Exception as error:
            return self._end(job, error)
        piece = job.answer.add(done)
        return replace(self._end(job), piece=piece, round=done) if job.answer.over else Event(job.id, piece, done)


def _drawn(job: Job, draft: Draft) -> int:
    """How many of a draft's tokens took passes; all of them where it copies only."""
    controller = job.decoder.controller
    copied = controller.copied(draft) if isinstance(controller, BatchController) else ()
    return sum(not one for one in copied) or len(draft.tokens)


def _begun(item: Item) -> int:
    """How many of its tokens have been through the target's first layers."""
    ahead = getattr(item.cache, "ahead", None)
    return 0 if ahead is None else min(len(ahead.tokens), len(item.tokens))


def shares(missing: Mapping[Key, int], rows: int) -> dict[Key, int]:
    """How many tokens of what each has missed are read in a pass that has ``rows`` for that.

    The shortest first, so that a short prompt hardly waits for a long one; but a share is the oldest's, lest it starve.

    Args:
        missing: tokens that each has yet to read, at least one; the oldest first.
        rows: tokens in all.

    Returns:
        Those that read in this pass.

    >>> shares({"long": 4000}, 6), shares({"long": 4000, "short": 4, "other": 5}, 6)
    ({'long': 6}, {'long': 2, 'short': 4})
    """
    counts = {oldest: min(count, max(1, rows // _OLDEST)) for oldest, count in islice(missing.items(), 1)}
    left = rows - sum(counts.values())
    for key in sorted(missing, key=lambda key: missing[key]):
        if more := min(missing[key] - counts.get(key, 0), left):
            counts[key] = counts.get(key, 0) + more
            left -= more
    return counts
