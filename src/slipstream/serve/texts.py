"""Text to ids and back, beside the event loop."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
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
#: Texts of more characters are long: encoding them takes a tenth of a second and more.
_LONG = 50_000


class Texts:
    """The target's tokenizer for the server's own use.

    A thread and a copy of the tokenizer are set aside for what may take long; fast tokenizers must not be changed (as
    encoding may) while another thread uses them. Texts that take seconds have a thread and a copy of their own, so that
    others do not wait behind them.
    """

    def __init__(self, tokenizer: Any | None, target: Model) -> None:
        self.tokenizer = tokenizer
        self._target = target
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix="slipstream-texts") for _ in range(2)]
        self._own = [_silent(copy.deepcopy(tokenizer)) for _ in self._threads]
        self._spelling: Spelling | None = None
        self._grammars: Grammars | None = None
        self._known: OrderedDict[tuple[str, str], Grammar] = OrderedDict()
        self._compiling = Lock()
        self.tool_style = _tool_style(tokenizer)
        """How the model calls tools; None if it does not."""
        self.tags = tags_of(tokenizer)

    async def apart(self, function: Callable[..., Result], *args: Any) -> Result:
        """``function(*args)`` on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads[0], function, *args)

    async def _encoded(self, encoding: Callable[[Any], Sequence[int]], size: int) -> tuple[int, ...]:
        """What ``encoding`` makes of a text of about ``size`` characters with a tokenizer, on the thread for such."""
        lane = int(size > _LONG)
        loop = asyncio.get_running_loop()
        return tuple(await loop.run_in_executor(self._threads[lane], encoding, self._own[lane]))

    async def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """A prompt's ids, checked.

        Raises:
            InputError: it cannot be read by the target.
        """
        size = len(prompt) if isinstance(prompt, str) else 0
        return await self._encoded(lambda own: self._checked(encode(prompt, own)), size)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """The ids of messages in the model's chat template.

        Raises:
            InputError: there is no template, or it does not take them.
        """
        size = len(str((messages, tools)))
        return await self._encoded(lambda own: self._checked(encode(messages, own, tools=tools)), size)

    async def plain(self, text: str) -> tuple[int, ...]:
        """The ids of a text without anything around it."""
        return await self._encoded(lambda own: _plain(text, own), len(text))

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
        spelling = self._spelled()
        special = spelling.special.get(token)
        return spelling.bytes_of(token) if special is None else special.encode()

    def written(self, token: int) -> bytes:
        """The bytes of text that a token stands for; none for special ones, some where a tokenizer does not tell."""
        try:
            return self._spelled().bytes_of(token)
        except InputError:
            return b" "

    def _spelled(self) -> Spelling:
        if self._spelling is None:
            self._spelling = Spelling(self.tokenizer, self._target.name)
        return self._spelling

    def close(self) -> None:
        """Let the threads go."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def _checked(self, ids: tuple[int, ...]) -> tuple[int, ...]:
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


def _plain(text: str, tokenizer: Any | None) -> Sequence[int]:
    if tokenizer is None:
        raise InputError("text was given, but the model has no tokenizer")
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _silent(tokenizer: Any) -> Any:
    """A tokenizer that does not warn of long texts on stderr, where log lines belong; they are refused by name."""
    if hasattr(tokenizer, "model_max_length"):
        tokenizer.model_max_length = sys.maxsize
    return tokenizer


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
