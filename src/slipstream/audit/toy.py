"""A target without weights, whose law is known exactly: for controls, and to see an audit at work."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream.audit.law import Row
from slipstream.errors import InputError

_PIECES = ("a", "b", "c", "d ", "e", "fa", "g", "h ", "ba", "i", "j")
_EOS = len(_PIECES)


class ToyTokenizer:
    """Id i stands for a short piece of text; the last id, end of sequence, for none."""

    pad_token_id = None
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        ids: list[int] = []
        while text:
            fitting = [i for i, piece in enumerate(_PIECES) if text.startswith(piece)]
            if not fitting:
                raise InputError(f"the toy target cannot spell {text[:20]!r}; use the letters a to j")
            ids.append(max(fitting, key=lambda i: len(_PIECES[i])))
            text = text[len(_PIECES[ids[-1]]) :]
        return {"input_ids": ids}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The pieces, one after the other."""
        return "".join(_PIECES[i] for i in ids if i < _EOS)

    def get_vocab(self) -> dict[str, int]:
        """Pieces and their ids."""
        return {piece: i for i, piece in enumerate((*_PIECES, "<eos>"))}


class ToyCache:
    """The tokens seen so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        del self.tokens[length:]


class ToyModel:
    """Gaussian logits, a function of the last two tokens; a model for Slipstream and a scorer for the audit.

    Args:
        seed: another seed, another law.
        likeness: how much the logits are those of seed 0: a draft is like its target, and not the same.
    """

    vocab_size = embedding_size = _EOS + 1
    max_positions = None
    eos_token_ids: tuple[int, ...] = (_EOS,)
    device = torch.device("cpu")

    def __init__(self, seed: int = 0, likeness: float = 0.0) -> None:
        self.name = f"toy-{seed}"
        self.tokenizer: Any | None = ToyTokenizer()
        self._seed = seed
        self._likeness = likeness
        self._rows: dict[tuple[int, ...], Row] = {}

    def row(self, tokens: Sequence[int]) -> Row:
        """Logits (V,) behind ``tokens``; not to be changed."""
        context = tuple(tokens[-2:])
        if context not in self._rows:
            own = _gaussian(self._seed, context)
            shared = _gaussian(0, context)
            self._rows[context] = self._likeness * shared + (1 - self._likeness) * own
        return self._rows[context]

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Row:
        """As ``Scorer`` has it."""
        tokens = [*prompt, *answer]
        return np.stack([self.row(tokens[:end]) for end in range(len(prompt), len(tokens) + 1)])

    def new_cache(self) -> ToyCache:
        """As ``Model`` has it."""
        return ToyCache()

    def forward(self, tokens: Sequence[int], cache: ToyCache, num_logits: int) -> torch.Tensor:
        """As ``Model`` has it."""
        cache.tokens.extend(tokens)
        ends = range(cache.length - num_logits + 1, cache.length + 1)
        rows = [torch.from_numpy(self.row(cache.tokens[:end])) for end in ends]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size, dtype=torch.float64)


def _gaussian(seed: int, context: tuple[int, ...]) -> Row:
    generator = np.random.default_rng(zlib.crc32(repr((seed, context)).encode()))
    row: Row = 1.5 * generator.standard_normal(_EOS + 1)
    row[_EOS] -= 2  # answers are mostly longer than a few tokens
    return row
