"""Compile ``kernels.cpp`` once, keep the library in the cache, load it.

There is no compiled part in the package: the machine's own C++ compiler makes it, in seconds, when a model is first
loaded. Without one, or on another kind of processor, everything works with torch's own kernels, more slowly.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ("-O3", "-std=c++17", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fopenmp", "-fPIC", "-shared")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300
#: Set to "0" to do without.
SWITCH = "SLIPSTREAM_NATIVE"


class UnavailableError(Exception):
    """Why there are no native kernels here: half a sentence."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none; ``why_not`` then has the reason."""
    try:
        return _load(_built())
    except UnavailableError:
        return None


def why_not() -> str | None:
    """Half a sentence why ``library`` has nothing here, or None if it has."""
    if library() is not None:
        return None
    try:
        _load(_built())
    except UnavailableError as reason:
        return str(reason)
    return None


def _built() -> Path:
    if os.environ.get(SWITCH) == "0":
        raise UnavailableError(f"{SWITCH}=0 is set")
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        raise UnavailableError("the processor has no AVX2")
    compiler = _compiler()
    command = [compiler, *_FLAGS]
    key = hashlib.sha256("\0".join([*command, _version(compiler), _SOURCE.read_text()]).encode()).hexdigest()[:16]
    folder = _folder()
    file = folder / f"kernels-{key}.so"
    if not file.exists():
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{file.name}.", delete=False) as made:
            pass
        try:
            _compile([*command, "-o", made.name, str(_SOURCE), *_openmp()])
            Path(made.name).replace(file)
        finally:
            Path(made.name).unlink(missing_ok=True)
    return file


def _compiler() -> str:
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else _COMPILERS:
        if name and (path := shutil.which(name)):
            return path
    raise UnavailableError(f"CXX={chosen} is not found" if chosen else "there is no C++ compiler (c++, g++ or clang++)")


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _compile(command: list[str]) -> None:
    _run(command)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(f"{command[0]} cannot be run ({error})") from error
    if done.returncode != 0:
        first = (done.stderr.strip() or "no message").splitlines()[0]
        raise UnavailableError(f"{command[0]} failed: {first}")
    return done.stdout


def _openmp() -> list[str]:
    """torch's own OpenMP library, so that both use one pool of threads rather than two that fight for the cores."""
    beside = Path(torch.__file__).parent / "lib"
    return [str(file) for file in sorted(beside.glob("libgomp*.so*"))[:1]]


def _folder() -> Path:
    """Where compiled kernels are kept: the user's cache folder, or the temporary one if that cannot be written."""
    name = "slipstream-kernels"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for folder in (user / name, Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise UnavailableError("neither the cache folder nor the temporary folder can be written")


def _load(file: Path) -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL(str(file))
    except OSError as error:
        raise UnavailableError(f"the compiled kernels cannot be loaded ({error})") from error
    i64, pointer = ctypes.c_int64, ctypes.c_void_p
    lib.slipstream_work.argtypes = [pointer, i64, i64, i64]
    lib.slipstream_work.restype = i64
    lib.slipstream_forward.argtypes = [
        pointer, i64, i64, i64, pointer, pointer, i64, pointer, pointer, i64, i64,
    ]  # fmt: skip
    lib.slipstream_forward.restype = None
    lib.slipstream_linear.argtypes = [pointer, i64, pointer, pointer, pointer, pointer, i64]
    lib.slipstream_linear.restype = None
    return lib
