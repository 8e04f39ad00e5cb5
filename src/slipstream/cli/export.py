"""``slipstream export``."""

from __future__ import annotations

from typing import Any

import click

_EXAMPLES = """\b
Examples:
  slipstream export plan.json --engine vllm --out deploy
  slipstream export plan.json --engine sglang --version 0.5.23 --tensor-parallel 2 --out deploy
  slipstream export plan.json --engine llama.cpp --target model.gguf --draft draft.gguf --out deploy
  slipstream export plan.json --engine vllm --kubernetes --replicas 3 --out deploy

OUT gets launch.sh (each option with the measured reason above it), config files, README.md with what is otherwise than
in the plan, and with --kubernetes a kustomize base and an overlay.
"""


@click.command("export", epilog=_EXAMPLES)
@click.argument("plan", metavar="PLAN")
@click.option(
    "--engine", type=click.Choice(("vllm", "sglang", "tensorrt-llm", "llama.cpp")), required=True, help="What runs it."
)
@click.option("--version", metavar="V", help="Of the engine (default: the newest that was checked).")
@click.option("--out", required=True, metavar="DIR", help="Where the files are written.")
@click.option("--target", metavar="MODEL", help="The target there, if it is called otherwise than in the plan.")
@click.option("--draft", metavar="MODEL", help="The draft model there.")
@click.option("--target-revision", metavar="REV", help="Version of the target's weights.")
@click.option("--draft-revision", metavar="REV", help="Version of the draft's weights.")
@click.option("--tensor-parallel", type=int, default=1, metavar="N", help="Accelerators of one replica (default: 1).")
@click.option("--memory-share", type=float, metavar="S", help="Of an accelerator's memory, for the engine.")
@click.option("--max-requests", type=int, metavar="N", help="Answered at a time (default: the plan's largest batch).")
@click.option(
    "--copies", type=click.Choice(("ngram", "suffix")), default="ngram", help="What copies earlier text, in vLLM."
)
@click.option("--port", type=int, metavar="P", help="Where it listens (default: the engine's own).")
@click.option("--kubernetes", is_flag=True, help="Write Kubernetes objects too.")
@click.option("--replicas", type=int, default=2, metavar="N", help="Pods (default: 2).")
@click.option("--max-replicas", type=int, metavar="N", help="Pods at most, when load rises (default: 4 x --replicas).")
@click.option(
    "--nodes", type=int, default=1, metavar="N", help="Machines of one replica (a LeaderWorkerSet, if over 1)."
)
@click.option("--name", default="llm", metavar="NAME", help="Of the Kubernetes objects (default: llm).")
@click.option("--image", metavar="IMAGE", help="Container image (default: the engine's own).")
@click.option("--storage", default="200Gi", metavar="SIZE", help="Volume for weights (default: 200Gi).")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
@click.option("--json", "as_json", is_flag=True, help="Print what was chosen as a JSON document on stdout.")
def command(**options: Any) -> int:
    """Write launch commands and config files with which another engine runs PLAN, what `slipstream plan` wrote."""
    from slipstream.cli.export_run import ExportTask, run

    return run(ExportTask(**options))
