"""One request of an engine: its decoding, its place in memory, what it waits for."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch import Tensor

from slipstream.answers import Answer
from slipstream.decode import Clock, Decoder, Progress
from slipstream.drafters.base import Read, Steps, run
from slipstream.estimates import Acceptance
from slipstream.models.base import Item
from slipstream.slots import Slot
from slipstream.types import Draft, Request, Round


@dataclass(eq=False)
class Job:
    """What the engine knows of a request."""

    id: int
    request: Request
    decoder: Decoder
    answer: Answer
    acceptance: Acceptance
    adapts: bool
    """Whether k is chosen over the whole batch; otherwise it is a matter of this request alone."""
    progress: Progress
    """Its cache is of use only while there are ``slots``."""
    slots: dict[int, Slot] = field(default_factory=dict)
    """Its places in memory, by the id of the model."""
    since: float = field(default_factory=perf_counter)
    draft_seconds: float = 0.0
    read_seconds: float = 0.0
    rounds_without: int = 0
    """Rounds since the latest draft."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and committed output."""
        return self.progress.tokens

    @property
    def cache(self) -> Any:
        """The target's."""
        return self.progress.cache

    @property
    def begun(self) -> bool:
        """Whether it has had its first round, which reads the prompt."""
        return bool(self.answer.rounds)

    @property
    def missing(self) -> int:
        """Tokens to be read before the next round can be had: in the first one, all of them are part of it."""
        return len(self.tokens) - self.cache.length - int(self.begun)

    @property
    def room(self) -> int:
        """How many tokens may be drafted."""
        return self.decoder.room(self.progress)

    @property
    def shares(self) -> bool:
        """Whether it takes prefixes from others and leaves them its own."""
        return self.request.reuse and self.request.params.share

    @property
    def copies(self) -> bool:
        """Whether its drafts cost next to nothing, so that all of them are made and those that pay are verified."""
        return getattr(self.decoder.session, "copies", False)

    @property
    def reads_draft(self) -> bool:
        """Whether it has a draft model that has to read along."""
        return self.decoder.k > 0 and hasattr(self.decoder.session, "catch_up")

    def draft(self, k: int) -> Steps:
        """A draft, a pass at a time; of sessions that cannot be interrupted, all at once."""
        session: Any = self.decoder.session
        if hasattr(session, "steps"):
            draft: Draft = yield from session.steps(self.tokens, (), k)
        else:
            draft = session.draft(self.tokens, k)
        return self.decoder.usable(draft, k)

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
        last = not self.begun and count >= self.missing
        return Item(self.tokens[start : start + count], self.cache, int(last))

    def verification(self, draft: Draft) -> Item:
        """Reading what a round with ``draft`` needs."""
        return Item(self.progress.unread(draft), self.cache, len(draft.tokens) + 1)

    def settle(self, draft: Draft, logits: Tensor) -> Round:
        """Verify and commit; the time since the round before counts for this one."""
        clock = Clock(self.since, self.since + self.draft_seconds, self.read_seconds)
        done = self.decoder.settle(self.progress, draft, logits, clock)
        self.since, self.draft_seconds, self.read_seconds = perf_counter(), 0.0, 0.0
        self.rounds_without = 0 if draft.tokens else self.rounds_without + 1
        return done


def readers(jobs: Sequence[Job]) -> list[Job]:
    """Those that are reading their prompts for the first time."""
    return [job for job in jobs if not job.begun]
