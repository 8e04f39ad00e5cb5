"""10,000 short requests of 64 clients on a tiny model: disconnects, bad bodies, stops, streams.

    python benchmarks/serve_soak.py [--requests 10000] [--clients 64] [--out FILE]

The server is a process of its own with a random model; what it has to answer is known from the library. Counts answers
that are lost, mixed or unfinished, and compares the server's memory at the end with that after the first tenth. Prints
one JSON document as the last line; the exit code is 1 if anything was wrong. Needs the folder ``tests`` beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from server_process import ServerProcess, server

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from conftest import save_checkpoint
from serving import parrot_tokenizer
from slipstream import SpeculativeDecoding
from slipstream.measure.document import tidy
from slipstream.measure.files import write_whole
from slipstream.measure.machine import describe_machine
from soak import Done, soak

_TOKENS = 24
_TEXTS = 64


class Known:
    """Prompts and what a greedy answer to each is, by the library."""

    extra: dict[str, Any] = {"temperature": 0, "max_tokens": _TOKENS}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        decoding = SpeculativeDecoding(folder, max_new_tokens=_TOKENS)
        texts = [f"{i}: the cat and the hat, {i * i} times" for i in range(_TEXTS)]
        chats = decoding.complete([[{"role": "user", "content": text}] for text in texts])
        plain = decoding.complete(texts)
        self._chats = {text: output.text for text, output in zip(texts, chats, strict=True)}
        self._completions = {text: output.text for text, output in zip(texts, plain, strict=True)}
        if len(set(self._chats.values())) < _TEXTS:
            raise SystemExit("two prompts have the same answer, so that mixing would not show")

    def text(self, number: int, rng: random.Random) -> str:
        """A prompt."""
        return rng.choice(list(self._chats))

    def chat(self, text: str) -> str:
        """The answer to it."""
        return self._chats[text]

    def completion(self, text: str) -> tuple[str, str]:
        """A prompt of the other kind, and its answer."""
        return text, self._completions[text]


def run(own: ServerProcess, known: Known, given: argparse.Namespace) -> tuple[dict[str, Any], Done]:
    """Warm up with a tenth, then the rest."""
    first = given.requests // 10
    often = {"clients": given.clients, "seconds": given.seconds}
    warm = asyncio.run(soak(own.url, known, requests=first, seed=0, **often))
    before = own.rss()
    start = perf_counter()
    done = asyncio.run(soak(own.url, known, requests=given.requests - first, seed=1, **often))
    seconds = perf_counter() - start
    done.faults += warm.faults
    done.sent += warm.sent
    done.counts += warm.counts
    return {
        "requests": done.sent,
        "by_kind": dict(done.counts),
        "faults": len(done.faults),
        "first_faults": done.faults[:10],
        "requests_per_second": (given.requests - first) / seconds,
        "rss_before": before,
        "rss_after": own.rss(),
    }, done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300.0, help="after which an answer counts as lost")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = save_checkpoint(Path(folder), parrot_tokenizer(), max_position_embeddings=2048)
        known = Known(checkpoint)
        options = ("--draft", "suffix", "--memory", "64MB", "--name", "toy", "--queue", "10000", "--threads", "1")
        with server(str(checkpoint), *options) as own:
            found, done = run(own, known, given)
            found["exit_code"] = own.end()
    document = {
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "machine": describe_machine(torch.device("cpu")),
        "soak": found,
    }
    text = json.dumps(tidy(document))
    if given.out is not None:
        write_whole(given.out, lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
    print(f"{found['requests']} requests, {len(done.faults)} faults, exit code {found['exit_code']}")
    print(text)
    return 1 if done.faults or found["exit_code"] else 0


if __name__ == "__main__":
    sys.exit(main())
