"""Linear layers by kind of weights: ``make_linear`` hides how they are stored and multiplied."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from slipstream.errors import InputError

#: (rows, in) -> (rows, out)
Linear = Callable[[Tensor], Tensor]

#: Weights that are stored and multiplied in one torch type.
DENSE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def activation_dtype(weights: str, device: torch.device) -> torch.dtype:
    """The floating type that activations have beside such ``weights``.

    Raises:
        InputError: a name that is not known, or not on this device.
    """
    if weights not in DENSE or (weights == "fp16" and device.type == "cpu"):
        raise InputError(f"weights={weights!r} is not available on {device.type}; use 'fp32', 'bf16' or 'auto'")
    return DENSE[weights]


def make_linear(weight: Tensor, bias: Tensor | None, weights: str) -> Linear:
    """A layer computing x W^T + b.

    Args:
        weight: (out, in).
        bias: (out,) or None.
        weights: how to keep them, a name that ``activation_dtype`` accepted.
    """
    kept = weight.to(DENSE[weights])
    kept_bias = None if bias is None else bias.to(DENSE[weights])
    return lambda x: F.linear(x, kept, kept_bias)
