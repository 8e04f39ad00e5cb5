"""Options that commands share, and what they turn into."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slipstream.plan import RULES

if TYPE_CHECKING:
    from slipstream.types import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

#: What -k takes besides a number.
POLICIES = ("adaptive", "halving")
WEIGHTS = ("auto", "fp32", "bf16", "fp16", "int8")

# Without a default here: what is not given keeps the default of SamplingParams.
_SAMPLING = (
    click.option("--max-new-tokens", "-n", type=int, metavar="N", help="At most N tokens (default: 256)."),
    click.option("--temperature", "-t", type=float, metavar="T", help="0 is greedy (default); 1 samples as trained."),
    click.option("--top-p", type=float, metavar="P", help="Sample from the likeliest tokens that reach P together."),
    click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens; 0 takes all."),
    click.option("--min-p", type=float, metavar="P", help="Sample tokens of at least P times the top probability."),
    click.option(
        "--repetition-penalty", type=float, metavar="X", help="Above 1: tokens that occurred get less likely."
    ),
    click.option("--frequency-penalty", type=float, metavar="X", help="Subtract X for each time a token was used."),
    click.option("--presence-penalty", type=float, metavar="X", help="Subtract X if a token was used."),
    click.option("--no-repeat-ngram-size", type=int, metavar="N", help="Let no N tokens in a row occur twice."),
    click.option("--min-new-tokens", type=int, metavar="N", help="At least N tokens."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be given several times."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token."),
    click.option("--seed", type=int, metavar="N", help="Same seed, same answer."),
)
_MODEL = (
    click.option("--weights", type=click.Choice(WEIGHTS), default="auto", help="Weights of MODEL (default: auto)."),
    click.option(
        "--draft-weights",
        type=click.Choice(WEIGHTS),
        default="auto",
        help="Of the draft (default: int8 on a CPU).",
    ),
    click.option("--device", default="cpu", metavar="NAME", help="cpu (default), cuda, cuda:1, mps."),
    click.option("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)."),
)
_OUTPUT = (
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout, and nothing else there."),
    click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR."),
    click.option("--svg", metavar="FILE", help="Save the coloured answer and the figures as an SVG picture."),
)


#: How sampled drafts are verified.
rule_option = click.option(
    "--rule",
    type=click.Choice(RULES),
    default=RULES[0],
    help="Accept rule for sampling: block (default; never accepts less) or token.",
)


class DraftLength(click.ParamType[Any]):
    """``-k``: a number of draft tokens, or the name of a policy."""

    name = "K"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """A number or one of ``POLICIES``."""
        if isinstance(value, int) or value in POLICIES:
            return value  # type: ignore[no-any-return]
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is no number of draft tokens; use adaptive, halving or a number", param, ctx)


class FiniteRange(click.FloatRange):
    """A number within limits; click lets "nan" through all of them, and "inf" through those without an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return float(number)


def sampling_options(function: Function) -> Function:
    """How tokens are chosen and when an answer ends."""
    return _with(_SAMPLING, function)


def model_options(function: Function) -> Function:
    """How weights are held and where."""
    return _with(_MODEL, function)


def output_options(function: Function) -> Function:
    """What is shown and saved."""
    return _with(_OUTPUT, function)


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Parameters from a command's options, validated.

    Raises:
        InputError: a value without a meaning.
    """
    from dataclasses import fields

    from slipstream.sampling import validate
    from slipstream.types import SamplingParams

    names = {field.name for field in fields(SamplingParams)}
    params = SamplingParams(**{name: value for name, value in options.items() if name in names and value is not None})
    validate(params)
    return params


def _with(options: tuple[Callable[[Any], Any], ...], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function


class Remembering(click.Command):
    """Keeps the words that it was called with, for the record."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["words"] = tuple(args)
        return super().parse_args(ctx, args)
