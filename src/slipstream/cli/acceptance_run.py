"""What ``slipstream acceptance`` does: answers, one pass of each model, rates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.drafts import members
from slipstream.cli.options import sampling_params
from slipstream.cli.pairs import Wanted, check_room, load
from slipstream.cli.plan_run import open_ledger, other_samplings
from slipstream.cli.progress import follow
from slipstream.cli.run import INTERRUPTED
from slipstream.cli.screen import next_step
from slipstream.errors import InputError
from slipstream.measure.files import check_writable

if TYPE_CHECKING:
    from slipstream.measure.ledger import Ledger
    from slipstream.measure.planning import Gathered, Subject
    from slipstream.plan import Acceptance

FORMAT = 1


@dataclass(frozen=True)
class AcceptanceTask:
    """The options as given."""

    model: str
    drafts: tuple[str, ...] = ()
    prompts: str | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    rule: str = "block"
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    fresh: bool = False
    out: str | None = None
    as_json: bool = False
    no_color: bool = False


def run(task: AcceptanceTask) -> int:
    """Do it; the exit code."""
    if task.max_new_tokens < 2:
        raise InputError(f"--max-new-tokens {task.max_new_tokens} is too few; use 2 or more")
    if task.out is not None:
        check_writable("--out", task.out)
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    params = replace(sampling_params({name: getattr(task, name) for name in names}), seed=0)
    drafts = tuple(members(draft) for draft in task.drafts or ("suffix",))
    from slipstream.measure import planning
    from slipstream.measure.plan_build import acceptances
    from slipstream.measure.prompts import read_prompts

    prompts = read_prompts(task.prompts, task.limit)
    pairs = load(
        Wanted(task.model, drafts, task.weights, task.draft_weights, task.device, task.threads, task.no_color), prompts
    )
    check_room(pairs.prompts, pairs.target)
    subject = planning.Subject(pairs.target, pairs.drafters, pairs.prompts, params, other_samplings(params), task.rule)
    ledger, found = open_ledger(subject, pairs, task.fresh), planning.Gathered()
    try:
        follow(_gather(subject, ledger, found), planning.text_steps(subject) + len(prompts), task.no_color)
    except KeyboardInterrupt:
        click.echo("slipstream: interrupted; the same command goes on from here", err=True)
        return INTERRUPTED
    rates = acceptances(subject, found)
    _deliver(task, rates, found)
    ledger.done()
    return 1 if found.failed else 0


def _gather(subject: Subject, ledger: Ledger, into: Gathered) -> Iterator[str]:
    from slipstream.measure import planning

    yield from planning.gather_texts(subject, ledger, into)
    yield from planning.gather_trails(subject, ledger, into)


def _deliver(task: AcceptanceTask, rates: Sequence[Acceptance], found: Gathered) -> None:
    from slipstream.fields import to_json
    from slipstream.measure.ledger import write_text

    document: dict[str, Any] = {
        "format": FORMAT,
        "target": task.model,
        "prompts": len(found.texts),
        "acceptance": to_json(rates),
        "failed": found.failed,
    }
    if task.as_json:
        click.echo(json.dumps(document))
    else:
        click.echo(table(rates), nl=False)
    drafts = ",".join(d.replace(",", "+") for d in dict.fromkeys(a.draft for a in rates))
    if drafts:
        next_step("plan", task.model, "--drafts", drafts, *(["--prompts", task.prompts] if task.prompts else []))
    if task.out is not None:
        write_text(task.out, json.dumps(document, indent=1) + "\n")
    for name, why in found.failed.items():
        click.echo(f"slipstream: {name} dropped out: {' '.join(why.split())}", err=True)


def table(rates: Sequence[Acceptance]) -> str:
    """Plain text: rates by rule and sampling, then positions and categories of the first one of each draft."""
    from slipstream.cli.plan_report import with_interval

    lines: list[str] = []
    for draft in dict.fromkeys(a.draft for a in rates):
        own = [a for a in rates if a.draft == draft]
        lines += [f"{draft} ({own[0].rate.how})", f"  {'rule':<14}{'temperature':>12}{'top p':>8}   accepted (95 %)"]
        for a in own:
            shown = with_interval(a.rate, digits=3)
            shown += " *" if a.sampling != own[0].sampling else ""
            lines.append(f"  {a.rule:<14}{a.sampling.temperature:>12g}{a.sampling.top_p:>8g}   {shown}")
        if len({a.sampling for a in own}) > 1:
            lines.append("  *: of the same answers, which were sampled as in the first line")
        positions = ", ".join(with_interval(q) for q in own[0].positions)
        lines.append(f"  by position ({own[0].rule}, given that the ones before were accepted): {positions}")
        categories = ", ".join(f"{c} {with_interval(e)}" for c, e in own[0].categories.items())
        lines += [f"  by category: {categories}", ""]
    return "\n".join(lines) + ("\n" if lines else "")
