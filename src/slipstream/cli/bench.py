"""``slipstream bench``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from slipstream.cli.options import Remembering, model_options, rule_option

_EXAMPLES = """\b
Examples:
  slipstream bench smollm2-135m
  slipstream bench TARGET --draft DRAFT --draft suffix,DRAFT -k 2,4,8 --prompts humaneval:20 --plot speed.svg
  slipstream bench TARGET --draft DRAFT --prompts prompts.jsonl --peer hf-plain,hf-assisted,hf-lookup
  slipstream bench TARGET --prompts prompts.jsonl --peer http://localhost:8080#llama.cpp --out result.json
  slipstream bench TARGET --json | tail -1 | jq .overall

Prompt files hold a JSON object a line: {"id", "category", "messages": [{"role", "content"}]}, or {"prompt": "text to
continue"}, or {"question_id", "category", "turns"} as Spec-Bench has them (the first turn is asked).

A peer is transformers' own generate, hf-MODE[:DTYPE][:K] with MODE plain, assisted or lookup, DTYPE fp32 (default),
bf16 or fp16, and K draft tokens; or a server's address, http://HOST:PORT[/v1][?model=NAME][#what to call it].
"""
_KS = "Draft tokens in a round: numbers, adaptive, halving (default: 1,2,4,8,adaptive)."


@click.command("bench", epilog=_EXAMPLES, cls=Remembering)
@click.argument("model", metavar="TARGET")
@click.option(
    "--draft",
    "drafts",
    multiple=True,
    metavar="DRAFT",
    help="suffix (default), a model, early-exit:LAYERS, or several: suffix,MODEL; repeatable.",
)
@click.option("-k", "ks", default="1,2,4,8,adaptive", metavar="K,K,...", help=_KS)
@rule_option
@click.option("--prompts", metavar="FILE", help="JSON lines, or humaneval[:N] (default: eight of the package's own).")
@click.option("--limit", type=int, metavar="N", help="Take N of the prompts, evenly spaced.")
@click.option("--max-new-tokens", "-n", type=int, default=128, metavar="N", help="At most N tokens (default: 128).")
@click.option("--repeat", "-r", "repeats", type=int, default=3, metavar="R", help="Ask R times (default: 3).")
@click.option("--temperature", "-t", type=float, default=0.0, metavar="T", help="0 is greedy (default).")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-sequence token.")
@click.option("--seed", type=int, default=0, metavar="N", help="For sampling; repeat i uses N + i (default: 0).")
@model_options
@click.option("--peer", "peers", multiple=True, metavar="PEER", help="Measure others beside it, see below; repeatable.")
@click.option("--plot", metavar="FILE", help="Draw speed-up against k and where time goes, as .png or .svg.")
@click.option("--out", metavar="FILE", help="Save the JSON document.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON document on stdout, the tables on stderr.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal; so does the variable NO_COLOR.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Measure what speculation gains for TARGET on this machine, with these drafts and prompts.

    Plain decoding and every draft with every k answer each prompt one after the other, in an order that moves on, so
    that drift meets all alike. Ratios are taken between answers to the same prompt in the same repeat; the median is
    quoted, with quartiles. Ctrl-C ends it and reports what there is.
    """
    from slipstream.cli.bench_run import BenchTask, run

    drafts = tuple(options.pop("drafts")) or ("suffix",)
    words = shlex.join(["slipstream", "bench", *ctx.meta["words"]])
    return run(BenchTask(command=words, drafts=drafts, **options))
