"""The monitor: looks at an engine, keeps what it saw, and tells what has changed. The one owner of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from slipstream.errors import InputError, SlipstreamError
from slipstream.monitor import alarms as kinds
from slipstream.monitor import deliver, drift
from slipstream.monitor.engines import counts
from slipstream.monitor.scrape import Look, Source
from slipstream.monitor.store import Logged, Store
from slipstream.monitor.stream import (
    Expected,
    SpeedUp,
    Watched,
    advance,
    from_document,
    raw_from_document,
    raw_to_document,
    speed_up,
    to_document,
)
from slipstream.monitor.types import Alarm, Identity, Rates, Raw, Reading, Stream, rates

_TRIES = 3
#: More streams than this are another's labels gone wild.
_MOST_STREAMS = 200
#: Processes behind one address that are told apart.
_MOST_PROCESSES = 32
#: Times below are none since 1970; clocks of two machines may differ by so many seconds.
_EPOCH, _CLOCKS = 1e9, 60.0


@dataclass(frozen=True)
class Options:
    """How to watch."""

    expected: Expected = field(default_factory=Expected)
    drift: drift.Settings = field(default_factory=drift.Settings)
    price: float | None = None
    webhooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seen:
    """A stream after a look, for people and programs."""

    stream: Stream
    state: Watched
    rates: Rates
    """Of the window."""
    overall: Rates
    """Since watching began."""
    speed_up: SpeedUp | None


@dataclass(frozen=True)
class Report:
    """Everything after a look."""

    service: str
    engine: str
    time: float
    seen: Sequence[Seen]
    alarms: Sequence[tuple[Alarm, float]]
    """Those that go on, and since when."""
    identity: Identity
    problem: str | None = None
    """Why nothing could be read; the rest is of the look before then."""
    undelivered: str | None = None

    @property
    def exit_code(self) -> int:
        """0 all is well, 1 an alarm, 3 nothing can be told yet."""
        if any(alarm.severity != "info" for alarm, _ in self.alarms):
            return 1
        told = any(seen.state.total.emitted for seen in self.seen)
        return 0 if told and self.problem is None else 3


@dataclass
class Processes:
    """Sums of processes that answered at the same address before, by when they were started; the latest few."""

    sums: dict[float, dict[Stream, Raw]] = field(default_factory=dict)

    def exchange(self, before: float, sums: dict[Stream, Raw], now: float) -> dict[Stream, Raw] | None:
        """Keep those of one process, and give those of another; None if it is not known."""
        self.sums.pop(before, None)
        self.sums[before] = sums
        found = self.sums.pop(now, None)
        for oldest in list(self.sums)[:-_MOST_PROCESSES]:
            del self.sums[oldest]
        return found

    def document(self) -> list[Any]:
        """For a file."""
        return [
            [started, [[asdict(stream), raw_to_document(raw)] for stream, raw in sums.items()]]
            for started, sums in self.sums.items()
        ]

    @classmethod
    def restore(cls, document: Sequence[Any]) -> Processes:
        """From ``document``."""
        return cls({s: {Stream(**stream): raw_from_document(raw) for stream, raw in sums} for s, sums in document})


def _ran_already(before: float, now: float, last_look: float) -> bool:
    """Whether a process that was started at ``now`` cannot be the one of ``before``, started again: it is older, or ran
    when that one answered last."""
    return now < before or _EPOCH < now < last_look - _CLOCKS


class Monitor:
    """Watches one engine.

    Args:
        source: where its metrics are.
        store: what is kept, and what was known before.
        options: how.
        service: its name in the store and in alarms.
    """

    def __init__(self, source: Source, store: Store, options: Options, service: str | None = None) -> None:
        self._source, self._store, self._options = source, store, options
        self.service = service or source.url
        known = store.state(self.service) or {}
        self._streams = {Stream(**entry["stream"]): from_document(entry["state"]) for entry in known.get("streams", ())}
        self._engine: str = known.get("engine", "")
        self._started: float | None = known.get("started")
        self._identity = Identity(**known["identity"]) if known.get("identity") else None
        self._failures: int = known.get("failures", 0)
        self._time: float = known.get("time", 0.0)
        self._processes = Processes.restore(known.get("processes", ()))
        self._unsaved: list[tuple[Alarm, float]] | None = None
        """The alarms of a look that could not be written down."""

    def relearn(self) -> None:
        """What is seen from now on is usual: forget what was, also which models ran."""
        self._streams = {s: replace(state, tests={}, recent=()) for s, state in self._streams.items()}
        self._identity = None

    def look(self, now: float) -> Report:
        """Look once; ``now`` is the time in seconds since 1970, for alarms.

        Raises:
            InputError: what is there is no engine's metrics, at the first look.
        """
        problem = None
        try:
            look = self._source.look()
        except SlipstreamError as error:
            if isinstance(error, InputError) and not self._engine:
                raise
            problem = str(error)
            self._failures += 1
            found = [kinds.unreachable(problem, self._failures)] if self._failures >= _TRIES else None
            unsaved = self._try_to_keep(now, {}, found)
        else:
            self._failures = 0
            unsaved = self._try_to_keep(now, *self._taken(look))
        problems = [what for what in (problem, unsaved) if what]
        return self.report("; ".join(problems) or None, None if unsaved else self._deliver())

    def _taken(self, look: Look) -> tuple[dict[Stream, Any], list[Alarm]]:
        """Take a look in; what was new by stream, and the alarms that there are now."""
        reading = look.reading
        restarted = self._other_process(reading)
        self._engine, self._started, self._time = reading.engine, reading.started, reading.time
        context = kinds.Context(reading.engine, self._options.expected, reading.identity, self._options.price)
        new, found = {}, list(kinds.mismatches(self._identity, reading.identity, context))
        self._identity = self._remembered(reading.identity)
        for stream, raw in list(reading.raw.items())[:_MOST_STREAMS]:
            before = self._streams.pop(stream, Watched())
            if before.raw is None and reading.cumulative:
                self._streams[stream] = replace(before, raw=raw)
                continue
            added = raw.since(before.raw, restarted) if reading.cumulative else raw
            counted = counts(reading, look.scrape, stream, added)
            reset = reading.cumulative and before.raw is not None and (restarted or raw.went_back(before.raw))
            state = replace(before, raw=raw if reset else raw.onto(before.raw), resets=before.resets + int(reset))
            self._streams[stream] = advance(state, counted, self._options.expected, self._options.drift)
            new[stream] = counted
        for stream in list(self._streams)[:-_MOST_STREAMS]:  # those that were not seen for longest
            del self._streams[stream]
        for stream in [s for s in reading.raw if s in self._streams]:  # one that is gone has no alarms
            found += kinds.find(stream, self._streams[stream], context)
        return new, found

    def _other_process(self, reading: Reading) -> bool:
        """Go on with the sums of the process that answers, if it is another than last time; whether it began anew.

        Behind one address may be several, which answer in turns.
        """
        before, now = self._started, reading.started
        if before is None or now is None or before == now:
            return False
        sums = {stream: state.raw for stream, state in self._streams.items() if state.raw is not None}
        known = self._processes.exchange(before, sums, now)
        began = known is None and not _ran_already(before, now, self._time)
        for stream, state in self._streams.items():
            # Of one that began anew all is new, also in streams that it has not named yet.
            self._streams[stream] = replace(state, raw=Raw() if began else (known or {}).get(stream))
        return began

    def _remembered(self, now: Identity) -> Identity:
        """The models as they were when the draft last changed, so that a mismatch stays one until it does."""
        before = self._identity
        if before is None or (now.draft and (now.draft, now.draft_version) != (before.draft, before.draft_version)):
            return now
        return before

    # --- alarms -------------------------------------------------------------------------------------------------------

    def _try_to_keep(self, now: float, new: Mapping[Stream, Any], found: Sequence[Alarm] | None) -> str | None:
        """Write it all down, or say why not: watching goes on, and the next look writes it."""
        self._unsaved = None
        try:
            self._keep(now, new, found)
        except SlipstreamError as error:
            self._unsaved = None if found is None else [(alarm, now) for alarm in found]
            return str(error)
        return None

    def _keep(self, now: float, new: Mapping[Stream, Any], found: Sequence[Alarm] | None) -> None:
        """Write it all down at once; ``found`` None leaves alarms as they are."""
        with self._store.together():
            if found is not None:
                self._settle(now, found)
            samples = [(stream.name, asdict(counted)) for stream, counted in new.items() if not counted.empty]
            self._store.keep(self.service, now, self._document(), samples)

    def _settle(self, now: float, found: Sequence[Alarm]) -> None:
        """Begin, go on with and end alarms; queue what has to be told."""
        going = {alarm.key: alarm for alarm in self._store.alarms(self.service)}
        current = {alarm.key: alarm for alarm in found}
        changed = []
        for key, alarm in current.items():
            if key in going:
                self._store.update_alarm(going[key], asdict(alarm))
            else:
                self._store.raise_alarm(self.service, key, now, asdict(alarm))
                changed.append(deliver.entry(alarm, self.service, self._engine, now, None))
        for key, logged in going.items():
            if key not in current:
                self._store.end_alarm(logged, now)
                alarm = kinds.at_rest(_alarm(logged))
                changed.append(deliver.entry(alarm, self.service, self._engine, logged.started, now))
        for url in self._options.webhooks if changed else ():
            self._store.queue(self.service, url, deliver.body(url, changed))

    def _deliver(self) -> str | None:
        """Send what is queued, oldest first; what does not arrive is tried again after the next look."""
        failed: dict[str, str] = {}
        for number, url, text in self._store.unsent(self.service):
            if url in failed:  # one that is dead must not keep others from hearing
                continue
            if (reason := deliver.post(url, text)) is not None:
                failed[url] = f"{url} cannot be told of alarms ({reason})"
            else:
                self._store.sent(number)
        return f"{'; '.join(failed.values())}; it is tried again after the next look" if failed else None

    def _document(self) -> dict[str, Any]:
        return {
            "engine": self._engine,
            "started": self._started,
            "time": self._time,
            "failures": self._failures,
            "processes": self._processes.document(),
            "identity": asdict(self._identity) if self._identity else None,
            "streams": [{"stream": asdict(s), "state": to_document(state)} for s, state in self._streams.items()],
        }

    def report(self, problem: str | None = None, undelivered: str | None = None) -> Report:
        """What is known now."""
        expected = self._options.expected
        seen = [
            Seen(
                s,
                state,
                rates(state.window),
                rates(state.total),
                speed_up(state.window, expected, state.tests.get("all")),
            )
            for s, state in self._streams.items()
        ]
        going = self._unsaved
        if going is None:
            going = [(_alarm(logged), logged.started) for logged in self._store.alarms(self.service)]
        return Report(
            service=self.service,
            engine=self._engine,
            time=self._time,
            seen=seen,
            alarms=going,
            identity=self._identity or Identity(),
            problem=problem,
            undelivered=undelivered,
        )


def _alarm(logged: Logged) -> Alarm:
    body = dict(logged.body)
    return Alarm(**(body | {"stream": Stream(**body["stream"])}))
