"""How much each key may ask: requests a minute, tokens a minute, requests at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic

_MINUTE = 60.0


@dataclass(frozen=True)
class Allowance:
    """Limits of one key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompts and answers together."""
    concurrent: int | None = None


@dataclass(frozen=True)
class Refusal:
    """Why a request cannot be taken now, and when it makes sense to try again."""

    message: str
    retry_after: float
    """Seconds."""

    @property
    def seconds(self) -> int:
        """For the Retry-After header."""
        return max(1, math.ceil(self.retry_after))


class Window:
    """An amount within the last minute, to the second."""

    def __init__(self, limit: int, clock: Callable[[], float] = monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._parts: deque[tuple[float, int]] = deque()
        """(when it was added, how much); parts of one second are one, with the time of the latest."""
        self._sum = 0

    def add(self, amount: int) -> None:
        """Count ``amount`` as of now."""
        now = self._clock()
        if self._parts and int(self._parts[-1][0]) == int(now):
            amount_before = self._parts.pop()[1]
            self._parts.append((now, amount_before + amount))
        else:
            self._parts.append((now, amount))
        self._sum += amount

    def wait(self) -> float:
        """Seconds until less than the limit is left of what was added; 0 if that is so now."""
        now = self._clock()
        while self._parts and self._parts[0][0] + _MINUTE <= now:
            self._sum -= self._parts.popleft()[1]
        left = self._sum
        for when, amount in self._parts:
            if left < self.limit:
                break
            left -= amount
            if left < self.limit:
                return when + _MINUTE - now
        return 0.0


class Meter:
    """What one key uses. May be called from any thread."""

    def __init__(self, allowance: Allowance, clock: Callable[[], float] = monotonic) -> None:
        self.allowance = allowance
        self.running = 0
        self._lock = Lock()
        self._requests = _window(allowance.requests_per_minute, clock)
        self._tokens = _window(allowance.tokens_per_minute, clock)

    def enter(self) -> Refusal | None:
        """Count a request that begins, or say why it may not; ``leave`` ends it.

        Tokens are counted as they come. So requests that were let in may go over the limit, and later ones wait for it.
        """
        with self._lock:
            most = self.allowance.concurrent
            if most is not None and self.running >= most:
                return Refusal(f"this key may have {most} requests at a time; wait for one to end", 1.0)
            for window, what in ((self._requests, "requests"), (self._tokens, "tokens")):
                if window is not None and (seconds := window.wait()):
                    message = f"this key may use {window.limit} {what} a minute; try again in {math.ceil(seconds)} s"
                    return Refusal(message, seconds)
            self.running += 1
            if self._requests is not None:
                self._requests.add(1)
            return None

    def spend(self, tokens: int) -> None:
        """Count tokens of a prompt or an answer."""
        if self._tokens is not None and tokens:
            with self._lock:
                self._tokens.add(tokens)

    def leave(self) -> None:
        """A request that was let in is over."""
        with self._lock:
            self.running -= 1


def _window(limit: int | None, clock: Callable[[], float]) -> Window | None:
    return None if limit is None else Window(limit, clock)
