"""How sure a figure is that was taken over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

_DRAWS = 2000


@dataclass(frozen=True)
class Interval:
    """A figure, and the range that 95 % of the figures of resampled prompts lie in."""

    value: float
    low: float
    high: float


def bootstrap(items: Sequence[T], figure: Callable[[Sequence[T]], float], seed: int = 0) -> Interval:
    """``figure`` of ``items``, and how far it moves when as many items are drawn from them with replacement.

    Give it one item a prompt: tokens of one prompt are not independent of each other. Pairs of results on the same
    prompt belong into one item.

    >>> bootstrap([1.0, 2.0, 3.0, 4.0], lambda some: sum(some) / len(some))
    Interval(value=2.5, low=1.5, high=3.5)
    """
    random = Random(seed)
    found = sorted(figure(random.choices(items, k=len(items))) for _ in range(_DRAWS))
    return Interval(figure(items), found[_DRAWS // 40], found[-_DRAWS // 40 - 1])


def bootstrap_ratio(above: Sequence[float], below: Sequence[float], empty: float = 1.0) -> Interval:
    """The same for sum(above) / sum(below), at once; ``empty`` if there is nothing below.

    Draws in which there is nothing below say nothing, and are left out.

    >>> bootstrap_ratio([1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1.0])
    Interval(value=2.5, low=1.5, high=3.5)
    """
    counts = _counts(len(above))
    over, under = counts @ np.asarray(above, dtype=float), counts @ np.asarray(below, dtype=float)
    whole = sum(below)
    if not whole:
        return Interval(empty, empty, empty)
    some = under != 0
    found = np.sort(over[some] / under[some])
    edge = len(found) // 40
    return Interval(sum(above) / whole, float(found[edge]), float(found[-edge - 1]))


@lru_cache(maxsize=16)
def _counts(size: int) -> Any:
    """How often each of ``size`` items is drawn, (draws, size): the draws of ``bootstrap``."""
    random = Random(0)
    found = np.zeros((_DRAWS, size))
    for row in found:
        for at in random.choices(range(size), k=size):
            row[at] += 1
    return found
