"""``slipstream costs``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.options import model_options

_EXAMPLES = """\b
Examples:
  slipstream costs smollm2-135m
  slipstream costs TARGET --draft DRAFT --threads 2
  slipstream costs TARGET --draft DRAFT --batches 1,4,16 --json

The figures are kept in the model cache, by model, weights, device, threads, machine and version. An adaptive k begins
with them.
"""


@click.command("costs", epilog=_EXAMPLES)
@click.argument("model", metavar="MODEL")
@click.option("--draft", "drafts", multiple=True, metavar="DRAFT", help="A draft model to measure too; repeatable.")
@click.option("--batches", default="1,2,4,8,16,32", metavar="B,B,...", help="Sequences in a pass (default: 1 to 32).")
@click.option("--context", type=int, default=256, metavar="N", help="Tokens before the passes (default: 256).")
@click.option("--turns", type=int, default=5, metavar="N", help="How often each pass is timed (default: 5).")
@model_options
@click.option("--fresh", is_flag=True, help="Forget what an interrupted measurement has found.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
def command(**options: Any) -> int:
    """Measure what passes of MODEL take: v(n) for 1 to 32 rows, batches, a draft step, reading a prompt."""
    from slipstream.cli.costs_run import CostsTask, run

    return run(CostsTask(**options))
