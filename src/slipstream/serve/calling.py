"""Grammars of tool calls, in Lark's notation: one that has to come, and one that may.

Where a call may come, text is free until one begins: behind the opening tag (Hermes), or in a message that begins with
a brace (Llama 3), only a call of an offered tool is left. Tags are tokens of their own in many tokenizers, and are
written as such; spelled out they mean the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.serve.tools import CLOSE, OPEN, PYTHON_TAG, Style

#: The arguments of a tool that says nothing of them.
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
#: Any arguments.
ANYTHING: dict[str, Any] = {"type": "object"}

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Tags:
    """Tokens outside of ordinary text that an answer may show."""

    ids: Mapping[str, int] = field(default_factory=dict)
    """Of the tags that are tokens of their own."""
    others: tuple[int, ...] = ()
    """What else is shown as text, such as the tags of a train of thought."""


def tags_of(tokenizer: Any) -> Tags:
    """Those of a tokenizer of transformers."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {token.content: number for number, token in added.items() if token.content in (OPEN, CLOSE, PYTHON_TAG)}
    shown = (n for n, token in added.items() if not token.special and token.content != OPEN)
    return Tags(ids, tuple(sorted(shown)))


def forced_call(style: Style, tools: Schemas, tags: Tags, *, several: bool) -> str:
    """A grammar of one call, or several.

    Args:
        style: of the model.
        tools: schemas of their arguments, by name.
        tags: of the tokenizer.
        several: whether more calls may follow the first.
    """
    more = ' ("\\n" call)*' if several and style == "hermes" else ""
    return _lines(f"start: call{more}", *_calls(style, tools, tags), _either("open", OPEN, tags))


def free_call(
    style: Style, tools: Schemas, tags: Tags, *, several: bool, answer: Mapping[str, Any] | None = None
) -> str:
    """A grammar of text with calls in it, if the model likes.

    Args:
        style: of the model.
        tools: schemas of their arguments, by name.
        tags: of the tokenizer.
        several: whether there may be more than one.
        answer: a schema that answers without calls follow; None: any text.
    """
    calls = _calls(style, tools, tags)
    if answer is not None:
        between = "/\\s*/" if style == "hermes" else "/; ?/"
        more = f" ({between} call)*" if several else ""
        told = f"answer: %json {json.dumps(answer)}"
        return _lines(f"start: answer | call{more}", told, *calls, _either("open", OPEN, tags))
    if style == "llama3":
        more = " (/; ?/ call)*" if several else ""
        return _lines(f"start: call{more} | TEXT?", rf"TEXT: {_NO_CALL}", *calls)
    other = "other" if tags.others else ""
    rules = ["TEXT: /(?s:.+)/", f"lead[lazy]: /(?s:.*)/ {json.dumps(OPEN)}", "open: lead" + _or_token(OPEN, tags)]
    if other:
        rules.append(f"other: <[{','.join(map(str, tags.others))}]>")
    if several:
        start = f"start: (TEXT | {other or 'TEXT'} | call)*"
    else:  # no two REST in a row, which could have a tag between them
        start = f"start: (TEXT | {other or 'TEXT'})* (call REST? {'(other REST?)*' if other else ''})?"
        rules.append(f"REST: /(?s:.+)/ & ~/(?s:.*){OPEN}(?s:.*)/")
    return _lines(start, *rules, *calls)


#: Text that is not taken for a call in the style of Llama 3: it does not begin with a brace, nor with the tag.
_SPACE = r"[\s\x1c-\x1f]"
_NO_CALL = rf"/{_SPACE}*([^\s\x1c-\x1f{{<]|<[^|])(?s:.*)/ | /{_SPACE}*<?/"


def _calls(style: Style, tools: Schemas, tags: Tags) -> list[str]:
    """Rules of ``call``; that of ``open`` is left to others."""
    hermes = style == "hermes"
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools.items()):
        head = f'{{"name": {json.dumps(name)}, "{"arguments" if hermes else "parameters"}": '
        if hermes:
            rules.append(f'call_{i}: open {json.dumps(chr(10) + head)} args_{i} "}}\\n" close')
        else:
            rules.append(f'call_{i}: python {json.dumps(head)} args_{i} "}}"')
        rules.append(f"args_{i}: %json {json.dumps(schema)}")
    rules.append(_either("close", CLOSE, tags) if hermes else f'python: ""{_or_token(PYTHON_TAG, tags)}')
    return rules


def _either(rule: str, tag: str, tags: Tags) -> str:
    return f"{rule}: {json.dumps(tag)}{_or_token(tag, tags)}"


def _or_token(tag: str, tags: Tags) -> str:
    return f" | <[{tags.ids[tag]}]>" if tag in tags.ids else ""


def _lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"
