"""``slipstream plan``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.options import model_options, rule_option

_EXAMPLES = """\b
Examples:
  slipstream plan TARGET --drafts DRAFT,suffix --prompts prompts.jsonl
  slipstream plan TARGET --drafts A,B,suffix,suffix+A,early-exit:8 --prompts prompts.jsonl --html plan.html
  slipstream plan TARGET --drafts A --objective throughput --batch 16 --requests-per-second 4
  slipstream generate TARGET --plan plan.json --prompt "..."

Drafts have commas between them; the members of a cascade plus signs. Prompts are as for `slipstream bench`; a line may
have an "answer", otherwise the target answers once, and that is kept. An interrupted plan is taken up where it was.
"""


@click.command("plan", epilog=_EXAMPLES)
@click.argument("model", metavar="TARGET")
@click.option("--drafts", default="suffix", metavar="A,B,...", help="What to choose from (default: suffix).")
@click.option("--prompts", metavar="FILE", help="JSON lines, or humaneval[:N] (default: eight of the package's own).")
@click.option("--limit", type=int, metavar="N", help="Take N of the prompts, evenly spaced.")
@click.option("--objective", type=click.Choice(("latency", "throughput")), default="latency", help="What to improve.")
@click.option("--requests-per-second", type=float, metavar="R", help="The load.")
@click.option("--batch", type=int, default=1, metavar="B", help="Requests answered at the same time (default: 1).")
@click.option("--latency-budget", type=float, metavar="MS", help="Milliseconds that an answer may take.")
@click.option(
    "--memory", type=float, metavar="GB", help="Memory there will be, in 10^9 bytes (default: this machine's)."
)
@click.option("--max-new-tokens", "-n", type=int, default=128, metavar="N", help="At most N tokens (default: 128).")
@click.option("--temperature", "-t", type=float, default=0.0, metavar="T", help="0 is greedy (default).")
@click.option("--top-p", type=float, metavar="P", help="Sample from the likeliest tokens that reach P together.")
@click.option("--top-k", type=int, metavar="K", help="Sample from the K likeliest tokens; 0 takes all.")
@rule_option
@model_options
@click.option("--out", default="plan.json", metavar="FILE", help="Where the plan goes (default: plan.json).")
@click.option("--html", metavar="FILE", help="Save a report to forward.")
@click.option("--no-check", is_flag=True, help="Leave out the short real run that the prediction is compared with.")
@click.option("--fresh", is_flag=True, help="Forget what an interrupted plan has measured.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan on stdout, and nothing else there.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
def command(**options: Any) -> int:
    """Decide with numbers: whether to speculate for TARGET, with which draft and k, and what it brings."""
    from slipstream.cli.plan_run import PlanTask, run

    return run(PlanTask(**options))
