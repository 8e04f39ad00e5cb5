"""``--plan plan.json``: what a plan recommends takes the place of options that were not given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.drafts import NONE

if TYPE_CHECKING:
    from slipstream.plan import Plan

plan_option = click.option(
    "--plan",
    "plan",
    metavar="FILE",
    help="Take draft, weights, rule and k (not `serve`) from what `slipstream plan` says.",
)


def apply_plan(ctx: click.Context, options: dict[str, Any], but: Sequence[str] = ()) -> None:
    """Take ``plan`` out of ``options`` and fill in what it recommends, except what the user gave and ``but``.

    Raises:
        InputError: the plan cannot be read.
    """
    file = options.pop("plan")
    if file is None:
        return
    from slipstream.plan import load

    plan = load(file)
    if options.get("model") not in (None, plan.target.model):
        click.echo(f"slipstream: the plan is of {plan.target.model}, not of {options['model']}", err=True)
    for name, value in recommended(plan).items():
        if name in options and name not in but and not _given(ctx, name):
            options[name] = value


def recommended(plan: Plan) -> dict[str, Any]:
    """Options by name."""
    found: dict[str, Any] = {"weights": _weights(plan.target.weights), "rule": plan.asked.rule}
    draft = plan.draft
    if draft is None:
        return found | {"draft": NONE}
    weights = next((m.weights for m in draft.members if m.kind == "model"), None)
    return found | {"draft": draft.name, "k": plan.verdict.k, "draft_weights": _weights(weights)}


def _weights(name: str | None) -> str:
    from slipstream.cli.options import WEIGHTS

    return name if name in WEIGHTS else "auto"


def _given(ctx: click.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source not in (click.core.ParameterSource.DEFAULT, None)
