"""Pacing: nothing lost, nothing early, nothing late, in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from statistics import pstdev
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.serve.pace import Schedule, paced
from slipstream.serve.service import Update
from slipstream.types import Output, Piece, Round, Stats


def played(bursts: Sequence[tuple[float, int]], longest: float = 0.5) -> list[tuple[float, float]]:
    """(came, left) of each item, for bursts of (gap before it, size), on a clock of steps."""
    schedule: Schedule[float] = Schedule(longest)
    out: list[tuple[float, float]] = []
    now = 0.0

    def leave(until: float) -> None:
        while schedule.next is not None and schedule.next <= until:
            at = schedule.next
            out.extend((came, at) for came in schedule.ready(at))

    for gap, size in bursts:
        leave(now + gap)
        now += gap
        schedule.add([now] * size, now)
        leave(now)
    out.extend((came, now) for came in schedule.rest())
    return out


BURSTS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 8)), max_size=30)


@given(BURSTS)
def test_all_leave_in_order_and_in_time(bursts: list[tuple[float, int]]) -> None:
    items = played(bursts)
    assert len(items) == sum(size for _, size in bursts)
    assert [came for came, _ in items] == sorted(came for came, _ in items)
    assert [left for _, left in items] == sorted(left for _, left in items)
    assert all(came <= left <= came + 0.5 + 1e-9 for came, left in items)


def test_the_first_token_does_not_wait() -> None:
    assert played([(1.0, 1)]) == [(1.0, 1.0)]


def test_bursts_become_even() -> None:
    bursts = [(0.0, 1), *[(0.2, 4)] * 20]
    left = [at for _, at in played(bursts)][8:-4]
    gaps = [b - a for a, b in pairwise(left)]
    assert pstdev(gaps) < 0.005
    assert sum(gaps) / len(gaps) == pytest.approx(0.05, rel=0.05)


def test_it_does_not_fall_behind() -> None:
    """Whatever the sizes of bursts, a token leaves about when the next burst comes, at the latest."""
    bursts = [(0.1, size) for size in (1, 8, 1, 8, 8, 1, 1, 1, 8) * 10]
    assert max(left - came for came, left in played(bursts, longest=9.0)) < 0.2


def run(bursts: Sequence[tuple[float, str]], longest: float = 0.5) -> list[tuple[float, str]]:
    async def source() -> AsyncIterator[str]:
        for gap, burst in bursts:
            await asyncio.sleep(gap)
            yield burst

    async def collect() -> list[tuple[float, str]]:
        return [(perf_counter(), item) async for items in paced(source(), longest) for item in items]

    return asyncio.run(collect())


def test_a_stream() -> None:
    items = run([(0, "a"), (0.06, "bcd"), (0.06, "efg")])
    assert "".join(item for _, item in items) == "abcdefg"
    at = {item: when for when, item in items}
    assert at["d"] - at["b"] > 0.02


def test_an_end_does_not_wait() -> None:
    start = perf_counter()
    assert "".join(item for _, item in run([(0, "a"), (0.1, "b" * 50)], longest=30)) == "a" + "b" * 50
    assert perf_counter() - start < 2


def test_failures_pass_through_behind_what_came() -> None:
    async def source() -> AsyncIterator[str]:
        yield "ab"
        raise RuntimeError("broken")

    async def collect() -> str:
        out = ""
        try:
            async for items in paced(source()):
                out += "".join(items)
        except RuntimeError:
            return out + "!"
        return out

    assert asyncio.run(collect()) == "ab!"


@pytest.mark.parametrize("burst_waits", [True, False])
def test_closing_ends_the_source(burst_waits: bool) -> None:
    ended = []

    async def source() -> AsyncIterator[str]:
        try:
            yield "a"
            await asyncio.sleep(0.02)
            yield "bcdefgh"
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def leave() -> None:
        stream = paced(source())
        async for items in stream:
            if burst_waits or "b" in items:
                break
        await stream.aclose()

    asyncio.run(leave())
    assert ended == [True]


def test_what_a_round_said_is_in_its_tokens() -> None:
    """Told one by one, they left out what drafting had gained: a paced stream never had it."""
    output = Output((1,), (5, 6, 7), "abc", "stop", ("accepted",) * 3, None, Stats())
    done = Round((5, 6, 7), 3, 3, 0.0, 0.0, 0.0)
    whole = Update(2, Piece("abc", (5, 6, 7), ("accepted",) * 3), done, output, 1.5)
    parts = whole.apart(lambda token: b"x")
    assert [part.piece for part in parts] == [
        Piece(c, (t,), ("accepted",)) for c, t in zip("abc", (5, 6, 7), strict=True)
    ]
    assert [part.round for part in parts] == [done, None, None]
    assert [(part.output, part.speed_up) for part in parts] == [(None, None), (None, None), (output, 1.5)]
    assert {part.index for part in parts} == {2}
