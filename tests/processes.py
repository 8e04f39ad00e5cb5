"""A server in a process of its own, for tests that use it as others would."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

PROGRAM = "from slipstream.cli.main import main; main()"


class Server:
    """``slipstream serve`` with these arguments on a free port (or ``port``); ends with the block."""

    def __init__(self, *args: object, port: int = 0, env: dict[str, str] | None = None) -> None:
        self.args = [str(a) for a in args]
        self.port = port
        self.env = os.environ | {"OMP_NUM_THREADS": "1", "NO_PROXY": "*"} | (env or {})
        self.lines: list[str] = []
        """What it wrote on stderr."""
        self.process: subprocess.Popen[str]

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def start(self, seconds: float = 120.0) -> None:
        command = [sys.executable, "-c", PROGRAM, "serve", *self.args, "--port", str(self.port)]
        self.process = subprocess.Popen(command, env=self.env, stderr=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()
        end = time.monotonic() + seconds
        while not (where := [line for line in self.lines if "running on http" in line]):
            assert self.process.poll() is None, self.lines
            assert time.monotonic() < end, self.lines
            time.sleep(0.02)
        self.port = int(where[-1].split("running on ")[1].split(" ")[0].rpartition(":")[2])

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End it; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(60)
        return code

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60)

    def log(self, event: str = "request") -> list[dict[str, Any]]:
        """Its log's lines of this kind."""
        return [line for text in self.lines if (line := json.loads(text))["event"] == event]

    def _read(self, stream: Any) -> None:
        with stream:
            for line in stream:
                self.lines.append(line.rstrip("\n"))


def until(wanted: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Wait for something; what it is."""
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
    return found


def capture_files(folder: Path) -> list[dict[str, Any]]:
    from slipstream.serve.capture import read_captured

    return list(read_captured(folder))


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
