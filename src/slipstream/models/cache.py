"""The key-value cache of the lean decoder: preallocated, growing by doubling, cut back by moving one number."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import InputError

_FIRST_CAPACITY = 256


@dataclass(frozen=True)
class Ahead:
    """Tokens behind a cache's length that have been through the first layers only."""

    layers: int
    tokens: tuple[int, ...]
    states: Tensor
    """(len(tokens), D) or wider: what goes into layer ``layers``."""


class KeyValueCache:
    """Keys and values of one sequence, one (layers, 2, kv_heads, capacity, head_dim) tensor."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self.ahead: Ahead | None = None
        self._store = torch.empty(layers, 2, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._placed = False

    @property
    def store(self) -> Tensor:
        """Everything that is held, (layers, 2, kv_heads, capacity, head_dim)."""
        return self._store

    @property
    def capacity(self) -> int:
        """Number of positions there is room for."""
        return self._store.shape[3]

    def place(self, store: Tensor) -> None:
        """Live in ``store``, (layers, 2, kv_heads, capacity, head_dim), with what is there, and grow no more."""
        self._placed = True
        self._live_in(store)

    def _live_in(self, store: Tensor) -> None:
        self._store = store
        # Views made once: a decode step should not spend its time on slicing.
        self._layers = [(keys, values) for keys, values in store]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions."""
        capacity = self._store.shape[3]
        if length <= capacity:
            return
        if self._placed:
            raise RuntimeError(f"a cache with room for {capacity} positions was to hold {length}")
        grown = max(_FIRST_CAPACITY, 2 * capacity, length)
        shape = (*self._store.shape[:3], grown, self._store.shape[4])
        store = torch.empty(shape, dtype=self._store.dtype, device=self._store.device)
        store[:, :, :, :capacity] = self._store
        self._live_in(store)

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's ``keys`` and ``values`` (kv_heads, n, head_dim) from position ``start`` on.

        Returns:
            That layer's keys and values up to and with the new ones, (kv_heads, start + n, head_dim).
        """
        count = keys.shape[1]
        all_keys, all_values = self._layers[layer]
        all_keys.narrow(1, start, count).copy_(keys)
        all_values.narrow(1, start, count).copy_(values)
        return all_keys.narrow(1, 0, start + count), all_values.narrow(1, 0, start + count)

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        self.ahead = None
        if not 0 <= length <= self.length:
            raise InputError(f"a cache of {self.length} positions cannot be cut to {length}; use 0 to {self.length}")
        self.length = length
