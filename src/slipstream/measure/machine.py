"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("slipstream", "torch", "transformers")


@dataclass(frozen=True)
class Machine:
    """The machine, its software, and the moment."""

    cpu: str
    cores: int
    """Cores that this process may use."""
    threads: int
    """PyTorch's threads within an operation."""
    instructions: str
    """What PyTorch's kernels use, such as AVX2."""
    memory_bytes: int | None
    accelerator: str | None
    system: str
    versions: dict[str, str]
    date: str
    """UTC, ISO 8601."""


def describe_machine(device: torch.device) -> Machine:
    """This machine, now; the accelerator is named if ``device`` is one."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability(),
        memory_bytes=_memory(),
        accelerator=_accelerator(device),
        system=f"{platform.system()} {platform.machine()}",
        versions=versions,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def memory_bytes(device: str) -> int | None:
    """Bytes of memory of a device; None if it is not here."""
    if device.split(":")[0] == "cpu":
        return _memory()
    here = device.startswith("cuda") and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(device).total_memory) if here else None


def _accelerator(device: torch.device) -> str | None:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return None if device.type == "cpu" else device.type


def package_version() -> str:
    """Of Slipstream; "unknown" where it is not installed."""
    try:
        return version("slipstream")
    except PackageNotFoundError:
        return "unknown"
