"""How sure a figure is that was taken over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

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
