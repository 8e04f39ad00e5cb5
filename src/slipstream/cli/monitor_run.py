"""What ``monitor`` does: check, look, show, wait."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipstream.cli.screen import is_terminal
from slipstream.errors import InputError
from slipstream.measure.files import check_writable, write_whole

if TYPE_CHECKING:
    from slipstream.monitor.stream import Expected
    from slipstream.monitor.watch import Monitor, Options, Report


@dataclass(frozen=True)
class MonitorTask:
    """One call of ``monitor``, as the user put it."""

    url: str | None = None
    engine: str = "auto"
    key: str | None = None
    plan: str | None = None
    acceptance: float | None = None
    plain_ms: float | None = None
    price: float | None = None
    no_speculation: bool = False
    interval: float = 15.0
    once: bool = False
    looks: int | None = None
    state: str | None = None
    keep_days: float = 30.0
    relearn: bool = False
    false_alarm_every: float = 1e7
    tolerance: float = 0.03
    learn: float = 10_000
    webhook: tuple[str, ...] = ()
    listen: str | None = None
    rules: str | None = None
    dashboard: str | None = None
    as_json: bool = False
    no_color: bool = False


def run(task: MonitorTask) -> int:
    """Do it; the exit code."""
    if task.rules or task.dashboard:
        return _write(task)
    options = check(task)
    with ExitStack() as stack:
        monitor = _open(task, options, stack)
        show = _shower(task, stack)
        return _watch(task, monitor, show)


def check(task: MonitorTask) -> Options:
    """Refuse what cannot work, before anything is asked."""
    from slipstream.monitor.drift import Settings
    from slipstream.monitor.scrape import check_url
    from slipstream.monitor.watch import Options

    if task.url is None:
        raise InputError("there is nothing to watch; give the address of an engine's metrics with --url")
    for name, value, least, most in (
        ("--acceptance", task.acceptance, 0.0, 1.0),
        ("--plain-ms", task.plain_ms, 1e-6, 1e9),
        ("--price", task.price, 0.0, 1e9),
        ("--interval", task.interval, 0.05, 86_400.0),
        ("--keep-days", task.keep_days, 0.01, 1e5),
        ("--false-alarm-every", task.false_alarm_every, 1e4, 1e15),
        ("--tolerance", task.tolerance, 0.0, 0.5),
        ("--learn", task.learn, 500.0, 1e9),
        ("--looks", task.looks, 1.0, 1e12),
    ):
        if value is not None and not least <= value <= most:
            raise InputError(f"{name} {value} is not usable; use a number from {least:g} to {most:g}")
    for url in task.webhook:
        check_url("--webhook", url)
    settings = Settings(false_alarm_every=task.false_alarm_every, tolerance=task.tolerance, learn=task.learn)
    return Options(expected(task), settings, task.price, task.webhook)


def expected(task: MonitorTask) -> Expected:
    """What should be seen, by the plan and the options."""
    from slipstream.monitor.expected import from_plan
    from slipstream.monitor.stream import Expected

    if task.plan is not None:
        from slipstream.plan import load

        found = from_plan(load(task.plan))
    else:
        found = Expected()
    given: dict[str, object] = {}
    if task.acceptance is not None:
        given |= {"acceptance": task.acceptance, "at": {}}
    if task.plain_ms is not None:
        given["plain_seconds"] = task.plain_ms / 1000
    if task.no_speculation:
        given["speculation"] = False
    return Expected(**(vars(found) | given))


def _open(task: MonitorTask, options: Options, stack: ExitStack) -> Monitor:
    from slipstream.monitor.scrape import Source
    from slipstream.monitor.store import Kept, Store
    from slipstream.monitor.watch import Monitor

    assert task.url is not None
    source = Source(task.url, task.engine, task.key)
    store = Store(task.state or default_state(), Kept(days=task.keep_days))
    stack.callback(store.close)
    monitor = Monitor(source, store, options)
    if task.relearn:
        monitor.relearn()
    return monitor


def default_state() -> str:
    """Where the state is kept unless another place is given."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return str(Path(home) / "slipstream" / "monitor.sqlite")


def _shower(task: MonitorTask, stack: ExitStack) -> Callable[[Report], None]:
    """What is done with each report."""
    from slipstream.cli.monitor_report import Board, document, sentence
    from slipstream.monitor.exporter import Exporter

    exporter = Exporter(task.listen) if task.listen else None
    if exporter is not None:
        stack.callback(exporter.close)
    watched = is_terminal(sys.stdout) and not task.as_json
    board = stack.enter_context(Board(sys.stdout, task.no_color, live=not task.once)) if watched else None

    def show(report: Report) -> None:
        if exporter is not None:
            exporter.show(report)
        if task.as_json:
            click.echo(json.dumps(document(report)))
        elif board is not None:
            board.show(report)
        else:
            click.echo(sentence(report))
        for what in (report.problem, report.undelivered):
            if what and board is None:
                click.echo(f"slipstream: {what}", err=True)

    return show


def _watch(task: MonitorTask, monitor: Monitor, show: Callable[[Report], None]) -> int:
    """Look again and again."""
    looks = 1 if task.once else task.looks
    done, code = 0, 3
    try:
        while True:
            began = time.monotonic()
            report = monitor.look(time.time())
            show(report)
            done, code = done + 1, report.exit_code
            if looks is not None and done >= looks:
                return code
            time.sleep(max(0.0, task.interval - (time.monotonic() - began)))
    except KeyboardInterrupt:
        return code


def _write(task: MonitorTask) -> int:
    """Rules and dashboard."""
    from slipstream.monitor.rules import dashboard, rules

    for option, path in (("--rules", task.rules), ("--dashboard", task.dashboard)):
        if path:
            check_writable(option, path)
    if task.rules:
        text = rules()
        write_whole(Path(task.rules), lambda partial: partial.write_text(text, encoding="utf-8"))
    if task.dashboard:
        board = json.dumps(dashboard(), indent=1) + "\n"
        write_whole(Path(task.dashboard), lambda partial: partial.write_text(board, encoding="utf-8"))
    return 0
