"""Statistics, counted once, from the rounds that verification returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import zip_longest

from slipstream.types import Round, Stats


def count_rounds(rounds: Iterable[Round]) -> Stats:
    """The statistics of one answer from its rounds in order; the first one read the prompt."""
    total = Stats()
    for number, r in enumerate(rounds):
        total = add_stats(total, _of_round(r, first=number == 0))
    return total


def add_stats(a: Stats, b: Stats) -> Stats:
    """Counts and times of two answers together; also of an answer so far and its next round."""

    def added(x: object, y: object) -> object:
        if isinstance(x, tuple) and isinstance(y, tuple):
            return tuple(m + n for m, n in zip_longest(x, y, fillvalue=0))
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            return {key: x.get(key, 0) + y.get(key, 0) for key in sorted({*x, *y})}
        return x + y  # type: ignore[operator]

    return Stats(**{f.name: added(getattr(a, f.name), getattr(b, f.name)) for f in fields(Stats)})  # type: ignore[arg-type]


def _of_round(r: Round, *, first: bool) -> Stats:
    return Stats(
        rounds=1,
        emitted=len(r.tokens),
        drafted=r.num_drafted,
        accepted=r.num_accepted,
        drafted_per_position=(1,) * r.num_drafted,
        accepted_per_position=(1,) * r.num_accepted,
        rounds_by_k={} if first else {r.num_drafted: 1},
        rounds_by_end={r.ended: 1} if r.ended is not None else {},
        drafted_by=Counter(r.sources),
        accepted_by=Counter(r.sources[: r.num_accepted]),
        prefill_seconds=r.verify_seconds if first else 0.0,
        draft_seconds=r.draft_seconds,
        verify_seconds=0.0 if first else r.verify_seconds,
        total_seconds=r.total_seconds,
        first_token_seconds=r.total_seconds if first else 0.0,
    )
