"""``slipstream audit``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.options import model_options, rule_option

_EXAMPLES = """\b
Examples:
  slipstream audit toy
  slipstream audit TARGET --draft DRAFT --minutes 5 --html audit.html
  slipstream audit TARGET --engine transformers --draft DRAFT
  slipstream audit TARGET --url http://localhost:8000 --json
  slipstream audit --url http://localhost:8000 --reference-url http://localhost:8001
  slipstream audit TARGET --callable mymodule:complete

TARGET is the model whose law the answers must follow; toy is a built-in one without weights, and as a draft a
law like it. --callable names a function f(prompt_ids, params, seed) that returns token ids.

Exit codes: 0 exact within power, 1 a fault was found, 2 the input cannot be used, 3 not decided.
"""


@click.command("audit", epilog=_EXAMPLES)
@click.argument("model", metavar="[TARGET]", required=False)
@click.option(
    "--engine", type=click.Choice(("slipstream", "transformers")), default="slipstream", help="What is put to the test."
)
@click.option("--url", metavar="URL", help="Test a server with OpenAI's /completions.")
@click.option("--reference-url", metavar="URL", help="Compare with this server, which decodes plainly.")
@click.option("--callable", "function", metavar="MODULE:FUNCTION", help="Test a Python function.")
@click.option("--draft", default="suffix", metavar="DRAFT", help="As for bench: suffix (default), MODEL, suffix,MODEL.")
@click.option("-k", "k", type=int, default=4, metavar="K", help="Draft tokens in a round (default: 4).")
@rule_option
@click.option(
    "--minutes", type=float, default=5.0, metavar="M", help="Ask the engine for M minutes at most (default: 5)."
)
@click.option("--tv", "variation", type=float, default=0.2, metavar="D", help="Total variation to find (default: 0.2).")
@click.option("--alpha", type=float, default=0.005, metavar="A", help="Probability of a false alarm (default: 0.005).")
@click.option(
    "--tolerance",
    type=float,
    metavar="T",
    help="How far an engine's logits may be off by rounding (default: 0.001).",
)
@click.option("--skip", default="", metavar="NAME,...", help="Parameters that the engine is known not to have.")
@click.option("--seed", type=int, default=0, metavar="N", help="Choose prompts and random numbers (default: 0).")
@model_options
@click.option("--resume", metavar="FILE", help="Save what was collected, and go on from it.")
@click.option("--html", metavar="FILE", help="Save the report as a page.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document on stdout.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
def command(**options: Any) -> int:
    """Test whether an engine's answers follow TARGET's law exactly, and keep to their parameters.

    Short answers to chosen prompts are compared with the probabilities that the target gives them, until the answer is
    clear. Every run also tries built-in decoders with published faults, which must be caught, and a correct one.
    """
    from slipstream.cli.audit_run import AuditTask, run

    return run(AuditTask(**options))
