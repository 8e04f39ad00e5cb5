"""Many requests at once: they share the passes of the models, and nothing else.

A step has one pass of the target, in which every request has rows: those of its round, or a part of its prompt. Before
it, draft models draft for all requests in lock step. Requests join and leave between steps.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from slipstream.answers import Setting, check_prompt
from slipstream.drafters.base import Drafter, Read
from slipstream.errors import InputError
from slipstream.estimates import OF_ALL, OF_REQUEST, Acceptance, Costs, Prior
from slipstream.goodput import choose
from slipstream.job import Job, drafting
from slipstream.models.base import Item, Model, forward_each
from slipstream.models.cache import KeyValueCache
from slipstream.prefix import PrefixCache, common
from slipstream.sampling import validate
from slipstream.slots import QUANTUM, make_arenas
from slipstream.types import Draft, Event, Request, Round
from slipstream.verify import RULES

#: The longest draft that the engine chooses by itself, and the one of a seeded sampled request, which must not depend
#: on what else is going on.
MOST, REPEATABLE = 16, 4
#: Rows that are left for reading prompts however many requests are decoding.
_LEAST_READING = 16
#: A draft model that has missed more than this reads it part by part first.
_LITTLE = 16
#: Rounds after which a request that drafts nothing tries one token.
_PROBE = 32
#: What requests know of acceptance when they begin counts for so many tokens.
_PRIOR_WEIGHT = 8.0

Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Limits:
    """What an engine may use.

    ``memory`` is in bytes, for caches of target and draft models and the prefix cache; None takes a quarter of what is
    free.
    """

    memory: int | None = None
    requests: int = 32
    """At most so many are answered at a time; the others wait."""
    rows: int = 64
    """Tokens that a pass reads, but for those of drafts: one for each request that is decoding, the rest of prompts."""
    prefix: float = 0.25
    """Share of the memory for prefixes; 0 keeps none."""


@dataclass
class _Plan:
    """What the jobs of one step do."""

    deciding: list[Job] = field(default_factory=list)
    """Those that have a round."""
    reading: dict[Job, int] = field(default_factory=dict)
    """Those that read so many more tokens of a prompt."""
    drafts: dict[Job, Draft] = field(default_factory=dict)


class Engine:
    """Answers requests with ``target``, drafts by ``drafter``.

    Args:
        target: any model. With the native kernels, all requests' tokens are rows of one pass, and what they answer has
            the same bits alone and in any company. Other models run one request after the other within a step.
        drafter: what ``make_drafter`` returns.
        tokenizer: for text and stop strings; None for the target's.
        rule: accept rule.
        coupled: random numbers belong to positions, see ``SpeculativeDecoding(bit_exact=True)``.
        limits: of memory and of work in a step.

    ``add`` and ``abort`` may be called from any thread, ``step`` from one at a time.
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
        memory = self.limits.memory if self.limits.memory is not None else _free_memory() // 4
        self._draft_models = models_of(drafter)
        hosted = isinstance(target.new_cache(), KeyValueCache)
        kept = int(memory * self.limits.prefix) if hosted else 0
        self._prefixes = PrefixCache(kept) if kept else None
        self._arenas = make_arenas([target, *self._draft_models], memory - kept)
        self._target = target
        self._verify, self._draft = Costs(1.0), Costs(1.0)
        self._acceptance = Acceptance(Prior(), OF_ALL)
        self._lock, self._stepping = Lock(), Lock()
        self._added: deque[Job] = deque()
        self._aborted: set[int] = set()
        self._known: set[int] = set()
        self._ids = 0
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []

    # --- from outside -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queue a request; its id.

        Raises:
            InputError: it cannot be answered, or never within the memory.
        """
        validate(request.params, self._target.vocab_size)
        check_prompt(request.prompt, self._target)
        decoder, answer = self.setting.start(tuple(request.prompt), request.params, request.index)
        arena = self._arenas[id(self._target)]
        if decoder.max_length > arena.positions:
            raise InputError(
                f"prompt and answer of up to {decoder.max_length} tokens do not fit the {arena.positions} that "
                "memory= has room for; lower max_new_tokens or raise memory="
            )
        adapts = request.k is None
        if (
            request.k is None
            and request.params.seed is not None
            and not (decoder.sampler.greedy or decoder.sampler.coupled)
        ):
            adapts = False
        own = MOST if adapts else REPEATABLE if request.k is None else request.k
        with self._lock:
            self._ids += 1
            self._known.add(self._ids)
            decoder = _with_k(decoder, own)
            acceptance = Acceptance(self._acceptance.summary(_PRIOR_WEIGHT), OF_REQUEST)
            job = Job(self._ids, request, decoder, answer, acceptance, list(request.prompt), adapts)
            self._added.append(job)
            return self._ids

    def abort(self, request: int) -> bool:
        """End a request with the next step; False if it is over already."""
        with self._lock:
            if request not in self._known:
                return False
            self._aborted.add(request)
            return True

    @property
    def unfinished(self) -> int:
        """How many requests have not had their last event."""
        with self._lock:
            return len(self._known)

    def step(self) -> list[Event]:
        """One round of everything; what it brought, in the order of admission."""
        with self._stepping:
            events = self._take_in()
            self._admit(events)
            plan = self._planned()
            failed = self._drafted(plan)
            events += [self._fail(job, error) for job, error in failed.items()]
            return events + self._read(plan)

    # --- joining and leaving ------------------------------------------------------------------------------------------

    def _take_in(self) -> list[Event]:
        """Queue what was added; let go of what was aborted, or needs no round at all."""
        with self._lock:
            self._waiting += self._added
            self._added.clear()
            aborted, self._aborted = self._aborted, set()
        over = [j for j in [*self._running, *self._waiting] if j.id in aborted or j.answer.over]
        events = []
        for job in over:
            job.answer.flush()
            events.append(self._end(job))
        return events

    def _admit(self, events: list[Event]) -> None:
        """Give the first of those who wait a place, as long as there is one."""
        for job in list(self._waiting):
            if len(self._running) >= self.limits.requests:
                return
            if self._would_share(job):
                continue
            if not self._seat(job):
                return
            self._waiting.remove(job)
            self._running.append(job)

    def _would_share(self, job: Job) -> bool:
        """Whether another one is just reading a prefix of it, which it can then take over."""
        if not self._shares(job) or self._prefixes is None:
            return False
        held = self._prefixes.length(job.tokens)
        beginnings = (common(other.tokens, job.tokens[:-1]) for other in self._reading() if self._shares(other))
        return any(count > held for count in beginnings)

    def _reading(self) -> Iterable[Job]:
        return (job for job in self._running if not job.begun)

    def _shares(self, job: Job) -> bool:
        return self._prefixes is not None and job.request.reuse and job.request.params.share

    def _seat(self, job: Job) -> bool:
        """Find a place for what it has so far and some more."""
        need = len(job.tokens) + 1
        want = min(job.decoder.max_length, need + 4 * QUANTUM)
        slots: list[Slot] = []
        for model in self._models(job):
            slot = self._arenas[id(model)].take(need, want)
            if slot is None:
                self._vacate(slots)
                return False
            slots.append(slot)
        job.slots = slots
        cache = slots[0].cache
        job.progress = job.decoder.begin(job.tokens, job.answer.push, cache)
        job.tokens = job.progress.tokens
        if len(slots) > 1:
            own = {id(m): s.cache for m, s in zip(self._draft_models, slots[1:], strict=True)}
            job.decoder.session.lend(lambda model: own[id(model)])  # type: ignore[attr-defined]
        if self._prefixes is not None and self._shares(job):
            self._prefixes.fill(job.tokens, cache)
        return True

    def _models(self, job: Job) -> list[Model]:
        return [self._target, *(self._draft_models if job.reads_draft else [])]

    def _vacate(self, slots: Sequence[Slot]) -> None:
        for arena in self._arenas.values():
            for slot in slots:
                if slot in arena.slots:
                    arena.give_back(slot)

    def _leave(self, job: Job) -> None:
        """Give its place up; its tokens stay."""
        if job in self._running:
            self._running.remove(job)
        if job.progress is not None and self._shares(job) and self._prefixes is not None:
            self._prefixes.keep(job.tokens, job.cache)
        self._vacate(job.slots)
        job.slots, job.progress = [], None

    def _end(self, job: Job, error: Exception | None = None) -> Event:
        if job in self._waiting:
            self._waiting.remove(job)
        if hasattr(job.decoder.session, "close"):
            job.decoder.session.close(job.tokens)
        self._leave(job)
        with self._lock:
            self._known.discard(job.id)
            self._aborted.discard(job.id)
        return Event(job.id, output=job.answer.output, error=error)

    def _fail(self, job: Job, error: Exception) -> Event:
        return self._end(job, error)

    # --- planning -----------------------------------------------------------------------------------------------------

    def _planned(self) -> _Plan:
        """Who reads what; those who read nothing have a round."""
        plan = _Plan()
        behind = {job: job.missing for job in self._running if job.missing > 0}
        plan.deciding = [job for job in self._running if job not in behind]
        left = max(self.limits.rows - len(plan.deciding), _LEAST_READING)
        for done, (job, missing) in enumerate(sorted(behind.items(), key=lambda pair: pair[1])):
            count = min(missing, max(1, left // (len(behind) - done)))
            plan.reading[job] = count
            left -= count
        return plan

    def _fit(self, plan: _Plan, rows: Callable[[Job], int]) -> None:
        """Make room for what each will read, the oldest first; for that, the youngest may lose their places."""
        for job in list(self._running):
            while job in self._running and not self._grown(job, job.cache.length + rows(job)):
                self._preempt(self._running[-1], plan)

    def _grown(self, job: Job, need: int) -> bool:
        want = min(need + max(QUANTUM, need // 2), job.decoder.max_length)
        arenas = [self._arenas[id(model)] for model in self._models(job)]
        return all(arena.grow(slot, need, want) for arena, slot in zip(arenas, job.slots, strict=True))

    def _preempt(self, job: Job, plan: _Plan) -> None:
        """Back to the head of the queue; what it had read is read again later."""
        self._leave(job)
        self._waiting.appendleft(job)
        plan.reading.pop(job, None)
        plan.drafts.pop(job, None)
        if job in plan.deciding:
            plan.deciding.remove(job)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _drafted(self, plan: _Plan) -> dict[Job, Exception]:
        """Draft for those who have a round, and let draft models read along; who failed at it, and why."""
        start = perf_counter()
        asked = self._asked(plan)
        self._fit(plan, lambda job: plan.reading.get(job, 0) or 1 + asked.get(job, 0))
        steps: dict[Job, Generator[Read, Tensor, Any]] = {}
        for job in plan.deciding:
            if asked.get(job, 0):
                steps[job] = drafting(job.decoder.session, job.tokens, asked[job])
        for job, count in plan.reading.items():
            if job.reads_draft:
                steps[job] = job.decoder.session.catch_up(job.tokens, count)  # type: ignore[attr-defined]
        failed: dict[Job, Exception] = {}
        for job, found in self._together(steps).items():
            try:
                if isinstance(found, Exception):
                    raise found
                if job in plan.deciding:
                    plan.drafts[job] = job.decoder.usable(found, asked[job])
            except Exception as error:
                failed[job] = error
        taken = perf_counter() - start
        for job in steps:
            job.draft_seconds += taken
        for job in failed:
            plan.reading.pop(job, None)
            if job in plan.deciding:
                plan.deciding.remove(job)
        return failed

    def _asked(self, plan: _Plan) -> dict[Job, int]:
        """How many tokens each is to draft; who must wait for its draft model reads instead."""
        asked: dict[Job, int] = {}
        adapting: list[Job] = []
        for job in list(plan.deciding):
            assert job.progress is not None
            room = job.decoder.room(job.progress)
            if room and job.draft_behind() > _LITTLE:
                asked[job] = 0
                continue
            if job.adapts:
                adapting.append(job)
            else:
                asked[job] = room
        return asked | self._chosen(adapting, sum(plan.reading.values()) + len(plan.deciding) - len(adapting))

    def _chosen(self, jobs: Sequence[Job], others: int) -> dict[Job, int]:
        rooms = [job.decoder.room(job.progress) for job in jobs if job.progress is not None]
        rates = [job.acceptance.positions(room) for job, room in zip(jobs, rooms, strict=True)]
        cost = self._draft.of if self._draft_models else None
        chosen = choose(rates, others, self._verify.of, cost)
        return {
            job: min(room, 1) if not k and job.rounds_without >= _PROBE else k
            for job, room, k in zip(jobs, rooms, chosen, strict=True)
        }

    def _together(self, steps: dict[Job, Generator[Read, Tensor, Any]]) -> dict[Job, Any]:
        """Run all to their ends, each pass for all that wait for one of the same model; results, or exceptions."""
        results: dict[Job, Any] = {}
        waiting: dict[Job, Read] = {}

        def advance(job: Job, resume: Callable[[], Read]) -> None:
            try:
                waiting[job] = resume()
            except StopIteration as done:
                results[job] = done.value
            except Exception as error:
                results[job] = error

        for job, one in steps.items():
            advance(job, lambda one=one: next(one))  # type: ignore[misc]
        while waiting:
            model = next(iter(waiting.values())).model
            batch = {job: read for job, read in waiting.items() if read.model is model}
            for job in batch:
                del waiting[job]
            start = perf_counter()
            logits = forward_each(model, [Item(r.tokens, r.cache, r.num_logits) for r in batch.values()])
            self._draft.verified(sum(len(r.tokens) for r in batch.values()), perf_counter() - start)
            for (job, _), rows in zip(batch.items(), logits, strict=True):
                one = steps[job]
                if isinstance(rows, Exception):
                    results[job] = rows
                    one.close()
                else:
                    advance(job, lambda one=one, rows=rows: one.send(rows))  # type: ignore[misc]
        return results

    # --- verifying ----------------------------------------------------------------------------------------------------

    def _read(self, plan: _Plan) -> list[Event]:
        """The target's pass, and what comes of it."""
        items = {job: job.chunk(count) for job, count in plan.reading.items()}
        items |= {job: job.verification(plan.drafts.get(job, Draft())) for job in plan.deciding}
        if not items:
            return []
        start = perf_counter()
        logits = forward_each(self._target, list(items.values()))
        taken = perf_counter() - start
        self._verify.verified(sum(len(item.tokens) for item in items.values()), taken)
        events: list[Event] = []
        for (job, item), rows in zip(items.items(), logits, strict=True):
            job.read_seconds += taken
            if isinstance(rows, Exception):
                events.append(self._fail(job, rows))
            elif item.num_logits:
                events += self._settled(job, plan.drafts.get(job, Draft()), rows)
            if not job.begun and job.progress is not None and self._shares(job) and self._prefixes is not None:
                self._prefixes.keep(job.tokens, job.cache)
        return events

    def _settled(self, job: Job, draft: Draft, logits: Tensor) -> list[Event]:
        with self._lock:
            if job.id in self._aborted:
                return []
        try:
            done = job.settle(draft, logits)
        except Exception as error:
            return [self._fail(job, error)]
        first = not job.begun
        piece = job.answer.add(done)
        self._learn(job, draft, done)
        if job.answer.over:
            end = self._end(job)
            return [Event(job.id, piece, end.output)]
        if first and self._shares(job) and self._prefixes is not None:
            self._prefixes.keep(job.tokens, job.cache)
        return [Event(job.id, piece)]

    def _learn(self, job: Job, draft: Draft, done: Round) -> None:
        seen = done.num_accepted if job.answer.over else min(done.num_accepted + 1, done.num_drafted)
        for acceptance in (job.acceptance, self._acceptance):
            for at in range(seen):
                sure = draft.confidence[at] if at < len(draft.confidence) else None
                acceptance.verified(at, sure, float(at < done.num_accepted))
            acceptance.end_round()
        if not done.num_drafted:
            job.acceptance.rest()


def models_of(drafter: Any) -> list[Model]:
    """The models that ``drafter`` drafts with, beside the target."""
    if hasattr(drafter, "drafters"):
        found = [model for one in drafter.drafters for model in models_of(one)]
        return list({id(model): model for model in found}.values())
    return [drafter.model] if hasattr(drafter, "model") else []


def _with_k(decoder: Any, k: int) -> Any:
    from dataclasses import replace

    return replace(decoder, k=k)


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
