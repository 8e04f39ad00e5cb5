"""What the target says at each position that is learned from: asked as it is needed, or kept from the first time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InputError
from slipstream.models.base import Model

#: Rows of logits that are in memory at once.
_CHUNK = 256
#: A probability that stands for none.
_LEAST = 1e-8


@dataclass(frozen=True)
class Targets:
    """What the target says at N positions, over B outcomes."""

    log_probs: Tensor
    """(N, B)"""
    rows: Tensor | None = None
    """(N, B - 1) the rows of the draft's output layer that all outcomes but the last are; the last one is "any other".
    None: the outcomes are the rows, B = R."""

    def seen_by(self, draft: Tensor) -> Tensor:
        """The draft's log-probabilities (N, R) over the same outcomes, (N, B)."""
        if self.rows is None:
            return draft
        named = draft.gather(1, self.rows)
        rest = (1 - named.exp().sum(dim=1, keepdim=True)).clamp(min=_LEAST).log()
        return torch.cat((named, rest), dim=1)


class Teacher(Protocol):
    """A source of targets."""

    def targets(self, row: int, ids: Sequence[int], positions: Tensor) -> Targets:
        """At ``positions`` of ``ids``, which are row number ``row`` of the data; -1 for what is no part of it."""
        ...


class Asking:
    """Asks the target each time.

    Args:
        model: the target.
        output_ids: (R,) the ids that the draft has outputs for, None for all that both have.
        rows: R.
    """

    def __init__(self, model: Model, output_ids: Tensor | None, rows: int) -> None:
        self._ids = output_ids
        self.rows = rows
        limited = getattr(model, "with_outputs", None)
        view = limited(output_ids) if limited is not None and output_ids is not None else None
        self._limited = view is not None
        self._model: Model = view if view is not None else model

    def targets(self, row: int, ids: Sequence[int], positions: Tensor) -> Targets:
        """Over all rows of the draft's output layer, given that it is one of them."""
        parts = []
        for start, logits in chunks(self._model, ids):
            wanted = positions[(positions >= start) & (positions < start + len(logits))] - start
            parts.append(self._own(logits[wanted]))
        return Targets(torch.cat(parts).float().log_softmax(dim=-1))

    def _own(self, logits: Tensor) -> Tensor:
        if self._ids is not None and not self._limited:
            return logits[:, self._ids]
        return logits[:, : self.rows]


def chunks(model: Model, ids: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The logits at every one of ``ids``, (n, V) at a time, each with the position of its first."""
    cache = model.new_cache()
    for start in range(0, len(ids), _CHUNK):
        some = ids[start : start + _CHUNK]
        yield start, model.forward(some, cache, len(some))


class Keeping:
    """Asks once for each row, and keeps the likeliest outcomes and what the others have together.

    Kept on disk, in files that are as large as they will be from the start: ``SIZES`` bytes an outcome.
    """

    def __init__(self, teacher: Teacher, folder: Path, shape: tuple[int, int, int], *, fresh: bool) -> None:
        """``shape``: rows, positions of a row, outcomes that are kept of each."""
        folder.mkdir(exist_ok=True)
        self._teacher = teacher
        self._outcomes = _file(folder / "outcomes", np.int32, shape, fresh)
        self._log_probs = _file(folder / "log_probs", np.float32, shape, fresh)
        self._done = _file(folder / "done", np.uint8, shape[:1], fresh)

    def targets(self, row: int, ids: Sequence[int], positions: Tensor) -> Targets:
        """Over the kept outcomes and "any other"."""
        if row < 0:
            return self._teacher.targets(row, ids, positions)
        at = positions.numpy()
        if not self._done[row]:
            self._keep(row, self._teacher.targets(row, ids, positions), at)
        named = torch.from_numpy(self._log_probs[row, at])
        rest = (1 - named.exp().sum(dim=1, keepdim=True)).clamp(min=_LEAST).log()
        return Targets(torch.cat((named, rest), dim=1), torch.from_numpy(self._outcomes[row, at]).long())

    def _keep(self, row: int, targets: Targets, at: Any) -> None:
        best = targets.log_probs.topk(self._outcomes.shape[2], dim=1)
        self._outcomes[row, at] = best.indices.cpu().numpy()
        self._log_probs[row, at] = best.values.cpu().numpy()
        for file in (self._outcomes, self._log_probs):
            file.flush()
        self._done[row] = 1
        self._done.flush()


def _file(path: Path, kind: Any, shape: tuple[int, ...], fresh: bool) -> Any:
    """An array in a file whose room on the disk is taken at once: a full disk must not show while it is written to."""
    size = math.prod(shape) * np.dtype(kind).itemsize
    if fresh or not path.exists() or path.stat().st_size != size:
        try:
            with path.open("wb") as opened:
                os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise InputError(
                f"cannot write {str(path)!r}, which takes {size:,} bytes: {error.strerror or error}; make room, choose "
                "another --out, or give --keep 0"
            ) from error
    return np.memmap(path, kind, "r+", shape=shape)


#: Bytes that ``Keeping`` takes for an outcome at a position.
SIZES = 8
