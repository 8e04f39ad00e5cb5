"""``slipstream demo``: what ``make demo`` runs."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import click

from slipstream.cli.models import fetch_shown
from slipstream.cli.options import DraftLength, output_options
from slipstream.cli.prompt import Prompt
from slipstream.cli.screen import note

MODEL = "smollm2-135m"
PARAMS: dict[str, Any] = {"max_new_tokens": 256}
_EXAMPLES = """\b
Examples:
  slipstream demo
  slipstream demo -k 4 --svg answer.svg
"""


@click.command("demo", epilog=_EXAMPLES)
@click.option(
    "-k", "k", type=DraftLength(), default="adaptive", metavar="K", help="As in generate (default: adaptive)."
)
@click.option("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice).")
@output_options
def command(**options: Any) -> int:
    """Fetch a small model once and let it edit a text: plainly, then with drafts copied from the prompt.

    The two answers are the same; the table says how much sooner the second one came.
    """
    from slipstream.cli.run import Task, check, run
    from slipstream.types import SamplingParams

    prompt = files("slipstream.cli").joinpath("demo.txt").read_text(encoding="utf-8").strip()
    task = Task(MODEL, Prompt(prompt, chat=True), SamplingParams(**PARAMS), compare=True, **options)
    check(task)
    fetch_shown(MODEL)
    click.echo(f"Prompt, answered by {MODEL}:\n\n{prompt}\n", err=True)
    code = run(task)
    note(
        "\nNext, your own prompt and model:\n"
        f'  slipstream generate {MODEL} --chat --prompt "..." --compare\n'
        "  slipstream generate path/to/model --draft path/to/draft --prompt-file question.txt --compare\n"
        f"This was one run of each; figures to rely on, repeated and interleaved: slipstream bench {MODEL}"
    )
    return code
