"""What speculation is expected to gain: tokens a round, speed-up, the best k, break-even. Arithmetic only.

All times are in plain target steps: c is a draft step, v(n) a target pass over n tokens, v(1) = 1 (Leviathan et al.
2023, arXiv 2211.17192, with the cost of verification added). An acceptance at position j is conditional: given that
the tokens before j were accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite
from operator import mul

from slipstream.errors import InputError

#: The longest draft that is looked at.
MOST = 32
_PRECISION = 1e-9


@dataclass(frozen=True)
class Costs:
    """What drafting and verifying cost, in plain target steps."""

    draft_step: float
    """c."""
    verify: Mapping[int, float] = field(default_factory=dict)
    """v(n) by n where it was measured; straight lines between, the last slope beyond, and v(1) = 1."""

    def __post_init__(self) -> None:
        if not (isfinite(self.draft_step) and self.draft_step >= 0):
            raise InputError(f"a draft step of {self.draft_step} plain steps is no cost; use a number from 0 up")
        wrong = next((n for n, v in self.verify.items() if n < 1 or not (isfinite(v) and v > 0)), None)
        if wrong is not None:
            raise InputError(f"v({wrong}) = {self.verify[wrong]} is no cost; use positive numbers for 1 token and more")

    @classmethod
    def linear(cls, draft_step: float, row: float) -> Costs:
        """v(n) = 1 + ``row`` (n - 1)."""
        if not row >= 0:
            raise InputError(f"a further row of {row} plain steps is no cost; use a number from 0 up")
        return cls(draft_step, {1: 1.0, 2: 1.0 + row})

    def v(self, tokens: int) -> float:
        """v(``tokens``).

        >>> Costs.linear(0.1, 0.25).v(5)
        2.0
        """
        points = sorted(({1: 1.0} | dict(self.verify)).items())
        if len(points) == 1:
            return points[0][1]
        at = next((i for i, (n, _) in enumerate(points) if n >= tokens), len(points) - 1)
        (n, low), (m, high) = points[max(at, 1) - 1], points[max(at, 1)]
        return low + (high - low) * (tokens - n) / (m - n)

    def round(self, k: int) -> float:
        """A round of ``k`` draft tokens: c k + v(k + 1)."""
        return self.draft_step * k + self.v(k + 1)


def constant(acceptance: float, k: int = MOST) -> tuple[float, ...]:
    """The same conditional acceptance at each of ``k`` positions."""
    return (acceptance,) * k


def expected_tokens(acceptances: Sequence[float]) -> float:
    """E(k), tokens emitted in a round with one draft token for each of ``acceptances``.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    wrong = next((a for a in acceptances if not 0 <= a <= 1), None)
    if wrong is not None:
        raise InputError(f"an acceptance of {wrong} is no probability; use numbers from 0 to 1")
    reached: Iterable[float] = accumulate(acceptances, mul)
    return 1 + sum(reached)


def speed_up(acceptances: Sequence[float], costs: Costs) -> float:
    """S(k) = E(k) / (c k + v(k + 1)), with k the number of ``acceptances``."""
    return expected_tokens(acceptances) / costs.round(len(acceptances))


@dataclass(frozen=True)
class Choice:
    """A number of draft tokens, 0 for plain decoding, and what it gains."""

    k: int
    speed_up: float


def best(acceptances: Sequence[float], costs: Costs) -> Choice:
    """The best k up to the number of ``acceptances``; the smallest of equals, so 0 where nothing gains."""
    choices = [Choice(k, speed_up(acceptances[:k], costs)) for k in range(1, len(acceptances) + 1)]
    gaining = [c for c in choices if c.speed_up > 1 + _PRECISION]
    return max(gaining, key=lambda c: (c.speed_up, -c.k), default=Choice(0, 1.0))


def acceptance_for(wanted: float, costs: Costs, k: int | None = None) -> float | None:
    """The constant acceptance from which S reaches ``wanted``, at ``k`` or else at the best k; None if none does."""

    def gain(acceptance: float) -> float:
        if k is not None:
            return speed_up(constant(acceptance, k), costs)
        return max(speed_up(constant(acceptance, n), costs) for n in range(1, MOST + 1))

    return _lowest(gain, wanted)


def break_even(costs: Costs, k: int | None = None) -> float | None:
    """The constant acceptance above which speculation gains at all; None if it never does.

    With v(n) = 1 + b (n - 1) and k free this is c + b.
    """
    return acceptance_for(1.0, costs, k)


def _lowest(rising: Callable[[float], float], wanted: float) -> float | None:
    """The lowest argument in [0, 1] from which a rising function is at least ``wanted``."""
    low, high = 0.0, 1.0
    if rising(high) < wanted:
        return None
    if rising(low) >= wanted:
        return low
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) >= wanted else (middle, high)
    return high


@dataclass(frozen=True)
class LoadCurve:
    """Latency under load, L = C1 / (1 - rate C2) (Kong 2026)."""

    idle_seconds: float
    """C1: latency of a request that is alone."""
    capacity_seconds: float
    """C2: what a request uses up of the server; 1 / C2 requests a second are the most."""

    @property
    def most(self) -> float:
        """Requests a second at which latency has no bound."""
        return 1 / self.capacity_seconds if self.capacity_seconds > 0 else inf

    def latency(self, rate: float) -> float:
        """Seconds a request takes where ``rate`` requests come a second.

        >>> LoadCurve(2.0, 0.5).latency(1.0)
        4.0
        """
        return self.idle_seconds / (1 - rate * self.capacity_seconds) if rate < self.most else inf

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> LoadCurve:
        """The curve through measured (requests a second, seconds): least squares of 1 / L = (1 - rate C2) / C1.

        Raises:
            InputError: fewer than two different rates, or latencies that fall with the rate.
        """
        rates, inverse = [rate for rate, _ in points], [1 / seconds for _, seconds in points if seconds > 0]
        if len(set(rates)) < 2 or len(inverse) < len(rates):
            raise InputError("a load curve needs positive latencies at two different request rates; measure more")
        centre, level = sum(rates) / len(rates), sum(inverse) / len(inverse)
        slope = sum((r - centre) * (i - level) for r, i in zip(rates, inverse, strict=True)) / sum(
            (r - centre) ** 2 for r in rates
        )
        idle = level - slope * centre
        if idle <= 0 or slope > 0:
            raise InputError("the latencies do not rise with the request rate, so no load curve fits; measure longer")
        return cls(1 / idle, -slope / idle)


def crossing_rate(plain: LoadCurve, speculative: LoadCurve) -> float | None:
    """Requests a second above which plain decoding has the lower latency; None if speculation is never overtaken.

    0 if it is never ahead. Both curves are of one server.
    """
    if speculative.idle_seconds >= plain.idle_seconds:
        return 0.0
    excess = plain.idle_seconds * speculative.capacity_seconds - speculative.idle_seconds * plain.capacity_seconds
    if excess <= 0:
        return None
    rate = (plain.idle_seconds - speculative.idle_seconds) / excess
    return rate if rate < min(plain.most, speculative.most) else None
