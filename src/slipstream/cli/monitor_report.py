"""A look of the monitor, for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from slipstream.cli.screen import console
from slipstream.monitor.stream import ALL
from slipstream.monitor.watch import Report, Seen

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

#: Raised when a reader of the document would have to change.
FORMAT = 1
_COLOURS = {"critical": "bold red", "warning": "yellow", "info": "cyan"}


def document(report: Report) -> dict[str, Any]:
    """Everything, for other programs; times in UTC."""
    return {
        "format": FORMAT,
        "kind": "slipstream monitor",
        "service": report.service,
        "engine": report.engine,
        "time": _time(report.time) if report.time else None,
        "exit_code": report.exit_code,
        "problem": report.problem,
        "undelivered": report.undelivered,
        "identity": asdict(report.identity),
        "streams": [_stream(seen) for seen in report.seen],
        "alarms": [asdict(alarm) | {"since": _time(since)} for alarm, since in report.alarms],
    }


def _stream(seen: Seen) -> dict[str, Any]:
    return {
        "stream": asdict(seen.stream),
        "window": asdict(seen.rates) | {"rounds": seen.state.window.rounds, "drafted": seen.state.window.drafted},
        "overall": asdict(seen.overall),
        "total": asdict(seen.state.total),
        "speed_up": asdict(seen.speed_up) if seen.speed_up else None,
        "resets": seen.state.resets,
        "tests": {
            name: {
                "usual": test.learned.rate if test.learned else None,
                "recent": test.recent,
                "evidence": test.evidence,
                "overdispersion": test.learned.overdispersion if test.learned else None,
                "learned_from": test.sums.size,
                "fallen": test.fallen,
                "risen": test.risen,
            }
            for name, test in seen.state.tests.items()
        },
    }


def sentence(report: Report) -> str:
    """One line a look."""
    parts = [_time(report.time) if report.time else "-", report.engine or "?"]
    for seen in report.seen:
        if not seen.stream.drafter:
            parts.append(f"{seen.stream.name}: {', '.join(_words(seen)) or 'nothing yet'}")
    parts += [f"ALARM {alarm.kind}: {alarm.what}" for alarm, _ in report.alarms]
    return "  ".join(parts)


def _words(seen: Seen) -> Iterator[str]:
    if seen.rates.acceptance is not None:
        yield f"accepted {seen.rates.acceptance:.0%}"
    if seen.rates.length is not None:
        yield f"{seen.rates.length:.2f} tokens a round"
    if seen.rates.drafting is not None:
        yield f"drafting in {seen.rates.drafting:.0%}"
    if seen.speed_up is not None:
        yield f"{seen.speed_up.value:.2f}x"


class Board(AbstractContextManager["Board"]):
    """The terminal view.

    Args:
        stream: the terminal.
        no_color: no colours.
        live: each look takes the place of the one before.
    """

    def __init__(self, stream: TextIO, no_color: bool, *, live: bool) -> None:
        from rich.live import Live

        self._console = console(stream, no_color)
        self._live = Live(console=self._console, auto_refresh=False) if live else None

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, report: Report) -> None:
        """Show this look."""
        if self._live is not None:
            self._live.update(view(report), refresh=True)
        else:
            self._console.print(view(report))


def view(report: Report) -> Group:
    """A table of streams, and the alarms under it."""
    from rich.console import Group
    from rich.text import Text

    head = Text(
        f"{report.service}  {report.engine or '?'}  {_time(report.time) if report.time else 'nothing seen yet'}"
    )
    parts: list[RenderableType] = [head, _table(report)]
    parts += [Text(what, "yellow") for what in (report.problem, report.undelivered) if what]
    for alarm, since in report.alarms:
        where = "" if alarm.stream.name == "all" else f" {alarm.stream.name}"
        parts.append(Text(f"\n{alarm.kind}{where}, since {_time(since)}: {alarm.what}", _COLOURS[alarm.severity]))
        parts.append(Text(f"  {alarm.advice}\n  Meanwhile: {alarm.cost}."))
    if not report.alarms:
        parts.append(Text("no alarm", "green"))
    return Group(*parts)


def _table(report: Report) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("stream", "accepted", "usual", "length", "drafting", "k", "by position", "speed-up", "evidence"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    for seen in report.seen:
        test, r = seen.state.tests.get(ALL), seen.rates
        table.add_row(
            seen.stream.name,
            _percent(r.acceptance),
            _percent(test.learned.rate) if test and test.learned else "learning" if test else "-",
            "-" if r.length is None else f"{r.length:.2f}",
            _percent(r.drafting),
            "-" if r.k is None else f"{r.k:.1f}",
            " ".join(f"{rate:.0%}" for rate in r.at.values()) or "-",
            "-" if seen.speed_up is None else f"{seen.speed_up.value:.2f}x",
            "-" if test is None or test.learned is None else f"{test.evidence:.2f}",
        )
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
