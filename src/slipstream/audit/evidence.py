"""Evidence that may be looked at after every answer: bets against a claim.

A bettor starts with 1 and bets on each token before seeing it. If the claim is true, the game is fair or worse, so the
wealth W is a supermartingale, and the probability that it ever reaches 1/a is at most a (Ville's
inequality; Grünwald et al., Safe Testing, arXiv 1906.07801). 1/max W is therefore a p-value however often one looks.

The bettor learns: in each place it expects what it saw there, on top of what the claim says. That is the likelihood
ratio of a Dirichlet mixture of multinomials against the claimed one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.audit.law import IMPOSSIBLE, Cells

#: The claim counts as much as this many answers when the bettor learns.
STRENGTH = 20.0
#: Prior weight of "a token that must not occur": two of them make a certain fault.
_PRIOR_IMPOSSIBLE = 0.01
#: One-sided 95 % point of a normal law.
_Z95 = 1.645


@dataclass
class Wealth:
    """The bettor's purse, in logarithms."""

    now: float = 0.0
    peak: float = 0.0

    def add(self, factor: float) -> None:
        """Multiply by exp(factor)."""
        self.now += factor
        self.peak = max(self.peak, self.now)

    @property
    def p_value(self) -> float:
        """Valid at any time: at most the probability of ever being this rich if the claim holds."""
        return math.exp(-self.peak)


@dataclass
class ChainBet:
    """Bets on each token given the ones before it, by what was seen behind the same tokens."""

    counts: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def factor(self, before: tuple[int, ...], law: Cells, token: int) -> float:
        """log of (what the bettor expected of the token's cell / what the claim allows), then learn it."""
        seen = self.counts.setdefault(before, {})
        cell = law.of(token)
        there = sum(n for other, n in seen.items() if law.of(other) == cell)
        total = sum(seen.values())
        prior = (1 - _PRIOR_IMPOSSIBLE) * law.probs[cell]
        if cell == len(law.ids) + 1:
            prior = _PRIOR_IMPOSSIBLE
        elif cell == len(law.ids):
            prior = max(prior, 1e-9)
        expected = (STRENGTH * prior + there) / (STRENGTH + total)
        seen[token] = seen.get(token, 0) + 1
        return math.log(expected / law.ceilings[cell])

    def cost(self, depth: int, laws: Mapping[tuple[int, ...], Cells]) -> float:
        """What learning costs the bettor in places with fewer than ``depth`` tokens before them, if the claim holds."""
        total = 0.0
        for before, seen in self.counts.items():
            if len(before) < depth and before in laws:
                free = sum(p > 0 for p in laws[before].probs) - 1
                total += free / 2 * math.log1p(sum(seen.values()) / STRENGTH)
        return total


@dataclass
class RankBet:
    """Bets that tokens of some rank (the likeliest, the second, ...) come too often, wherever they occur."""

    seen: list[float] = field(default_factory=lambda: [0.0] * 10)
    expected: list[float] = field(default_factory=lambda: [0.0] * 10)

    def factor(self, law: Cells, token: int) -> float:
        """log of the bettor's expectation / what the claim allows, then learn."""
        cell, last = law.of(token), len(law.ids) + 1
        ranks = [*range(len(law.ids)), 9]
        tilt = [(STRENGTH + self.seen[r]) / (STRENGTH + self.expected[r]) for r in ranks]
        norm = sum(t * p for t, p in zip(tilt, law.probs, strict=False))
        for r, p in zip(ranks, law.probs, strict=False):
            self.expected[r] += p
        if cell == last:
            return 0.0
        self.seen[ranks[cell]] += 1
        share = tilt[cell] * max(law.probs[cell], 1e-9) / max(norm, 1e-9)
        return math.log((1 - IMPOSSIBLE) * min(share, 1.0) / law.ceilings[cell])


@dataclass
class PairBet:
    """Bets on which of two sources each of a pair of outcomes came from: a coin toss if their laws are the same."""

    ours: dict[str, int] = field(default_factory=dict)
    theirs: dict[str, int] = field(default_factory=dict)

    def factor(self, our: str, their: str) -> float:
        """log of (2 x the bettor's probability of the way round that it is), then learn."""
        as_it_is = self._expected(self.ours, our) * self._expected(self.theirs, their)
        swapped = self._expected(self.ours, their) * self._expected(self.theirs, our)
        self.ours[our] = self.ours.get(our, 0) + 1
        self.theirs[their] = self.theirs.get(their, 0) + 1
        return math.log(2 * as_it_is / (as_it_is + swapped))

    def _expected(self, own: Mapping[str, int], outcome: str) -> float:
        """By what came from this source, on top of what came from both."""
        both = sum(self.ours.values()) + sum(self.theirs.values())
        kinds = len(self.ours.keys() | self.theirs.keys()) + 1
        pooled = (self.ours.get(outcome, 0) + self.theirs.get(outcome, 0) + 1) / (both + kinds)
        return (own.get(outcome, 0) + STRENGTH * pooled) / (sum(own.values()) + STRENGTH)


def holm(p_values: Sequence[float], alpha: float) -> list[bool]:
    """Which of the hypotheses fall, so that a true one falls with probability at most ``alpha`` (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    falls = [False] * len(p_values)
    for step, index in enumerate(order):
        if p_values[index] > alpha / (len(p_values) - step):
            break
        falls[index] = True
    return falls


def detectable(samples: int, cost: float, alpha: float) -> float:
    """The total variation that ``samples`` answers find with probability 0.95, whatever its shape; at most 1.

    A law at total variation d has a relative entropy of at least 2 d^2 (Pinsker). After n answers the bettor's log
    wealth is about 2 n d^2 - cost, with a standard deviation of about 2 d sqrt(n); it must reach log(1 / alpha).
    """
    if samples == 0:
        return 1.0
    return min(1.0, _root(math.log(1 / alpha) + cost) / math.sqrt(samples))


def samples_for(variation: float, free: int, alpha: float) -> int:
    """How many answers find a total variation in one place with ``free`` + 1 cells, with probability 0.95."""
    samples = 50
    while detectable(samples, free / 2 * math.log1p(samples / STRENGTH), alpha) > variation:
        samples = math.ceil(samples * 1.1)
    return samples


def _root(need: float) -> float:
    """y = d sqrt(n) with 2 y^2 - 2 z y = need."""
    return (2 * _Z95 + math.sqrt(4 * _Z95**2 + 8 * need)) / 4
