"""What a drafter is: something that, shown the tokens so far, proposes the next ones.

A third party adds one by writing these two small classes; nothing else in Slipstream needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from slipstream.models.base import Cache, Model, feed
from slipstream.models.exit_head import Exit
from slipstream.sampling import Ahead, Sampler
from slipstream.types import Draft, DraftEnd

Outcome = TypeVar("Outcome")


class DraftSession(Protocol):
    """The drafting of one request.

    A session that has a method ``share(cache)`` is given the target's cache of the request, before the first round.
    """

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Propose up to ``k`` >= 1 tokens to follow ``tokens`` (prompt + committed output).

        ``tokens`` differs from the previous call's by what the last round committed, which may be less than what was
        drafted: a session that keeps state catches up and rolls back by itself. Fewer tokens than ``k``, or none, is
        always a correct answer. ``Draft.probs`` must be the very distributions that the tokens were drawn from.
        """
        ...


@dataclass(frozen=True)
class Read:
    """A pass of a draft model that a draft waits for: ``tokens`` behind what is in ``cache``."""

    model: Model
    tokens: Sequence[int]
    cache: Any
    num_logits: int = 1
    """Of how many of the last tokens logits are wanted, (num_logits, V)."""
    exit: Exit | None = None
    """Where the pass ends, if not behind the last layer."""


@dataclass
class Drawn:
    """A draft in the making."""

    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def add(self, ahead: Ahead, token: int) -> None:
        """``token`` is what came of ``ahead``."""
        self.tokens.append(token)
        self.confidence.append(ahead.confidence)
        if not isinstance(ahead.of, int):
            self.rows.append(ahead.of)

    def draft(self, ended: DraftEnd) -> Draft:
        """All of it; ``ended``: why there is no more."""
        probs = torch.stack(self.rows) if self.rows else None
        return Draft(tuple(self.tokens), probs, ended, confidence=tuple(self.confidence))


#: Drafting, interrupted at each pass: yields it, is sent its logits, returns the draft.
Steps = Generator[Read, Tensor, Draft]


def run(steps: Generator[Read, Tensor, Outcome]) -> Outcome:
    """Make the passes one by one."""
    try:
        read = next(steps)
        while True:
            read = steps.send(passed(read))
    except StopIteration as done:
        outcome: Outcome = done.value
        return outcome


def passed(read: Read) -> Tensor:
    """What ``read`` asks for, by a pass of its own."""
    model: Any = read.model
    if read.exit is None:
        return feed(model, read.tokens, read.cache, read.num_logits)
    logits: Tensor = model.exit_early(read.tokens, read.cache, read.exit.layers, read.num_logits, read.exit.head)
    return logits


class Gate(Protocol):
    """Whether to draft another token; see ``GatedSession``."""

    def __call__(self, drafted: int, confidence: float, source: str = "", /) -> bool:
        """After ``drafted`` tokens of this round; ``source`` names the drafter if several share the draft."""
        ...


class Preference(Protocol):
    """Whether a token is to be taken from one drafter rather than asking another, which needs a pass for it."""

    def __call__(self, confidence: float, source: str, other: str, /) -> bool:
        """``source`` is this sure of it; both by name."""
        ...


@runtime_checkable
class GatedSession(Protocol):
    """A session that finds one token after the other and lets itself be stopped.

    ``gate`` is set from outside; while it is None nothing is asked. Before each further token the session asks it with
    the number of tokens drafted so far in this round and its confidence: how sure it is of the next token, in [0, 1], a
    function of the distribution that the token will be drawn from, known before it is drawn. False ends the draft there
    with ``Draft.ended = "controller"``. A token that is drawn is never dropped: that would bias answers towards what is
    kept.

    Where another pass is needed to know that distribution, the session first asks with NaN for the confidence: is such
    a pass worth its time? A session that needs no passes has an attribute ``copies``, True.
    """

    gate: Gate | None


class Continuing(GatedSession, Protocol):
    """What a session may have besides; whoever uses one looks for each by its name."""

    latest: int | None
    """Of a prompt that it has not begun to read, so many of the last tokens are read; None: all, if need be again."""

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        """As ``draft``, behind ``drafted`` tokens that others propose in the same round and that may yet be rejected.

        With it a drafter can go on from another's tokens in a cascade.
        """
        ...

    def steps(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Steps:
        """``draft_after``, a pass at a time, so that drafts of many requests can share their passes."""
        ...

    def lend(self, new_cache: Callable[[Model], Cache]) -> None:
        """Start anew with caches from ``new_cache`` in place of the models' own."""
        ...

    def catch_up(self, tokens: Sequence[int], most: int) -> Generator[Read, Tensor, int]:
        """Read up to ``most`` of the ``tokens`` that it has not read; returns how many are left but for the last."""
        ...

    def close(self, tokens: Sequence[int]) -> None:
        """Called once when the request is over, abandoned ones included, with its prompt and committed output."""
        ...


class Drafter(Protocol):
    """A source of drafts, shared by all requests."""

    name: str

    def start(self, sampler: Sampler) -> DraftSession:
        """Begin one request; ``sampler`` turns logits into the request's probabilities and draws from them."""
        ...
