"""One figure from several measurements: the median, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class Spread:
    """Half of the measurements lie between ``low`` and ``high``, the quartiles."""

    median: float
    low: float
    high: float
    minimum: float
    maximum: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of those values that there are; None if there is none.

    >>> spread([1.0, 4.0, 2.0, 3.0, None])
    Spread(median=2.5, low=1.75, high=3.25, minimum=1.0, maximum=4.0, count=4)
    """
    found = sorted(v for v in values if v is not None)
    if not found:
        return None
    low, _, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return Spread(median(found), low, high, found[0], found[-1], len(found))
