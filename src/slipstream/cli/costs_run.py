"""What ``slipstream costs`` does: time passes turn by turn, keep the curves, show them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.pairs import Wanted, load
from slipstream.cli.progress import follow
from slipstream.cli.run import INTERRUPTED
from slipstream.cli.screen import next_step
from slipstream.errors import InputError

if TYPE_CHECKING:
    from slipstream.measure.curves import Curve
    from slipstream.models.base import Model

#: The passes run behind these tokens, over and over; what they say does not matter.
_IDS = tuple(range(5, 205))
_MOST_BATCH = 256
_SHOWN_ROWS = (1, 2, 3, 5, 9, 16, 32)


@dataclass(frozen=True)
class CostsTask:
    """The options as given."""

    model: str
    drafts: tuple[str, ...] = ()
    batches: str = "1,2,4,8,16,32"
    context: int = 256
    turns: int = 5
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    fresh: bool = False
    as_json: bool = False
    no_color: bool = False


def run(task: CostsTask) -> int:
    """Do it; the exit code."""
    batches = _batches(task.batches)
    for option, value in (("--context", task.context), ("--turns", task.turns)):
        if value < 1:
            raise InputError(f"{option} {value} is too few; use 1 or more")
    drafts = tuple((name,) for name in task.drafts)
    wanted = Wanted(task.model, drafts, task.weights, task.draft_weights, task.device, task.threads, task.no_color)
    if set(wanted.draft_models) != set(task.drafts):
        raise InputError("--draft names something other than a model; only models have passes to measure")
    pairs = load(wanted, ())
    models = {task.model: pairs.target} | {name: pairs.drafters[name].model for name in task.drafts}
    _check_room(task.context, models)
    found: dict[str, Curve] = {}
    from slipstream.measure.curves import steps

    try:
        follow(_measure(task, models, batches, found), steps(task.turns) * len(models), task.no_color)
    except KeyboardInterrupt:
        click.echo("slipstream: interrupted; the same command goes on from here", err=True)
        return INTERRUPTED
    click.echo(json.dumps(document(found)) if task.as_json else table(found), nl=task.as_json)
    next_step("plan", task.model, "--drafts", ",".join(task.drafts) or "suffix", "--prompts", "prompts.jsonl")
    return 0


def _check_room(context: int, models: Mapping[str, Model]) -> None:
    """The longest pass must fit behind the context, or the figures would be of another one than they say."""
    from slipstream.measure.curves import ROWS

    for name, model in models.items():
        limit = model.max_positions
        if limit is not None and context + max(ROWS) > limit:
            raise InputError(
                f"--context {context} leaves no room for {max(ROWS)} tokens more in the {limit} positions of {name}; "
                f"use {max(1, limit - max(ROWS))} or less"
            )


def _batches(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError(f"--batches {text!r} is no list of numbers; write for example --batches 1,4,16")
    if (most := max(map(int, words))) > _MOST_BATCH:
        raise InputError(f"--batches {text!r} has {most} sequences in a pass; use {_MOST_BATCH} at most")
    return tuple(sorted({1, *map(int, words)}))


def _measure(
    task: CostsTask, models: Mapping[str, Model], batches: tuple[int, ...], into: dict[str, Curve]
) -> Iterator[str]:
    from dataclasses import asdict

    from slipstream.fields import from_json, to_json
    from slipstream.measure import curves
    from slipstream.measure.ledger import Ledger
    from slipstream.measure.planning import now

    keys = {name: asdict(curves.key_of(model)) for name, model in models.items()}
    ledger = Ledger(["costs", keys, batches, task.context, task.turns], fresh=task.fresh)
    if ledger.resumed:
        click.echo(f"slipstream: going on from an interrupted run, {ledger.resumed} steps are known", err=True)
    for name, model in models.items():
        if name not in ledger:
            cells = curves.grid(batches=batches)
            timing = yield from curves.measure_curve(
                model, _IDS, task.context, cells, task.turns, curves.Kept(ledger, name)
            )
            how = f"measured here: median of {task.turns} turns behind {task.context} tokens"
            curve = timing.curve(model, task.context, now(), how)
            curves.keep(curve)
            ledger.put(name, to_json(curve))
        into[name] = from_json(curves.Curve, ledger[name], name)
    ledger.done()


def document(found: Mapping[str, Curve]) -> dict[str, Any]:
    """Everything, for other programs; seconds. Measured cells, and the others of the grid as predicted from them."""
    from slipstream.fields import to_json
    from slipstream.measure.curves import BATCHES

    def cells(curve: Curve) -> list[dict[str, Any]]:
        measured = {(c.rows, c.batch) for c in curve.cells}
        return [
            {
                "rows": n,
                "batch": b,
                "seconds": curve.seconds(n, b),
                "v": curve.v(n, b),
                "how": curve.how if (n, b) in measured else "predicted from passes over as many rows in all",
            }
            for b in BATCHES
            for n in range(1, 33)
        ]

    return {
        "format": 1,
        "models": {name: {**to_json(curve), "cells": to_json(cells(curve))} for name, curve in found.items()},
        "c": {name: step_ratio(found, name) for name in list(found)[1:]},
    }


def step_ratio(found: Mapping[str, Curve], draft: str) -> dict[str, Any]:
    """c: a draft step in plain target steps."""
    target = next(iter(found.values()))
    return {"value": found[draft].seconds(1) / target.seconds(1), "how": "measured here: passes over one token"}


def table(found: Mapping[str, Curve]) -> str:
    """Plain text."""
    lines: list[str] = []
    for name, curve in found.items():
        batches = sorted({c.batch for c in curve.cells})
        measured = {(c.rows, c.batch) for c in curve.cells}
        lines += [f"{name}, {curve.key.weights}: milliseconds of a pass ({curve.how}; *: predicted from these)"]
        lines.append("  rows of each" + "".join(f"{f'batch {b}':>12}" for b in batches))
        for n in _SHOWN_ROWS:
            cells = [f"{1e3 * curve.seconds(n, b):.1f}{'' if (n, b) in measured else '*'}" for b in batches]
            lines.append(f"  {n:>12}" + "".join(f"{cell:>12}" for cell in cells))
        shape = ", ".join(f"v({n}) = {curve.v(n):.2f}" for n in (2, 5, 9, 17))
        lines.append(f"  {shape}; a prompt token {1e3 * curve.prompt_token:.2f} ms")
        if name != next(iter(found)):
            lines.append(
                f"  a draft step is c = {step_ratio(found, name)['value']:.3f} of a plain step (measured here)"
            )
        lines.append("")
    return "\n".join(lines)
