"""``slipstream distill``."""

from __future__ import annotations

import shlex
from typing import Any

import click

from slipstream.cli.options import WEIGHTS, Remembering

_EXAMPLES = """\b
Examples:
  slipstream distill smollm2-135m --init prune:4 --draft-vocab 8192 --data ~/code --pattern '*.py' --minutes 40 --out d
  slipstream distill TARGET --init DRAFT --lora 16 --data chats.jsonl --out my-draft
  slipstream distill TARGET --early-exit 8 --data chats.jsonl --out head
  slipstream distill --from-plan plan.json --capture traffic/ --latest 2000 --out newer-draft
  slipstream generate TARGET --draft my-draft --prompt "..."
  slipstream generate TARGET --draft early-exit:head --prompt "..."

JSON lines hold {"messages": [...]}, with an "answer" or a last message by the assistant, or none of both: then the
target answers first; {"prompt": "..."}; or {"text": "..."}. Ctrl-C keeps what there is; --resume goes on.
"""


@click.command("distill", epilog=_EXAMPLES, cls=Remembering)
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--init", default="", metavar="START", help="A draft model, prune:4, or layers:0,9,19,29 of TARGET.")
@click.option("--data", multiple=True, metavar="[NAME=]PATH", help="Files or folders; repeatable.")
@click.option("--capture", metavar="DIR", help="As --data: traffic that slipstream serve captured.")
@click.option("--from-plan", metavar="FILE", help="Begin with the draft of this plan, and refuse what is no better.")
@click.option("--latest", type=int, metavar="N", help="Take the last N texts or conversations only.")
@click.option("--out", required=True, metavar="DIR", help="Where the draft is written.")
@click.option("--pattern", default="*", metavar="GLOB", help="Which files of folders, such as '*.py' (default: all).")
@click.option(
    "--validation-data", multiple=True, metavar="[NAME=]PATH", help="Measure on this, not on a part of --data."
)
@click.option("--validation", type=float, default=0.1, metavar="SHARE", help="Share to set aside (default: 0.1).")
@click.option("--validation-tokens", type=int, metavar="N", help="Measure at N tokens (default: 8192).")
@click.option("--draft-vocab", type=int, metavar="N", help="Output rows for the N most frequent ids only.")
@click.option("--full-vocab", is_flag=True, help="With --draft-vocab: write rows for all ids, for other programs.")
@click.option("--lora", type=int, metavar="RANK", help="Train low-rank adapters only, and merge them.")
@click.option("--early-exit", type=int, metavar="N", help="An exit head behind N layers of TARGET, not a draft model.")
@click.option("--rank", type=int, default=64, metavar="R", help="Of the exit head's adapter (default: 64).")
@click.option("--fit", type=int, default=32, metavar="N", help="Rows to fit a pruned start's output layer on first.")
@click.option("--embeddings", is_flag=True, help="Train the table of input embeddings too.")
@click.option("--length", type=int, default=512, metavar="N", help="Tokens in a row of training data (default: 512).")
@click.option("--steps", type=int, metavar="N", help="Steps (default: 500).")
@click.option("--minutes", type=float, metavar="M", help="Rows and steps that take M minutes here.")
@click.option("--loss", default="kl", metavar="NAME", help="kl (default), reverse-kl, js, tv, acceptance or ce.")
@click.option("--learning-rate", type=float, default=1e-3, metavar="X", help="The highest (default: 0.001).")
@click.option("--batch", type=int, default=2, metavar="N", help="Rows in a step (default: 2).")
@click.option("--accumulate", type=int, default=1, metavar="N", help="In N parts, which takes less memory.")
@click.option("--bf16", is_flag=True, help="Multiply in bfloat16.")
@click.option("--keep", type=int, metavar="N", help="Keep the N likeliest tokens of what TARGET says; 0 asks anew.")
@click.option("--on-policy", type=float, default=0.0, metavar="SHARE", help="Steps on text that the draft writes.")
@click.option("--seed", type=int, default=0, metavar="N", help="Same seed, same run (default: 0).")
@click.option("--evaluate-every", type=int, metavar="N", help="Measure after N steps (default: 50, or fewer).")
@click.option("--patience", type=int, default=6, metavar="N", help="End after N without a better one (default: 6).")
@click.option("--temperature", "-t", type=int, default=0, metavar="T", help="Raise the speed-up at 0 (default) or 1.")
@click.option("--checkpoint-minutes", type=float, default=5.0, metavar="M", help="Keep the state every M minutes.")
@click.option("--answer-tokens", type=int, default=256, metavar="N", help="Answers to prompts: at most N tokens.")
@click.option("--answer-temperature", type=float, default=0.0, metavar="T", help="Answers to prompts: 0 is greedy.")
@click.option("--weights", type=click.Choice(WEIGHTS), default="auto", help="Weights of TARGET (default: auto).")
@click.option("--device", default="cpu", metavar="NAME", help="Of TARGET: cpu (default), cuda.")
@click.option("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice).")
@click.option("--logs", metavar="DIR", help="Figures for TensorBoard.")
@click.option("--resume", is_flag=True, help="Go on with an interrupted run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--no-color", is_flag=True, help="No colours on a terminal.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Make a draft model for TARGET from your own text, with acceptance as its measure."""
    from slipstream.cli.distill_run import run

    words = shlex.join(["slipstream", "distill", *ctx.meta["words"]])
    return run(command=words, **options)
