"""Weights as the native kernels read them: panels of 16 outputs, input by input."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from slipstream.models.native.build import library

PANEL = 16
#: Rows that share one reading of the weights.
TILE = 6
#: Inputs that share one int8 scale of an output.
GROUP = 128
_KINDS = {"fp32": 0, "fp16": 1, "int8": 2}
KINDS = tuple(_KINDS)


class LinearStruct(ctypes.Structure):
    """``Linear`` of kernels.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class PanelLinear:
    """x W^T + b. A row's result has the same bits whatever the other rows are and however many.

    Made by ``pack``; only where ``library()`` is there.
    """

    kind: str
    outputs: int
    inputs: int
    weight: Tensor
    """fp32, fp16: (panels, inputs, 16); int8: (panels, inputs / 2, 16, 2)."""
    scale: Tensor | None
    """int8: (panels, groups, 16)."""
    bias: Tensor | None
    """(panels * 16,)"""

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, kind: str) -> PanelLinear:
        """Round ``weight`` (out, in) to ``kind``."""
        outputs, inputs = weight.shape
        weight = F.pad(weight.float(), (0, 0, 0, -outputs % PANEL))
        bias = None if bias is None else F.pad(bias.float(), (0, -outputs % PANEL))
        if kind == "int8":
            packed, scale = _bytes(weight)
            return cls(kind, outputs, inputs, packed, scale, bias)
        stored = weight.to(torch.float16 if kind == "fp16" else torch.float32)
        panels = stored.view(-1, PANEL, inputs).transpose(1, 2).contiguous()
        return cls(kind, outputs, inputs, panels, None, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)."""
        rows, stride = len(x), padded(self.inputs)
        padded_x = F.pad(x, (0, stride - self.inputs)).contiguous()
        y = torch.empty(rows, padded(self.outputs))
        steps, step = torch.empty(rows, stride, dtype=torch.int16), torch.empty(rows)
        lib = library()
        assert lib is not None
        lib.slipstream_linear(
            ctypes.byref(self.struct()),
            rows,
            padded_x.data_ptr(),
            y.data_ptr(),
            steps.data_ptr(),
            step.data_ptr(),
            torch.get_num_threads(),
        )
        return y[:, : self.outputs]

    def quick(self) -> PanelLinear:
        """Itself."""
        return self

    def bit_exact(self) -> PanelLinear:
        """Itself."""
        return self

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights (n, in) of some outputs, as they are stored; not for int8."""
        return self.weight[outputs // PANEL, :, outputs % PANEL]

    def struct(self) -> LinearStruct:
        """What the kernels are given; valid as long as this object lives."""
        return LinearStruct(
            _KINDS[self.kind], self.outputs, self.inputs, address(self.weight), address(self.scale), address(self.bias)
        )


def padded(n: int) -> int:
    """``n`` rounded up to whole panels."""
    return n + -n % PANEL


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None for None."""
    return None if tensor is None else tensor.data_ptr()


def _bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) to whole numbers in panels and the scales of groups of inputs."""
    outputs, inputs = weight.shape
    grouped = F.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    scale = grouped.abs().amax(dim=2).clamp(min=1e-30) / 127
    whole = (grouped / scale.unsqueeze(2)).round_().to(torch.int8).view(outputs, -1)[:, : inputs + inputs % 2]
    panels = whole.view(-1, PANEL, whole.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return panels, scale.view(-1, PANEL, scale.shape[1]).transpose(1, 2).contiguous()
