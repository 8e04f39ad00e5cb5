"""``--capture DIR``: prompts and answers, kept for the training of drafts.

Every answer is one JSON line, written by one system call, so that files hold whole lines even after a ``kill -9``.
Files are rotated, and the oldest go when there are too many. Writing is a thread's: it never holds up an answer, and
when the disk is full, or anything else is wrong with it, capturing ends and serving goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any

from slipstream.errors import InputError

Record = dict[str, Any]
#: Changes a record before it is written, or drops it with None.
Redact = Callable[[Record], Record | None]
#: Called with what became of a record: "written", or why not.
Count = Callable[[str], None]

_NAME = re.compile(r"chats-\d{8}T\d{6}-\d+-\d+\.jsonl")
_WAITING = 256
_MEGABYTE = 2**20


@dataclass(frozen=True)
class CaptureSettings:
    """Where to, how much, and what of it."""

    folder: str
    rate: float = 1.0
    """Share of the answers that is kept, in (0, 1]."""
    file_bytes: int = 64 * _MEGABYTE
    """A file is followed by the next one before it grows over this."""
    total_bytes: int = 1024 * _MEGABYTE
    """The oldest files go when there is more than this in the folder."""
    redact: str | None = None
    """``module:function``."""


class Capture:
    """Keeps records; ``offer`` may be called from any thread and neither waits nor raises.

    Raises:
        InputError: the folder cannot be used or is another server's, or the redaction cannot be found.
    """

    def __init__(self, settings: CaptureSettings, count: Count | None = None) -> None:
        self.rate = settings.rate
        self.stopped: OSError | None = None
        """Why nothing is kept any more."""
        self._count = count or (lambda _: None)
        self._redact = find_hook(settings.redact)
        self._folder = Folder(Path(settings.folder), settings.file_bytes, settings.total_bytes)
        self._random = random.Random()
        self._queue: Queue[Record | None] = Queue(_WAITING)
        self._thread = Thread(target=self._work, name="capture", daemon=True)
        self._thread.start()

    def offer(self, record: Record) -> None:
        """Keep a record, if it is drawn and the disk keeps up."""
        if self.stopped is not None or self._random.random() >= self.rate:
            return
        try:
            self._queue.put_nowait(record)
        except Full:
            self._count("too many at a time")

    def close(self, seconds: float = 5.0) -> None:
        """Write what is waiting, and end."""
        with suppress(Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)
        self._folder.close()

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            if self.stopped is not None:
                continue
            try:
                self._count(self._keep(record))
            except OSError as error:
                self.stopped = error
                self._count("disk")
                _tell_stopped(error)

    def _keep(self, record: Record) -> str:
        try:
            kept = self._redact(json.loads(json.dumps(record)))
            line = None if kept is None else json.dumps(kept, ensure_ascii=False).encode() + b"\n"
        except (Exception, SystemExit) as error:  # the operator's code; what it could not redact is not written
            _tell_unredacted(error)
            return "redaction failed"
        if line is None:
            return "redacted"
        return "written" if self._folder.write(line) else "too long"


class Folder:
    """A bounded folder of JSON lines. For one thread at a time.

    Raises:
        InputError: it cannot be made or written to, or another server uses it.
    """

    def __init__(self, path: Path, file_bytes: int, total_bytes: int) -> None:
        self.path = path
        self._file_bytes = min(file_bytes, total_bytes)
        self._total_bytes = total_bytes
        self._file: int | None = None
        self._size = 0
        self._number = 0
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"--capture {path} cannot be used: {reason}; give a folder to write to") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise InputError(f"--capture {path} is in use by another server; give each its own folder") from None

    def write(self, line: bytes) -> bool:
        """Add a line; False if it is longer than a file may be.

        Raises:
            OSError: the disk is full, or fails; what was written of the line is taken back.
        """
        if len(line) > self._file_bytes:
            return False
        if self._file is None or self._gone or self._size + len(line) > self._file_bytes:
            self._next(len(line))
        assert self._file is not None
        try:
            written = os.write(self._file, line)
            while written < len(line):  # nearly full: the next call says so
                written += os.write(self._file, line[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        return True

    def files(self) -> list[Path]:
        """The files, oldest first."""
        return files_of(self.path)

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def _gone(self) -> bool:
        """Whether somebody has deleted the file that is written to: what came then would be nowhere."""
        return self._file is not None and os.fstat(self._file).st_nlink == 0

    def _next(self, coming: int) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._drop_oldest(max(coming, self._file_bytes))
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        self._number += 1
        name = f"chats-{now}-{self._number:06d}-{os.getpid()}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._file, self._size = os.open(self.path / name, flags, 0o600), 0

    def _drop_oldest(self, coming: int) -> None:
        sizes: dict[Path, int] = {}
        for file in self.files():
            with suppress(FileNotFoundError):  # others may take files away at any time
                sizes[file] = file.stat().st_size
        for file in list(sizes):
            if sum(sizes.values()) + coming <= self._total_bytes:
                break
            file.unlink(missing_ok=True)
            del sizes[file]


def files_of(folder: Path) -> list[Path]:
    """Captured files in ``folder``, oldest first."""
    return sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name))


def read_captured(folder: Path) -> Iterator[Record]:
    """All records, oldest first; a line that was cut off (a machine that lost power) is left out."""
    for file in files_of(folder):
        with file.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    with suppress(ValueError):
                        yield json.loads(line)


def find_hook(name: str | None) -> Redact:
    """The function that ``module:function`` names; without a name, one that changes nothing.

    Raises:
        InputError: there is no such function.
    """
    if name is None:
        return lambda record: record
    module, _, function = name.partition(":")
    try:
        found = getattr(import_module(module), function)
    except Exception as error:  # the operator's code is run, and may do anything
        what = str(error) or type(error).__name__
        raise InputError(
            f"--capture-redact {name}: {what}; give module:function, with the module's folder in PYTHONPATH"
        ) from error
    if not callable(found):
        raise InputError(f"--capture-redact {name} is no function; give one that takes and returns a record")
    return lambda record: _checked(found(record), name)


def _checked(record: Any, name: str) -> Record | None:
    if record is not None and not isinstance(record, Mapping):
        raise TypeError(f"{name} returned a {type(record).__name__}, not a dict or None")
    return None if record is None else dict(record)


def _tell_stopped(error: OSError) -> None:
    from slipstream.serve.logs import log

    log.error("capture stopped", extra={"fields": {"reason": error.strerror or str(error)}})


def _tell_unredacted(error: BaseException) -> None:
    from slipstream.serve.logs import described, log

    log.error("redaction failed; the record was dropped", extra={"fields": described(error)})
