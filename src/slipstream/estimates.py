"""What the controller of k knows: what passes cost here, and how often drafts are accepted. Arithmetic only, no clock.

Both are learned from the rounds themselves, start from a sane guess, and forget: machines drift and texts turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

#: The longest draft that is ever worth asking for, and so the most rows of a pass but one.
MOST = 32
#: Before anything is measured: v(n) = 1 + 0.05 (n - 1).
_ROW = 0.05
_KEPT_SAMPLES = 15
#: A row count that was seen once or twice, by chance in a bad moment, is believed for this many rounds.
_FEW, _FEW_LAST = 3, 256
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
        shape: v(n) by n as it was measured earlier, in plain target passes: where nothing is known of n yet.
    """

    def __init__(self, step: float, *, fixed: bool = False, shape: Mapping[int, float] | None = None) -> None:
        self.fixed = fixed
        self._guess = step
        self._shape = dict(shape or {})
        self._passes: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._rounds = 0
        self._drafts: deque[tuple[int, int, float]] = deque(maxlen=_KEPT_SAMPLES)
        self._reading: deque[tuple[int, int, float]] = deque(maxlen=_KEPT_SAMPLES)
        self._wide: tuple[float, ...] = ()
        self._curve: tuple[float, ...] | None = None
        self._draft: DraftCost | None = None

    def plain_passes(self) -> int:
        """How many passes over one token are remembered."""
        return len(self._passes.get(1, ()))

    @property
    def measured(self) -> bool:
        """Whether any pass is remembered."""
        return bool(self._passes)

    def since_plain(self) -> int:
        """Rounds since the latest pass over one token; very many if there was none."""
        return self._rounds - self._seen.get(1, -(10**6))

    def most(self) -> int:
        """The longest draft to risk: twice what was tried, since nobody knows what lies beyond."""
        if self.fixed:
            return MOST
        return min(MOST, max(8, 2 * max(self._seen, default=0), max(self._shape, default=1) - 1))

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
        self._wide = ()

    def drafted(self, passes: int, read: int, seconds: float) -> None:
        """A draft of ``passes`` steps, which had to read ``read`` tokens first, took ``seconds``."""
        if self.fixed or seconds < 0:
            return
        (self._drafts if read <= _USUAL_READING else self._reading).append((passes, read, seconds))
        self._draft = None

    def verify(self) -> tuple[float, ...]:
        """Seconds of a pass over n tokens at index n, for n up to MOST + 1; never falling."""
        if self._curve is None:
            self._curve = _filled(self._points(), MOST + 2)
        return self._curve

    def of(self, rows: int) -> float:
        """Seconds of a pass over any number of tokens."""
        n = min(rows, _WIDEST)
        if n >= len(self._wide):
            self._wide = _filled(self._points(), min(2 * n, _WIDEST) + 1)
        return self._wide[n] * (rows / n if n else 1.0)

    def _points(self) -> list[tuple[int, float]]:
        points = {n: (median(s), float(len(s))) for n, s in self._passes.items()}
        if self._shape:
            # Relative to what passes take now: the machine may be slower than it was then.
            base = median(s / self._shaped(n) for n, (s, _) in points.items()) if points else 1.0
            points = {n: (base * v, _EARLIER) for n, v in self._shape.items()} | points
        return _monotone((n, s, weight) for n, (s, weight) in sorted(points.items()))

    def _shaped(self, rows: int) -> float:
        """v as it was measured earlier, between and beyond by straight lines."""
        known = sorted(({1: 1.0} | self._shape).items())
        if len(known) == 1:
            return known[0][1]
        after = next((i for i, (n, _) in enumerate(known) if n >= rows), len(known) - 1)
        (n, low), (m, high) = known[max(after, 1) - 1], known[max(after, 1)]
        return max(low + (high - low) * (rows - n) / (m - n), known[0][1])

    def draft(self) -> DraftCost:
        """What a draft takes."""
        if self._draft is None:
            plain = self.verify()[1]
            call, step = fitted_line([(p, s) for p, _, s in self._drafts if p]) or (0.0, self._guess * plain)
            if not any(p for p, _, _ in self._drafts) and self._drafts:
                call = median(s for _, _, s in self._drafts)
            reads = [max(0.0, s - call - step * p) / m for p, m, s in self._reading]
            self._draft = DraftCost(call, step, median(reads) if reads else 0.1 * step)
        return self._draft


#: What a row count that was measured earlier weighs against those that are measured now.
_EARLIER = 0.5
#: Beyond so many rows, costs are taken to be in proportion to them.
_WIDEST = 2048
_GUESSED = tuple(1 + _ROW * (max(n, 1) - 1) for n in range(_WIDEST + 1))


def _monotone(points: Iterable[tuple[int, float, float]]) -> list[tuple[int, float]]:
    """The nearest never falling values to ``(n, value, weight)``: pool adjacent violators."""
    pools: list[tuple[list[int], float, float]] = []
    for n, value, weight in points:
        pools.append(([n], value, weight))
        while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
            (ns, a, w), (more, b, x) = pools[-2:]
            pools[-2:] = [([*ns, *more], (a * w + b * x) / (w + x), w + x)]
    return [(n, value) for ns, value, _ in pools for n in ns]


