"""Who has a place in memory: caches in arenas, and the beginnings of prompts that are kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.answers import Setting
from slipstream.drafters.base import Read
from slipstream.errors import InputError
from slipstream.job import Job, readers
from slipstream.models.base import Model
from slipstream.models.cache import KeyValueCache
from slipstream.prefix import PrefixCache, common
from slipstream.slots import QUANTUM, Arena, make_arenas, position_bytes
from slipstream.types import Request

#: Places are this much larger than needed, if there is room: growing may mean that others move.
_AHEAD = 4 * QUANTUM


@dataclass(frozen=True)
class Limits:
    """What an engine may use."""

    memory: int | None = None
    """Bytes for caches of target and draft models and for kept prefixes; None: a quarter of what is free."""
    requests: int = 32
    """At most so many are answered at a time; the others wait."""
    rows: int | None = None
    """Tokens of prompts that a pass reads, or as many as requests are decoding, if these are more. None: as many as the
    target gains from; fewer if few read while others decode, which wait for that pass."""
    prefix: float = 0.25
    """Share of the memory for prefixes; 0 keeps none."""


def check_limits(limits: Limits) -> None:
    """Refuse limits with which nothing would ever be answered.

    Raises:
        InputError: it names the first.
    """
    whole = {"memory": limits.memory, "requests": limits.requests, "rows": limits.rows}
    for name, value in whole.items():
        if value is None and name != "requests":
            continue
        if type(value) is not int or value < 1:
            raise InputError(f"{name}={value!r} leaves no room for a request; give a whole number from 1 on")
    if not 0 <= limits.prefix < 1:
        raise InputError(f"prefix={limits.prefix!r} is no share of the memory; give a number from 0 up to, not with, 1")


class Seats:
    """The memory of an engine. A place has a slot in the target's arena and one in that of each draft model."""

    def __init__(self, target: Model, draft_models: Sequence[Model], limits: Limits) -> None:
        memory = limits.memory if limits.memory is not None else _free_memory() // 4
        hosted = isinstance(target.new_cache(), KeyValueCache)
        kept = int(memory * limits.prefix) if hosted else 0
        self.prefixes = PrefixCache(kept) if kept else None
        self.arenas = make_arenas([target, *draft_models], memory - kept)
        """The target's, then one for each draft model, which may be the target once more."""

    def renew(self, draft_models: Sequence[Model]) -> None:
        """Have other draft models for those who come from now on; who is here keeps the arenas that it has.

        The memory of arenas is free again when the last of those is gone.
        """
        self.arenas = [self.arenas[0], *(Arena(model, self.positions) for model in draft_models)]

    @property
    def positions(self) -> int:
        """How many tokens all requests together may have at a time."""
        return self.arenas[0].positions

    def take(self, job: Job) -> bool:
        """Find a place for what it has so far and some more, and begin there anew; False if there is none."""
        need = len(job.tokens) + 1
        want = min(job.decoder.max_length, need + _AHEAD)
        for arena in job.arenas if job.reads_draft else job.arenas[:1]:
            slot = arena.take(need, want)
            if slot is None:
                self._vacate(job)
                return False
            job.slots.append(slot)
        job.progress.cache = job.slots[0].cache
        job.decoder.share(job.progress)
        session: Any = job.decoder.session
        if job.reads_draft:
            drafting = zip(job.arenas[1:], job.slots[1:], strict=True)
            caches = {id(arena.model): slot.cache for arena, slot in drafting}
            session.lend(lambda model: caches[id(model)])
        if self.prefixes is not None and job.shares:
            self.prefixes.fill(job.tokens, job.cache)
        return True

    def grow(self, job: Job, need: int) -> bool:
        """Make room for ``need`` tokens; False if there is none."""
        want = min(need + max(QUANTUM, need // 2), job.decoder.max_length)
        return all(arena.grow(slot, need, want) for arena, slot in zip(job.arenas, job.slots, strict=False))

    def fits(self, job: Job, read: Read) -> bool:
        """Make room for a pass of a draft model, which may need more tokens than the target for the same text."""
        need = read.cache.length + len(read.tokens)
        own = [pair for pair in zip(job.arenas, job.slots, strict=False) if pair[1].cache is read.cache]
        return all(arena.grow(slot, need) for arena, slot in own)

    def leave(self, job: Job, *, keep: bool = True) -> None:
        """Give its place up."""
        if keep and job.slots:
            self.keep(job)
        self._vacate(job)

    def keep(self, job: Job) -> None:
        """Leave what it has read to others."""
        if self.prefixes is not None and job.shares:
            self.prefixes.keep(job.tokens, job.cache)

    def better_waits(self, job: Job, running: Sequence[Job]) -> bool:
        """Whether another one is just reading a prefix of it, which it can then take over."""
        if self.prefixes is None or not job.shares:
            return False
        held = self.prefixes.length(job.tokens)
        return any(common(other.tokens, job.tokens[:-1]) > held for other in readers(running) if other.shares)

    def _vacate(self, job: Job) -> None:
        for arena, slot in zip(job.arenas, job.slots, strict=False):
            arena.give_back(slot)
        job.slots.clear()


def enough_memory(setting: Setting, requests: Sequence[Request]) -> int:
    """Bytes with which none of ``requests`` has to wait for another; less, if there are not so many."""
    each = sum(map(position_bytes, [setting.target, *models_of(setting.drafter)]))
    lengths = [len(r.prompt) + r.params.max_new_tokens + QUANTUM for r in requests]
    if setting.target.max_positions is not None:
        lengths = [min(length, setting.target.max_positions + QUANTUM) for length in lengths]
    wanted, least = (int(each * n / (1 - Limits.prefix)) + each * QUANTUM for n in (sum(lengths), max(lengths)))
    return max(least, min(wanted, _free_memory() // 4))


def models_of(drafter: Any) -> list[Model]:
    """The models that ``drafter`` drafts with, beside the target."""
    if hasattr(drafter, "drafters"):
        found = [model for one in drafter.drafters for model in models_of(one)]
        return list({id(model): model for model in found}.values())
    return [drafter.model] if hasattr(drafter, "model") else []


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
