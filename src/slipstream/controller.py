"""How many tokens to draft in each round: a fixed number, practitioners' halving, or what pays here and now.

A *policy* belongs to a ``SpeculativeDecoding`` and starts a *controller* for each request. Whatever a controller
decides, answers keep the target's distribution, because of what it is shown: past tokens and rounds, the tokens drafted
so far (all of them will be verified), and how sure the drafter is of the next token *before* it is drawn. It never sees
a token that it may still leave out, except a copied one, which is a function of the past.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from threading import Lock
from typing import Any, Protocol

from slipstream.errors import InputError
from slipstream.estimates import MOST, OF_ALL, OF_REQUEST, Acceptance, Costs, DraftCost, Prior
from slipstream.types import Draft

#: Costs of a draft step that are assumed, in plain target passes, until they are measured.
_STEP_OF_MODEL, _STEP_OF_COPY = 0.15, 0.01


@dataclass(frozen=True)
class Played:
    """One round, as a controller learns from it."""

    length: int
    """Tokens before it."""
    asked: int
    """0: the drafter was not asked."""
    draft: Draft
    """Before the controller cut it."""
    kept: int
    """Draft tokens that were verified."""
    tokens: tuple[int, ...]
    """Accepted ones and the corrected or bonus token, before stop rules cut them."""
    draft_seconds: float
    verify_seconds: float

    @property
    def accepted(self) -> int:
        """Draft tokens that stand."""
        return len(self.tokens) - 1


class Controller(Protocol):
    """Decides on k for one request."""

    gated: bool
    """Whether step-wise drafters are to ask ``goes_on``."""

    def ask(self, room: int, length: int) -> int:
        """The most tokens to draft now, at most ``room`` >= 1, after ``length`` tokens; 0 leaves the drafter alone."""
        ...

    def goes_on(self, drafted: int, confidence: float, source: str = "", /) -> bool:
        """Whether to draw another token after ``drafted`` ones in this round.

        ``confidence``: how sure the drafter is of it; NaN if only another pass could tell, which may not be worth it.
        ``source``: which drafter, if several share a draft.
        """
        ...

    def keep(self, draft: Draft) -> int:
        """How many tokens of a one-hot draft to verify."""
        ...

    def learn(self, played: Played) -> None:
        """A round is over."""
        ...


class Policy(Protocol):
    """What starts controllers; shared by all requests."""

    @property
    def name(self) -> str:
        """How reports call it."""
        ...

    def start(self, session: object, drafter: str, *, repeatable: bool, isolated: bool) -> Controller:
        """Begin one request.

        Args:
            session: its drafting.
            drafter: name of the drafter.
            repeatable: decisions must not depend on clocks or other requests.
            isolated: nothing may be learned from or for other requests.
        """
        ...


@dataclass(frozen=True)
class Fixed:
    """Always k. Policy and controller in one, since there is no state."""

    k: int
    gated = False

    @property
    def name(self) -> str:
        """How reports call it."""
        return str(self.k)

    def start(self, session: object, drafter: str, *, repeatable: bool, isolated: bool) -> Fixed:
        """Begin one request."""
        return self

    def ask(self, room: int, length: int) -> int:
        """k."""
        return min(self.k, room)

    def goes_on(self, drafted: int, confidence: float, source: str = "", /) -> bool:
        """Always."""
        return True

    def keep(self, draft: Draft) -> int:
        """All."""
        return len(draft.tokens)

    def learn(self, played: Played) -> None:
        """Nothing."""


class Halving:
    """Practitioners' heuristic: a larger k, halved once, after the first rejection in an answer."""

    name = "halving"

    def __init__(self, k: int = 8) -> None:
        self.k = k

    def start(self, session: object, drafter: str, *, repeatable: bool, isolated: bool) -> HalvingController:
        """Begin one request."""
        return HalvingController(self.k)


