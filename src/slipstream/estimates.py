"""What the controller of k knows: what passes cost here, and how often drafts are accepted. Arithmetic only, no clock.

Both are learned from the rounds themselves, start from a sane guess, and forget: machines drift and texts turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: The longest draft that is ever worth asking for, and so the most rows of a pass but one.
MOST = 32
#: Before anything is measured: v(n) = 1 + 0.05 (n - 1).
_ROW = 0.05
_KEPT_SAMPLES = 15
#: A row count that was seen once or twice, by chance in a bad moment, is believed for this many rounds.
_FEW, _FEW_LAST = 3, 64
#: A draft that had to read more than this many tokens first tells of reading rather than of steps.
_USUAL_READING = 3


@dataclass(frozen=True)
class DraftCost:
    """A draft of p passes that has to read m tokens first takes ``call + step p + read m`` seconds."""

    call: float
    step: float
    read: float


class Costs:
    """Seconds of passes: medians of the latest ones.

    Args:
        step: guess of a draft step, in plain target passes.
        fixed: never learn. Costs are then in plain target passes.
    """

    def __init__(self, step: float, *, fixed: bool = False) -> None:
        self.fixed = fixed
        self._guess = step
        self._passes: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._rounds = 0
        self._drafts: deque[tuple[int, int, float]] = deque(maxlen=_KEPT_SAMPLES)
        self._reading: deque[tuple[int, int, float]] = deque(maxlen=_KEPT_SAMPLES)
        self._curve: tuple[float, ...] | None = None
        self._draft: DraftCost | None = None

    def plain_passes(self) -> int:
        """How many passes over one token are remembered."""
        return len(self._passes.get(1, ()))

    def since_plain(self) -> int:
        """Rounds since the latest pass over one token."""
        return self._rounds - self._seen.get(1, 0)

    def verified(self, rows: int, seconds: float) -> None:
        """A target pass over ``rows`` tokens took ``seconds``."""
        if self.fixed or seconds <= 0:
            return
        self._rounds += 1
        self._seen[rows] = self._rounds
        self._passes.setdefault(rows, deque(maxlen=_KEPT_SAMPLES)).append(seconds)
        for n in [n for n, s in self._passes.items() if n > 1 and len(s) < _FEW]:
            if self._rounds - self._seen[n] > _FEW_LAST:
                del self._passes[n]
        self._curve = self._draft = None

    def drafted(self, passes: int, read: int, seconds: float) -> None:
        """A draft of ``passes`` steps, which had to read ``read`` tokens first, took ``seconds``."""
        if self.fixed or seconds < 0:
            return
        (self._drafts if read <= _USUAL_READING else self._reading).append((passes, read, seconds))
        self._draft = None

    def verify(self) -> tuple[float, ...]:
        """Seconds of a pass over n tokens at index n, for n up to MOST + 1; never falling."""
        if self._curve is None:
            points = _monotone([(n, median(s), len(s)) for n, s in sorted(self._passes.items())])
            self._curve = tuple(_interpolated(points, n) for n in range(MOST + 2))
        return self._curve

    def draft(self) -> DraftCost:
        """What a draft takes."""
        if self._draft is None:
            plain = self.verify()[1]
            call, step = _line([(p, s) for p, _, s in self._drafts if p]) or (0.0, self._guess * plain)
            if not any(p for p, _, _ in self._drafts) and self._drafts:
                call = median(s for _, _, s in self._drafts)
            reads = [max(0.0, s - call - step * p) / m for p, m, s in self._reading]
            self._draft = DraftCost(call, step, median(reads) if reads else 0.1 * step)
        return self._draft


def _guessed(rows: int) -> float:
    return 1 + _ROW * (max(rows, 1) - 1)


def _monotone(points: Iterable[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """The nearest never falling values to ``(n, value, weight)``: pool adjacent violators."""
    pools: list[tuple[list[int], float, float]] = []
    for n, value, weight in points:
        pools.append(([n], value, weight))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (ns, a, w), (more, b, x) = pools[-2:]
            pools[-2:] = [([*ns, *more], (a * w + b * x) / (w + x), w + x)]
    return [(n, value) for ns, value, _ in pools for n in ns]


def _interpolated(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Between measured points a straight line, outside of them the guessed shape."""
    if not points:
        return _guessed(rows)
    below = [(n, s) for n, s in points if n <= rows]
    above = [(n, s) for n, s in points if n >= rows]
    if below and above:
        (n, low), (m, high) = below[-1], above[0]
        return low if m == n else low + (high - low) * (rows - n) / (m - n)
    n, seconds = below[-1] if below else above[0]
    return seconds * _guessed(rows) / _guessed(n)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Intercept and slope, neither negative, of seconds over passes: Theil and Sen's medians; None without points."""
    if not points:
        return None
    most = median(s / p for p, s in points)
    slopes = [(s - t) / (p - q) for (p, s), (q, t) in combinations(points, 2) if p != q]
    slope = min(max(median(slopes), 0.0), most) if slopes else most
    return max(0.0, median(s - slope * p for p, s in points)), slope


