"""What a long measurement has found so far, on disk, so that it can be taken up again after an interrupt."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.measure.files import write_whole
from slipstream.models.registry import cache_folder

FOLDER = ".work"


class Ledger:
    """Results by name, of one job; each is on disk as soon as it is there.

    Args:
        job: what the results depend on, of JSON's types. Another job has another file.
        fresh: forget what there is.
    """

    def __init__(self, job: Any, *, fresh: bool = False) -> None:
        digest = hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()[:24]
        self.path = cache_folder() / FOLDER / f"{digest}.jsonl"
        self._found: dict[str, Any] = {}
        if fresh:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        self.resumed = self._read()
        """Number of results that were there already."""

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def put(self, name: str, value: Any) -> None:
        """Remember ``value``, of JSON's types."""
        self._found[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, value]) + "\n")

    def done(self) -> None:
        """The job is over: what was on the way to its result is not needed any more."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _read(self) -> int:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return 0
        if lines and not self.path.read_bytes().endswith(b"\n"):
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in lines:
            with suppress(ValueError):  # the last one may have been cut off
                name, value = json.loads(line)
                self._found[name] = value
        return len(self._found)


def stamp(path: str) -> list[Any]:
    """What tells a file or folder from a later one under the same name."""
    found = Path(path).expanduser()
    files = sorted(found.iterdir()) if found.is_dir() else [found]
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in files if f.is_file()] or [path]


def write_text(path: str, text: str) -> None:
    """A file, whole or not at all."""
    write_whole(Path(path), lambda partial: partial.write_text(text, encoding="utf-8"))
