"""Where a prompt comes from, and how it becomes token ids."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InputError


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or (``chat``) a message to answer, after an optional ``system`` message."""

    text: str
    chat: bool = False
    system: str | None = None

    def ids(self, tokenizer: Any, model: str) -> list[int]:
        """Token ids; a chat template is applied once and brings its own BOS.

        Raises:
            InputError: the model has no tokenizer or no chat template.
        """
        from slipstream.text import encode

        if tokenizer is None:
            raise InputError(f"{model} has no tokenizer; put its tokenizer.json beside the weights")
        if not self.chat:
            return list(encode(self.text, tokenizer))
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(f"{model} has no chat template; leave out --chat")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return list(encode([*system, {"role": "user", "content": self.text}], tokenizer))


def read_prompt(text: str | None, file: str | None, source: str | None) -> str:
    """The one prompt among ``--prompt``, ``--prompt-file`` and standard input; one final line break is cut off.

    Raises:
        InputError: none, more than one, an unreadable or an empty one.
    """
    given = [name for name, value in (("--prompt", text), ("--prompt-file", file), ("-", source)) if value is not None]
    if len(given) > 1:
        raise InputError(f"there are two prompts ({' and '.join(given)}); give one")
    if source not in (None, "-"):
        raise InputError(
            f"{source!r} is one argument too many; give the prompt with --prompt, or - to read it from there"
        )
    if text is None:
        text = _from_stdin(asked=bool(given)) if file in (None, "-") else _from_file(str(file))
    if not text.strip():
        raise InputError("the prompt is empty; write something to answer")
    return text


def _from_file(name: str) -> str:
    try:
        raw = Path(name).read_bytes()
    except OSError as error:
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise InputError(f"cannot read the prompt file {name!r}: {reason}; give another path") from None
    return _decoded(raw, f"the prompt file {name!r}")


def _from_stdin(*, asked: bool) -> str:
    if not asked and sys.stdin.isatty():
        raise InputError("there is no prompt; give --prompt TEXT or --prompt-file FILE, or pipe one in")
    return _decoded(sys.stdin.buffer.read(), "standard input")


def _decoded(raw: bytes, what: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 text (byte {error.start}); convert it first") from None
    # Editors end a file with a line break that nobody meant as part of the prompt.
    return text.removesuffix("\n").removesuffix("\r")
