"""``slipstream acceptance``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.options import model_options, rule_option

_EXAMPLES = """\b
Examples:
  slipstream acceptance TARGET --draft DRAFT --prompts prompts.jsonl
  slipstream acceptance TARGET --draft DRAFT --draft suffix,DRAFT -t 1 --top-p 0.9 --json

No speculation is run: the target answers once (or the file has an "answer" beside each prompt), both models read each
answer once, and acceptance is the mean of sum min(P, q), with 95 % intervals over prompts.
"""


@click.command("acceptance", epilog=_EXAMPLES)
@click.argument("model", metavar="TARGET")
@click.option("--draft", "drafts", multiple=True, metavar="DRAFT", help="A draft, as for generate; repeatable.")
@click.option("--prompts", metavar="FILE", help="JSON lines, or humaneval[:N] (default: eight of the package's own).")
@click.option("--limit", type=int, metavar="N", help="Take N of the prompts, evenly spaced.")
@click.option("--max-new-tokens", "-n", type=int, default=128, metavar="N", help="At most N tokens (default: 128).")
@click.option("--temperature", "-t", type=float, default=1.0, metavar="T", help="Of the answers (default: 1).")
@click.option("--top-p", type=float, metavar="P", help="Sample from the likeliest tokens that reach P together.")
@click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens; 0 takes all.")
@rule_option
@model_options
@click.option("--fresh", is_flag=True, help="Forget what an interrupted measurement has found.")
@click.option("--out", metavar="FILE", help="Save the JSON document.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
def command(**options: Any) -> int:
    """Measure how many of a draft's tokens TARGET would accept, by rule, temperature, position and category."""
    from slipstream.cli.acceptance_run import AcceptanceTask, run

    return run(AcceptanceTask(**options))
