"""Measures the memory of loading models and running one pass, in a process of its own: ``python -m ... 'JSON'``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_STATUS = Path("/proc/self/status")
_INTERVAL = 0.002
#: glibc's own first limit in bytes.
_MAPPED_FROM = 128 * 1024


@dataclass(frozen=True)
class Trial:
    """What to load and run."""

    models: tuple[tuple[str, str], ...]
    """Name and weights, the target first."""
    context: int
    k: int
    device: str = "cpu"
    batch: int = 1


@dataclass(frozen=True)
class Peak:
    """Bytes beyond the program itself."""

    bytes: int
    program: int
    """What the program had before it loaded anything."""


def measure_peak(trial: Trial) -> Peak | str:
    """Run ``trial`` in a process of its own; a sentence if it did not come to its end.

    glibc maps large arrays on their own until the first is freed; then it takes the next ones from its heap, where
    what was freed may stay: up to a quarter more, from one run to the next. The setting keeps it at the first.
    """
    command = [sys.executable, "-m", "slipstream.measure.peak", json.dumps(asdict(trial))]
    environment = {"MALLOC_MMAP_THRESHOLD_": str(_MAPPED_FROM), **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return Peak(**json.loads(done.stdout.splitlines()[-1]))
    if done.returncode == -9:
        return "the trial was killed, as systems do when memory runs out"
    said = done.stderr.strip().splitlines()
    return f"the trial failed ({said[-1][:200] if said else done.returncode})"


def _run(trial: Trial) -> Peak:
    """Load, fill the caches of the batch to ``context``, verify k + 1 tokens of each; in this process."""
    import gc

    import torch

    from slipstream.models.base import Item, feed, forward_each
    from slipstream.models.heap import return_freed
    from slipstream.models.load import open_checkpoint
    from slipstream.models.native.build import library

    library()
    device = torch.device(trial.device)
    if device.type == "cuda":
        torch.zeros(1, device=device)
    # Tokenizers and what transformers imports belong to the program.
    opened = [open_checkpoint(name, weights=weights, device=device) for name, weights in trial.models]
    gc.collect()
    return_freed()
    with _watching(device) as most:
        program = most[0]
        models = [checkpoint.load() for checkpoint in opened]
        held: list[object] = []
        for model in reversed(models):
            caches = [model.new_cache() for _ in range(trial.batch)]
            held.append(caches)
            tokens = [i % model.embedding_size for i in range(trial.context)]
            for cache in caches:
                feed(model, tokens, cache, 0)
                cache.truncate(max(0, trial.context - trial.k - 1))
            rows = trial.k + 1 if model is models[0] else 1
            rows_of_all = _passed(forward_each(model, [Item(tuple(tokens[-rows:]), cache, rows) for cache in caches]))
            (torch.cat(rows_of_all) if trial.batch > 1 else rows_of_all[0]).double().softmax(-1)
    return Peak(most[0] - program, program)


def _passed(found: Sequence[Tensor | Exception]) -> list[Tensor]:
    """Logits of every sequence, or the first error."""
    for one in found:
        if isinstance(one, Exception):
            raise one
    return [one for one in found if not isinstance(one, Exception)]


@contextmanager
def _watching(device: object) -> Iterator[list[int]]:
    """A list whose only entry is the most memory in use so far."""
    most, over = [_used(device)], threading.Event()
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        yield most
        most[0] = torch.cuda.max_memory_allocated()
        return

    def watch() -> None:
        while not over.wait(_INTERVAL):
            most[0] = max(most[0], _used(device))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def _used(device: object) -> int:
    """Memory of this process that is its own: pages of files do not count, since the system takes them back at will."""
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        return torch.cuda.memory_allocated()
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        from slipstream.measure.memory import peak_bytes

        return peak_bytes(device) or 0


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    given["models"] = tuple((name, weights) for name, weights in given["models"])
    sys.stdout.write(json.dumps(asdict(_run(Trial(**given)))) + "\n")
