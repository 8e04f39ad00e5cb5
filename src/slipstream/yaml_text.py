"""YAML, written with comments: maps and lists in block style, texts quoted as JSON quotes them."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_WIDTH = 100


@dataclass(frozen=True)
class Noted:
    """An entry of a map, with a comment above it."""

    value: Any
    note: str


def plain(value: Any) -> Any:
    """Without comments."""
    if isinstance(value, Noted):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value


def dump(value: Any, indent: int = 0) -> str:
    r"""YAML of maps, lists, texts, numbers, truth values and None.

    >>> print(dump({"k": Noted(4, "why"), "of": ["a", {"b": 1}]}), end="")
    # why
    k: 4
    of:
      - "a"
      - b: 1
    """
    pad, lines = "  " * indent, []
    if isinstance(value, Mapping):
        for key, entry in value.items():
            note = entry.note if isinstance(entry, Noted) else ""
            lines += comment(note, pad)
            lines.append(f"{pad}{_key(key)}:{_entry(entry.value if isinstance(entry, Noted) else entry, indent)}")
    else:
        for entry in value:
            nested = isinstance(entry, Mapping | list | tuple) and entry
            text = dump(entry, indent + 1).strip() if nested else _flat(entry)
            lines.append(f"{pad}- {text}")
    return "\n".join(lines) + "\n"


def comment(text: str, pad: str = "") -> list[str]:
    """Lines of a comment."""
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{pad}# ", subsequent_indent=f"{pad}# ") if text else []


def _entry(entry: Any, indent: int) -> str:
    if isinstance(entry, Mapping | list | tuple) and entry:
        return "\n" + dump(entry, indent + 1).rstrip("\n")
    if isinstance(entry, str) and "\n" in entry:
        pad = "  " * (indent + 1)
        body = "\n".join(f"{pad}{text}" if text else "" for text in entry.rstrip("\n").split("\n"))
        return f" |{'' if entry.endswith(chr(10)) else '-'}\n{body}"
    return f" {_flat(entry)}"


def _flat(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


#: What YAML 1.1 reads as something else than a text.
_OTHER = ("yes", "no", "on", "off", "y", "n", "true", "false", "null")


def _key(key: Any) -> str:
    if not isinstance(key, str):
        return str(key)
    usual = key.translate(str.maketrans("", "", "-_./"))
    return key if usual.isalnum() and usual[0].isalpha() and key.lower() not in _OTHER else json.dumps(key)
