"""``slipstream generate``."""

from __future__ import annotations

from typing import Any

import click

from slipstream.cli.from_plan import apply_plan, plan_option
from slipstream.cli.options import (
    DraftLength,
    model_options,
    output_options,
    rule_option,
    sampling_options,
    sampling_params,
)
from slipstream.cli.prompt import Prompt, read_prompt
from slipstream.cli.screen import note

_EXAMPLES = """\b
Examples:
  slipstream generate smollm2-135m --chat --prompt "Write a haiku about rivers."
  slipstream generate path/to/target --draft path/to/draft -k 5 --prompt-file question.txt --compare
  slipstream generate path/to/target --draft suffix,path/to/draft --prompt-file question.txt --compare
  cat report.txt | slipstream generate model.gguf --chat --system "Summarise." --json | tail -1

A draft is a model, suffix (copies from the text so far), none, or several with commas between them: a cascade, in
which the next one drafts what the one before is not sure of.

The answer goes to stdout, figures go to stderr. On a terminal each token is coloured by where it came from.
"""


_K = "Draft tokens in a round: adaptive (default: whatever is fastest), halving, or a number."


@click.command("generate", epilog=_EXAMPLES)
@click.argument("model")
@click.argument("source", required=False, metavar="[-]")
@click.option(
    "--draft",
    default="suffix",
    metavar="DRAFT",
    help="suffix (default: copies), a model, early-exit:LAYERS, several (suffix,MODEL), none.",
)
@click.option("-k", "k", type=DraftLength(), default="adaptive", metavar="K", help=_K)
@rule_option
@plan_option
@click.option("--prompt", "-p", metavar="TEXT", help="The prompt.")
@click.option("--prompt-file", "-f", metavar="FILE", help="Read the prompt from FILE; - is stdin.")
@click.option("--chat", is_flag=True, help="The prompt is a message: apply the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system message to go before it (implies --chat).")
@sampling_options
@click.option("--compare", is_flag=True, help="Answer plainly too, first, and compare speed and answers.")
@model_options
@output_options
@click.option("--plot", metavar="FILE", help="Draw k and acceptance over the answer, as .png or .svg.")
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> int:
    """Answer a prompt with MODEL, sooner, by verifying the guesses of a draft.

    MODEL and DRAFT are a name from `slipstream models`, a checkpoint folder, a .gguf file, or a hub id. Without
    --prompt or --prompt-file the prompt is read from stdin.
    """
    apply_plan(ctx, options)
    text = read_prompt(options.pop("prompt"), options.pop("prompt_file"), options.pop("source"))
    system = options.pop("system")
    chat = options.pop("chat") or system is not None
    params = sampling_params(options)

    from slipstream.cli.run import Task, run

    names = Task.__dataclass_fields__.keys() & options.keys()
    task = Task(prompt=Prompt(text, chat, system), params=params, **{name: options[name] for name in names})
    code = run(task)
    if not task.compare and not task.plain:
        note("\nNext: add --compare to see what the draft gains, or try other -k.")
    elif task.compare:
        note("\nNext: try other -k and other drafts; `slipstream models` lists what is here.")
    return code
