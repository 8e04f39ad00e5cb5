"""One stream as it is watched: what was counted, what is usual, what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import sqrt
from typing import Any

from slipstream.measure.expectation import Costs
from slipstream.monitor import drift
from slipstream.monitor.types import NOTHING, Counts, Raw, rates, trials

#: The window that rates are shown of: the latest looks with so many rounds, and no more looks than that.
WINDOW_ROUNDS, WINDOW_LOOKS = 2000.0, 60
#: Tests are told apart by name: the whole stream, or a position.
ALL = "all"
_POSITIONS = 16


@dataclass(frozen=True)
class Expected:
    """What a plan, or the user, says should be seen; None: not said."""

    acceptance: float | None = None
    at: Mapping[int, float] = field(default_factory=dict)
    k: float | None = None
    speculation: bool | None = None
    """Whether there should be drafts."""
    costs: Costs | None = None
    plain_seconds: float | None = None
    """A token without speculation."""
    target: str | None = None
    draft: str | None = None


@dataclass(frozen=True)
class Watched:
    """The state of a stream; a value, which ``advance`` takes one look further."""

    raw: Raw | None = None
    """The engine's sums at the last look."""
    total: Counts = NOTHING
    """Since watching began; goes on over restarts of the engine and of the monitor."""
    recent: tuple[Counts, ...] = ()
    """Of the latest looks."""
    tests: Mapping[str, drift.Detector] = field(default_factory=dict)
    silent: float = 0.0
    """Tokens emitted since the last draft token."""
    resets: int = 0

    @property
    def window(self) -> Counts:
        """The latest looks together."""
        whole = self.recent[-1] if self.recent else NOTHING
        for counts in self.recent[:-1]:
            whole = counts.plus(whole)
        return whole

    @property
    def drafted_before(self) -> bool:
        """Whether there ever were drafts."""
        return bool(self.total.drafted)


def advance(state: Watched, new: Counts, expected: Expected, settings: drift.Settings) -> Watched:
    """One look further: what was counted since the last one goes into totals, window and tests."""
    if new.empty:
        return state
    recent = (*state.recent, new)[-WINDOW_LOOKS:]
    while len(recent) > 1 and sum(c.rounds or 0.0 for c in recent[1:]) >= WINDOW_ROUNDS:
        recent = recent[1:]
    drafted = new.drafted or 0.0
    return replace(
        state,
        total=_total(state.total, new),
        recent=recent,
        tests=_tested(state.tests, new, expected, settings),
        silent=0.0 if drafted else state.silent + (new.emitted or 0.0),
    )


def _total(total: Counts, new: Counts) -> Counts:
    """What is not told now adds nothing: counters never go away."""
    known: dict[str, Any] = {f.name: getattr(new, f.name) for f in fields(Counts)}
    told: dict[str, Any] = {name: 0.0 if value is None else value for name, value in known.items()}
    return total.plus(Counts(**told))


def _tested(
    tests: Mapping[str, drift.Detector], new: Counts, expected: Expected, settings: drift.Settings
) -> dict[str, drift.Detector]:
    after = dict(tests)
    at_position = replace(settings, learn=settings.learn / 4, batch=settings.batch / 2)  # one token a round
    if new.drafted and new.accepted is not None:
        test = after.get(ALL) or drift.start(settings, expected.acceptance)
        after[ALL] = drift.step(test, new.accepted, new.drafted)
    for j, (accepted, tried) in trials(new).items():
        if j <= _POSITIONS and tried > 0:
            test = after.get(str(j)) or drift.start(at_position, expected.at.get(j))
            after[str(j)] = drift.step(test, accepted, tried)
    return after


@dataclass(frozen=True)
class SpeedUp:
    """Plain time per token over this one's, as far as rounds and costs tell; ``low`` and ``high`` are its 99.7 %."""

    value: float
    low: float
    high: float
    how: str


def speed_up(window: Counts, expected: Expected, test: drift.Detector | None) -> SpeedUp | None:
    """What drafting gains now; None if neither costs nor a plain time are known, or nothing was counted.

    Rounds with a draft of k tokens take c k + v(k + 1) plain steps, rounds without one take one.
    """
    seen = rates(window)
    if expected.costs is not None and seen.length and window.rounds and window.drafting_rounds is not None:
        takes = round_time(window, expected.costs)
        spread = sqrt(test.learned.variance * (window.drafted or 0.0)) if test and test.learned else 0.0
        margin = 3 * spread / window.rounds
        low, high = (max(1.0, seen.length + sign * margin) / takes for sign in (-1, 1))
        return SpeedUp(seen.length / takes, low, high, "predicted from acceptance and the plan's costs")
    if expected.plain_seconds is not None and seen.seconds_per_token:
        value = expected.plain_seconds / seen.seconds_per_token
        return SpeedUp(value, value, value, "measured: plain time per token given / the engine's; depends on load")
    return None


def round_time(window: Counts, costs: Costs) -> float:
    """Mean time of a round in plain steps."""
    assert window.rounds
    assert window.drafting_rounds is not None
    share = min(1.0, window.drafting_rounds / window.rounds)
    k = (window.drafted or 0.0) / window.drafting_rounds if window.drafting_rounds else 0.0
    whole = int(k)
    drafting = costs.round(whole) + (k - whole) * (costs.round(whole + 1) - costs.round(whole))
    return share * drafting + (1 - share)


# --- as JSON ----------------------------------------------------------------------------------------------------------


def to_document(state: Watched) -> dict[str, Any]:
    """For a file."""
    return {
        "raw": raw_to_document(state.raw) if state.raw is not None else None,
        "total": _plain(state.total),
        "recent": [_plain(counts) for counts in state.recent],
        "tests": {name: test.document() for name, test in state.tests.items()},
        "silent": state.silent,
        "resets": state.resets,
    }


def from_document(document: Mapping[str, Any]) -> Watched:
    """A state from ``to_document``."""
    return Watched(
        raw=raw_from_document(document["raw"]) if document["raw"] is not None else None,
        total=Counts(**_keyed(document["total"])),
        recent=tuple(Counts(**_keyed(counts)) for counts in document["recent"]),
        tests={name: drift.restore(test) for name, test in document["tests"].items()},
        silent=document["silent"],
        resets=document["resets"],
    )


def raw_to_document(raw: Raw) -> dict[str, Any]:
    """For a file."""
    return _plain(raw)


def raw_from_document(document: Mapping[str, Any]) -> Raw:
    """Sums from ``raw_to_document``."""
    return Raw(**_keyed(document))


def _plain(value: Raw | Counts) -> dict[str, Any]:
    return {
        f.name: dict(entry) if isinstance(entry := getattr(value, f.name), Mapping) else entry for f in fields(value)
    }


def _keyed(document: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's keys are texts; positions are numbers."""
    return {
        name: {int(key): number for key, number in value.items()} if isinstance(value, dict) else value
        for name, value in document.items()
    }
