"""Prefixes that were computed before: keys and values of whole blocks of tokens, found by the tokens up to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.cache import KeyValueCache

#: Tokens that are kept and found together.
BLOCK = 16


@dataclass(frozen=True, eq=False)
class _Block:
    number: int
    store: Tensor
    """(layers, 2, kv_heads, BLOCK, head_dim)"""


class PrefixCache:
    """A tree of blocks of at most ``limit`` bytes; those that were not used for the longest time go first.

    A block is known by the block before it and its own tokens, not by a hash of them: another prefix can never be taken
    for it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        """Bytes that are held."""
        self.taken = 0
        """Tokens that did not have to be read."""
        self._blocks: OrderedDict[tuple[int, tuple[int, ...]], _Block] = OrderedDict()
        self._made = 0

    def length(self, tokens: Sequence[int]) -> int:
        """How many of the first ``tokens``, but for the last of all, are held."""
        return BLOCK * sum(1 for _ in self._path(tokens))

    def fill(self, tokens: Sequence[int], cache: KeyValueCache) -> int:
        """Write what is held of ``tokens`` into an empty cache that has room for them; how many that are."""
        path = list(self._path(tokens))
        for number, (_, block) in enumerate(path):
            cache.store[:, :, :, number * BLOCK : (number + 1) * BLOCK] = block.store
        cache.length = len(path) * BLOCK
        self.taken += cache.length
        self._touch([key for key, _ in path])
        return cache.length

    def keep(self, tokens: Sequence[int], cache: KeyValueCache) -> None:
        """Take over the whole blocks of ``tokens`` that are in ``cache``, but for the last token.

        The last one of committed tokens has not been read; what the cache has in its place may be a rejected one.
        """
        parent, used = 0, []
        with torch.inference_mode(False):
            for start in range(0, min(len(tokens) - 1, cache.length) - BLOCK + 1, BLOCK):
                key = (parent, tuple(tokens[start : start + BLOCK]))
                block = self._blocks.get(key)
                if block is None:
                    block = self._add(key, cache.store[:, :, :, start : start + BLOCK])
                parent = block.number
                used.append(key)
        self._touch(used)
        while self.size > self.limit:
            _, gone = self._blocks.popitem(last=False)
            self.size -= gone.store.nbytes

    def _add(self, key: tuple[int, tuple[int, ...]], part: Tensor) -> _Block:
        self._made += 1
        block = self._blocks[key] = _Block(self._made, part.clone())
        self.size += block.store.nbytes
        return block

    def _path(self, tokens: Sequence[int]) -> Iterator[tuple[tuple[int, tuple[int, ...]], _Block]]:
        parent = 0
        for start in range(0, len(tokens) - BLOCK, BLOCK):
            key = (parent, tuple(tokens[start : start + BLOCK]))
            block = self._blocks.get(key)
            if block is None:
                return
            yield key, block
            parent = block.number

    def _touch(self, path: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """The beginning last: without it, what follows could not be found."""
        for key in reversed(path):
            self._blocks.move_to_end(key)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens in whole blocks two sequences have in common from their start on."""
    count = 0
    for start in range(0, min(len(a), len(b)) - BLOCK + 1, BLOCK):
        if list(a[start : start + BLOCK]) != list(b[start : start + BLOCK]):
            break
        count = start + BLOCK
    return count
