"""Has acceptance changed? A sequential test with a stated rate of false alarms.

Draft tokens come in batches, one a look at the engine or several together, of at least ``Settings.batch`` tokens.
While a stream is learned, its batches give the usual rate and how much batches vary. From then on each batch is bet
on: the likelihood of its rate if the rate had fallen by d, over that if it had not,

    log L = (d / s^2) (p - d/2 - y),   s^2 = V / n

for a batch of n tokens with rate y. V, the long-run variance of a token, is estimated from the batches, not from p (1
- p): tokens of an answer go together, and so do answers of a time. The Shiryaev-Roberts statistic R <- (1 + R) L adds
up the bets that began at every moment so far; it is compared with a threshold A, averaged over several d. If nothing
has changed, R minus the number of batches is a martingale, so the mean number of batches to a false alarm is at least
A (Pollak 1985; as an e-detector: Shin, Ramdas and Rinaldo 2022, arXiv 2203.03532).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import exp, inf, log, sqrt
from typing import Any

#: Falls below what is tolerated that are bet on.
FALLS = (0.04, 0.08, 0.15, 0.25)
#: One strange moment is no drift: a batch brings at most this share of the evidence, unless it is as large as several.
_MOST, _SEVERAL = 1 / 3, 2000.0
#: Of what is known before the first batch: tokens of overdispersion, and how many batches it weighs.
_PRIOR, _PRIOR_WEIGHT = 6.0, 8.0
_LEAST_RATE = 0.02
#: Learning goes on while there is less evidence than this, for so many times the tokens of the first learning.
_CALM, _FURTHER = 0.3, 10.0


@dataclass(frozen=True)
class Settings:
    """How a change is looked for."""

    false_alarm_every: float = 1e7
    """Draft tokens of one test that lie, on average, at least between two false alarms."""
    tolerance: float = 0.03
    """A fall by so much is none."""
    learn: float = 10_000
    """Draft tokens from which the usual rate and its variation are learned before anything is tested."""
    batch: float = 200
    """Draft tokens in a batch, at least."""


@dataclass(frozen=True)
class Sums:
    """Of batches with h hits of n, and of neighbours: enough for the rate, the variance and the correlation."""

    count: int = 0
    size: float = 0.0
    hits: float = 0.0
    squares: float = 0.0
    """Of h h / n."""
    products: float = 0.0
    """Of h h' / sqrt(n n'), with h', n' of the batch before."""
    crossed: float = 0.0
    """Of (h n' + h' n) / sqrt(n n')."""
    roots: float = 0.0
    """Of sqrt(n n')."""
    last: tuple[float, float] | None = None
    """h and n of the latest batch."""

    def plus(self, hits: float, size: float) -> Sums:
        """With another batch."""
        products = crossed = roots = 0.0
        if self.last is not None:
            before, earlier = self.last
            roots = sqrt(size * earlier)
            products, crossed = hits * before / roots, (hits * earlier + before * size) / roots
        return Sums(
            self.count + 1,
            self.size + size,
            self.hits + hits,
            self.squares + hits * hits / size,
            self.products + products,
            self.crossed + crossed,
            self.roots + roots,
            (hits, size),
        )


@dataclass(frozen=True)
class Learned:
    """What is usual."""

    rate: float
    variance: float
    """V, of a token in the long run: the variance of the mean of n tokens is V / n."""
    batch: float
    """Mean size of a batch."""
    batches: int

    @property
    def overdispersion(self) -> float:
        """V over that of independent tokens."""
        return self.variance / max(self.rate * (1 - self.rate), _LEAST_RATE)


@dataclass(frozen=True)
class Detector:
    """One test in progress: a value; ``step`` gives the next one."""

    settings: Settings = field(default_factory=Settings)
    learned: Learned | None = None
    sums: Sums = field(default_factory=Sums)
    """Of the batches that were learned from."""
    given: float | None = None
    """The usual rate, if it was not learned but measured elsewhere."""
    open_size: float = 0.0
    """Of the batch that is not full yet."""
    open_hits: float = 0.0
    down: tuple[float, ...] = (-inf,) * len(FALLS)
    """log R for each fall."""
    up: tuple[float, ...] = (-inf,) * len(FALLS)
    """The same for rises."""
    fallen: bool = False
    """Whether an alarm was raised and the rate has not been back since."""
    risen: bool = False
    since: float = 0.0
    """Tokens since the likeliest moment of change, or since learning ended."""
    recent: float | None = None
    """The rate lately, over a few batches."""

    @property
    def evidence(self) -> float:
        """Of a fall: log of the statistic over log of the threshold; 1 is an alarm."""
        return self._share(self.down)

    @property
    def calm(self) -> bool:
        """Whether nothing speaks of a change, so that more may be learned."""
        return not self.fallen and not self.risen and max(self._share(self.down), self._share(self.up)) < _CALM

    def _share(self, statistic: tuple[float, ...]) -> float:
        return 0.0 if self.learned is None else max(0.0, _pooled(statistic)) / self.threshold

    @property
    def threshold(self) -> float:
        """log A."""
        assert self.learned is not None
        return log(max(2.0, self.settings.false_alarm_every / self.learned.batch))

    def document(self) -> dict[str, Any]:
        """For a file."""
        return asdict(replace(self, down=_finite(self.down), up=_finite(self.up)))


def restore(document: dict[str, Any]) -> Detector:
    """A detector from ``Detector.document``."""
    known = {f.name: document[f.name] for f in fields(Detector) if f.name in document}
    known["settings"] = Settings(**known["settings"])
    known["learned"] = Learned(**known["learned"]) if known["learned"] else None
    last = known["sums"].pop("last")
    known["sums"] = Sums(**known["sums"], last=tuple(last) if last else None)
    for name in ("down", "up"):
        known[name] = tuple(known[name])
    return Detector(**known)


def start(settings: Settings, rate: float | None = None) -> Detector:
    """A new test; with the ``rate`` that a plan measured, falls are looked for from the first batch on."""
    if rate is None:
        return Detector(settings)
    variance = _PRIOR * max(rate * (1 - rate), _LEAST_RATE)
    return Detector(settings, learned=Learned(rate, variance, settings.batch, 0), given=rate)


def step(detector: Detector, accepted: float, drafted: float) -> Detector:
    """Take in what was drafted since the last look."""
    size, hits = detector.open_size + drafted, detector.open_hits + min(accepted, drafted)
    if size < detector.settings.batch:
        return replace(detector, open_size=size, open_hits=hits)
    detector = replace(detector, open_size=0.0, open_hits=0.0)
    if detector.learned is not None:
        detector = _test(detector, hits / size, size)
    return _learn(detector, hits, size)


def _learn(detector: Detector, hits: float, size: float) -> Detector:
    """Learning comes after testing, and stops where a change is suspected or enough is known."""
    settings, learned = detector.settings, detector.learned
    if not detector.calm or detector.sums.size >= _FURTHER * settings.learn:
        return detector
    sums = detector.sums.plus(hits, size)
    detector = replace(detector, sums=sums)
    if learned is None and (sums.size < settings.learn or sums.count < _PRIOR_WEIGHT):
        return detector
    return replace(detector, learned=learn(sums, detector.given))


def learn(sums: Sums, given: float | None = None) -> Learned:
    """The usual rate, and the long-run variance of a token from batches.

    Batches next to each other go together (long answers, slow changes of the mixture), so their variance is raised by
    (1 + r) / (1 - r), with r their correlation (that of an autoregression of order 1), and by what few batches leave
    open: an upper bound of its estimate at about 80 %.
    """
    rate = sums.hits / sums.size
    square = max(0.0, sums.squares - rate * sums.hits)  # of (h - rate n) / sqrt(n)
    lag = sums.products - rate * sums.crossed + rate * rate * sums.roots
    correlation = min(0.8, max(0.0, lag / square + 1 / sums.count)) if square else 0.0
    binomial = max(rate * (1 - rate), _LEAST_RATE)
    measured = square / max(1, sums.count - 1) * (1 + correlation) / (1 - correlation)
    independent = sums.count * (1 - correlation) / (1 + correlation)
    upper = measured * (1 + 0.85 * sqrt(2 / max(2.0, independent)))
    weight = _PRIOR_WEIGHT / (_PRIOR_WEIGHT + independent)
    variance = max(binomial, weight * _PRIOR * binomial + (1 - weight) * upper)
    return Learned(rate if given is None else given, variance, sums.size / sums.count, sums.count)


def _test(detector: Detector, rate: float, size: float) -> Detector:
    usual = detector.learned
    assert usual is not None
    spread = sqrt(usual.variance / size)
    limit = detector.threshold
    most = limit * min(1.0, max(_MOST, size / _SEVERAL))
    unsure = 0.0 if detector.given is not None else sqrt(usual.variance / detector.sums.size)
    slack, gap = detector.settings.tolerance + unsure, usual.rate - rate
    down = _bets(detector.down, gap - slack, spread, most)
    up = _bets(detector.up, -gap - slack, spread, most)
    tested = replace(detector, recent=_recent(detector.recent, rate))
    low, high = _pooled(down), _pooled(up)
    # Over when the usual rate is as likely again as the lower one; what was bet begins anew then.
    fallen = low >= limit or (detector.fallen and low > 0)
    risen = high >= limit or (detector.risen and high > 0)
    since = detector.since + size if low > 0 else 0.0
    return replace(tested, fallen=fallen, risen=risen, since=since, down=_limited(down, limit), up=_limited(up, limit))


def _bets(before: Sequence[float], gap: float, spread: float, most: float) -> tuple[float, ...]:
    """log of (1 + R) L for each fall, with log L at most ``most``."""
    bets = [min(most, d / spread**2 * (gap - d / 2)) for d in FALLS]
    return tuple(_log_one_plus(r) + bet for r, bet in zip(before, bets, strict=True))


def _limited(values: Sequence[float], limit: float) -> tuple[float, ...]:
    """No more than an alarm takes, so that the way back is as short as the way there."""
    return tuple(min(value, limit + log(len(FALLS))) for value in values)


def _log_one_plus(value: float) -> float:
    return value + exp(-value) if value > 30 else log(1 + exp(value))


def _pooled(values: Sequence[float]) -> float:
    """log of the mean of R."""
    most = max(values)
    return -inf if most == -inf else most + log(sum(exp(v - most) for v in values) / len(values))


def _recent(before: float | None, rate: float) -> float:
    return rate if before is None else before + 0.3 * (rate - before)


def _finite(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(-1e9, v) for v in values)
