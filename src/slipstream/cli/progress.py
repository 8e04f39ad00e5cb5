"""Shows how far a long measurement is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import click

from slipstream.cli.screen import is_terminal, wants_colour

_LINES = 20


def follow(steps: Iterable[str], total: int, no_color: bool = False) -> None:
    """Run ``steps``, each of which says what comes next; ``total`` is how many there are, about.

    Raises:
        KeyboardInterrupt: also if the process is asked to end (SIGTERM).
    """
    with _ended_politely():
        _follow(steps, total, no_color)


@contextmanager
def _ended_politely() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does: the cursor comes back, and the user hears how to go on."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there signals can be had
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _follow(steps: Iterable[str], total: int, no_color: bool) -> None:
    if not is_terminal(sys.stderr):
        told = -1
        for number, step in enumerate(steps):
            if (share := _LINES * number // max(total, 1)) > told:
                told = share
                click.echo(f"step {number + 1} of {max(total, number + 1)}: {step}", err=True)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description:<40.40}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(),
    )  # fmt: skip
    shown = Console(file=sys.stderr, no_color=not wants_colour(sys.stderr, no_color), highlight=False, markup=False)
    with Progress(*columns, console=shown, transient=True) as progress:
        bar = progress.add_task("", total=total)
        for number, step in enumerate(steps):
            progress.update(bar, description=step, completed=number, total=max(total, number + 1))
