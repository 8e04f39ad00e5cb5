"""Text to ids and back, beside the event loop."""

from __future__ import annotations

import asyncio
import copy
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, Literal, TypeVar

from slipstream.answers import check_prompt
from slipstream.errors import InputError
from slipstream.grammar import Grammar, Grammars
from slipstream.models.base import Model
from slipstream.models.spelling import Spelling
from slipstream.serve.calling import tags_of
from slipstream.serve.tools import Style, style_of
from slipstream.text import encode

Result = TypeVar("Result")
GrammarKind = Literal["json", "regex", "lark"]

#: So many of the latest grammars are kept.
_KEPT = 64


class Texts:
    """The target's tokenizer for the server's own use.

    A thread and a copy of the tokenizer are set aside for what may take long; fast tokenizers must not be changed (as
    encoding may) while another thread uses them.
    """

    def __init__(self, tokenizer: Any | None, target: Model) -> None:
        self.tokenizer = tokenizer
        self._own = copy.deepcopy(tokenizer)
        self._target = target
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-texts")
        self._spelling: Spelling | None = None
        self._grammars: Grammars | None = None
        self._known: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._compiling = Lock()
        self.tool_style = _tool_style(tokenizer)
        """How the model calls tools; None if it does not."""
        self.tags = tags_of(tokenizer)

    async def apart(self, function: Callable[..., Result], *args: Any) -> Result:
        """``function(*args)`` on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """A prompt's ids, checked.

        Raises:
            InputError: it cannot be read by the target.
        """
        return await self.apart(self._encode, prompt)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """The ids of messages in the model's chat template.

        Raises:
            InputError: there is no template, or it does not take them.
        """
        return await self.apart(self._encode_chat, messages, tools)

    async def plain(self, text: str) -> tuple[int, ...]:
        """The ids of a text without anything around it."""
        return await self.apart(self._plain, text)

    async def grammar(self, kind: GrammarKind, rules: str) -> Grammar:
        """What answers have to follow; ``rules`` of "json" is a schema, as JSON.

        Raises:
            InputError: it cannot be used.
        """
        return await asyncio.to_thread(self._grammar, kind, rules)

    def text_of(self, ids: Sequence[int]) -> str:
        """What ``ids`` stand for, without special tokens."""
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; of a special one, its name."""
        if self._spelling is None:
            self._spelling = Spelling(self.tokenizer, self._target.name)
        special = self._spelling.special.get(token)
        return self._spelling.bytes_of(token) if special is None else special.encode()

    def written(self, token: int) -> bytes:
        """The bytes of text that a token stands for; none for special ones."""
        if self._spelling is None:
            self._spelling = Spelling(self.tokenizer, self._target.name)
        return self._spelling.bytes_of(token)

    def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        ids = encode(prompt, self._own)
        check_prompt(ids, self._target)
        return ids

    def _encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[int, ...]:
        ids = encode(messages, self._own, tools=tools)
        check_prompt(ids, self._target)
        return ids

    def _grammar(self, kind: GrammarKind, rules: str) -> Grammar:
        with self._compiling:
            if (kind, rules) in self._known:
                self._known.move_to_end((kind, rules))
                return self._known[kind, rules]
            if self._grammars is None:
                own = copy.deepcopy(self.tokenizer)
                self._grammars = Grammars(own, self._target.vocab_size, self._target.eos_token_ids)
            made = self._grammars.json(json.loads(rules)) if kind == "json" else getattr(self._grammars, kind)(rules)
            self._known[kind, rules] = made
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
            return made

    def _plain(self, text: str) -> tuple[int, ...]:
        if self._own is None:
            raise InputError("text was given, but the model has no tokenizer")
        return tuple(self._own(text, add_special_tokens=False)["input_ids"])


def _tool_style(tokenizer: Any | None) -> Style | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    style = style_of(template)
    if style == "hermes" and tokenizer is not None:
        ids = tokenizer("<tool_call>", add_special_tokens=False)["input_ids"]
        if not tokenizer.decode(ids, skip_special_tokens=True):
            return None  # the tags would be left out of the text
    return style
