"""What a monitor counts, and what follows from it: one definition for every engine.

A *round* is one pass of the target over one running answer; the passes that read its prompt are not counted, where the
engine lets one tell. A round without a draft is a round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Counts:
    """Counters of one stream (an engine's model and drafter), or what was added to them; None: not told."""

    emitted: float | None = None
    """Tokens that came out of rounds."""
    rounds: float | None = None
    drafting_rounds: float | None = None
    """Rounds with at least one draft token."""
    drafted: float | None = None
    accepted: float | None = None
    drafted_at: Mapping[int, float] = field(default_factory=dict)
    """Draft tokens by position, from 1."""
    accepted_at: Mapping[int, float] = field(default_factory=dict)
    seconds: float | None = None
    """Time that answers spent between their first and their last token, added up over answers."""
    k_zero: float | None = None
    """Rounds for which the engine itself chose to draft nothing."""

    def plus(self, other: Counts) -> Counts:
        """Both together; what one of them does not tell is not told.

        >>> Counts(drafted=1, accepted_at={1: 1}).plus(Counts(drafted=2, accepted_at={2: 1})).accepted_at
        {1: 1, 2: 1}
        """

        def added(a: Any, b: Any) -> Any:
            if isinstance(a, Mapping):
                return {key: a.get(key, 0) + b.get(key, 0) for key in sorted({*a, *b})}
            return None if a is None or b is None else a + b

        return Counts(**{f.name: added(getattr(self, f.name), getattr(other, f.name)) for f in fields(Counts)})

    @property
    def empty(self) -> bool:
        """Whether nothing happened, as far as is told."""
        values = (self.emitted, self.rounds, self.drafted, self.accepted)
        return not any(values)


#: Nothing happened.
NOTHING = Counts(0.0, 0.0, 0.0, 0.0, 0.0, {}, {}, 0.0, 0.0)


@dataclass(frozen=True)
class Rates:
    """What a window of counts says; None: cannot be told."""

    acceptance: float | None
    """accepted / drafted."""
    length: float | None
    """Mean accepted length: tokens a round, the corrected or bonus token included."""
    at: Mapping[int, float]
    """Acceptance at a position, given that the tokens before it were accepted."""
    drafting: float | None
    """Share of rounds that had a draft."""
    k: float | None
    """Draft tokens a round, rounds without a draft included."""
    seconds_per_token: float | None


def rates(counts: Counts) -> Rates:
    """The definitions.

    >>> rates(Counts(emitted=170, rounds=100, drafting_rounds=50, drafted=100, accepted=70)).length
    1.7
    """
    emitted = counts.emitted if counts.emitted is not None else _sum(counts.accepted, counts.rounds)
    return Rates(
        acceptance=_ratio(counts.accepted, counts.drafted),
        length=_ratio(emitted, counts.rounds),
        at=conditional(counts),
        drafting=_ratio(counts.drafting_rounds, counts.rounds),
        k=_ratio(counts.drafted, counts.rounds),
        seconds_per_token=_ratio(counts.seconds, counts.emitted),
    )


def conditional(counts: Counts) -> dict[int, float]:
    """Acceptance at each position given the one before it was accepted; ``trials`` says out of how many."""
    return {j: a / n for j, (a, n) in trials(counts).items() if n > 0}


def trials(counts: Counts) -> dict[int, tuple[float, float]]:
    """(accepted, tried) at each position.

    Tried at j are draft tokens whose predecessors were accepted. Engines count what was accepted at j; tried at j is
    what was accepted at j - 1 if every draft has a token j. Where drafts differ in length and the engine counts what
    was drafted at j, the share of drafts that were that long is taken out, as if length and acceptance were
    independent.
    """
    found = {}
    before = counts.drafting_rounds if counts.drafting_rounds is not None else counts.drafted_at.get(1)
    for j in sorted(counts.accepted_at):
        drafted, earlier = counts.drafted_at.get(j), counts.drafted_at.get(j - 1)
        if j > 1 and drafted is not None and earlier and before is not None:
            before *= min(1.0, drafted / earlier)
        if before is not None:
            found[j] = (min(counts.accepted_at[j], before), before)
        before = counts.accepted_at[j]
    return found


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None and b > 0 else None


def _sum(a: float | None, b: float | None) -> float | None:
    return a + b if a is not None and b is not None else None


@dataclass(frozen=True)
class Stream:
    """Whose counters: one model, on one replica of an engine, with one drafter where the engine tells them apart."""

    model: str = ""
    replica: str = ""
    drafter: str = ""

    @property
    def name(self) -> str:
        """For people.

        >>> Stream("llama", "0").name
        'llama/0'
        """
        return "/".join(part for part in (self.model, self.replica, self.drafter) if part) or "all"


@dataclass(frozen=True)
class Identity:
    """Which models an engine says it runs; None where it does not say."""

    target: str | None = None
    target_version: str | None = None
    draft: str | None = None
    draft_version: str | None = None
    engine_version: str | None = None
    trained_for: str | None = None
    """The target version that the draft was trained for, where the draft says so."""


@dataclass(frozen=True)
class Raw:
    """Sums of one stream's metrics as the engine has them; None: no such metric."""

    drafted: float | None = None
    accepted: float | None = None
    drafting_rounds: float | None = None
    rounds: float | None = None
    generated: float | None = None
    firsts: float | None = None
    seconds: float | None = None
    k_zero: float | None = None
    """Rounds for which the engine itself chose to draft nothing."""
    drafted_at: Mapping[int, float] = field(default_factory=dict)
    accepted_at: Mapping[int, float] = field(default_factory=dict)

    def since(self, before: Raw | None, restarted: bool = False) -> Raw:
        """What was added since ``before``. A counter that went back was reset: then all that there is was added.

        >>> Raw(drafted=7).since(Raw(drafted=5)).drafted, Raw(drafted=3).since(Raw(drafted=5)).drafted
        (2, 3)
        """
        if before is None or restarted or self.went_back(before):
            return self

        def less(now: Any, then: Any) -> Any:
            if isinstance(now, Mapping):
                return {key: value - then.get(key, 0) for key, value in now.items()}
            return None if now is None else now - (then or 0)

        return Raw(**{f.name: less(getattr(self, f.name), getattr(before, f.name)) for f in fields(Raw)})

    def onto(self, before: Raw | None) -> Raw:
        """What is known now: what an answer leaves out is as it was, or it would be counted again when it is back.

        >>> Raw(drafted=7, accepted_at={1: 3}).onto(Raw(accepted=2, accepted_at={1: 2, 2: 1})).accepted_at
        {1: 3, 2: 1}
        """
        if before is None:
            return self

        def newer(now: Any, then: Any) -> Any:
            if isinstance(now, Mapping):
                return {**then, **now}
            return then if now is None else now

        return Raw(**{f.name: newer(getattr(self, f.name), getattr(before, f.name)) for f in fields(Raw)})

    def went_back(self, before: Raw) -> bool:
        """Whether a counter is smaller than ``before``: the engine was started again, or reset."""
        for f in fields(Raw):
            now, then = getattr(self, f.name), getattr(before, f.name)
            if isinstance(now, Mapping):
                if any(value < then.get(key, 0) for key, value in now.items()):
                    return True
            elif now is not None and then is not None and now < then - _ROUNDING * abs(then) and f.name != "seconds":
                return True
        return False


#: A counter that an engine computes from an average may fall by so much of itself.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Reading:
    """One look at an engine."""

    engine: str
    time: float
    """Seconds since 1970."""
    raw: Mapping[Stream, Raw]
    k: Mapping[Stream, float] = field(default_factory=dict)
    """Draft tokens in a round now, where the engine says so."""
    cumulative: bool = True
    """Whether ``raw`` goes on growing; False if it is what happened since the last look."""
    started: float | None = None
    """When the engine's process started, if it says so."""
    identity: Identity = field(default_factory=Identity)
    running: float | None = None
    """Requests in progress."""
    blind: bool = False
    """Whether the engine has no counters of drafts at all."""


@dataclass(frozen=True)
class Alarm:
    """Something that somebody should look at."""

    kind: str
    """One of ``slipstream.monitor.alarms.KINDS``."""
    stream: Stream
    what: str
    """One sentence: what was found, with figures."""
    advice: str
    """What to do, as sentences, with commands."""
    cost: str
    """What it costs meanwhile."""
    severity: str = "warning"
    position: int | None = None
    value: float | None = None
    expected: float | None = None

    @property
    def key(self) -> str:
        """The same alarm again has the same key."""
        place = "" if self.position is None else f"@{self.position}"
        return f"{self.kind}{place}:{self.stream.name}"
