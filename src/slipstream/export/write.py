"""An export as files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from slipstream.export import llama_cpp, sglang, tensorrt_llm, vllm
from slipstream.export.types import FILES, Export
from slipstream.plan import Plan
from slipstream.yaml_text import comment

#: Each engine's exporter, by its name.
EXPORTERS = {
    "vllm": vllm.export,
    "sglang": sglang.export,
    "tensorrt-llm": tensorrt_llm.export,
    "llama.cpp": llama_cpp.export,
}
SCRIPT, README = "launch.sh", "README.md"


def words(export: Export, files: str) -> list[str]:
    """The command, with config files in the folder ``files``."""
    found = [export.program]
    for argument in export.arguments:
        found += [
            word.replace(f"{FILES}/", f"{files}/", 1) if word.startswith(FILES) else word for word in argument.words
        ]
    return found


def documents(plan: Plan, export: Export) -> dict[str, str]:
    """Files by name: a script, config files, and what is to be known."""
    return {SCRIPT: script(plan, export), README: readme(plan, export), **export.files}


def script(plan: Plan, export: Export) -> str:
    """A shell script in which every choice has its reason above it."""
    lines = ["#!/bin/sh", *_head(plan, export), "set -eu"]
    if export.files:
        lines.append('here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)')
    lines += [f"export {name}={shlex.quote(value)}" for name, value in export.environment.items()]
    lines.append("set --")
    for argument in export.arguments:
        lines += ["", *comment(argument.why)] if argument.why else []
        lines.append(f'set -- "$@" {" ".join(_quoted(word) for word in argument.words)}')
    lines += ["", f'exec {export.program} "$@"']
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    if word.startswith(f"{FILES}/"):
        return f'"$here"/{shlex.quote(word.removeprefix(f"{FILES}/"))}'
    return shlex.quote(word)


def _head(plan: Plan, export: Export) -> Iterator[str]:
    yield from comment(
        f"{export.engine} {export.version}, written by `slipstream export` from a plan of {plan.created}."
    )
    yield from comment(f"Checked against: {export.checked}.")
    for warning in export.warnings:
        yield from comment(f"Warning: {warning}.")
    yield from comment(plan.verdict.sentence)
    for note in export.notes:
        yield from comment(f"Note: {note}.")


def readme(plan: Plan, export: Export) -> str:
    """What to do, and what the engine cannot."""
    address, target = f"http://HOST:{export.port}", shlex.quote(plan.target.model)
    lines = [
        f"# {export.engine} {export.version}",
        "",
        f"From a plan of {plan.created} for {plan.target.model}. {plan.verdict.sentence}",
        "",
        "```sh",
        f"sh {SCRIPT}",
        f"slipstream bench {target} --peer {address}",
        f"slipstream audit {target} --url {address}",
        f"slipstream monitor --url {address}{export.metrics} --plan plan.json",
        "```",
        "",
        f"Names and meanings of options were checked against: {export.checked}.",
        *(f"**{warning[0].upper()}{warning[1:]}.**" for warning in export.warnings),
        "",
    ]
    if export.notes:
        lines += ["What is otherwise than in the plan:", "", *(f"- {note}" for note in export.notes), ""]
    lines += ["| option | why |", "|---|---|"]
    lines += [f"| `{_cell(' '.join(a.words))}` | {_cell(a.why)} |" for a in export.arguments if a.why]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace(f"{FILES}/", "")


def listing(files: Mapping[str, str]) -> str:
    """Names, for people."""
    return "\n".join(sorted(files))
