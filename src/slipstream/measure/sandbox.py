"""Runs a program that nobody has read: in a process of its own, with limits, in an empty folder, without a network.

Limits bound processor time, memory, files and processes. Network and other processes are taken away by namespaces where
the system lets an ordinary user make them; everywhere a hook in Python refuses sockets, new processes, signals to
others, and changes of files outside the folder. That keeps accidents in. It is no wall against a program that was
written to break out.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

Outcome = Literal["passed", "failed", "timed out"]
_MEGABYTE = 1 << 20
#: Runs inside: sets the limits, then the program, then says the word that only a program which ended well gets to say.
_INSIDE = """
import sys
word, seconds, memory = sys.stdin.readline().strip(), int(sys.argv[1]), int(sys.argv[2])
program = sys.stdin.read()
try:
    import resource
    limits = {"CPU": seconds, "AS": memory, "FSIZE": 1 << 20, "NOFILE": 32, "CORE": 0, "NPROC": 0}
    for name, value in limits.items():
        kind = getattr(resource, "RLIMIT_" + name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):
                pass
except ImportError:
    pass
try:
    import signal
    signal.alarm(seconds + 1)  # should nobody be left to end it
except AttributeError:
    pass
import io, os
out, sys.stdout, sys.stderr, sys.stdin = os.dup(1), io.StringIO(), io.StringIO(), io.StringIO()
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.dont_write_bytecode = True
folder, code = os.path.realpath(os.getcwd()), compile(program, "<program>", "exec")
refused = ("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.exec", "os.kill", "pty.")
changes = ("remove", "rename", "rmdir", "mkdir", "truncate", "chmod", "chown", "link", "symlink", "utime", "setxattr")
changes = {"os." + name for name in changes} | {"shutil.rmtree"}
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def watch(event, args, inside=os.path.realpath, null=os.devnull, sep=os.sep):
    if event.startswith(refused):
        raise PermissionError("there is no network here, and there are no other processes")
    if event in changes or event == "open" and isinstance(args[2], int) and args[2] & writing:
        for path in args[: 1 if event == "open" else 2]:
            if isinstance(path, (str, bytes)) and os.fsdecode(path) != null:
                if not (inside(os.fsdecode(path)) + sep).startswith(folder + sep):
                    raise PermissionError("files outside the folder cannot be changed")
sys.addaudithook(watch)
exec(code, {"__name__": "__program__"})
os.write(out, word.encode())
"""


@dataclass(frozen=True)
class Bounds:
    """What a program may use."""

    seconds: float = 10.0
    memory_bytes: int = 1024 * _MEGABYTE


def run_program(program: str, bounds: Bounds = Bounds()) -> Outcome:
    """Run ``program`` to its end; "passed" if no exception left it and it did not end itself."""
    word = secrets.token_hex(16)
    inside = [sys.executable, "-I", "-c", _INSIDE, str(int(bounds.seconds) + 1), str(bounds.memory_bytes)]
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        process = subprocess.Popen(
            [*_apart(), *inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(f"{word}\n{program}".encode("utf-8", "replace"), timeout=bounds.seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            _kill(process)
    return "passed" if said == word.encode() and process.returncode == 0 else "failed"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()


@cache
def _apart() -> tuple[str, ...]:
    """The words that take network and other processes away, if this system lets us; what is started ends with it."""
    tool = shutil.which("unshare")
    if tool is None:
        return ()
    words = (tool, "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
    tried = subprocess.run([*words, sys.executable, "-c", ""], capture_output=True, check=False)
    return words if tried.returncode == 0 else ()


def has_no_network() -> bool:
    """Whether programs run without a network, rather than with sockets removed only."""
    return bool(_apart())
