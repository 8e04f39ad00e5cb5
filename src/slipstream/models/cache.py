"""The key-value cache of the lean decoder: preallocated, growing by doubling, cut back by moving one number."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import InputError

_FIRST_CAPACITY = 256


class KeyValueCache:
    """Keys and values of one sequence, one (layers, 2, kv_heads, capacity, head_dim) tensor."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.length = 0
        self._store = torch.empty(layers, 2, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._layers: list[tuple[Tensor, Tensor]] = []

    @property
    def store(self) -> Tensor:
        """Everything that is held, (layers, 2, kv_heads, capacity, head_dim)."""
        return self._store

    @property
    def capacity(self) -> int:
        """Number of positions there is room for."""
        return self._store.shape[3]

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions."""
        capacity = self._store.shape[3]
        if length <= capacity:
            return
        grown = max(_FIRST_CAPACITY, 2 * capacity, length)
        shape = (*self._store.shape[:3], grown, self._store.shape[4])
        store = torch.empty(shape, dtype=self._store.dtype, device=self._store.device)
        store[:, :, :, : self.length] = self._store[:, :, :, : self.length]
        self._store = store
        # Views made once: a decode step should not spend its time on slicing.
        self._layers = [(keys, values) for keys, values in store]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one layer's ``keys`` and ``values`` (kv_heads, n, head_dim) behind ``length``, which stays as it is.

        Returns:
            That layer's keys and values up to and with the new ones, (kv_heads, length + n, head_dim).
        """
        count = keys.shape[1]
        all_keys, all_values = self._layers[layer]
        all_keys.narrow(1, self.length, count).copy_(keys)
        all_values.narrow(1, self.length, count).copy_(values)
        return all_keys.narrow(1, 0, self.length + count), all_values.narrow(1, 0, self.length + count)

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        if not 0 <= length <= self.length:
            raise InputError(f"a cache of {self.length} positions cannot be cut to {length}; use 0 to {self.length}")
        self.length = length
