"""``--stream-pace``: tokens that were verified together leave one after the other.

A round brings several tokens at once, then nothing for a while. For somebody who reads along, they are spread over the
time that the next round is likely to take, so that the last one leaves about when the next ones come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Generic, TypeVar

Item = TypeVar("Item")

#: Nothing waits longer than this, in seconds.
LONGEST = 0.5
_NEW = 0.3  # weight of the latest gap


class Schedule(Generic[Item]):
    """When items leave that came in bursts: at most one gap between bursts, and ``LONGEST``, after they came."""

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        self._gap: float | None = None
        self._came: float | None = None
        self._waiting: deque[tuple[float, float, Item]] = deque()
        """(when it leaves, when it came, the item)."""

    def add(self, items: Sequence[Item], now: float) -> None:
        """A burst that came now; it and what still waits are spread anew over the gap until the next."""
        if self._came is not None:
            gap = now - self._came
            self._gap = gap if self._gap is None else self._gap + _NEW * (gap - self._gap)
        self._came = now
        waiting = [(came, item) for _, came, item in self._waiting] + [(now, item) for item in items]
        step = (self._gap or 0.0) / len(waiting) if waiting else 0.0
        self._waiting = deque(
            (min(now + number * step, came + self._longest), came, item) for number, (came, item) in enumerate(waiting)
        )

    def ready(self, now: float) -> list[Item]:
        """What is to leave by now."""
        out = []
        while self._waiting and self._waiting[0][0] <= now:
            out.append(self._waiting.popleft()[2])
        return out

    def rest(self) -> list[Item]:
        """All that waits, for an answer that is over."""
        out = [item for _, _, item in self._waiting]
        self._waiting.clear()
        return out

    @property
    def next(self) -> float | None:
        """When the next one leaves."""
        return self._waiting[0][0] if self._waiting else None


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """``text`` in as many parts as there are ``sizes``, about in their proportions.

    >>> cut("one two", [3, 4]), cut("", [1, 2]), cut("abc", [0, 0])
    (['one', ' two'], ['', ''], ['', 'abc'])
    """
    total, out, done, start = sum(sizes), [], 0, 0
    for size in sizes[:-1]:
        done += size
        end = round(len(text) * done / total) if total else 0
        out.append(text[start:end])
        start = end
    return [*out, text[start:]]


async def paced(bursts: AsyncIterator[Sequence[Item]], longest: float = LONGEST) -> AsyncGenerator[list[Item]]:
    """The items of ``bursts``, spread; when they end, so does the waiting."""
    schedule: Schedule[Item] = Schedule(longest)
    coming: asyncio.Future[Sequence[Item]] | None = None
    try:
        while True:
            if coming is None:
                coming = asyncio.ensure_future(anext(bursts))
            left = None if schedule.next is None else max(0.0, schedule.next - perf_counter())
            await asyncio.wait([coming], timeout=left)
            if coming.done():
                try:
                    schedule.add(coming.result(), perf_counter())
                except StopAsyncIteration:
                    break
                coming = None
            if items := schedule.ready(perf_counter()):
                yield items
        if items := schedule.rest():
            yield items
    finally:
        if coming is not None and not coming.done():
            coming.cancel()
            with suppress(asyncio.CancelledError):
                await coming
        close = getattr(bursts, "aclose", None)
        if close is not None:
            await close()
