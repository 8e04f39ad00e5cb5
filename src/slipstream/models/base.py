"""What Slipstream asks of a model: a forward pass over new tokens, and a cache that can be cut back.

Both protocols are small on purpose. A model owns weights only; all state of a request lives in its cache, so that one
model serves any number of requests and an abandoned request leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

#: Tokens of a prompt that go through the model in one pass; bounds the memory of activations.
PREFILL_CHUNK = 512
#: The same of models without `prompt_rows` where others may be waiting for that pass.
ROWS = 64


class Cache(Protocol):
    """Keys and values (or whatever a model keeps) of the first ``length`` tokens of one sequence."""

    @property
    def length(self) -> int:
        """Number of tokens whose state is held."""
        ...

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on; ``length`` at most the present one."""
        ...


class Model(Protocol):
    """A causal language model."""

    name: str
    vocab_size: int
    """V: number of rows of the output layer, padding rows included."""
    embedding_size: int
    """Number of rows of the input embedding: ids at or above it cannot be fed."""
    max_positions: int | None
    """Number of positions the model was made for; None if it has no limit."""
    eos_token_ids: tuple[int, ...]
    tokenizer: Any | None
    """A transformers tokenizer, or None if the model came without one."""
    device: torch.device

    def new_cache(self) -> Cache:
        """An empty cache for one sequence."""
        ...

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> Tensor:
        """Append ``tokens`` to the sequence in ``cache``, which came from this model's ``new_cache``.

        Returns:
            Logits of the last ``num_logits`` of ``tokens``, shape (num_logits, V), in the model's floating type.
        """
        ...


@dataclass(frozen=True)
class Item:
    """One sequence's part of a pass over several."""

    tokens: Sequence[int]
    cache: Any
    num_logits: int


def forward_each(model: Model, items: Sequence[Item]) -> list[Tensor | Exception]:
    """Append each item's tokens to its cache: in one pass if ``model`` has ``forward_batch``, else one after the other.

    Returns:
        For each item its logits (num_logits, V), or why it failed; its cache is then as it was.
    """
    batch = getattr(model, "forward_batch", None)
    if batch is not None and len(items) > 1:
        before = [item.cache.length for item in items]
        try:
            return list(batch(items))
        except Exception:  # whose fault it is shows one by one
            for item, length in zip(items, before, strict=True):
                item.cache.truncate(length)
    return [_forward(model, item) for item in items]


def _forward(model: Model, item: Item) -> Tensor | Exception:
    before = item.cache.length
    try:
        return feed(model, item.tokens, item.cache, item.num_logits)
    except Exception as error:
        item.cache.truncate(before)
        return error


def feed(model: Model, tokens: Sequence[int], cache: Cache, num_logits: int) -> Tensor:
    """Append ``tokens`` to ``cache`` in chunks; logits of the last ``num_logits`` of them, (num_logits, V)."""
    head, tail = tokens[: len(tokens) - num_logits], tokens[len(tokens) - num_logits :]
    start = 0
    while len(head) - start + len(tail) > PREFILL_CHUNK and start < len(head):
        chunk = head[start : start + PREFILL_CHUNK]
        model.forward(chunk, cache, 0)
        start += len(chunk)
    return model.forward([*head[start:], *tail], cache, num_logits)
