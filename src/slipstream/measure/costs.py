"""What forward passes cost: v(n), and the time that a run spends inside models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from slipstream.measure.spread import Spread, spread
from slipstream.models.base import Cache, Model, feed

#: Numbers of tokens in one pass that are measured: every draft up to 8, and two longer ones.
ROWS = (*range(1, 10), 12, 16)
TURNS = 7


class TimedModel:
    """A model that is what it was, and counts the time inside its forward passes."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.seconds = 0.0
        self.passes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> Tensor:
        """The model's own pass."""
        start = perf_counter()
        logits = self._model.forward(tokens, cache, num_logits)
        synchronize(self._model.device)
        self.seconds += perf_counter() - start
        self.passes += 1
        return logits


def timed(model: Model) -> tuple[TimedModel, Model]:
    """A timed ``model``, once as the clock that it is and once as the model that it stands for."""
    clock = TimedModel(model)
    return clock, cast(Model, clock)


def synchronize(device: torch.device) -> None:
    """Wait for what an accelerator has been given to do, as reading the result would."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class PassCost:
    """A pass over ``rows`` new tokens behind ``context`` old ones."""

    rows: int
    context: int
    seconds: Spread
    v: Spread
    """Its time / the time of a pass over one token in the same turn."""


@dataclass(frozen=True)
class Probe:
    """One pass that can be repeated: its cache is cut back afterwards."""

    model: Model
    cache: Cache
    tokens: tuple[int, ...]

    def seconds(self) -> float:
        """Run it once."""
        length = self.cache.length
        start = perf_counter()
        self.model.forward(self.tokens, self.cache, len(self.tokens))
        synchronize(self.model.device)
        taken = perf_counter() - start
        self.cache.truncate(length)
        return taken


def make_probes(model: Model, tokens: Sequence[int], context: int, rows: Sequence[int] = ROWS) -> list[Probe]:
    """Passes over each number of ``rows`` behind the first ``context`` of ``tokens``, which are repeated if need be.

    Numbers for which the model's context has no room are left out.
    """
    limit = model.max_positions
    possible = [n for n in rows if limit is None or context + n <= limit]
    if not possible or context < 1:
        return []
    cycle = [min(t, model.embedding_size - 1) for t in tokens]
    cycle *= 1 + (context + max(rows)) // len(cycle)
    cache = model.new_cache()
    feed(model, cycle[:context], cache, 0)
    return [Probe(model, cache, tuple(cycle[context : context + n])) for n in possible]


def run_probes(probes: Sequence[Probe], turns: int = TURNS) -> Iterator[list[float]]:
    """Seconds of each probe, a list a turn. Every turn begins at another probe, so that none is always first.

    A turn before the first one is not counted: it pays for what happens only once.
    """
    for turn in range(-1, turns):
        seconds = [0.0] * len(probes)
        for i in range(len(probes)):
            at = (i + turn) % len(probes)
            seconds[at] = probes[at].seconds()
        if turn >= 0:
            yield seconds


def pass_costs(probes: Sequence[Probe], turns: Sequence[Sequence[float]]) -> tuple[PassCost, ...]:
    """v(n) of the ``probes`` of one model, of which the first one has one row, from the turns of ``run_probes``."""
    costs = []
    for i, probe in enumerate(probes):
        seconds = spread(turn[i] for turn in turns)
        ratios = spread(turn[i] / turn[0] for turn in turns)
        if seconds is not None and ratios is not None:
            costs.append(PassCost(len(probe.tokens), probe.cache.length, seconds, ratios))
    return tuple(costs)


def usual_context(lengths: Sequence[int], new_tokens: int, limit: int | None) -> int:
    """A context as a pass in the middle of a usual answer has it, with room for the longest pass."""
    context = int(median(lengths)) + new_tokens // 2
    return context if limit is None else min(context, limit - max(ROWS))
