"""Capture: whole lines, bounded folders, redaction, and what becomes of it all when the disk is full."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream import InputError
from slipstream.serve import capture as module
from slipstream.serve.capture import Capture, CaptureSettings, Folder, files_of, read_captured


def captured(folder: Path) -> list[dict[str, Any]]:
    return list(read_captured(folder))


def until(wanted: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not wanted():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def kept(folder: Path, count: int = 3, outcomes: Counter[str] | None = None, **settings: Any) -> None:
    """Offer so many records, and close."""
    outcomes = Counter() if outcomes is None else outcomes
    capture = Capture(CaptureSettings(str(folder), **settings), lambda outcome: outcomes.update([outcome]))
    for number in range(count):
        capture.offer({"prompt": f"p{number}", "answer": "x\n\N{SNOWMAN}"})
        until(lambda: not capture._queue.full())
    capture.close()


def test_records_are_lines(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    kept(tmp_path / "new" / "folder", 3, outcomes)
    folder = tmp_path / "new" / "folder"
    assert [r["prompt"] for r in captured(folder)] == ["p0", "p1", "p2"]
    (file,) = files_of(folder)
    assert len(file.read_text(encoding="utf-8").splitlines()) == 3
    assert outcomes == {"written": 3}


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    before = os.umask(0)
    try:
        kept(folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files_of(folder))


def test_files_are_rotated_and_the_oldest_go(tmp_path: Path) -> None:
    kept(tmp_path, 200, file_bytes=1000, total_bytes=5000)
    sizes = [file.stat().st_size for file in files_of(tmp_path)]
    assert len(sizes) >= 4
    assert all(size <= 1000 for size in sizes)
    assert sum(sizes) <= 5000
    numbers = [int(r["prompt"][1:]) for r in captured(tmp_path)]
    assert numbers == list(range(numbers[0], 200))  # the newest, in order, without a gap
    assert numbers[0] > 0


def test_the_bound_holds_over_restarts(tmp_path: Path) -> None:
    for _ in range(5):
        kept(tmp_path, 40, file_bytes=1000, total_bytes=3000)
        assert sum(file.stat().st_size for file in files_of(tmp_path)) <= 3000


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "chats-mine.jsonl").write_text("precious" * 1000, encoding="utf-8")
    kept(tmp_path, 100, file_bytes=500, total_bytes=1000)
    assert (tmp_path / "chats-mine.jsonl").exists()


def test_a_record_longer_than_a_file(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    kept(tmp_path, 1, outcomes, file_bytes=20)
    assert outcomes == {"too long": 1}
    assert captured(tmp_path) == []


def test_sampling(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    capture = Capture(CaptureSettings(str(tmp_path), rate=0.25), lambda outcome: outcomes.update([outcome]))
    capture._random.seed(0)
    for number in range(1000):
        capture.offer({"prompt": str(number)})
        until(lambda: not capture._queue.full())
    capture.close()
    assert 200 < outcomes["written"] < 300


def redact(record: dict[str, Any]) -> dict[str, Any] | None:
    """What an operator's hook may do."""
    if record["prompt"] == "p1":
        return None
    if record["prompt"] == "p2":
        raise ValueError("p2 is too much for it")
    if record["prompt"] == "p4":
        sys.exit("the hook has had enough")
    record["answer"] = "***"
    return record