# --- acceptance -------------------------------------------------------------------------------------------------------

#: Borders of the bins of a drafter's confidence.
_BORDERS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_CENTRES = (0.1, 0.27, 0.42, 0.57, 0.72, 0.85, 0.94, 0.99)
_POSITIONS = 12


@dataclass
class Rate:
    """A share of successes that forgets: decayed counts."""

    hits: float = 0.0
    count: float = 0.0

    def add(self, value: float) -> None:
        """One more observation, in [0, 1]."""
        self.hits += value
        self.count += 1

    def decay(self, factor: float) -> None:
        """Count what there is for less."""
        self.hits *= factor
        self.count *= factor

    def toward(self, prior: float, weight: float) -> float:
        """The share, with ``weight`` imagined observations of ``prior``."""
        return (self.hits + weight * prior) / (self.count + weight)


@dataclass(frozen=True)
class Prior:
    """What other requests saw: the level, and how positions and confidence deviate from it."""

    level: float = 0.7
    weight: float = 5.0
    positions: tuple[float, ...] = (0.0,) * _POSITIONS
    bins: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Memory:
    """How fast an ``Acceptance`` forgets: factors a verified token, and a round."""

    token: float
    round: float


OF_REQUEST = Memory(token=0.97, round=0.98)
OF_ALL = Memory(token=0.998, round=0.999)


class Acceptance:
    """Conditional acceptance of one drafter's tokens, by position in a draft and by the drafter's confidence."""

    def __init__(self, prior: Prior, memory: Memory) -> None:
        self._prior = prior
        self._memory = memory
        self._level = Rate(prior.level * prior.weight, prior.weight)
        self._positions = [Rate() for _ in range(_POSITIONS)]
        self._bins = [Rate() for _ in _CENTRES]

    @property
    def level(self) -> float:
        """Over all positions."""
        return self._level.toward(0.5, 0.01)

    def verified(self, position: int, confidence: float | None, value: float) -> None:
        """The token at ``position`` (from 0), reached by accepted ones, was accepted (1) or not (0)."""
        self.expected(position, value)
        if confidence is not None:
            self._bins[_bin(confidence)].add(value)

    def expected(self, position: int, value: float) -> None:
        """The token that would have been at ``position`` would be accepted with this probability, as far as known."""
        self._level.decay(self._memory.token)
        self._level.add(value)
        self._positions[min(position, _POSITIONS - 1)].add(value)

    def end_round(self) -> None:
        """A round has passed."""
        for rate in (*self._positions, *self._bins):
            rate.decay(self._memory.round)

    def rest(self) -> None:
        """A round has passed without a draft: what was known is worth less, so that news counts for more."""
        if self._level.count > 4:
            self._level.decay(0.98)
        for rate in (*self._positions, *self._bins):
            rate.decay(0.98)

    def positions(self, count: int) -> list[float]:
        """Acceptance at the first ``count`` positions, each given that the ones before were accepted."""
        level = self.level
        known = [
            rate.toward(_share(level + offset), 4.0)
            for rate, offset in zip(self._positions, self._prior.positions, strict=True)
        ]
        return [known[min(j, _POSITIONS - 1)] for j in range(count)]

    def given(self, confidence: float) -> float:
        """Acceptance of a token of which the drafter is this sure."""
        return self._bin_rate(_bin(confidence))

    def unsure(self, confidence: float) -> bool:
        """Whether too little is known of tokens like this to leave them out."""
        at = _bin(confidence)
        return self._bins[at].count < (2 if self._prior.bins is None else 0.5)

    def summary(self, weight: float) -> Prior:
        """What a new request may start from."""
        level = self.level
        seen = self._level.count
        return Prior(
            level=level,
            weight=weight,
            positions=tuple(r.toward(level, 8.0) - level for r in self._positions),
            bins=tuple(self._bin_rate(b) for b in range(len(_CENTRES))) if seen > 50 else None,
        )

    def _bin_rate(self, at: int) -> float:
        if self._prior.bins is not None:
            mean = self._prior.bins[at] + 0.5 * (self.level - self._prior.level)
        else:
            mean = 0.5 * (_CENTRES[at] + self.level)
        return self._bins[at].toward(_share(mean), 3.0)


def _bin(confidence: float) -> int:
    return sum(confidence >= border for border in _BORDERS)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
