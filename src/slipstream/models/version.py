"""A version for a model on disk, so that whoever watches sees that it was replaced."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
#: Of a large file so many blocks of so many bytes are looked at, evenly spread: training changes numbers everywhere.
_BLOCKS, _BLOCK = 256, 4096
_DIGITS = 12


def version_of(model: Path) -> str:
    """Twelve hexadecimal digits of the configuration and weights of a folder or a file; "" if there are none.

    In milliseconds, whatever the size: from the sizes of the files, and samples of what is in them.
    """
    files = [model] if model.is_file() else sorted({f for p in ("config.json", *_WEIGHTS) for f in model.glob(p)})
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.stat().st_size} ".encode())
        digest.update(_sample(file))
    return digest.hexdigest()[:_DIGITS] if files else ""


def trained_for(draft: Path) -> str:
    """The version of the target that ``slipstream distill`` made this draft for; "" if it does not say."""
    try:
        said = json.loads((draft / "distill.json").read_text(encoding="utf-8"))["target"]["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return said if isinstance(said, str) else ""


def _sample(file: Path) -> bytes:
    size = file.stat().st_size
    if size <= _BLOCKS * _BLOCK:
        return file.read_bytes()
    with file.open("rb") as opened:
        parts = []
        for number in range(_BLOCKS):
            opened.seek((size - _BLOCK) * number // (_BLOCKS - 1))
            parts.append(opened.read(_BLOCK))
    return b"".join(parts)
