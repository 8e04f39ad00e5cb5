"""How many tokens to draft for each of many requests: as many as yield the most tokens a second, over all of them.

Liu et al. 2024 (arXiv 2406.14066). Rows of a pass are cheap while there are few of them and dear once arithmetic is the
limit, so as the batch fills, k falls by itself, first where acceptance is low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from slipstream.estimates import OF_ALL, OF_REQUEST, Acceptance, Costs, Mean, Prior
from slipstream.types import Draft, Round

#: The longest draft.
MOST = 16
#: Rounds after which a request that drafts nothing tries one token.
PROBE = 32
#: What a request knows of acceptance when it begins counts for so many tokens.
_PRIOR_WEIGHT = 8.0
#: A pass of a draft model, in passes of the target, until one is measured.
_STEP = 0.15

#: Seconds of a pass over so many rows.
PassCost = Callable[[int], float]


def choose(rates: Sequence[Sequence[float]], others: int, verify: PassCost, draft: PassCost | None) -> list[int]:
    """k of each request, 0 included.

    Args:
        rates: for each request the acceptance at every position that it has room for, given the ones before.
        others: rows that are in the target's pass anyway, beside one for each request.
        verify: of the target.
        draft: of the draft model, whose passes serve all requests that still draft; None if drafts cost nothing.

    Returns:
        The numbers that maximise (tokens of all requests) / (draft passes + target's pass).

    >>> alone, crowd = [[0.8, 0.6]], [[0.8, 0.6]] * 12
    >>> cost = lambda rows: max(8.0, rows)  # arithmetic is the limit from 8 rows on
    >>> choose(alone, 0, cost, None), choose(crowd, 0, cost, None) == [0] * 12
    ([2], True)
    """
    slots = [(s, -j, r) for r, some in enumerate(rates) for j, s in enumerate(accumulate(some, mul))]
    slots.sort(key=lambda slot: (-slot[0], -slot[1], slot[2]))  # of equals, earlier positions first
    certain, rows = len(rates), len(rates) + others
    tokens, drafting = float(certain), 0.0
    level: list[int] = []
    best, count = tokens / verify(rows), 0
    for n, (expected, negative, _) in enumerate(slots, start=1):
        at = -negative
        tokens += expected
        if draft is not None:
            level += [0] * (at + 1 - len(level))
            drafting += draft(level[at] + 1) - (draft(level[at]) if level[at] else 0.0)
            level[at] += 1
        if (rate := tokens / (drafting + verify(rows + n))) > best:
            best, count = rate, n
    ks = [0] * len(rates)
    for _, _, r in slots[:count]:
        ks[r] += 1
    return ks


@dataclass(frozen=True)
class Candidate:
    """A request that may draft."""

    acceptance: Acceptance
    room: int
    rounds_without: int
    copied: Draft | None = None
    """Its draft, if that cost nothing and is there already."""

    def rates(self) -> list[float]:
        """Acceptance at each position, given the ones before."""
        if self.copied is None:
            return self.acceptance.positions(min(self.room, MOST))
        if self.copied.confidence:
            return [self.acceptance.given(sure) for sure in self.copied.confidence]
        return self.acceptance.positions(len(self.copied.tokens))


class Goodput:
    """What passes cost here and how drafts fare, and the k that follows from it."""

    def __init__(self) -> None:
        self._verify, self._draft = Costs(1.0), Costs(1.0)
        self._each = Mean()
        self._acceptance = Acceptance(Prior(), OF_ALL)
        self.pays = True
        """Whether anybody drafts."""

    def start(self) -> Acceptance:
        """What a new request expects."""
        return Acceptance(self._acceptance.summary(_PRIOR_WEIGHT), OF_REQUEST)

    def ks(self, candidates: Sequence[Candidate], others: int) -> list[int]:
        """k of each; ``others`` are rows that are in the pass anyway."""
        copying = all(one.copied is not None for one in candidates)
        ks = choose([one.rates() for one in candidates], others, self._verify.of, None if copying else self._step)
        if candidates:
            self.pays = any(ks)
        return [
            min(one.room, 1) if not k and one.copied is None and one.rounds_without >= PROBE else k
            for one, k in zip(candidates, ks, strict=True)
        ]

    def took(self, rows: int, seconds: float) -> None:
        """A pass of the target over ``rows`` took so long."""
        self._verify.verified(rows, seconds)

    def took_draft(self, rows: int, seconds: float) -> None:
        """A pass of a draft model over ``rows`` took so long."""
        self._draft.verified(rows, seconds)

    def took_each(self, tokens: int, seconds: float) -> None:
        """Drafting ``tokens`` without passes that could be shared took so long."""
        self._each.decay(0.9)
        self._each.total += seconds
        self._each.count += tokens

    def learn(self, acceptance: Acceptance, draft: Draft, done: Round, *, over: bool) -> None:
        """A round of a request is over. One that a stop rule cut has no rejection."""
        seen = done.num_accepted if over else min(done.num_accepted + 1, done.num_drafted)
        for one in (acceptance, self._acceptance):
            for at in range(seen):
                sure = draft.confidence[at] if at < len(draft.confidence) else None
                one.verified(at, sure, float(at < done.num_accepted))
            one.end_round()
        if not done.num_drafted:
            acceptance.rest()

    def _step(self, rows: int) -> float:
        """Seconds of a step of the drafts of ``rows`` requests."""
        each = self._each.total / self._each.count if self._each.count else 0.0
        if self._draft.measured:
            return self._draft.of(rows) + each * rows
        return each * rows or _STEP * self._verify.of(rows)
