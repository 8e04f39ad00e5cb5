"""What may watch the server: metrics, logs, captures.

All methods are called on the event loop, in order, never two at a time; they must not block. What an observer raises is
logged and goes no further.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

from slipstream.types import Output, Piece, Request, Round

logger = logging.getLogger("slipstream.serve")

Outcome = Literal["finished", "aborted", "failed"]


@dataclass(frozen=True)
class Call:
    """One HTTP request that was accepted, and the answers that it asks for."""

    id: str
    """As in the response's ``id``."""
    endpoint: Literal["chat", "completion"]
    requests: tuple[Request, ...]
    """One for each answer, in the order of ``choices``."""
    body: Mapping[str, Any]
    """The parsed request; it holds what the user wrote."""
    stream: bool = False
    user: str | None = None
    """What the client says of its own user."""
    began: float = field(default_factory=perf_counter)
    state: dict[str, Any] = field(default_factory=dict)
    """For whoever admits it: the API key's name, and the like."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; the prompt of ``n`` samples counts once."""
        return sum(len(request.prompt) for request in self.requests if request.index == 0)

    @property
    def most_tokens(self) -> int:
        """Tokens that may be generated at most."""
        return sum(request.params.max_new_tokens for request in self.requests)


@dataclass(frozen=True)
class Tokens:
    """What one round of one answer brought."""

    index: int
    """Which of the call's answers."""
    round: Round
    """Its ``tokens``, their ``origins``, the ``sources`` of the draft, k, times."""
    piece: Piece
    """Its text."""
    at: float
    """``perf_counter()`` when the round was over."""


@dataclass(frozen=True)
class End:
    """How a call ended."""

    outcome: Outcome
    outputs: tuple[Output | None, ...]
    """Of each answer what there is; None if it never began."""
    error: Exception | None
    at: float


class Observer(Protocol):
    """Watches calls. ``on_begin`` and ``on_end`` are called once for each, ``on_tokens`` in between."""

    def on_begin(self, call: Call) -> None:
        """It was accepted, and is handed to the engine."""
        ...

    def on_tokens(self, call: Call, tokens: Tokens) -> None:
        """A round of one of its answers is over."""
        ...

    def on_end(self, call: Call, end: End) -> None:
        """All of its answers are over."""
        ...

    # An observer may also have ``on_sent(call, index, count)``: so many tokens of a streamed answer went out.


class Observers:
    """All of them, as one that never fails."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Let one more watch, from the next event on."""
        self._observers.append(observer)

    def on_begin(self, call: Call) -> None:
        """Tell all."""
        self._tell("on_begin", call)

    def on_tokens(self, call: Call, tokens: Tokens) -> None:
        """Tell all."""
        self._tell("on_tokens", call, tokens)

    def on_end(self, call: Call, end: End) -> None:
        """Tell all."""
        self._tell("on_end", call, end)

    def on_sent(self, call: Call, index: int, count: int) -> None:
        """Tell those who want to know that so many tokens of a stream went out."""
        self._tell("on_sent", call, index, count)

    def _tell(self, method: str, *what: Any) -> None:
        for observer in self._observers:
            try:
                if method != "on_sent" or hasattr(observer, method):
                    getattr(observer, method)(*what)
            except Exception:
                logger.exception("%s.%s failed", type(observer).__name__, method)
