"""Tokens to text, one token at a time, and the rules that end an answer.

Everything here advances token by token, so that it cannot matter how tokens were grouped into rounds.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from slipstream.errors import InputError
from slipstream.types import FinishReason

#: Text, token ids, or chat messages, which the tokenizer's chat template turns into ids.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def encode(
    prompt: Prompt, tokenizer: Any | None, *, tools: Sequence[Mapping[str, Any]] | None = None
) -> tuple[int, ...]:
    """A prompt's ids, with special tokens exactly once; ``tools`` are shown to the chat template beside messages.

    Raises:
        InputError: empty text, text without a tokenizer, messages without a chat template or not to its liking, or
            something else altogether.
    """
    if isinstance(prompt, str):
        return _encode_text(prompt, tokenizer)
    given = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if getattr(prompt, "ndim", 1) == 2 and len(given) == 1:  # what a tokenizer returns for one text
        given = given[0]
    items: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, bytes) else [None]
    if items and all(isinstance(m, Mapping) for m in items):
        return _encode_messages(items, tokenizer, tools)
    ids = tuple(token_id(item) for item in items)
    if None in ids:
        raise InputError(
            f"the prompt {str(prompt)[:60]!r} is neither text nor token ids nor chat messages; give one of these"
        )
    return cast(tuple[int, ...], ids)


def token_id(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or getattr(value, "ndim", 0) > 0:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _encode_text(text: str, tokenizer: Any | None) -> tuple[int, ...]:
    if not text:
        raise InputError("the prompt is empty; write something to continue")
    if tokenizer is None:
        raise InputError("the prompt is text, but there is no tokenizer; pass tokenizer= or token ids")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the prompt is not Unicode text (its character {error.start} is half of a pair); decode it as UTF-8"
        ) from None
    # Text that a chat template has rendered begins with the BOS token already.
    bos = getattr(tokenizer, "bos_token", None)
    rendered = text.startswith(bos) if bos else False
    return tuple(tokenizer(text, add_special_tokens=not rendered)["input_ids"])


def _encode_messages(
    messages: list[Any], tokenizer: Any | None, tools: Sequence[Mapping[str, Any]] | None
) -> tuple[int, ...]:
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the prompt is a list of messages, but there is no chat template; pass text or token ids")
    try:
        ids = tokenizer.apply_chat_template(
            messages,
            tools=None if tools is None else list(tools),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    except Exception as error:  # a template is a program that came with the model; many refuse a system message
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"the model's chat template does not take these messages ({reason}); change them, or give text"
        ) from error
    return tuple(ids)


class Detokenizer:
    """Decodes a growing list of ids; characters come out once they are complete.

    The pieces, with ``flush()`` last, add up to ``tokenizer.decode(all ids, skip_special_tokens=True)``.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # ids[_start:_done] is context that has been emitted; decoding it again with what follows keeps the tokenizer's
        # rules for the first token of a text (a dropped leading space) away from tokens in the middle.
        self._start = 0
        self._done = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty inside a character."""
        self._ids.append(token)
        before, after = self._decode(self._done), self._decode(len(self._ids))
        if after.endswith(_REPLACEMENT) or len(after) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """The rest, with a replacement character where the ids stop inside a character."""
        before, after = self._decode(self._done), self._decode(len(self._ids))
        self._start = self._done = len(self._ids)
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._start : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class Ending:
    """Cuts an answer: end-of-sequence ids, stop strings and length, whichever matches first.

    Args:
        stop_ids: ids that end the answer; such an id stays in the tokens and out of the text.
        stop: strings that end the answer; the text is cut before them.
        min_tokens: ``stop`` strings do not count before this many tokens.
        max_tokens: the answer's length at most.
        tokenizer: None if text is not wanted; then ``stop`` must be empty.
    """

    def __init__(
        self, *, stop_ids: Collection[int], stop: Sequence[str], min_tokens: int, max_tokens: int, tokenizer: Any
    ) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._count = 0
        self._held = ""
        self.reason: FinishReason | None = "length" if max_tokens <= 0 else None

    def push(self, token: int) -> str:
        """Take the next token; the text it releases. Sets ``reason`` if the answer ends with it."""
        self._count += 1
        if token in self._stop_ids:
            self.reason = "stop"
            return self.flush()
        released = self._release(self._detokenizer.push(token)) if self._detokenizer else ""
        if self.reason is None and self._count >= self._max_tokens:
            self.reason = "length"
            released += self.flush()
        return released

    def flush(self) -> str:
        """Whatever text is still held back, up to a stop string that an incomplete character at the end completes."""
        rest = self._held + (self._detokenizer.flush() if self._detokenizer else "")
        self._held = ""
        at = self._stop_in(rest)
        if at is not None and self.reason is not None:
            self.reason = "stop"
        return rest[:at]

    def _release(self, text: str) -> str:
        """Add ``text`` to what is held back; let go of what can no longer be part of a stop string."""
        if not self._stop:
            return text
        self._held += text
        if (end := self._stop_in(self._held)) is not None:
            released, self._held = self._held[:end], ""
            self.reason = "stop"
            self._detokenizer = None
            return released
        keep = max(_overlap(self._held, s) for s in self._stop)
        released, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return released

    def _stop_in(self, text: str) -> int | None:
        """Where the first stop string begins, if there is one that counts."""
        if self._count < self._min_tokens:
            return None
        return min((at for s in self._stop if (at := text.find(s)) >= 0), default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
