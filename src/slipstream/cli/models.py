"""``slipstream models``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from slipstream.cli.screen import console, is_terminal, note
from slipstream.models import registry

_EXAMPLES = """\b
Examples:
  slipstream models
  slipstream models fetch smollm2-135m

The cache is the folder SLIPSTREAM_CACHE, or slipstream in your cache folder.
"""


@click.group("models", invoke_without_command=True, epilog=_EXAMPLES)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the models in the cache and those that can be fetched, or fetch one."""
    if ctx.invoked_subcommand is not None:
        return
    entries = registry.list_models()
    if as_json:
        rows = [{"name": e.name, "kind": e.kind, "bytes": e.bytes, "path": str(e.path)} for e in entries]
        click.echo(json.dumps(rows))
        return
    table: list[tuple[str, str, str, str]] = [(e.name, e.kind, _megabytes(e.bytes / 1e6), str(e.path)) for e in entries]
    here = {e.name for e in entries}
    table += [
        (name, "-", _megabytes(source.megabytes), f"to be fetched: {source.title}, {source.licence}")
        for name, source in registry.SOURCES.items()
        if name not in here
    ]
    _echo_table([("NAME", "KIND", "SIZE", "WHERE"), *table])
    if entries:
        note(f'\nNext: slipstream generate {entries[0].name} --chat --prompt "Hello"')
    else:
        note("\nNext: slipstream models fetch smollm2-135m")


@command.command("fetch", epilog="\b\nExample:\n  slipstream models fetch smollm2-135m\n")
@click.argument("name")
def fetch(name: str) -> None:
    """Download model NAME into the cache, unless it is there."""
    click.echo(fetch_shown(name))
    note(f'\nNext: slipstream generate {name} --chat --prompt "Hello"')


def fetch_shown(name: str) -> str:
    """Fetch a model, telling on stderr what takes time; its path."""
    with _steps() as tell:
        return str(registry.fetch(name, progress=tell))


@contextmanager
def _steps() -> Iterator[registry.Progress]:
    """Shows the present step and how long it has been going on; one line a step if nobody watches."""
    if not is_terminal(sys.stderr):
        yield lambda step: click.echo(step, err=True)
        return
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr, no_color=False), transient=True) as progress:
        running: TaskID | None = None

        def tell(step: str) -> None:
            nonlocal running
            if running is not None:
                progress.remove_task(running)
            # No step tells how far it is, so the bar only moves.
            running = progress.add_task(step, total=None)

        yield tell


def _megabytes(count: float) -> str:
    return f"{count:,.0f} MB"


def _echo_table(rows: list[tuple[str, str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, kind, size, where in rows:
        click.echo(f"{name:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}  {where}")
