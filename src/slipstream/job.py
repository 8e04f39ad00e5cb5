"""One request of an engine: its decoding, its place in memory, what it waits for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from slipstream.answers import Answer
from slipstream.controller import Fixed
from slipstream.decode import Clock, Decoder, Progress, Proposal
from slipstream.drafters.base import Read, run
from slipstream.goodput import BatchController
from slipstream.models.base import Item
from slipstream.slots import Arena, Slot
from slipstream.types import Draft, Request, Round


@dataclass(eq=False)
class Job:
    """What the engine knows of a request."""

    id: int
    request: Request
    decoder: Decoder
    answer: Answer
    progress: Progress
    """Its cache is of use only while there are ``slots``."""
    arenas: Sequence[Arena]
    """Where it may have slots: the target's, then those of its draft models."""
    slots: list[Slot] = field(default_factory=list)
    """Its places in ``arenas``, as far as it has them."""
    since: float = field(default_factory=perf_counter)
    draft_seconds: float = 0.0
    read_seconds: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """Prompt and committed output."""
        return self.progress.tokens

    @property
    def cache(self) -> Any:
        """The target's."""
        return self.progress.cache

    @property
    def adapts(self) -> bool:
        """Whether k is chosen over the whole batch; otherwise it is a matter of this request alone."""
        return isinstance(self.decoder.controller, BatchController)

    @property
    def missing(self) -> int:
        """Tokens to be read before the next round can be had; those of the first round are part of it."""
        held: int = self.cache.length
        return len(self.tokens) - held - int(not self.progress.reading)

    @property
    def shares(self) -> bool:
        """Whether it takes prefixes from others and leaves them its own."""
        return self.request.reuse and self.request.params.share

    @property
    def copies(self) -> bool:
        """Whether some of its drafts cost next to nothing: these are made first, and those that pay are verified."""
        session = self.decoder.session
        return hasattr(session, "copied") or (getattr(session, "copies", False) and not hasattr(session, "catch_up"))

    def copied(self, room: int) -> Draft:
        """What it drafts for next to nothing; of a cascade, what it is sure of, or all if its models draft nothing."""
        session: Any = self.decoder.session
        if not hasattr(session, "copied"):
            draft: Draft = session.draft(self.tokens, room)
            return draft
        controller = self.decoder.controller
        alone = isinstance(controller, BatchController) and not controller.drafts_pay
        found: Draft = session.copied(self.tokens, room, sure=not alone)
        return found

    @property
    def reads_draft(self) -> bool:
        """Whether it may have a draft model that has to read along."""
        plain = isinstance(self.decoder.controller, Fixed) and self.decoder.controller.k == 0
        return not plain and hasattr(self.decoder.session, "catch_up")

    def draft(self, k: int) -> Generator[Read, Tensor, Proposal]:
        """A draft, a pass at a time; of sessions that cannot be interrupted, all at once."""
        session: Any = self.decoder.session
        if hasattr(session, "steps"):
            draft: Draft = yield from session.steps(self.tokens, (), k)
        else:
            draft = session.draft(self.tokens, k)
        return self.decoder.cut(draft, k)

    def draft_behind(self) -> int:
        """How many tokens its draft model has yet to read before a draft begins."""
        return run(self.catch_up(0))

    def catch_up(self, most: int) -> Generator[Read, Tensor, int]:
        """Its draft model reads up to ``most`` of what it has missed; returns how many are left."""
        if not self.reads_draft:
            return 0
        session: Any = self.decoder.session
        left: int = yield from session.catch_up(self.tokens, most)
        return left

    def chunk(self, count: int) -> Item:
        """Reading ``count`` more tokens; with logits of the last one, if that makes the first round."""
        start = self.cache.length
        last = self.progress.reading and count >= self.missing
        return Item(self.tokens[start : start + count], self.cache, int(last))

    def verification(self, proposal: Proposal) -> Item:
        """Reading what a round with this draft needs."""
        return Item(self.progress.unread(proposal.draft), self.cache, len(proposal.draft.tokens) + 1)

    def settle(self, proposal: Proposal, logits: Tensor) -> Round:
        """Verify and commit; the time since the round before counts for this one."""
        clock = Clock(self.since, self.since + self.draft_seconds, self.read_seconds)
        done = self.decoder.settle(self.progress, proposal, logits, clock)
        self.since, self.draft_seconds, self.read_seconds = perf_counter(), 0.0, 0.0
        return done


def readers(jobs: Sequence[Job]) -> list[Job]:
    """Those that are reading their prompts for the first time."""
    return [job for job in jobs if job.progress.reading]
