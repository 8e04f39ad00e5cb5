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
from slipstream.monitor.stream import Expected, SpeedUp, Watched, advance, from_document, speed_up, to_document
from slipstream.monitor.types import Alarm, Identity, Rates, Stream, rates

_TRIES = 3
#: More streams than this are another's labels gone wild.
_MOST_STREAMS = 200


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

    def relearn(self) -> None:
        """What is seen from now on is usual: forget what was, also which models ran."""
        self._streams = {s: replace(state, tests={}, recent=()) for s, state in self._streams.items()}
        self._identity = None

    def look(self, now: float) -> Report:
        """Look once; ``now`` is the time in seconds since 1970, for alarms.

        Raises:
            InputError: what is there is no engine's metrics, at the first look.
            SlipstreamError: the state cannot be written.
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
            self._keep(now, {}, found)
        else:
            self._failures = 0
            self._keep(now, *self._taken(look))
        return self.report(problem, self._deliver())

    def _taken(self, look: Look) -> tuple[dict[Stream, Any], list[Alarm]]:
        """Take a look in; what was new by stream, and the alarms that there are now."""
        reading = look.reading
        restarted = None not in (self._started, reading.started) and reading.started != self._started
        self._engine, self._started, self._time = reading.engine, reading.started, reading.time
        context = kinds.Context(reading.engine, self._options.expected, reading.identity, self._options.price)
        new, found = {}, list(kinds.mismatches(self._identity, reading.identity, context))
        self._identity = self._remembered(reading.identity)
        for stream, raw in list(reading.raw.items())[:_MOST_STREAMS]:
            before = self._streams.get(stream, Watched())
            if before.raw is None and reading.cumulative:
                self._streams[stream] = replace(before, raw=raw)
                continue
            added = raw.since(before.raw, restarted) if reading.cumulative else raw
            counted = counts(reading, look.scrape, stream, added)
            reset = reading.cumulative and before.raw is not None and (restarted or raw.went_back(before.raw))
            state = replace(before, raw=raw, resets=before.resets + int(reset))
            self._streams[stream] = advance(state, counted, self._options.expected, self._options.drift)
            new[stream] = counted
        for stream, state in self._streams.items():
            found += kinds.find(stream, state, context)
        return new, found

    def _remembered(self, now: Identity) -> Identity:
        """The models as they were when the draft last changed, so that a mismatch stays one until it does."""
        before = self._identity
        if before is None or (now.draft and (now.draft, now.draft_version) != (before.draft, before.draft_version)):
            return now
        return before

    # --- alarms -------------------------------------------------------------------------------------------------------

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
        for number, url, text in self._store.unsent(self.service):
            if (reason := deliver.post(url, text)) is not None:
                return f"{url} cannot be told of alarms ({reason}); it is tried again after the next look"
            self._store.sent(number)
        return None

    def _document(self) -> dict[str, Any]:
        return {
            "engine": self._engine,
            "started": self._started,
            "time": self._time,
            "failures": self._failures,
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
