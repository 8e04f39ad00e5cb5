"""Files that are either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import InputError, SlipstreamError


def check_writable(option: str, name: str) -> None:
    """Refuse a path that nothing can be written to, before the work whose result is to go there.

    Raises:
        InputError: the folder is missing or closed, or the path is a folder itself.
    """
    path = Path(name)
    try:
        folder = path.resolve().parent
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{option} {name[:200]!r} is not usable as a path ({error}); choose another") from error
    if not folder.is_dir():
        raise InputError(f"{option} {name!r} is in a folder that does not exist; make the folder first")
    if path.is_dir():
        raise InputError(f"{option} {name!r} is a folder; give the path of a file")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"{option} {name!r} cannot be written; choose another place")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a file beside ``path``, then put it in its place at once; a device is written as it is.

    Raises:
        SlipstreamError: the disk is full, or something else that shows only now.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    special = path.exists() and not path.is_file()  # replacing /dev/null would break the machine
    try:
        write(path if special else partial)
        if not special:
            partial.replace(path)
    except OSError as error:
        raise SlipstreamError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