def test_redaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hook drops, or fails at, is not written."""
    monkeypatch.setitem(sys.modules, "hooks_of_tests", sys.modules[__name__])
    outcomes: Counter[str] = Counter()
    kept(tmp_path, 6, outcomes, redact="hooks_of_tests:redact")
    assert [record["prompt"] for record in captured(tmp_path)] == ["p0", "p3", "p5"]
    assert {record["answer"] for record in captured(tmp_path)} == {"***"}
    assert outcomes == {"written": 3, "redacted": 1, "redaction failed": 2}


def test_the_hook_cannot_change_what_others_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hooks_of_tests", sys.modules[__name__])
    record = {"prompt": "p0", "answer": "a"}
    capture = Capture(CaptureSettings(str(tmp_path), redact="hooks_of_tests:redact"))
    capture.offer(record)
    capture.close()
    assert record["answer"] == "a"


@pytest.mark.parametrize("hook", ["no.such.module:f", "json:nothing", "json", "json:__name__", ":f", "json:"])
def test_hooks_that_are_not_there(tmp_path: Path, hook: str) -> None:
    with pytest.raises(InputError, match="--capture-redact"):
        Capture(CaptureSettings(str(tmp_path), redact=hook))


@pytest.mark.parametrize("code", ["def redact(record) return", "redact = nothing", "raise RuntimeError"])
def test_a_hook_that_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Only a missing module was told in a sentence; a mistake in it ended in a traceback."""
    (tmp_path / "broken_hook_of_tests.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="--capture-redact broken_hook_of_tests:redact: "):
        Capture(CaptureSettings(str(tmp_path / "chats"), redact="broken_hook_of_tests:redact"))


def test_files_that_somebody_takes_away(tmp_path: Path) -> None:
    """What came after the current file had been deleted went to where nobody could read it, until the next file."""
    folder = Folder(tmp_path, 100, 250)
    for number in range(20):
        assert folder.write(b'{"n": %d}\n' % number)
        assert captured(tmp_path)[-1] == {"n": number}
        if number % 4 == 3:
            for file in folder.files():
                file.unlink()
    folder.close()


def test_a_folder_that_somebody_takes_away_stops_capture(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    capture = Capture(CaptureSettings(str(tmp_path / "chats")), lambda outcome: outcomes.update([outcome]))
    capture.offer({"prompt": "p0"})
    until(lambda: outcomes["written"] == 1)
    shutil.rmtree(tmp_path / "chats")
    capture.offer({"prompt": "p1"})
    until(lambda: capture.stopped is not None)
    capture.close()
    assert outcomes == {"written": 1, "disk": 1}


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="--capture"):
        Capture(CaptureSettings(str(tmp_path / "file")))


def test_a_folder_of_another_server(tmp_path: Path) -> None:
    first = Folder(tmp_path, 1000, 1000)
    with pytest.raises(InputError, match="another server"):
        Folder(tmp_path, 1000, 1000)
    first.close()
    Folder(tmp_path, 1000, 1000).close()


# --- a full disk ------------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_capture_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nearly full one takes a part of a line; that part is taken back."""
    outcomes: Counter[str] = Counter()
    capture = Capture(CaptureSettings(str(tmp_path)), lambda outcome: outcomes.update([outcome]))
    real, room = os.write, 100

    def write(file: int, data: bytes) -> int:
        nonlocal room
        if file != capture._folder._file:
            return real(file, data)
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[:room]
        room -= len(part)
        return real(file, part)

    monkeypatch.setattr(module.os, "write", write)
    for number in range(10):
        capture.offer({"prompt": str(number) * 40})
    until(lambda: capture.stopped is not None)
    capture.offer({"prompt": "later"})
    room = 10**6
    capture.close()
    assert outcomes["disk"] == 1
    assert outcomes["written"] == 1
    (file,) = files_of(tmp_path)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"prompt": "0" * 40}]
    assert capture.stopped is not None
    assert capture.stopped.errno == errno.ENOSPC


def test_a_limit_of_the_system(tmp_path: Path) -> None:
    """The same with a real limit: the kernel takes what fits, then refuses."""
    code = f"""
        import resource, signal
        from slipstream.serve.capture import Capture, CaptureSettings
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        capture = Capture(CaptureSettings({str(tmp_path)!r}))
        for number in range(40):
            capture.offer({{"prompt": str(number) * 30}})
        capture.close()
        assert capture.stopped is not None
        print("served on")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "served on\n", done.stderr
    assert "capture stopped" in done.stderr
    (file,) = files_of(tmp_path)
    lines = file.read_bytes()
    assert lines.endswith(b"\n")
    assert [json.loads(line)["prompt"][0] for line in lines.splitlines()] == [
        str(n)[0] for n in range(len(captured(tmp_path)))
    ]


def test_a_slow_disk_does_not_hold_up_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    outcomes: Counter[str] = Counter()
    go_on = threading.Event()
    real = Folder.write
    monkeypatch.setattr(Folder, "write", lambda self, line: go_on.wait(20) and real(self, line))
    capture = Capture(CaptureSettings(str(tmp_path)), lambda outcome: outcomes.update([outcome]))
    for number in range(1000):
        capture.offer({"prompt": str(number)})
    assert outcomes["too many at a time"] >= 1000 - module._WAITING - 1
    go_on.set()
    capture.close()
    assert outcomes["written"] + outcomes["too many at a time"] == 1000


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def test_after_kill_9_every_line_is_whole_and_the_next_server_goes_on(tmp_path: Path) -> None:
    code = f"""
        import itertools
        from slipstream.serve.capture import Capture, CaptureSettings
        capture = Capture(CaptureSettings({str(tmp_path)!r}, file_bytes=200_000))
        for number in itertools.count():
            capture.offer({{"number": number, "answer": "x" * 10_000}})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        until(lambda: len(files_of(tmp_path)) >= 3)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    lines = [line for file in files_of(tmp_path) for line in file.read_bytes().splitlines(keepends=True)]
    assert len(lines) > 20
    assert all(line.endswith(b"\n") and json.loads(line)["answer"] == "x" * 10_000 for line in lines)
    kept(tmp_path, 2)
    assert len(captured(tmp_path)) == len(lines) + 2


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A machine that loses power may leave one."""
    kept(tmp_path, 2)
    (file,) = files_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    assert [r["prompt"] for r in captured(tmp_path)] == ["p0"]
