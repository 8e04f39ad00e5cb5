"""How many tokens to draft for each of many requests: as many as yield the most tokens a second, over all of them.

Liu et al. 2024 (arXiv 2406.14066). Rows of a pass are cheap while there are few of them and dear once arithmetic is the
limit, so as the batch fills, k falls by itself, first where acceptance is low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from slipstream.controller import BRIEF, Adaptive, Controller, Played
from slipstream.estimates import OF_ALL, OF_REQUEST, Acceptance, Costs, Mean, Prior
from slipstream.types import Draft, Stats

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


class BatchController:
    """One request's part in the choice: what it knows of its drafts, and the k that was chosen for its next round."""

    gated = False

    def __init__(self, knowledge: Goodput, *, isolated: bool) -> None:
        self._knowledge = knowledge
        self._isolated = isolated
        self._acceptance = Acceptance(Prior() if isolated else knowledge.prior(), OF_REQUEST)
        self._resting = 0
        self.k = 0

    def rates(self, room: int, copied: Draft | None) -> list[float]:
        """Acceptance at each position of a draft, given the ones before; of a copied one, of each of its tokens."""
        if copied is None:
            return self._acceptance.positions(min(room, MOST))
        if copied.confidence:
            return [self._acceptance.given(sure) for sure in copied.confidence]
        return self._acceptance.positions(len(copied.tokens))

    def choose(self, k: int, *, probe: bool) -> None:
        """The k of the next round; if it is 0 for long, 1 now and then."""
        self.k = 1 if not k and probe and self._resting >= PROBE else k

    def ask(self, room: int, length: int) -> int:
        """What was chosen."""
        return min(self.k, room)

    def goes_on(self, drafted: int, confidence: float, source: str = "", /) -> bool:
        """Always."""
        return True

    def keep(self, draft: Draft) -> int:
        """What was chosen."""
        return self.k

    def learn(self, played: Played) -> None:
        """A round is over."""
        self._resting = 0 if played.kept else self._resting + 1
        self._see(self._acceptance, played)
        if not self._isolated:
            self._see(self._knowledge.acceptance, played)
        if not played.kept:
            self._acceptance.rest()

    @staticmethod
    def _see(acceptance: Acceptance, played: Played) -> None:
        for at in range(min(played.accepted + 1, played.kept)):
            sure = played.draft.confidence[at] if at < len(played.draft.confidence) else None
            acceptance.verified(at, sure, float(at < played.accepted))
        acceptance.end_round()


class Goodput:
    """What passes cost here and how drafts fare, and the k that follows from it: the policy of a batch.

    Args:
        costs: of the target's passes and of the draft model's; learned, if not given.
    """

    name = "goodput"

    def __init__(self, costs: tuple[Costs, Costs] | None = None) -> None:
        self._verify, self._draft = costs or (Costs(1.0), Costs(1.0))
        self._each = Mean()
        self.acceptance = Acceptance(Prior(), OF_ALL)
        self.pays = True
        """Whether anybody drafts."""

    def start(self, session: object, drafter: str, *, repeatable: bool, isolated: bool) -> Controller:
        """Begin one request. If it has to repeat, k is its own matter."""
        if repeatable:
            return Adaptive().start(session, drafter, repeatable=True, isolated=isolated)
        if hasattr(session, "latest"):
            session.latest = BRIEF  # all of a long prompt would delay everyone
        return BatchController(self, isolated=isolated)

    def prior(self) -> Prior:
        """What a new request expects."""
        return self.acceptance.summary(_PRIOR_WEIGHT)

    def choose(
        self, controllers: Sequence[BatchController], rates: Sequence[Sequence[float]], others: int, *, free: bool
    ) -> None:
        """Set k of each.

        Args:
            controllers: of requests that may draft.
            rates: their acceptance at the positions that they have room for.
            others: rows that are in the pass anyway.
            free: drafts cost nothing.
        """
        ks = choose(rates, others, self._verify.of, None if free else self._step)
        for controller, k, some in zip(controllers, ks, rates, strict=True):
            controller.choose(k, probe=bool(some) and not free)
        if controllers:
            self.pays = any(ks)

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

    def speed_up(self, stats: Stats) -> float | None:
        """Estimate for one answer: its time after the first token if nothing had been drafted, over that which it took.

        From what passes cost here, as if it had been alone; None if nothing is known of that.
        """
        later = stats.emitted - 1
        if later < 1 or not self._verify.measured:
            return None
        took = sum(n * self._verify.of(1 + k) for k, n in stats.rounds_by_k.items()) + stats.draft_seconds
        return later * self._verify.of(1) / took

    def _step(self, rows: int) -> float:
        """Seconds of a step of the drafts of ``rows`` requests."""
        each = self._each.total / self._each.count if self._each.count else 0.0
        if self._draft.measured:
            return self._draft.of(rows) + each * rows
        return each * rows or _STEP * self._verify.of(rows)
