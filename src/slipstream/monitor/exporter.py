"""The monitor's own metrics, the same for every engine, for Prometheus to scrape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from slipstream.errors import InputError
from slipstream.monitor.alarms import KINDS
from slipstream.monitor.exposition import line
from slipstream.monitor.stream import ALL
from slipstream.monitor.watch import Report, Seen

PREFIX = "slipstream_monitor_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Series:
    """A metric of the exporter."""

    name: str
    kind: str
    text: str
    unit: str = "short"
    """As Grafana calls it."""

    @property
    def full(self) -> str:
        """Its name outside."""
        return PREFIX + self.name


#: Counters: what is added up over restarts of engine and monitor.
COUNTERS = {
    "emitted": Series("emitted_tokens_total", "counter", "Tokens that came out of rounds."),
    "rounds": Series("rounds_total", "counter", "Rounds, those without a draft included."),
    "drafting_rounds": Series("drafting_rounds_total", "counter", "Rounds with a draft."),
    "drafted": Series("drafted_tokens_total", "counter", "Draft tokens."),
    "accepted": Series("accepted_tokens_total", "counter", "Accepted draft tokens."),
    "seconds": Series("decode_seconds_total", "counter", "Time of answers after their first token.", "s"),
}
#: Rates of the latest 2,000 rounds or so.
RATES = {
    "acceptance": Series("acceptance_rate", "gauge", "Accepted / drafted.", "percentunit"),
    "length": Series("mean_accepted_length", "gauge", "Tokens a round."),
    "drafting": Series("drafting_share", "gauge", "Share of rounds with a draft.", "percentunit"),
    "k": Series("mean_k", "gauge", "Draft tokens a round."),
    "seconds_per_token": Series("seconds_per_token", "gauge", "Decode time of a token.", "s"),
}
AT = Series("position_acceptance_rate", "gauge", "Acceptance at a position, given the ones before.", "percentunit")
SPEED_UP = Series("speed_up", "gauge", "Plain time per token / this one's, estimated.")
USUAL = Series("usual_acceptance_rate", "gauge", "What was learned as usual.", "percentunit")
EVIDENCE = Series("drift_evidence", "gauge", "Evidence of a fall; 1 is an alarm.")
ALARM = Series("alarm", "gauge", "1 while an alarm of this kind goes on.")
UP = Series("up", "gauge", "1 if the engine's metrics could be read at the last look.")
LOOK = Series("last_look_timestamp_seconds", "gauge", "When the engine was last looked at.", "dateTimeAsIso")


def text(report: Report) -> str:
    """Everything, in Prometheus' text format."""
    everywhere = {"service": report.service, "engine": report.engine}
    lines: list[str] = []
    for series, found in _families(report):
        rows = [line(series.full, everywhere | labels, value) for labels, value in found]
        if rows:
            lines += [f"# HELP {series.full} {series.text}", f"# TYPE {series.full} {series.kind}", *rows]
    return "\n".join(lines) + "\n"


Rows = list[tuple[dict[str, str], float]]


def _families(report: Report) -> Iterator[tuple[Series, Rows]]:
    for name, series in COUNTERS.items():
        yield series, [(_labels(s), v) for s in report.seen if (v := getattr(s.state.total, name)) is not None]
    for name, series in RATES.items():
        yield series, [(_labels(s), v) for s in report.seen if (v := getattr(s.rates, name)) is not None]
    at = [(_labels(s) | {"position": str(j)}, rate) for s in report.seen for j, rate in s.rates.at.items()]
    yield AT, at
    yield SPEED_UP, [(_labels(s), s.speed_up.value) for s in report.seen if s.speed_up is not None]
    tests = [(s, name, test) for s in report.seen for name, test in s.state.tests.items() if test.learned is not None]
    yield USUAL, [(_labels(s), test.learned.rate) for s, name, test in tests if name == ALL and test.learned]
    yield EVIDENCE, [(_labels(s) | {"position": "" if name == ALL else name}, t.evidence) for s, name, t in tests]
    going = {(alarm.kind, alarm.severity) for alarm, _ in report.alarms}
    yield ALARM, [({"kind": kind, "severity": how}, float((kind, how) in going)) for kind, (_, how) in KINDS.items()]
    yield UP, [({}, float(report.problem is None))]
    yield LOOK, [({}, report.time)]


def _labels(seen: Seen) -> dict[str, str]:
    return {"model": seen.stream.model, "replica": seen.stream.replica, "drafter": seen.stream.drafter}


class Exporter:
    """Serves the latest report at ``/metrics`` from a thread of its own.

    Args:
        address: HOST:PORT, or :PORT for all addresses.

    Raises:
        InputError: it is no address, or is taken.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit() or int(port) > 65_535:
            raise InputError(f"--listen {address!r} is no address; write HOST:PORT, or :PORT")
        self._text = b""
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path.split("?")[0] in ("/metrics", "/")
                body = exporter._text if known else b"only /metrics is here\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nobody wants a line for each scrape."""

        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except OSError as error:
            raise InputError(f"--listen {address!r} cannot be used ({error}); choose another port") from error
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def show(self, report: Report) -> None:
        """Serve this from now on."""
        self._text = text(report).encode()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
