"""Figures for TensorBoard, where a folder for them is given."""

from __future__ import annotations

from typing import Any


class Board:
    """Writes figures by step into ``folder``; nothing without one."""

    def __init__(self, folder: str | None, done: int = 0) -> None:
        """``done``: steps that count; figures of later ones, of a run that was killed behind them, are taken back."""
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(folder, purge_step=done + 1 if done else None)

    def add(self, name: str, value: float, step: int) -> None:
        """One figure."""
        if self._writer is not None:
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()
