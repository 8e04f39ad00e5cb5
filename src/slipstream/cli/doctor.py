"""``slipstream doctor``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.options import WEIGHTS

_EXAMPLES = """\b
Examples:
  slipstream doctor TARGET --draft DRAFT
  slipstream doctor llama-70b/ --draft llama-1b/ --device cuda --memory 160 --context 8192 --batch 16
  slipstream doctor TARGET --draft DRAFT --engine vLLM --engine llama.cpp --json
  slipstream doctor smollm2-135m --measure

Folders may hold config.json and tokenizer files only. Exit code 1: there is a blocker.
"""


@click.command("doctor", epilog=_EXAMPLES)
@click.argument("target", metavar="TARGET")
@click.option("--draft", metavar="DRAFT", help="The draft; what copies needs no model to compare.")
@click.option("-k", type=int, default=4, metavar="K", help="Draft tokens in a round (default: 4).")
@click.option("--context", type=int, default=2048, metavar="N", help="Tokens of prompt and answer (default: 2048).")
@click.option("--batch", type=int, default=1, metavar="N", help="Sequences at once (default: 1).")
@click.option("--weights", type=click.Choice(WEIGHTS), default="auto", help="Weights of TARGET (default: auto).")
@click.option("--draft-weights", type=click.Choice(WEIGHTS), default="auto", help="Weights of DRAFT.")
@click.option("--device", default="cpu", metavar="NAME", help="cpu (default) or cuda, which need not be here.")
@click.option("--memory", type=float, metavar="GB", help="Memory there is, in 10^9 bytes (default: this machine's).")
@click.option("--text", "text_file", metavar="FILE", help="Text like yours, by which vocabularies are compared.")
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="Only this engine's row; repeatable.")
@click.option("--engines-table", metavar="FILE", help="A table of engines of your own (TOML).")
@click.option("--measure", is_flag=True, help="Load the models, run one pass, and measure the peak of memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(**options: Any) -> int:
    """Tell whether TARGET and a draft can work together, in seconds and without generating anything."""
    from slipstream.cli.doctor_run import DoctorTask, run

    return run(DoctorTask(**options))
