"""How many tokens to draft for each of many requests: as many as yield the most tokens a second, over all of them.

Liu et al. 2024 (arXiv 2406.14066). Rows of a pass are cheap while there are few of them and dear once arithmetic is the
limit, so as the batch fills, k falls by itself, first where acceptance is low.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from slipstream.controller import BRIEF, Adaptive, Controller, Played
from slipstream.estimates import OF_ALL, OF_REQUEST, Acceptance, Costs, Mean, Memory, Prior
from slipstream.types import Draft, Stats

#: The longest draft.
MOST = 16
#: Rounds after which a request that drafts nothing tries one token.
PROBE = 32
#: What a request knows of acceptance when it begins counts for so many tokens.
_PRIOR_WEIGHT = 8.0
#: What drafts must bring at best to be looked for.
_LEAST_GAIN = 1.05
#: A pass of a draft model, in passes of the target, until one is measured.
_STEP = 0.15

#: Seconds of a pass over so many rows.
PassCost = Callable[[int], float]


def choose(
    rates: Sequence[Sequence[float]],
    others: int,
    verify: PassCost,
    draft: PassCost | None,
    free: Sequence[int] = (),
    left: float = 1.0,
    worth: float = 0.0,
) -> list[int]:
    """k of each request, 0 included.

    Args:
        rates: for each request the acceptance at every position that it has room for, given the ones before.
        others: rows that are in the target's pass anyway, beside one for each request.
        verify: of the target.
        draft: of the draft model, whose passes serve all requests that still draft; None if drafts cost nothing.
        free: for each request the number of its first tokens that are there already, copied; none, if not given.
        left: rows that a drawn token adds to the target's pass; less than one where drafting did a part of its work.
        worth: tokens that a second brings otherwise; 0: what this pass yields at best.

    Returns:
        The numbers that maximise (tokens of all requests) / (draft passes + target's pass), or tokens less what those
        seconds are worth.

    >>> alone, crowd = [[0.8, 0.6]], [[0.8, 0.6]] * 12
    >>> cost = lambda rows: max(8.0, rows)  # arithmetic is the limit from 8 rows on
    >>> choose(alone, 0, cost, None), choose(crowd, 0, cost, None) == [0] * 12
    ([2], True)
    >>> choose([[0.9, 0.9, 0.1, 0.1]], 0, cost, lambda rows: 4.0, [2])  # copies are taken, the draft model is not asked
    [2]
    """
    slots = [(s, -j, r) for r, some in enumerate(rates) for j, s in enumerate(accumulate(some, mul))]
    slots.sort(key=lambda slot: (-slot[0], -slot[1], slot[2]))  # of equals, earlier positions first
    certain, rows = len(rates), len(rates) + others
    copied = free or [0] * certain
    tokens, drafting, added = float(certain), 0.0, 0.0
    level: list[int] = []

    def gain(seconds: float) -> float:
        return tokens - worth * seconds if worth else tokens / seconds

    best, count = gain(verify(rows)), 0
    for n, (expected, negative, r) in enumerate(slots, start=1):
        at = -negative - copied[r]
        tokens += expected
        added += 1.0 if at < 0 else left
        if draft is not None and at >= 0:
            level += [0] * (at + 1 - len(level))
            drafting += draft(level[at] + 1) - (draft(level[at]) if level[at] else 0.0)
            level[at] += 1
        if (found := gain(drafting + verify(rows + round(added)))) > best:
            best, count = found, n
    ks = [0] * len(rates)
    for _, _, r in slots[:count]:
        ks[r] += 1
    return ks


@dataclass(frozen=True)
class Offer:
    """What a request could have verified in its next round."""

    rates: Sequence[float]
    """Acceptance at each position, given the ones before."""
    copied: int = 0
    """So many of the first tokens are there already."""

    @property
    def drafts(self) -> bool:
        """Whether more could be drafted."""
        return len(self.rates) > self.copied


class BatchController:
    """One request's part in the choice: what it knows of its drafts, and the k that was chosen for its next round.

    Args:
        knowledge: of all requests.
        copying: the drafters whose tokens are copied; None: all are. Copies and drawn tokens are known apart, since a
            draft model that is not worth its time says nothing of copies.
        isolated: whether others learn nothing from it, nor it from them.
    """

    gated = False

    def __init__(self, knowledge: Goodput, copying: Collection[str] | None, *, isolated: bool) -> None:
        self._knowledge = knowledge
        self._copying = copying
        self._isolated = isolated
        self._known = Known() if isolated else knowledge.known.summary()
        self._resting = 0
        self.drafts_pay = True
        """Whether they did when nothing could be copied."""
        self.k = 0

    def offer(self, room: int, copied: Draft | None) -> Offer:
        """What it could have verified: ``copied`` tokens, and behind them, unless it only copies, drafted ones."""
        sure = [] if copied is None else self._rates(copied)
        if self._copying is None:
            return Offer(sure, len(sure))
        return Offer([*sure, *self._known.drafts.positions(max(0, min(room, MOST) - len(sure)))], len(sure))

    def _rates(self, copied: Draft) -> list[float]:
        if copied.confidence:
            return [self._known.copies.given(sure) for sure in copied.confidence]
        return self._known.copies.positions(len(copied.tokens))

    def choose(self, k: int, offer: Offer) -> None:
        """The k of the next round; if nothing is drafted for long, one token now and then."""
        if k > offer.copied or (offer.drafts and not offer.copied):
            self.drafts_pay = k > offer.copied
        probe = offer.drafts and k <= offer.copied and self._resting >= PROBE
        self.k = offer.copied + 1 if probe else k

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
        copied = self.copied(played.draft)[: played.kept]
        self._resting = self._resting + 1 if all(copied) else 0
        for known in (self._known,) if self._isolated else (self._known, self._knowledge.known):
            known.see(played, copied)
        self._known.rest(copied)

    def copied(self, draft: Draft) -> list[bool]:
        """Which of its tokens are."""
        sources = (*draft.sources, *[""] * len(draft.tokens))
        return [self._copying is None or sources[at] in self._copying for at in range(len(draft.tokens))]


class Known:
    """How copied tokens fare, and how drafted ones."""

    def __init__(self, memory: Memory = OF_REQUEST, copies: Prior | None = None, drafts: Prior | None = None) -> None:
        self.copies = Acceptance(copies or Prior(), memory)
        self.drafts = Acceptance(drafts or Prior(), memory)

    def summary(self) -> Known:
        """What a new request expects."""
        return Known(OF_REQUEST, self.copies.summary(_PRIOR_WEIGHT), self.drafts.summary(_PRIOR_WEIGHT))

    def see(self, played: Played, copied: Sequence[bool]) -> None:
        """Learn from a round; ``copied`` says it of each token that was verified."""
        drafted = 0
        for at in range(min(played.accepted + 1, played.kept)):
            sure = played.draft.confidence[at] if at < len(played.draft.confidence) else None
            stands = float(at < played.accepted)
            if copied[at]:
                self.copies.verified(at, sure, stands)
            else:
                self.drafts.verified(drafted, sure, stands)
                drafted += 1
        self.copies.end_round()
        self.drafts.end_round()

    def rest(self, copied: Sequence[bool]) -> None:
        """What a round had none of is known less surely."""
        if not any(copied):
            self.copies.rest()
        if all(copied):
            self.drafts.rest()


class Goodput:
    """What passes cost here and how drafts fare, and the k that follows from it: the policy of a batch.

    Args:
        costs: of the target's passes and of the draft model's; learned, if not given.
    """

    name = "goodput"

    def __init__(self, costs: tuple[Costs, Costs] | None = None) -> None:
        self._verify, self._draft = costs or (Costs(1.0), Costs(1.0))
        self._each = Mean()
        self.known = Known(OF_ALL)
        self.pays = True
        """Whether draft models are worth their time."""
        self.left = 1.0
        """Rows that a drawn token adds to the target's pass; less where drafting did a part of its work."""

    def start(self, session: object, drafter: str, *, repeatable: bool, isolated: bool) -> Controller:
        """Begin one request. If it has to repeat, k is its own matter."""
        if repeatable:
            return Adaptive().start(session, drafter, repeatable=True, isolated=isolated)
        if hasattr(session, "latest"):
            session.latest = BRIEF  # all of a long prompt would delay everyone
        return BatchController(self, _copying(session), isolated=isolated)

    def forget_drafts(self) -> None:
        """Draft models are other ones from now on."""
        self._draft = self._draft if self._draft.fixed else Costs(1.0)
        self._each = Mean()
        self.known.drafts = Acceptance(Prior(), OF_ALL)
        self.pays = True

    def choose(
        self, controllers: Sequence[BatchController], offers: Sequence[Offer], others: int, reading: int = 0
    ) -> None:
        """Set k of each.

        A pass that reads prompts yields few tokens a second, so that drafts would seem cheap in it. But they keep it
        from reading, and a second is worth what all of them will get once they decode.

        Args:
            controllers: of requests that may draft.
            offers: what each could have verified.
            others: rows that are in the pass anyway.
            reading: requests that have yet to begin.
        """
        copied, all_ = [offer.copied for offer in offers], len(offers) + reading
        worth = all_ / self._verify.of(all_) if reading else 0.0
        rates = [offer.rates for offer in offers]
        ks = choose(rates, others, self._verify.of, self._step, copied, self.left, worth)
        for controller, k, offer in zip(controllers, ks, offers, strict=True):
            controller.choose(k, offer)
        if any(offer.drafts for offer in offers):
            self.pays = any(k > free for k, free in zip(ks, copied, strict=True))

    def pays_for(self, requests: int) -> bool:
        """Whether draft models would be worth their time with so many requests that have nothing to copy."""
        rates = [self.known.drafts.positions(MOST)] * requests
        return self.pays and any(choose(rates, 0, self._verify.of, self._step, left=self.left))

    def may_pay(self, requests: int, others: int) -> bool:
        """Whether drafts could be worth the rows of ``requests``, if every token of them stood.

        Where they could not, arithmetic is the limit, and even to look for copies takes time that nothing brings back.
        """
        rows = requests + others
        plain = requests / self._verify.of(rows)
        costs = ((n, self._verify.of(rows + round(n * self.left))) for n in range(1, 2 * MOST + 1))
        return any((requests + n) / cost > _LEAST_GAIN * plain for n, cost in costs)

    def took(self, rows: int, seconds: float, *, begun: int = 0) -> None:
        """A pass of the target over ``rows`` took so long; drafting had done a part of the work of ``begun`` ones."""
        self._verify.verified(max(1, rows - round(begun * (1 - self.left))), seconds)

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


def _copying(session: object) -> Collection[str] | None:
    """Whose tokens are copied, of all that a session drafts; None: everybody's."""
    if hasattr(session, "copying"):
        found: Collection[str] = session.copying
        return found
    return None if getattr(session, "copies", False) else ()
