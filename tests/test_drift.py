"""The sequential test of acceptance: how soon it tells a fall, and that it keeps still otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slipstream.monitor.drift import Detector, Settings, Sums, learn, start, step
from slipstream.monitor.simulation import Service, services, simulate

#: A look brings about so many draft tokens.
LOOK = 100
FALLEN, SERVICES, DRAFTED = 0.41, 20, 50_000


def _looks(service: Service, drafted: int, seed: int) -> tuple[np.ndarray, int]:
    """Accepted tokens of each look, and draft tokens of a look."""
    each = service.k * service.concurrent
    steps = max(1, LOOK // each)
    accepted = simulate(service, drafted, np.random.default_rng(seed))
    whole = accepted[: len(accepted) // steps * steps]
    return whole.reshape(-1, steps).sum(axis=1), each * steps


def _run(test: Detector, looks: np.ndarray, size: int) -> tuple[Detector, int | None]:
    """The test after the looks, and draft tokens until an alarm."""
    alarm = None
    for number, accepted in enumerate(looks, start=1):
        test = step(test, float(accepted), size)
        if test.fallen and alarm is None:
            alarm = number * size
    return test, alarm


def test_a_fall_is_told_within_2000_tokens_and_none_in_a_million() -> None:
    """68 % to 41 %: 20 services of different concurrency, k and unevenness, 50,000 stationary draft tokens each."""
    delays = []
    for i, service in enumerate(services(SERVICES, 0.68)):
        test, alarm = _run(start(Settings()), *_looks(service, DRAFTED, 1300 + i))
        assert alarm is None, service
        assert test.learned is not None
        assert test.learned.overdispersion > 1.5, "a simulation of independent tokens shows nothing"
        _, delay = _run(test, *_looks(replace(service, acceptance=FALLEN), 6000, 1500 + i))
        assert delay is not None, service
        delays.append(delay)
    assert max(delays) <= 2000
    assert np.median(delays) <= 1300


def test_a_binomial_variance_would_raise_false_alarms() -> None:
    """Why the variance is estimated from batches: with p (1 - p) the same traffic is one alarm after the other."""
    alarms = 0
    for i, service in enumerate(services(SERVICES, 0.68)):
        looks, size = _looks(service, 20_000, 1300 + i)
        test, _ = _run(start(Settings()), looks, size)
        assert test.learned is not None
        independent = replace(test.learned, variance=0.68 * 0.32)
        naive = replace(test, learned=independent, given=test.learned.rate, sums=replace(test.sums, size=1e12))
        naive = replace(naive, settings=replace(naive.settings, tolerance=0.0))
        _, alarm = _run(naive, looks, size)
        alarms += alarm is not None
    assert alarms >= SERVICES // 2


def test_the_rate_of_false_alarms_is_the_one_stated() -> None:
    """Independent tokens just at the tolerated rate, known variance: at most one alarm in so many tokens on average."""
    rng = np.random.default_rng(5)
    settings = Settings(false_alarm_every=100_000, tolerance=0.0)
    alarms = 0
    for _ in range(40):
        test = start(settings, 0.6)
        assert test.learned is not None
        test = replace(test, learned=replace(test.learned, variance=0.24, batches=1000), sums=Sums(size=1e12))
        _, alarm = _run(test, rng.binomial(200, 0.6, 250), 200)
        alarms += alarm is not None
    assert alarms <= 20  # 40 x 50,000 tokens = 2,000,000: 20 alarms, if every alarm began anew


def test_variance_is_that_of_the_long_run() -> None:
    """Batches of an autoregression: the sums tell the variance of its mean over long stretches."""
    rng = np.random.default_rng(3)
    level, levels = 0.0, []
    for _ in range(4000):
        level = 0.5 * level + rng.normal(0, 0.05)
        levels.append(0.6 + level)
    sums = Sums()
    for rate in levels:
        sums = sums.plus(200 * rate, 200)
    found = learn(sums)
    # of the mean of n tokens in the long run: var(level) (1 + r) / (1 - r) per batch of 200
    expected = 200 * 0.05**2 / (1 - 0.5**2) * (1 + 0.5) / (1 - 0.5)
    assert found.rate == pytest.approx(np.mean(levels))
    assert found.variance == pytest.approx(expected, rel=0.15)


def test_sums_are_those_of_the_batches() -> None:
    """Against the plain formulas."""
    rng = np.random.default_rng(2)
    sizes = rng.integers(200, 400, 30)
    hits = rng.binomial(sizes, rng.beta(8, 4, 30))
    sums = Sums()
    for h, n in zip(hits, sizes, strict=True):
        sums = sums.plus(float(h), float(n))
    rate = hits.sum() / sizes.sum()
    residuals = (hits - rate * sizes) / np.sqrt(sizes)
    assert sums.squares - rate * sums.hits == pytest.approx((residuals**2).sum())
    lag = sums.products - rate * sums.crossed + rate**2 * sums.roots
    assert lag == pytest.approx((residuals[1:] * residuals[:-1]).sum())


def test_one_strange_batch_is_no_drift() -> None:
    test = _learned()
    test = step(test, 0, 200)
    assert not test.fallen
    for _ in range(3):
        test = step(test, 0, 200)
    assert test.fallen


def test_small_falls_are_tolerated() -> None:
    rng = np.random.default_rng(1)
    test = _learned(tolerance=0.05)
    for hits in rng.binomial(200, 0.66, 2000):
        test = step(test, float(hits), 200)
        assert not test.fallen


def test_an_alarm_ends_when_the_rate_is_back() -> None:
    test = _learned()
    for _ in range(5):
        test = step(test, 80, 200)
    assert test.fallen
    for _ in range(20):
        test = step(test, 140, 200)
    assert not test.fallen


def test_a_change_is_not_learned_as_usual() -> None:
    test = _learned()
    for _ in range(2000):
        test = step(test, 80, 200)
    assert test.fallen
    assert test.learned is not None
    assert test.learned.rate == pytest.approx(0.7, abs=0.02)


def test_looks_with_few_tokens_are_put_together() -> None:
    test = start(Settings(learn=1000))
    for _ in range(150):
        test = step(test, 7, 10)
    assert test.learned is None or test.learned.batch == 200
    assert test.sums.count == 7
    for _ in range(150):
        test = step(test, 7, 10)
    assert test.learned is not None
    assert test.learned.rate == pytest.approx(0.7)


def test_a_plans_rate_is_tested_from_the_first_batch_on() -> None:
    test = start(Settings(), 0.7)
    for _ in range(6):
        test = step(test, 60, 200)
    assert test.fallen


def _learned(tolerance: float = 0.03) -> Detector:
    rng = np.random.default_rng(0)
    test = start(Settings(tolerance=tolerance))
    for hits in rng.binomial(200, 0.7, 60):
        test = step(test, float(hits), 200)
    assert test.learned is not None
    return test
