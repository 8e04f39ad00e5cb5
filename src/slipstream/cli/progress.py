"""Shows how far a long measurement is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import click

from slipstream.cli.screen import is_terminal, wants_colour

_LINES = 20


def follow(steps: Iterable[str], total: int, no_color: bool = False) -> None:
    """Run ``steps``, each of which says what comes next; ``total`` is how many there are, about."""
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
