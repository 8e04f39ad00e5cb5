"""A small head between a target's first layers and its output layer, trained for early exit: norm and adapter.

    x (n, D) -> y = rms_norm(x) * norm -> y + up(down(y)) -> the target's own output layer

A folder holds ``exit_head.safetensors`` with ``norm`` (D,), ``down`` (r, D), ``up`` (D, r), and ``exit_head.json`` with
the number of layers before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from slipstream.errors import InputError

WEIGHTS, SETTINGS = "exit_head.safetensors", "exit_head.json"


@dataclass(frozen=True)
class ExitHead:
    """Its weights, and how many of the target's layers come before it."""

    layers: int
    norm: Tensor
    down: Tensor
    up: Tensor

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """(n, D) -> (n, D)."""
        y = F.rms_norm(x, self.norm.shape, self.norm, eps)
        return y + F.linear(F.linear(y, self.down), self.up)

    def to(self, like: Tensor) -> ExitHead:
        """In the type and on the device of ``like``."""
        return ExitHead(self.layers, self.norm.to(like), self.down.to(like), self.up.to(like))


def save_exit_head(head: ExitHead, folder: Path, about: Mapping[str, Any]) -> None:
    """Write it into ``folder``, which exists; ``about`` is kept beside the number of layers."""
    from safetensors.torch import save_file

    tensors = {"norm": head.norm, "down": head.down, "up": head.up}
    save_file({n: t.detach().float().contiguous() for n, t in tensors.items()}, folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    (folder / SETTINGS).write_text(json.dumps({"layers": head.layers, **about}, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Exit:
    """Where a pass ends early: behind so many layers, with a head or the model's own last norm."""

    layers: int
    head: ExitHead | None = None


def read_exit_head(folder: Path) -> ExitHead:
    """The head in ``folder``.

    Raises:
        InputError: there is none, or it is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        layers = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["layers"]
        tensors = load_file(folder / WEIGHTS)
        head = ExitHead(int(layers), tensors["norm"], tensors["down"], tensors["up"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise InputError(f"{folder} holds no exit head that can be read ({error}); make it again") from error
    width, rank = head.norm.shape[0], head.down.shape[0]
    if head.down.shape != (rank, width) or head.up.shape != (width, rank):
        raise InputError(f"the exit head in {folder} has shapes that do not fit each other; make it again")
    if not all(torch.isfinite(t).all() for t in tensors.values()):
        raise InputError(f"the exit head in {folder} holds numbers that are not finite; make it again")
    return head
