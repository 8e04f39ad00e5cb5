"""Linear layers by kind of weights: ``make_linear`` hides how they are stored and multiplied.

On a CPU the dense types of torch make a pass over five rows cost three to four times a pass over one. Our native
kernels do not, nor, where those cannot be had, the packed weights of torch's FBGEMM.
"""

from __future__ import annotations

import math
import warnings
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from slipstream.errors import InputError
from slipstream.models.native.build import library
from slipstream.models.native.panels import KINDS, PanelLinear

#: Weights that are stored and multiplied in one torch type.
DENSE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Weights that are packed for FBGEMM on a CPU; activations are float32.
PACKED = ("fp16", "int8")
#: A row of activations is brought to [-1, 1] and rounded to 63 steps each way: 7 bits, so that the sum of two products
#: with 8-bit weights stays inside the 16 bits that AVX2 adds them in.
_STEPS = 63
_ZERO = 64


class Linear(Protocol):
    """x W^T + b."""

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        ...

    def quick(self) -> Linear:
        """The same weights with the cheapest arithmetic: good enough for drafts."""
        ...

    def bit_exact(self) -> Linear:
        """The same weights; a row's result has the same bits whatever the other rows are and however many."""
        ...


class DenseLinear:
    """Weights in one of torch's own types."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, by_row: bool = False) -> None:
        self._weight = weight
        self._bias = bias
        self._by_row = by_row

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        if self._by_row and len(x) > 1:
            return torch.cat([F.linear(row, self._weight, self._bias) for row in x.split(1)])
        return F.linear(x, self._weight, self._bias)

    def quick(self) -> DenseLinear:
        """Itself."""
        return self

    def bit_exact(self) -> DenseLinear:
        """One product a row, since how rows are summed depends on how many there are."""
        return DenseLinear(self._weight, self._bias, by_row=True)


class HalfLinear:
    """fp16 weights packed for FBGEMM, float32 activations and sums."""

    def __init__(self, packed: torch.ScriptObject, *, row_multiple: int = 1) -> None:
        self._packed = packed
        self._row_multiple = row_multiple

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> HalfLinear:
        """Round ``weight`` (out, in) to fp16."""
        return cls(torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias))

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        rows = len(x)
        if missing := -rows % self._row_multiple:
            x = F.pad(x, (0, 0, 0, missing))
        y: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        return y[:rows]

    def quick(self) -> HalfLinear:
        """Itself."""
        return self

    def bit_exact(self) -> HalfLinear:
        """Rows padded to a multiple of three: kernels for a rest of one or two rows sum in an order of their own."""
        return HalfLinear(self._packed, row_multiple=3)


class ByteLinear:
    """8-bit weights with a scale an output channel; activations of 7 bits, or of 14 in two parts.

    Two parts: s = 63 row / its absolute maximum; high = round(s); low = 126 (s - high). Both are rows of one call, and
    y = (y_high + y_low / 126) maximum / 63. The scale is the row's own, so its neighbours do not matter.
    """

    def __init__(self, packed: torch.ScriptObject, bias: Tensor | None, parts: int = 2) -> None:
        self._packed = packed
        self._bias = bias
        self._parts = parts

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> ByteLinear:
        """Round ``weight`` (out, in) to 8 bits a channel."""
        scales = weight.abs().amax(dim=1).clamp(min=1e-12).double() / 127
        with warnings.catch_warnings():  # torch announces a successor that has no such kernels
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(
                weight.float(), scales, torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
            )
        return cls(torch.ops.quantized.linear_prepack(rounded, None), bias)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        if self._parts == 1 and len(x) == 1:
            # One row's range is the batch's range: one operation that finds it, rounds and multiplies.
            single: Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, reduce_range=True)
            return single if self._bias is None else single.add_(self._bias)
        step = (torch.linalg.vector_norm(x, ord=math.inf, dim=1, keepdim=True) / _STEPS).clamp_(min=1e-30)
        steps = x / step
        if self._parts == 1:
            y = self._multiply(steps)
        else:
            high = steps.round()
            both = self._multiply(torch.cat((high, (steps - high).mul_(2 * _STEPS))))
            y = both[: len(x)].add_(both[len(x) :], alpha=1 / (2 * _STEPS))
        y *= step
        return y if self._bias is None else y.add_(self._bias)

    def quick(self) -> ByteLinear:
        """One-part activations."""
        return ByteLinear(self._packed, self._bias, parts=1)

    def bit_exact(self) -> ByteLinear:
        """Itself: sums of integers have no order."""
        return self

    def _multiply(self, steps: Tensor) -> Tensor:
        """The product with whole numbers of steps in [-63, 63]; what is between is rounded."""
        multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        y: Tensor = multiply(steps, 1.0, _ZERO, self._packed)
        return y


def activation_dtype(weights: str, device: torch.device) -> torch.dtype:
    """The floating type that activations have beside such ``weights``.

    Raises:
        InputError: a name that is not known, or not on this device.
    """
    if device.type == "cpu" and weights in PACKED:
        return torch.float32
    if weights not in DENSE:
        raise InputError(f"weights={weights!r} is not available on {device.type}; use 'fp32', 'bf16' or 'auto'")
    return DENSE[weights]


def embedding_dtype(weights: str) -> torch.dtype:
    """The type that an embedding table is kept in beside such ``weights``."""
    return DENSE.get(weights, torch.float16)


def stored_bytes(weights: str, dimensions: int) -> int:
    """Bytes of one number of a tensor: matrices are stored as ``weights`` says, vectors like activations."""
    if weights == "int8":
        return 1 if dimensions > 1 else 4
    if dimensions > 1 or weights not in PACKED:
        return DENSE[weights].itemsize
    return 4


def make_linear(weight: Tensor, bias: Tensor | None, weights: str) -> Linear:
    """A layer computing x W^T + b.

    Args:
        weight: (out, in), in the type of the activations, on their device.
        bias: (out,) or None.
        weights: how to keep them, a name that ``activation_dtype`` accepted.
    """
    if weight.device.type == "cpu" and weights in KINDS and library() is not None:
        return PanelLinear.pack(weight, bias, weights)
    if weight.device.type == "cpu" and weights == "fp16":
        return HalfLinear.pack(weight, bias)
    if weight.device.type == "cpu" and weights == "int8":
        return ByteLinear.pack(weight, bias)
    return DenseLinear(weight, bias)


def packed_kernels() -> bool:
    """Whether there are products with packed weights here: our own, or those of torch's FBGEMM."""
    if library() is not None:
        return True
    try:
        for kind in PACKED:
            make_linear(torch.ones(8, 8, dtype=torch.float32), None, kind)(torch.ones(1, 8, dtype=torch.float32))
    except (RuntimeError, AttributeError):
        return False
    return True
