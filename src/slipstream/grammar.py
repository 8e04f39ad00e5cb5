"""Answers that follow a grammar: a JSON schema, a regular expression, a context-free grammar.

A grammar is a logits processor: at each position it leaves the tokens with which the text can still become a sentence
of the grammar, and an end-of-sequence id where it is one. So drafted, corrected and bonus tokens are treated alike, and
answers follow the target's distribution, masked. Needs llguidance (the extra ``server``).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher

_WORD = 32
Bits = np.ndarray[Any, np.dtype[np.uint32]]


class Grammars:
    """Makes grammars for one model.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: V, padding rows included.
        stop_ids: the model's end-of-sequence ids; one of them has to be sampled where a sentence is complete.

    Raises:
        InputError: another kind of tokenizer, or nothing that could end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Collection[int]) -> None:
        from llguidance.hf import from_tokenizer

        ends = sorted(t for t in stop_ids if t < _size(tokenizer))
        if not ends:
            raise InputError("the model has no end-of-sequence id, so an answer could not end where its grammar does")
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=ends)
        except Exception as error:
            raise InputError(f"grammars do not work with the model's tokenizer ({_line(error)})") from error

    def json(self, schema: Mapping[str, Any], *, compact: bool = False) -> Grammar:
        """JSON that follows ``schema``; ``compact``: without white space where it means nothing."""
        from llguidance import LLMatcher

        options: Any = {"whitespace_flexible": False} if compact else None
        return self._made("JSON schema", lambda: LLMatcher.grammar_from_json_schema(json.dumps(schema), options))

    def regex(self, pattern: str) -> Grammar:
        """Text that matches ``pattern`` as a whole."""
        from llguidance import LLMatcher

        return self._made("regular expression", lambda: LLMatcher.grammar_from_regex(pattern))

    def lark(self, rules: str) -> Grammar:
        """Text that follows ``rules``, in Lark's notation, from ``start`` on."""
        from llguidance import LLMatcher

        return self._made("grammar", lambda: LLMatcher.grammar_from_lark(rules))

    def _made(self, kind: str, rules: Callable[[], str]) -> Grammar:
        from llguidance import LLMatcher

        try:
            matcher = LLMatcher(self._tokenizer, rules(), log_level=0)
            error = matcher.get_error()
        except Exception as problem:
            error = str(problem)
        if error:
            raise InputError(f"the {kind} cannot be used: {_line(error)}")
        grammar = Grammar(matcher, self._tokenizer.vocab_size)
        if grammar.processor(0).allowed([]) is None:
            raise InputError(f"the {kind} cannot be used: no text follows it")
        return grammar


class Grammar:
    """What answers have to follow."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def processor(self, prompt_length: int) -> GrammarMask:
        """For ``SamplingParams.logits_processors`` of one answer, behind a prompt of so many tokens."""
        return GrammarMask(self._matcher, self._vocab_size, prompt_length)


class GrammarMask:
    """A logits processor. What it remembers of the tokens that it was last called with only saves time.

    Behind tokens that the grammar does not allow, as drafts may be, everything is forbidden; so it is where the grammar
    has a dead end, or turns out to be too complex.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, prompt_length: int) -> None:
        self._begin = matcher
        self._matcher = matcher.deep_copy()
        self._prompt_length = prompt_length
        self._taken: list[int] = []
        self._words = np.zeros(-(-vocab_size // _WORD), dtype=np.uint32)

    def __call__(self, tokens: Sequence[int], row: Tensor) -> Tensor:
        """``row`` (V,) with -inf for what the grammar does not allow next."""
        words = self.allowed(tokens[self._prompt_length :])
        if words is None:
            return torch.full_like(row, -math.inf)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little", count=len(row))
        return row.masked_fill(torch.from_numpy(bits == 0).to(row.device), -math.inf)

    def allowed(self, output: Sequence[int]) -> Bits | None:
        """A bit for each token that may follow ``output``, 32 to a word; None if there is none."""
        if not self._follow(output):
            return None
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words if self._sound() and self._words.any() else None

    def _follow(self, output: Sequence[int]) -> bool:
        """Bring the matcher to the end of ``output``; False if that is not allowed by then."""
        same = next((i for i, (a, b) in enumerate(zip(self._taken, output, strict=False)) if a != b), None)
        kept = min(len(self._taken), len(output)) if same is None else same
        if kept < len(self._taken):
            self._matcher.rollback(len(self._taken) - kept)
            del self._taken[kept:]
        fresh = list(output[kept:])
        count = self._matcher.try_consume_tokens(fresh) if fresh else 0
        self._taken += fresh[:count]
        return self._sound() and count == len(fresh)

    def _sound(self) -> bool:
        """Whether the matcher works; it never gets well again, so it is replaced."""
        if not self._matcher.is_error():
            return True
        self._matcher = self._begin.deep_copy()
        self._taken.clear()
        return False


def _size(tokenizer: Any) -> int:
    """Number of ids; as many as anybody asks for, where that is not known."""
    try:
        return len(tokenizer)
    except TypeError:
        return sys.maxsize


def _line(error: object) -> str:
    """A message in one short line, without what is for llguidance's developers."""
    return " ".join(str(error).partition("<state>")[0].split())[:300]
