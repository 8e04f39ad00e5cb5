"""``slipstream bench`` beside llama.cpp's server in one or more modes, all in one interleaved run.

    python benchmarks/llama_cpp.py LLAMA_SERVER TARGET.gguf --mode plain --mode "draft=-md DRAFT.gguf" -- \\
        qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b --prompts humaneval:20 --out benchmarks/results/llama-f16.json

One server a ``--mode NAME[=ARGS]`` is started with these further arguments, asked as a peer ``llama.cpp-NAME``, and
stopped at the end. What follows ``--`` goes to ``slipstream bench``. The servers share the pages of the weights' file;
one that is not asked does nothing.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack

READY_SECONDS = 600


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(given: argparse.Namespace, extra: str, stack: ExitStack) -> int:
    """Start a server and wait until it is ready; its port."""
    port = free_port()
    words = [given.server, "-m", given.target, "--host", "127.0.0.1", "--port", str(port), "-t", str(given.threads)]
    words += ["-c", str(given.context), "-np", "1", "--no-webui", *shlex.split(extra)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(server.wait, 30)
    stack.callback(server.terminate)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}: {shlex.join(words)}")
        try:
            opener.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return port
        except OSError:  # not listening yet, or still loading
            time.sleep(1)
    sys.exit(f"the server was not ready in {READY_SECONDS} seconds: {shlex.join(words)}")


def main() -> int:
    own, bench = sys.argv[1:], []
    if "--" in own:
        own, bench = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="the program llama-server")
    parser.add_argument("target", help="a .gguf file")
    parser.add_argument("--mode", action="append", metavar="NAME[=ARGS]")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    given = parser.parse_args(own)
    with ExitStack() as stack:
        peers: list[str] = []
        for mode in given.mode or ["plain"]:
            name, _, extra = mode.partition("=")
            peers += ["--peer", f"http://127.0.0.1:{start(given, extra, stack)}#llama.cpp-{name}"]
        program = [sys.executable, "-c", "from slipstream.cli.main import main; main()"]
        return subprocess.run([*program, "bench", *bench, *peers], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
