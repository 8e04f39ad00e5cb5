"""``slipstream serve`` as a process, for benchmarks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_READY_SECONDS = 900
_PROGRAM = "from slipstream.cli.main import main; main()"


@dataclass
class ServerProcess:
    """A server that answers."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def rss(self) -> int:
        """Bytes of memory that it holds."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii"))
        return int(found[1]) * 1024 if found else 0

    def end(self, seconds: float = 60) -> int:
        """Ask it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


@contextmanager
def server(target: str, *options: str) -> Iterator[ServerProcess]:
    """Start one on a free port; it is ended with the block."""
    words = [sys.executable, "-c", _PROGRAM, "serve", target, "--port", "0", *options]
    made = ServerProcess(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
    reader = threading.Thread(target=lambda: made.log.extend(made.process.stderr or ()), daemon=True)
    reader.start()
    try:
        until = time.monotonic() + _READY_SECONDS
        while not (found := re.search(r"running on (http://[\d.]+:\d+)", "".join(made.log))):
            if made.process.poll() is not None or time.monotonic() > until:
                sys.exit("the server did not start:\n" + "".join(made.log[-20:]))
            time.sleep(0.1)
        made.url = found[1]
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.wait()
        reader.join(5)


def with_options(options: Sequence[tuple[str, object]]) -> list[str]:
    """Those that were given, as words."""
    return [word for name, value in options if value is not None for word in (name, str(value))]
