"""Text to ids and back, beside the event loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slipstream.answers import check_prompt
from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.models.spelling import Spelling
from slipstream.text import encode

Result = TypeVar("Result")


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

    def _plain(self, text: str) -> tuple[int, ...]:
        if self._own is None:
            raise InputError("text was given, but the model has no tokenizer")
        return tuple(self._own(text, add_special_tokens=False)["input_ids"])
