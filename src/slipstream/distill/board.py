"""Figures for TensorBoard, where a folder for them is given."""

from __future__ import annotations

from typing import Any


class Board:
    """Writes figures by step into ``folder``; nothing without one."""

    def __init__(self, folder: str | None) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(folder)

    def add(self, name: str, value: float, step: int) -> None:
        """One figure."""
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)
