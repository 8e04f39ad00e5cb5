"""``slipstream serve``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.from_plan import apply_plan, plan_option
from slipstream.cli.options import DraftLength, FiniteRange, model_options, rule_option
from slipstream.cli.serve_around import around_options

_EXAMPLES = """\b
Examples:
  slipstream serve smollm2-135m
  slipstream serve path/to/target --draft suffix,path/to/draft --port 8080
  slipstream serve path/to/target --plan plan.json      # its draft, weights and rule; k follows the load
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hello"}], "stream": true}'

Any OpenAI client works: base_url="http://127.0.0.1:8000/v1", api_key="none".
"""


@click.command("serve", epilog=_EXAMPLES)
@click.argument("model", metavar="TARGET")
@click.option(
    "--draft",
    default="suffix",
    metavar="DRAFT",
    help="suffix (default), a model, early-exit:LAYERS, several (suffix,MODEL), none.",
)
@click.option(
    "-k",
    "k",
    type=DraftLength(),
    default="adaptive",
    metavar="K",
    help="Draft tokens in a round: adaptive (default: what the batch can bear), halving, or a number.",
)
@rule_option
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Where to listen (default: 127.0.0.1).")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Default: 8000; 0: any free one.")
@click.option("--name", metavar="NAME", help="The model's name for clients (default: that of TARGET).")
@click.option("--memory", metavar="SIZE", help="For caches, such as 4GB (default: a quarter of what is free).")
@click.option("--requests", type=click.IntRange(1), default=32, help="Answered at a time (default: 32).")
@click.option("--rows", type=click.IntRange(1), help="Tokens of prompts in a pass (default: what TARGET gains from).")
@click.option("--queue", type=click.IntRange(0), default=256, help="Answers that may wait (default: 256).")
@click.option("--max-tokens", type=click.IntRange(1), default=1024, help="Length of chat answers if not said (1024).")
@click.option("--max-n", type=click.IntRange(1), default=16, help="Answers that a request may ask for (16).")
@click.option("--drain-seconds", type=FiniteRange(0), default=30.0, help="After SIGTERM, to finish (30).")
@click.option("--tls-cert", metavar="FILE", help="Certificate, for https.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@plan_option
@model_options
@around_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Serve TARGET over HTTP, as OpenAI's API has it.

    TARGET and DRAFT are a name from `slipstream models`, a checkpoint folder, a .gguf file, or a hub id.
    """
    apply_plan(ctx, options, but=("k",))
    from slipstream.cli.serve_run import run

    return run(options)
