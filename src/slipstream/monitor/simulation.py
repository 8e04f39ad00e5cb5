"""Services whose acceptance varies as real ones' does, to try the tests of ``drift`` on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Service:
    """What a service's acceptance depends on. Spreads are of log-odds of accepting a token."""

    acceptance: float
    """accepted / drafted, on average."""
    k: int = 4
    concurrent: int = 8
    """Answers in progress at a time."""
    answer_rounds: float = 40
    """Mean rounds of an answer; lengths are exponential."""
    of_answers: float = 0.4
    """Answers differ: some texts are easy."""
    of_stretches: float = 0.3
    """Stretches within an answer differ; they last about 12 rounds."""
    of_times: float = 0.06
    """The mixture of requests changes slowly, over about 20,000 draft tokens."""


def simulate(service: Service, drafted: int, rng: np.random.Generator) -> Array:
    """Accepted tokens of every step, (steps,); a step is a round of each answer in progress, k x concurrent draft
    tokens.

    Within a round tokens go together too: those behind the first rejected one are rejected.
    """
    steps = -(-drafted // (service.k * service.concurrent))
    odds = _level(service) + _effects(service, steps, rng)
    return np.asarray(_accepted(odds, service.k, rng).sum(axis=0))


def _effects(service: Service, steps: int, rng: np.random.Generator) -> Array:
    """Deviations of log-odds, (concurrent, steps)."""
    slots = service.concurrent
    new = rng.random((slots, steps)) < 1 / service.answer_rounds
    answers = rng.normal(0, service.of_answers, (slots, steps))
    latest = np.maximum.accumulate(np.where(new, np.arange(steps), 0), axis=1)
    of_answer = np.take_along_axis(answers, latest, axis=1)
    stretches = _autoregressions(slots, steps, 12.0, rng) * service.of_stretches
    tokens_a_step = service.k * slots
    times = _autoregressions(1, steps, 20_000 / tokens_a_step, rng) * service.of_times
    return np.asarray(of_answer + stretches + times)


def _autoregressions(count: int, steps: int, memory: float, rng: np.random.Generator) -> Array:
    """Of order 1 with variance 1 that forget over ``memory`` steps; (count, steps)."""
    keep = float(np.exp(-1 / max(memory, 1e-9)))
    noise = np.empty((count, steps))
    for row in noise:
        row[:] = rng.normal(0, np.sqrt(1 - keep**2), steps)
        row[0] = rng.normal()
    levels = noise.T.copy()
    for step in range(1, steps):
        levels[step] += keep * levels[step - 1]
    return np.asarray(levels.T)


def _accepted(odds: Array, k: int, rng: np.random.Generator) -> Array:
    """Tokens accepted before the first rejection, at most k."""
    a = 1 / (1 + np.exp(-odds))
    return np.asarray(np.minimum(k, np.floor(np.log(rng.random(odds.shape)) / np.log(np.clip(a, 1e-9, 1 - 1e-9)))))


def _level(service: Service) -> float:
    """The log-odds at which the service has its acceptance."""
    spread = float(np.sqrt(service.of_answers**2 + service.of_stretches**2 + service.of_times**2))
    points, weights = np.polynomial.hermite_e.hermegauss(32)
    low, high = -6.0, 9.0
    for _ in range(40):
        middle = (low + high) / 2
        a = 1 / (1 + np.exp(-(middle + spread * points)))
        mean = float(sum((a**j) @ weights for j in range(1, service.k + 1)) / weights.sum() / service.k)
        low, high = (middle, high) if mean < service.acceptance else (low, middle)
    return low


def services(count: int, acceptance: float) -> list[Service]:
    """Different ones: alone and in crowds, of even and uneven traffic, short and long drafts."""
    shapes = [(1, 0.2), (4, 0.25), (8, 0.3), (16, 0.3), (32, 0.4)]
    return [
        Service(acceptance, k=(3, 4, 5, 6)[i % 4], concurrent=shapes[i % 5][0], of_answers=shapes[i % 5][1])
        for i in range(count)
    ]