class HalvingController:
    """``k`` until a draft token is rejected, half of it from then on."""

    gated = False

    def __init__(self, k: int) -> None:
        self._k = k
        self._halved = False

    def ask(self, room: int, length: int) -> int:
        """k."""
        return min(self._k, room)

    def goes_on(self, drafted: int, confidence: float, source: str = "", /) -> bool:
        """Always."""
        return True

    def keep(self, draft: Draft) -> int:
        """All."""
        return len(draft.tokens)

    def learn(self, played: Played) -> None:
        """See whether there was a rejection."""
        if not self._halved and played.accepted < played.kept:
            self._halved = True
            self._k = max(1, self._k // 2)


def make_policy(k: object) -> Policy:
    """A policy from what a user writes: a number, ``"halving"``, ``"adaptive"``, or a policy.

    Raises:
        InputError: anything else.
    """
    if type(k) is int and k >= 0:
        return Fixed(k)
    if isinstance(k, str) and k == "halving":
        return Halving()
    if isinstance(k, str) and k == "adaptive":
        return Adaptive()
    if not isinstance(k, type) and hasattr(k, "start") and hasattr(k, "name"):
        return k
    raise InputError(
        f"k={k!r} is not a number of draft tokens; use 'adaptive', 'halving', 0 (plain decoding) or a positive integer"
    )


# --- adaptive ---------------------------------------------------------------------------------------------------------


class Adaptive:
    """Maximises expected tokens a second; 0 is an answer.

    Args:
        shared: requests learn from each other's rounds. False: each starts from nothing.
    """

    name = "adaptive"

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self.shape: Mapping[int, float] = {}
        """v(n) as it was measured earlier on this machine; set before the first request."""
        self.step: float | None = None
        """A draft step, in plain target passes, as it was measured earlier."""
        self._lock = Lock()
        self._knowledge: dict[bool, Knowledge] = {}

    def start(self, session: object, drafter: str, *, repeatable: bool, isolated: bool) -> AdaptiveController:
        """Begin one request."""
        stepwise = hasattr(session, "gate")
        step = _STEP_OF_MODEL if stepwise else _STEP_OF_COPY
        if repeatable:  # by nominal costs, whatever was measured
            own = Knowledge(Costs(step, fixed=True))
            return AdaptiveController(own, session, drafter)
        if stepwise and self.step is not None:
            step = self.step
        if isolated or not self.shared:
            own = Knowledge(Costs(step, shape=self.shape))
        else:
            with self._lock:
                own = self._knowledge.setdefault(stepwise, Knowledge(Costs(step, shape=self.shape)))
        return AdaptiveController(own, session, drafter)


class Knowledge:
    """What requests share: costs, and acceptance by drafter; safe to use from several threads."""

    def __init__(self, costs: Costs) -> None:
        self._lock = Lock()
        self._credit: float | None = None
        self._costs = costs
        self._acceptance: dict[str, Acceptance] = {}

    def costs(self) -> tuple[tuple[float, ...], DraftCost, int]:
        """v(n) in seconds at index n, the cost of drafts, and the longest draft to risk; 0: a plain pass is due."""
        with self._lock:
            costs = self._costs
            old = costs.since_plain() > (_REFRESH if costs.plain_passes() > 2 else _CONFIRM)
            return costs.verify(), costs.draft(), 0 if old and not costs.fixed else costs.most()

    def prior(self, drafter: str) -> Prior:
        """What a new request starts from."""
        with self._lock:
            seen = self._acceptance.get(drafter)
            return seen.summary(_PRIOR_WEIGHT) if seen is not None else Prior()

    def took(self, rows: int, verify: float, draft: tuple[int, int, float] | None) -> None:
        """Seconds of a pass over ``rows``, and of a draft: (passes, tokens read first, seconds)."""
        with self._lock:
            self._costs.verified(rows, verify)
            if draft is not None:
                self._costs.drafted(*draft)

    def may_probe(self, price: float, plain: float) -> bool:
        """Whether a probe may take ``price`` seconds, where a plain pass takes ``plain``.

        The credit is that of all requests: where answers are short, one for each would be a fair part of their time.
        """
        with self._lock:
            return price <= (_PROBE_PASSES * plain if self._credit is None else self._credit)

    def spent(self, seconds: float, probing: float, plain: float) -> None:
        """A round took so long, ``probing`` seconds (or less than none) more of it than plain decoding would have."""
        with self._lock:
            credit = _PROBE_PASSES * plain if self._credit is None else self._credit
            self._credit = min(credit + _PROBE_SHARE * seconds - probing, _MOST_PASSES * plain)

    def verified(self, drafter: str, seen: Sequence[Seen]) -> None:
        """Outcomes of one round."""
        with self._lock:
            acceptance = self._acceptance.setdefault(drafter, Acceptance(Prior(), OF_ALL))
            _learn(acceptance, seen)


@dataclass(frozen=True)
class Seen:
    """A draft token that was reached: at which place of the draft, how sure its drafter was, what became of it."""

    position: int
    confidence: float | None
    value: float
    verified: bool = True


def _learn(acceptance: Acceptance, seen: Sequence[Seen]) -> None:
    for one in seen:
        if one.verified:
            acceptance.verified(one.position, one.confidence, one.value)
        else:
            acceptance.left_out(one.value)
    acceptance.end_round()


_PRIOR_WEIGHT = 8.0
#: Rounds after which a plain pass is measured again, at first and later, lest k be chosen by a price of long ago.
_CONFIRM, _REFRESH = 32, 256
#: Probing may take this share of the time, and a few plain passes more at first; so many can be saved up for it.
_PROBE_SHARE, _PROBE_PASSES, _MOST_PASSES = 0.01, 2.0, 8.0
_FIRST_GAP, _LAST_GAP = 4, 16
#: An answer is expected to go on for as many tokens as it has already, and so many more; half as many rounds.
_EXPECTED = 96
#: What a draft model reads of a prompt at first.
BRIEF = 64
#: How sure a copy has to be for a probe to be put off.
_SURE = 0.7
#: A drafter whose call costs less than this share of a plain pass is asked always.
_FREE = 0.01
#: Tokens that are reached less often than this do not matter.
_NO_REACH = 1e-3


@dataclass(frozen=True)
class Outlook:
    """What a round's decisions go by; times in seconds."""

    verify: tuple[float, ...]
    draft: DraftCost
    rates: list[float]
    """Acceptance at each position, given the ones before."""
    worth: float
    """Tokens a second that time brings otherwise: what a further draft token has to beat."""
    room: int

    def price(self, passes: int, missed: int) -> float:
        """Seconds of a draft."""
        return self.draft.call + self.draft.step * passes + self.draft.read * missed

    def gains(self, at: int, reach: float, first: float | None, worth: float) -> Iterator[float]:
        """For 1, 2, ... more tokens: how many stand on average, less what their time is worth.

        Args:
            at: tokens drafted so far.
            reach: probability that all of them are accepted.
            first: acceptance of the next one if its pass is done already; None if it must be paid for.
            worth: tokens a second that time brings otherwise.
        """
        tokens, seconds = 0.0, -self.verify[at + 1] - (0.0 if first is None else self.draft.step)
        for ahead in range(at, self.room):
            reach *= self.rates[ahead] if first is None or ahead > at else first
            tokens += reach
            seconds += self.draft.step
            yield tokens - worth * (seconds + self.verify[ahead + 2])
            if reach < _NO_REACH:
                return

    def pays(self, at: int, reach: float, first: float | None, worth: float = 0.0) -> bool:
        """Whether some number of further tokens is worth its time; arguments as in ``gains``."""
        return any(gain > 0 for gain in self.gains(at, reach, first, max(worth, self.worth)))


class AdaptiveController:
    """The decisions of one request. See docs/control.md."""

    gated = True

    def __init__(self, knowledge: Knowledge, session: object, drafter: str) -> None:
        self._knowledge = knowledge
        self._session: Any = session
        self._stepwise = hasattr(session, "gate")
        self._drafter = drafter
        self._acceptance: dict[str, Acceptance] = {}
        self._available = 1.0
        self._copies = bool(getattr(session, "copies", False))
        self._draws = bool(getattr(session, "draws", False))
        self._whole: Collection[str] = getattr(session, "whole", ())
        self._read = 0
        self._owed = 0
        self._prompt = -1
        self._brief = False
        if self._stepwise and hasattr(session, "latest"):
            reader: Any = session
            reader.latest = BRIEF
            self._brief = reader.latest is not None
        self._patience = _Patience()
        # Copies of a cascade say nothing of how those would fare that need passes.
        self._silence = _Patience() if self._draws else self._patience
        self._turns: dict[str, bool] = {}
        self._probing = False
        self._free = False
        self._drafting = True
        self._elapsed = 0.0
        self._outlook: Outlook | None = None
        self._reach = 1.0
        self._tokens = 0.0
        self._passes = 0
        self._left_out: float | None = None
        self._wasted = False

    # --- deciding -----------------------------------------------------------------------------------------------------

    def ask(self, room: int, length: int) -> int:
        """The most tokens to draft."""
        self._reach, self._tokens, self._passes, self._left_out = 1.0, 0.0, 0, None
        self._probing = False
        verify, draft, most = self._knowledge.costs()
        if not most:
            self._outlook = None
            return 0
        if self._prompt < 0:
            self._begin(length)
        self._look(verify, draft, min(room, most))
        if self._brief and self._whole_pays(room, length):
            self._read_whole(length)
            self._look(verify, draft, min(room, most))
        self._drafting = self._pays(length, room)
        room = min(room, most)
        if self._drafting:
            return room if self._stepwise or draft.step < _FREE * verify[1] else self._best_length()
        self._free = draft.call + draft.step < _FREE * verify[1]
        # Copies cost nothing, and each of them may be a better one than the last.
        anyway = self._copies if self._stepwise else self._free
        self._probing = (self._draws or not anyway) and self._may_probe(length)
        return room if anyway else int(self._probing)

    def goes_on(self, drafted: int, confidence: float, source: str = "", /) -> bool:
        """Whether to draw another token."""
        outlook = self._outlook
        if outlook is None or drafted >= outlook.room:
            return False
        if isnan(confidence):  # only who needs a pass asks so
            yes = drafted == 0 if self._probing else self._drafting and outlook.pays(drafted, self._reach, None)
            yes = yes or (source in self._whole and self._free)
            self._passes += yes
            return yes
        if self._tries:
            return drafted == 0
        acceptance = self._of(source or self._drafter)
        rate = acceptance.given(confidence)
        due = drafted == 0 and self._patience.over
        # What is copied now can be copied in the next round as well: a longer copy has to beat the rate of this one.
        worth = 0.0 if self._passes else (1 + self._tokens) / outlook.verify[drafted + 1]
        if outlook.pays(drafted, self._reach, rate, worth) or acceptance.unsure(confidence) or due:
            self._reach *= rate
            self._tokens += self._reach
            return True
        self._left_out = rate
        return False

    def prefers(self, confidence: float, source: str, other: str, /) -> bool:
        """Whether to take a token from ``source``, which needs no pass, rather than to ask ``other``, which does."""
        if self._outlook is None:
            return True
        if self._tries:  # its pass is done; of several that may have become useful each gets its turn
            self._turns[source] = not self._turns.get(source, False)
            return self._turns[source]
        # What it says itself, since only tokens that were taken tell how often it is right when it is less sure.
        right = (self._of(source).given(confidence) + confidence) / 2
        return right >= (_SURE if self._probing else self._of(other).level)

    @property
    def _tries(self) -> bool:
        """Whether this round is a probe, as far as is known: in a cascade it may turn out to have a copy."""
        return self._probing and (bool(self._passes) or not self._draws)

    def keep(self, draft: Draft) -> int:
        """How many tokens of a one-hot draft to verify: as many as have the best outlook together."""
        outlook = self._outlook
        count = min(len(draft.tokens), outlook.room if outlook else 0)
        if outlook is None or self._tries or self._passes:
            return count
        expected, reach = [0.0], 1.0
        for at in range(count):
            reach *= self._rate(draft, at)
            expected.append(expected[-1] + reach)
        verify = outlook.verify
        # What is not verified now can be copied in the next round, at the same rate.
        worth = max(outlook.worth, *((1 + tokens) / verify[n + 1] for n, tokens in enumerate(expected)))
        return max(range(count + 1), key=lambda n: expected[n] - worth * (verify[n + 1] - verify[1]))

    def _look(self, verify: tuple[float, ...], draft: DraftCost, room: int) -> None:
        rates = self._of(self._drafter).positions(MOST)
        self._outlook = Outlook(verify, draft, rates, self._worth(verify, draft, rates, room), room)

    # A draft model reads the end of a long prompt first. Answers are often short, and the end is often enough: to read
    # all of it may take longer than it saves.

    def _begin(self, length: int) -> None:
        self._prompt = length - 1
        self._brief = self._brief and self._prompt > BRIEF
        self._read = self._prompt - BRIEF if self._brief else 0

    def _whole_pays(self, room: int, length: int) -> bool:
        """Whether to read all, if ``room`` tokens may follow: answers that are long already go on as long again."""
        outlook = self._outlook
        assert outlook is not None
        left, price = min(self._elapsed, room / outlook.worth), outlook.draft.read * length
        if left <= price:  # even if it saved all of the time
            return False
        prior = Acceptance(self._knowledge.prior(self._drafter), OF_REQUEST)
        hoped = self._worth(outlook.verify, outlook.draft, prior.positions(MOST), outlook.room)
        return (1 - outlook.worth / hoped) * left > price

    def _read_whole(self, length: int) -> None:
        self._session.latest = None
        self._brief = False
        self._owed = length - self._read
        self._read = length

    def _key(self, drafter: str) -> str:
        """What acceptance is kept under: that with a prompt's end is another one."""
        return f"{drafter} (brief)" if self._brief else drafter

    def _of(self, drafter: str) -> Acceptance:
        key = self._key(drafter)
        if key not in self._acceptance:
            self._acceptance[key] = Acceptance(self._knowledge.prior(key), OF_REQUEST)
        return self._acceptance[key]

    def _rate(self, draft: Draft, at: int) -> float:
        acceptance = self._of(_source(draft, at, self._drafter))
        if draft.confidence:
            return acceptance.given(draft.confidence[at])
        return acceptance.positions(at + 1)[at]

    def _worth(self, verify: tuple[float, ...], draft: DraftCost, rates: list[float], room: int) -> float:
        """Tokens a second with the best k, if the text goes on as it is."""
        best = 1 / verify[1]
        tokens, reach, often = 0.0, 1.0, self._available
        for k in range(1, room + 1):
            reach *= rates[k - 1]
            tokens += reach
            seconds = verify[1] + often * (draft.call + draft.step * k + verify[k + 1] - verify[1])
            best = max(best, (1 + often * tokens) / seconds)
        return best

    def _pays(self, length: int, left: int) -> bool:
        """Whether drafting pays at all, with what a draft model has missed to be read first.

        Args:
            length: tokens so far.
            left: the most that may follow.
        """
        outlook = self._outlook
        assert outlook is not None
        gain = max(outlook.gains(0, 1.0, None, outlook.worth), default=-1.0) - outlook.worth * outlook.draft.call
        rounds = min(left, _EXPECTED + length - self._prompt) / 2
        return gain * rounds > outlook.worth * outlook.draft.read * self._missed(length)

    def _best_length(self) -> int:
        """k for a drafter that can be asked for a number only."""
        outlook = self._outlook
        assert outlook is not None
        best, chosen, tokens, reach = 0.0, 1, 0.0, 1.0
        for k in range(1, outlook.room + 1):
            reach *= outlook.rates[k - 1]
            tokens += reach
            seconds = outlook.draft.step * k + outlook.verify[k + 1] - outlook.verify[1]
            if tokens - outlook.worth * seconds > best:
                best, chosen = tokens - outlook.worth * seconds, k
        return chosen

    def _may_probe(self, length: int) -> bool:
        """Whether to try one token again: at growing distances, and within a budget of time."""
        outlook = self._outlook
        assert outlook is not None
        if not self._silence.over:
            return False
        price = outlook.price(1, self._missed(length)) + outlook.verify[2] - outlook.verify[1]
        return self._knowledge.may_probe(price, outlook.verify[1])

    # --- learning -----------------------------------------------------------------------------------------------------

    def learn(self, played: Played) -> None:
        """A round is over."""
        # Passes that came to nothing: no token of the draft's is one of the target's, or it was given up for a copy.
        self._wasted = bool(self._passes) and not played.draft.tokens and self._left_out is None
        self._learn_costs(played)
        self._learn_acceptance(played)
        self._learn_to_probe(played)

    def _learn_costs(self, played: Played) -> None:
        outlook, passes = self._outlook, self._passes if self._stepwise else len(played.draft.tokens)
        draft, missed = None, self._missed(played.length)
        passes += max(0, sum(source in self._whole for source in played.draft.sources) - 1)
        if played.asked and (passes or not self._stepwise):
            missed, self._owed = missed + self._owed, 0
            draft = (passes, missed, played.draft_seconds)
            self._read = played.length + played.kept
        if played.asked:
            self._available += 0.1 * (bool(played.draft.tokens) - self._available)
        self._knowledge.took(played.kept + 1, played.verify_seconds, draft)
        if outlook is None:
            return
        seconds = outlook.verify[played.kept + 1] + (outlook.price(passes, missed) if draft else 0.0)
        self._elapsed += seconds
        lost = seconds - len(played.tokens) * outlook.verify[1] if self._tries else 0.0
        self._knowledge.spent(seconds, lost, outlook.verify[1])

    def _missed(self, length: int) -> int:
        """Tokens that a draft model would have to read before its first step, beyond the one or two of every round."""
        return max(0, length - self._read - 2) if self._stepwise else 0

    def _learn_acceptance(self, played: Played) -> None:
        seen = self._seen(played)
        for drafter, some in seen.items():
            _learn(self._of(drafter), some)
            self._knowledge.verified(self._key(drafter), some)
        if not played.asked and self._outlook is not None:
            self._of(self._drafter).rest()

    def _seen(self, played: Played) -> dict[str, list[Seen]]:
        """What became of each draft token that was reached."""
        draft = played.draft
        found: dict[str, list[Seen]] = {}

        def add(at: int, value: float, *, verified: bool = True) -> None:
            confidence = draft.confidence[at] if at < len(draft.confidence) else None
            source = _source(draft, at, self._drafter)
            found.setdefault(source, []).append(Seen(at, confidence, value, verified))
            if source != self._drafter:  # a member of a cascade; positions are those of the whole
                found.setdefault(self._drafter, []).append(Seen(at, None, value, verified))

        if self._wasted:
            found[self._drafter] = [Seen(0, None, 0.0)]
        for at in range(min(played.accepted + 1, played.kept)):
            add(at, 1.0 if at < played.accepted else 0.0)
        if played.accepted == played.kept:
            if played.kept < len(draft.tokens):
                # A copied token that was left out: the token that came instead says whether it would have stood.
                add(played.kept, float(played.tokens[-1] == draft.tokens[played.kept]))
            elif self._left_out is not None:
                add(played.kept, self._left_out, verified=False)
        return found

    def _learn_to_probe(self, played: Played) -> None:
        stood = played.accepted > 0
        tried = played.kept + self._wasted
        self._patience.round(tried, stood=stood, drafting=self._drafting, probing=self._tries)
        if self._draws:
            self._silence.round(self._passes, stood=stood, drafting=self._drafting, probing=self._tries)


class _Patience:
    """How many rounds nothing was tried, and after how many something is: at growing distances."""

    def __init__(self) -> None:
        self._gap = _FIRST_GAP
        self._resting = 0

    @property
    def over(self) -> bool:
        """Whether it is time to try."""
        return self._resting >= self._gap

    def round(self, tried: int, *, stood: bool, drafting: bool, probing: bool) -> None:
        """A round is over: how much was tried, whether any of it stood, whether that was no probe, or one."""
        if not tried:
            self._resting += 1
        elif stood:
            if drafting:
                self._gap, self._resting = _FIRST_GAP, 0
        else:
            self._gap = min(2 * self._gap, _LAST_GAP) if probing or self._resting else self._gap
            self._resting = 0


def _source(draft: Draft, at: int, otherwise: str) -> str:
    return draft.sources[at] if at < len(draft.sources) else otherwise