def _filled(points: Sequence[tuple[int, float]], count: int) -> tuple[float, ...]:
    """A value for each of ``count`` numbers of rows from 0 on.

    A straight line between measured points; in its lower half no dearer than the guessed shape from there on. Kernels'
    steps lie anywhere between two points. Optimism costs one pass, which corrects it, while a row count that looks dear
    would never be tried; of the lower half, so that a step is found by bisection.
    """
    if not points:
        return _GUESSED[:count]
    (first, least), values, at = points[0], [], -1
    for rows in range(count):
        while at + 1 < len(points) and points[at + 1][0] <= rows:
            at += 1
        n, low = points[max(at, 0)]
        guess = low * _GUESSED[rows] / _GUESSED[n]
        if at >= 0 and at + 1 < len(points):
            m, high = points[at + 1]
            line = low + (high - low) * (rows - n) / (m - n)
            guess = min(guess, line) if 2 * rows <= n + m else line
        elif first < n < rows <= 2 * n:
            guess = min(guess, low + (low - least) * (rows - n) / (n - first))
        values.append(guess)
    return tuple(values)


def fitted_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
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
class Mean:
    """A mean that forgets: decayed counts."""

    total: float = 0.0
    count: float = 0.0

    def add(self, value: float) -> None:
        """One more observation."""
        self.total += value
        self.count += 1

    def decay(self, factor: float) -> None:
        """Count what there is for less."""
        self.total *= factor
        self.count *= factor

    def move(self, value: float) -> None:
        """An observation that is itself an estimate: it shifts the mean, but is no evidence."""
        count = self.count
        self.add(value)
        self.decay(count / self.count)

    def toward(self, prior: float, weight: float) -> float:
        """The mean, with ``weight`` imagined observations of ``prior``."""
        return (self.total + weight * prior) / (self.count + weight)


@dataclass(frozen=True)
class Prior:
    """What other requests saw: the level, and how positions and confidence deviate from it."""

    level: float = 0.7
    weight: float = 5.0
    positions: tuple[float, ...] = (0.0,) * _POSITIONS
    bins: tuple[float, ...] = tuple(0.3 * (centre - 0.7) for centre in _CENTRES)


@dataclass(frozen=True)
class Memory:
    """How fast an ``Acceptance`` forgets: factors a verified token, and a round."""

    token: float
    round: float


OF_REQUEST = Memory(token=0.997, round=0.998)
OF_ALL = Memory(token=0.998, round=0.999)
#: The latest dozen tokens; where they say something else than the longer memory, by this many deviations, the text has
#: turned, and the longer memory starts again from them, as if it were so many tokens long.
_LATEST = 0.92
_TURNED = 3.0
_AFRESH = 8.0


class Acceptance:
    """Conditional acceptance of one drafter's tokens: a level that follows the text, and slower deviations from it.

    A deviation belongs to a position in a draft, or to the drafter's confidence; of both, only tokens that were really
    verified tell.
    """

    def __init__(self, prior: Prior, memory: Memory) -> None:
        self._prior = prior
        self._memory = memory
        self._level = Mean(prior.level * prior.weight, prior.weight)
        self._latest = Mean(prior.level * prior.weight, prior.weight)
        self._positions = [Mean() for _ in range(_POSITIONS)]
        self._bins = [Mean() for _ in _CENTRES]

    @property
    def level(self) -> float:
        """Over all tokens that were drafted or might have been."""
        return self._level.toward(0.5, 0.01)

    def verified(self, position: int, confidence: float | None, value: float) -> None:
        """The token at ``position`` (from 0), reached by accepted ones, was accepted (1) or not (0)."""
        level = self.level
        self._positions[min(position, _POSITIONS - 1)].add(value - level)
        if confidence is not None:
            self._bins[_bin(confidence)].add(value - level)
        self._level.decay(self._memory.token)
        self._level.add(value)
        self._latest.decay(_LATEST)
        self._latest.add(value)
        self._turn()

    def left_out(self, value: float) -> None:
        """A token that was reached and left out would have been accepted with this probability, as far as is known."""
        self._level.move(value)

    def _turn(self) -> None:
        """Forget what was before, if the text has turned."""
        level, latest = self.level, self._latest.toward(0.5, 0.01)
        spread = max(level * (1 - level), 0.08) * (1 - _LATEST) / (1 + _LATEST)
        if self._level.count > 2 * _AFRESH and abs(latest - level) > _TURNED * spread**0.5:
            self._level = Mean(latest * _AFRESH, _AFRESH)

    def end_round(self) -> None:
        """A round has passed."""
        for mean in (*self._positions, *self._bins):
            mean.decay(self._memory.round)

    def rest(self) -> None:
        """A round has passed without a draft: what was known is worth less, so that news counts for more."""
        for mean in (self._level, self._latest):
            if mean.count > 4:
                mean.decay(0.97)

    def positions(self, count: int) -> list[float]:
        """Acceptance at the first ``count`` positions, each given that the ones before were accepted."""
        level = self.level
        known = [_share(level + offset) for offset in self._offsets(self._positions, self._prior.positions, 20.0)]
        return [known[min(j, _POSITIONS - 1)] for j in range(count)]

    def given(self, confidence: float) -> float:
        """Acceptance of a token of which the drafter is this sure."""
        at = _bin(confidence)
        return _share(self.level + self._bins[at].toward(self._prior.bins[at], 8.0))

    def unsure(self, confidence: float) -> bool:
        """Whether too little is known of tokens like this to leave them out."""
        return self._bins[_bin(confidence)].count < 1

    def summary(self, weight: float) -> Prior:
        """What a new request may start from."""
        return Prior(
            level=self.level,
            weight=weight,
            positions=self._offsets(self._positions, self._prior.positions, 20.0),
            bins=self._offsets(self._bins, self._prior.bins, 8.0),
        )

    @staticmethod
    def _offsets(means: Sequence[Mean], prior: Sequence[float], weight: float) -> tuple[float, ...]:
        return tuple(mean.toward(offset, weight) for mean, offset in zip(means, prior, strict=True))


def _bin(confidence: float) -> int:
    return sum(confidence >= border for border in _BORDERS)


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)
