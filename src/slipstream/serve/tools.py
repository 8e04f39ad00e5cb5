"""Tool calls in a model's text, found as it streams.

Two styles: Hermes (Qwen, Hermes, ...), ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` anywhere in a text,
and Llama 3, ``{"name": ..., "parameters": {...}}`` as the whole of it, several with ``;`` between them. What looks like
a call, but is of no tool that was offered, or no JSON, stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

Style = Literal["hermes", "llama3"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
#: A call's beginning up to the arguments, if they are an object.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class Called:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments of the latest call."""

    text: str


Found = Said | Called | Arguments


def style_of(template: str | None) -> Style | None:
    """The style that a chat template teaches; None if it knows of no tools."""
    if template is None or "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    if PYTHON_TAG in template or '"parameters"' in template:
        return "llama3"
    return None


class CallParser:
    """Takes a text piece by piece; what is found does not depend on where it was cut, but for pieces being joined.

    Args:
        style: of the model.
        names: of the tools that were offered.
    """

    def __init__(self, style: Style, names: Collection[str]) -> None:
        self._hermes = style == "hermes"
        self._names = frozenset(names)
        self._text = ""
        """What has not been decided on."""
        self._reader: _Reader | None = None
        self._between = not self._hermes
        """Whether a call may begin right here, without a tag; behind a call: what comes before the next."""
        self._after = False
        self.calls = 0

    def push(self, text: str) -> list[Found]:
        """More text; what can be said of it by now."""
        self._text += text
        return _joined(self._run(last=False))

    def flush(self) -> list[Found]:
        """The text is over."""
        return _joined(self._run(last=True))

    def _run(self, *, last: bool) -> Iterator[Found]:
        going = True
        while going:
            before = (self._text, self._reader, self._between, self._after)
            if self._reader is not None:
                yield from self._read(last=last)
            elif self._after:
                self._leave(last=last)
            elif self._between:
                self._look(last=last)
            else:
                yield from self._say(last=last)
            going = (self._text, self._reader, self._between, self._after) != before
        if last:
            self._text = ""

    def _say(self, *, last: bool) -> Iterator[Found]:
        """Plain text, up to a tag; spaces before it belong to neither."""
        if not self._hermes:
            if self._text:
                yield Said(self._text)
                self._text = ""
            return
        at = self._text.find(OPEN)
        if at >= 0:
            said = self._text[:at].rstrip()
            if said:
                yield Said(said)
            self._reader = _Reader(self._text[len(said) : at + len(OPEN)])
            self._text = self._text[at + len(OPEN) :]
            return
        kept = 0 if last else _overlap(self._text, OPEN)
        ready = self._text[: len(self._text) - kept]
        if not last or (self.calls and not ready.strip()):
            ready = ready.rstrip()
        if ready:
            yield Said(ready)
            self._text = self._text[len(ready) :]

    def _look(self, *, last: bool) -> None:
        """Where a call may begin without a tag: does one?"""
        bare = self._text.lstrip().removeprefix(PYTHON_TAG).lstrip()
        if not last and PYTHON_TAG.startswith(bare):
            return
        self._between = False
        if bare.startswith("{"):
            self._reader = _Reader(self._text[: len(self._text) - len(bare)])
            self._text = bare

    def _read(self, *, last: bool) -> Iterator[Found]:
        """A call in the making."""
        reader = self._reader
        assert reader is not None
        self._text, given = "", self._text
        for one in reader.push(given):
            if isinstance(one, Called) and one.name not in self._names:
                reader.refuse()
                break
            self.calls += isinstance(one, Called)
            yield one
        if reader.failed or (last and not reader.done and not reader.begun):
            said, self._text = reader.split()
            self._reader = None
            yield Said(said)
        elif reader.done:
            self._text, self._reader, self._after = reader.split()[1], None, True
        elif last:
            self._reader = None

    def _leave(self, *, last: bool) -> None:
        """Behind a call: its closing tag, or what stands between two."""
        rest = self._text.lstrip()
        end = CLOSE if self._hermes else ";"
        if rest.startswith(end):
            self._text, self._after, self._between = rest[len(end) :], False, not self._hermes
        elif last or not end.startswith(rest):
            self._text, self._after = rest, False


class _Reader:
    """Reads one JSON object that is a call."""

    def __init__(self, lead: str) -> None:
        self.begun = False
        """Whether its name is out."""
        self.done = False
        self.failed = False
        self._lead = lead
        self._body = ""
        self._at = 0
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments: int | None = None
        """The depth of the object that the arguments are in; None outside of them."""

    def push(self, text: str) -> list[Found]:
        """More of it."""
        self._body += text
        found: list[Found] = []
        if not self.begun and (head := _HEAD.match(self._body)):
            self.begun = True
            found.append(Called(head[1]))
            while self._at < head.end():
                self._step()
            self._arguments = self._depth
        start = self._at
        while self._at < len(self._body) and not (self.done or self.failed):
            self._step()
            if self._arguments is not None and self._depth == self._arguments and not self._in_string:
                found.append(Arguments(self._body[start : self._at]))
                self._arguments = None
        if self._arguments is not None and self._at > start:
            found.append(Arguments(self._body[start : self._at]))
        if self.done and not self.begun:
            found += self._whole()
        return found

    def refuse(self) -> None:
        """It is no call after all."""
        head = _HEAD.match(self._body)
        self.failed = True
        self._at = self._at if head is None else head.end()

    def split(self) -> tuple[str, str]:
        """What belongs to it, with what came before, and what does not."""
        return self._lead + self._body[: self._at], self._body[self._at :]

    def _step(self) -> None:
        """Take one character."""
        char = self._body[self._at]
        if self._depth == 0 and char != "{" and not char.isspace():
            self.failed = True
            return
        self._at += 1
        if self._in_string:
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0

    def _whole(self) -> list[Found]:
        """A call whose parts are in another order, or whose arguments are not an object."""
        try:
            call = json.loads(self._body[: self._at], strict=False)
        except (ValueError, RecursionError):
            call = None
        name = call.get("name") if isinstance(call, dict) else None
        given: Any = next((call[key] for key in _ARGUMENTS if key in call), {}) if isinstance(call, dict) else None
        if not isinstance(name, str) or not isinstance(given, dict | str | None):
            self.failed = True
            return []
        self.begun = True
        return [Called(name), Arguments(given if isinstance(given, str) else json.dumps(given or {}))]


def _joined(found: Iterator[Found]) -> list[Found]:
    """Neighbours of a kind as one."""
    out: list[Found] = []
    for one in found:
        last = out[-1] if out else None
        if isinstance(one, Said) and isinstance(last, Said):
            out[-1] = Said(last.text + one.text)
        elif isinstance(one, Arguments) and isinstance(last, Arguments):
            out[-1] = Arguments(last.text + one.text)
        else:
            out.append(one)
    return out


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``tag``."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
