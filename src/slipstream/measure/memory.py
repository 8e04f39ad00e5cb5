"""Peak memory of this process, on Linux, macOS and Windows as far as each tells."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def reset_peak(device: Any) -> None:
    """Start a new peak at the present level, where the system can; else the peak is that of the whole process."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def used_bytes(device_name: str) -> int:
    """Memory in use now, where the system tells; else 0."""
    if device_name.startswith("cuda"):
        import torch

        return torch.cuda.memory_allocated(device_name)
    return _from_status("VmRSS") or 0


def peak_bytes(device: Any) -> int | None:
    """Most memory that was in use at once: of the GPU if the model is there, else resident in main memory."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return _from_status("VmHWM") or _maxrss()


def _from_status(entry: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{entry}:")), None)


def _maxrss() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
