"""Texts of a usual Linux machine to train drafts on: Python's standard library, and the licences of its packages."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

#: Parts of the library that are no usual code, or not of the library.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}


def code(folder: Path) -> Path:
    """The standard library's modules without tests; each module is an entry of ``folder``."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        inside = file.relative_to(library)
        if not _LEFT_OUT & set(inside.parts) and not inside.parts[0].startswith("_sysconfigdata"):
            _copy(file, folder / inside)
    return folder


def legal(folder: Path) -> Path:
    """Licences and copyright notices; each package is an entry of ``folder``."""
    for file in sorted(Path("/usr/share/common-licenses").glob("*")):
        if not file.is_symlink():
            _copy(file, folder / file.name)
    for file in sorted(Path("/usr/share/doc").glob("*/copyright")):
        if not file.is_symlink() and not file.parent.is_symlink():
            _copy(file, folder / file.parent.name / "copyright.txt")
    return folder


def _copy(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copyfile(file, target)
