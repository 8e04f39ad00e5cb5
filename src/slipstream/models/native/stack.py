"""A whole decoder in one call: the layers of a model, described to the native kernels once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cache import KeyValueCache
from slipstream.models.native.build import library
from slipstream.models.native.panels import LinearStruct, PanelLinear, address, padded


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        ("window", ctypes.c_int64),
    )


class _ModelStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn")),
        ("eps", ctypes.c_double),
        ("layer", ctypes.POINTER(_LayerStruct)),
        ("norm", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("head", LinearStruct),
    )


class _RowStruct(ctypes.Structure):
    _fields_ = (("cache", ctypes.c_void_p), ("capacity", ctypes.c_int64), ("position", ctypes.c_int64))


@dataclass(frozen=True)
class Rows:
    """Where each row of a pass belongs: its cache and its position there."""

    caches: Sequence[KeyValueCache]
    positions: Sequence[int]

    def struct(self) -> ctypes.Array[_RowStruct]:
        """What the kernels are given."""
        made = (_RowStruct * len(self.caches))()
        for row, cache, position in zip(made, self.caches, self.positions, strict=True):
            row.cache, row.capacity, row.position = cache.store.data_ptr(), cache.capacity, position
        return made


class Stack:
    """The layers and output layer of a Llama-family decoder.

    Args:
        layers: objects with the fields of ``_LayerStruct``, linear layers as ``PanelLinear``.
        head: the output layer.
        norm: (width,), the final norm's weight.
        shape: heads, key/value heads, head size.
        eps: of all norms.
    """

    def __init__(
        self, layers: Sequence[Any], head: PanelLinear, norm: Tensor, shape: tuple[int, int, int], eps: float
    ) -> None:
        structs = [_layer(layer) for layer in layers]
        self._layers = (_LayerStruct * len(structs))(*structs)
        heads, kv_heads, head_dim = shape
        width, ffn = head.inputs, layers[0].down.inputs if layers else 1
        self._model = _ModelStruct(
            len(structs), width, heads, kv_heads, head_dim, ffn, eps, self._layers, address(norm), None, head.struct()
        )
        self._kept = (layers, head, norm)  # the structs hold addresses only
        self.width = padded(width)
        self._head = head

    def forward(
        self, x: Tensor, rows: Rows, turns: Tensor, num_logits: int, layers: tuple[int, int] | None = None
    ) -> Tensor:
        """Run ``x`` through some layers, in place, and the last rows of it through the output layer.

        Args:
            x: (n, width padded to 16), contiguous float32; embeddings before, hidden states after.
            rows: the caches to append to and the positions to append at.
            turns: (positions, 2, head_dim), beyond every position.
            num_logits: of how many of the last rows logits are wanted.
            layers: first and one past the last; None for all.

        Returns:
            (num_logits, outputs)
        """
        lib = library()
        assert lib is not None
        first, last = layers or (0, self._model.layers)
        n, longest, threads = len(x), max(rows.positions) + 1, torch.get_num_threads()
        model = _ModelStruct.from_buffer_copy(self._model)
        model.turns = turns.data_ptr()
        pointer = ctypes.byref(model)
        logits = torch.empty(num_logits, padded(self._head.outputs))
        work = torch.empty(lib.slipstream_work(pointer, n, longest, threads))
        lib.slipstream_forward(
            pointer,
            first,
            last,
            n,
            rows.struct(),
            x.data_ptr(),
            num_logits,
            logits.data_ptr(),
            work.data_ptr(),
            longest,
            threads,
        )
        return logits[:, : self._head.outputs]


def _layer(layer: Any) -> _LayerStruct:
    products = [getattr(layer, name).struct() for name in ("qkv", "out", "gate_up", "down")]
    norms = [address(getattr(layer, name)) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")]
    return _LayerStruct(*products, *norms, layer.window or 0)
