"""Where the caches of many sequences live: an arena of fixed size a model, and slots in it that grow and move.

A slot is contiguous, since that is how kernels read it. Slots lie in one row; if the gap behind one is too small for it
to grow, the others move. So nothing is ever refused while enough is free in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.models.cache import KeyValueCache

#: Slots are whole multiples of so many positions.
QUANTUM = 64
#: What a position counts for where a model does not say what it takes.
_UNKNOWN_BYTES = 1 << 16
#: Numbers that are moved at once, which bounds the memory that moving takes.
_PIECE = 1 << 20


def position_bytes(model: Model) -> int:
    """Bytes of cache that one token takes."""
    return int(getattr(model, "position_bytes", _UNKNOWN_BYTES))


@dataclass(eq=False)
class Slot:
    """Room for one sequence."""

    cache: Any
    start: int
    capacity: int
    """In positions."""


class Arena:
    """Caches of many sequences of ``model``, of ``positions`` tokens in all.

    Caches of the lean decoder live in one tensor, made at once. Those of other models live where the model puts them,
    and are only counted.
    """

    def __init__(self, model: Model, positions: int) -> None:
        self.model = model
        self.positions = positions // QUANTUM * QUANTUM
        self.slots: list[Slot] = []
        """In the order in which they lie."""
        like = model.new_cache()
        self._flat: Tensor | None = None
        if isinstance(like, KeyValueCache):
            layers, two, heads, _, size = like.store.shape
            self._rows, self._size = (layers, two, heads), size
            self._width = layers * two * heads * size
            self._flat = like.store.new_empty(self.positions * self._width)

    @property
    def free(self) -> int:
        """Positions that are in no slot."""
        return self.positions - sum(slot.capacity for slot in self.slots)

    def take(self, need: int, want: int = 0) -> Slot | None:
        """A slot for ``need`` positions, or up to ``want`` if there are; None if ``need`` is not free."""
        capacity = self._capacity(need, want, self.free)
        if capacity is None:
            return None
        end = self.slots[-1].start + self.slots[-1].capacity if self.slots else 0
        slot = Slot(self.model.new_cache(), end, 0)
        self.slots.append(slot)
        self._resize(slot, capacity)
        return slot

    def grow(self, slot: Slot, need: int, want: int = 0) -> bool:
        """Make room for ``need`` positions in ``slot``, or up to ``want`` if there are; False if they are not free."""
        if need <= slot.capacity:
            return True
        capacity = self._capacity(need, want, slot.capacity + self.free)
        if capacity is None:
            return False
        self._resize(slot, capacity)
        return True

    def give_back(self, slot: Slot) -> None:
        """The sequence is over."""
        self.slots.remove(slot)
        slot.cache = None

    def _capacity(self, need: int, want: int, most: int) -> int | None:
        capacity = min(_whole(max(need, want)), most)
        return capacity if capacity >= need else None

    def _resize(self, slot: Slot, capacity: int) -> None:
        at = self.slots.index(slot)
        border = self.slots[at + 1].start if at + 1 < len(self.slots) else self.positions
        if slot.start + capacity > border:
            self._close_ranks(slot, capacity)
        self._relay(slot, slot.start, capacity)

    def _close_ranks(self, grown: Slot, capacity: int) -> None:
        """Move the slots together, with room for ``capacity`` positions in ``grown``."""
        starts, end = [], 0
        for slot in self.slots:
            starts.append(end)
            end += capacity if slot is grown else slot.capacity
        moves = list(zip(self.slots, starts, strict=True))
        # A slot that moves left never reaches one that is yet to move right, and the other way round.
        for slot, start in moves:
            if start < slot.start:
                self._move(slot, start)
        for slot, start in reversed(moves):
            if start > slot.start:
                self._move(slot, start)

    def _move(self, slot: Slot, start: int) -> None:
        if self._flat is not None:
            _shift(self._flat, slot.start * self._width, start * self._width, slot.capacity * self._width)
        slot.start = start
        self._place(slot)

    def _relay(self, slot: Slot, start: int, capacity: int) -> None:
        """Give ``slot`` more capacity where it is: each head's keys or values move apart, the last ones first."""
        if self._flat is not None:
            old = self._view(start, slot.capacity).flatten(0, 2)
            new = self._view(start, capacity).flatten(0, 2)
            for row in reversed(range(len(new))):
                new[row, : slot.cache.length] = old[row, : slot.cache.length].clone()
        slot.capacity = capacity
        self._place(slot)

    def _place(self, slot: Slot) -> None:
        if self._flat is not None:
            slot.cache.place(self._view(slot.start, slot.capacity))

    def _view(self, start: int, capacity: int) -> Tensor:
        assert self._flat is not None
        part = self._flat[start * self._width : (start + capacity) * self._width]
        return part.view(*self._rows, capacity, self._size)


def make_arenas(models: list[Model], memory: int) -> list[Arena]:
    """An arena for each model: all of the same number of positions, of ``memory`` bytes together.

    Raises:
        InputError: it is not enough for anything.
    """
    each = sum(map(position_bytes, models))
    positions = memory // each
    if positions < QUANTUM:
        raise InputError(
            f"memory={memory} bytes hold {positions} tokens at {each:,} bytes each; give at least {QUANTUM * each:,}"
        )
    return [Arena(model, positions) for model in models]


def _whole(positions: int) -> int:
    return -(-positions // QUANTUM) * QUANTUM


@torch.inference_mode()
def _shift(flat: Tensor, source: int, to: int, count: int) -> None:
    """Move ``count`` numbers within ``flat``, piece by piece, in the order in which none is overwritten unread."""
    pieces = range(0, count, _PIECE)
    for at in pieces if to < source else reversed(pieces):
        size = min(_PIECE, count - at)
        flat[to + at : to + at + size] = flat[source + at : source + at + size].clone()
