"""Tokens per second of ``slipstream serve`` with 1 to 32 requests at a time, speculative against plain, over HTTP.

    python benchmarks/serve_load.py TARGET --draft DRAFT [--levels 1,2,4,8,16,32] [--out FILE]
    python benchmarks/serve_load.py TARGET --draft DRAFT --url llama.cpp=http://127.0.0.1:8080 --levels 1,8
    python benchmarks/serve_load.py --url transformers=http://127.0.0.1:8000,MODEL-NAME --levels 1,8

At each level so many clients send one request after the other, all streamed. One server answers both ways, in turn;
ratios are taken within a turn. ``--url NAME=URL[,MODEL]`` asks other servers too, in the same turns. ``--long N``
measures how long a short prompt waits for its first token while a prompt of N tokens is being read, and when idle.
Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import torch
from output import publish
from rich.console import Console
from rich.table import Table
from server_process import server, with_options

from slipstream.measure.machine import describe_machine
from slipstream.measure.prompts import read_prompts
from slipstream.measure.spread import spread

#: Short prompts are sent with this distance while a long one is read.
_GAP_SECONDS = 0.02


@dataclass(frozen=True)
class Way:
    """A server, and how it is asked."""

    name: str
    url: str
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Timing:
    """One answer."""

    tokens: int
    first: float
    """Seconds to its first token."""
    total: float


async def ask(client: httpx.AsyncClient, way: Way, messages: Any, new: int) -> Timing:
    """One streamed answer."""
    body = {
        "messages": messages,
        "max_tokens": new,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **way.extra,
    }
    start, first, chunks, tokens = perf_counter(), 0.0, 0, None
    async with client.stream("POST", way.url.rstrip("/") + "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{way.name}: status {response.status_code}: {(await response.aread()).decode()[:300]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            document = json.loads(line[6:])
            if "error" in document:
                raise SystemExit(f"{way.name}: {document['error']}")
            if document.get("usage"):
                tokens = document["usage"]["completion_tokens"]
            if any(c["delta"].get("content") for c in document["choices"]):
                chunks += 1
                first = first or perf_counter() - start
    total = perf_counter() - start
    return Timing(chunks if tokens is None else tokens, first or total, total)


async def load(way: Way, messages: Sequence[Any], level: int, new: int) -> dict[str, float]:
    """All of ``messages`` answered, ``level`` at a time."""
    # Some servers close what was kept open while the next request is on its way.
    limits = httpx.Limits(max_connections=level, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        left: Iterator[Any] = iter(messages)

        async def one_after_the_other() -> list[Timing]:
            return [await ask(client, way, each, new) for each in left]

        start = perf_counter()
        found = await asyncio.gather(*(one_after_the_other() for _ in range(level)))
        seconds = perf_counter() - start
    timings = [one for some in found for one in some]
    return {
        "tokens_per_second": sum(t.tokens for t in timings) / seconds,
        "first_token_seconds": sorted(t.first for t in timings)[len(timings) // 2],
        "token_seconds": sum(t.total - t.first for t in timings) / max(1, sum(t.tokens - 1 for t in timings)),
    }


async def first_tokens(way: Way, short: Any, long_text: str, count: int) -> dict[str, list[float]]:
    """Seconds to the first token of a short prompt: idle, and while a long one is read."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        idle = [(await ask(client, way, short, 1)).first for _ in range(count)]
        reading = asyncio.create_task(ask(client, way, [{"role": "user", "content": long_text}], 1))
        await asyncio.sleep(_GAP_SECONDS)
        pending = []
        while not reading.done() and len(pending) < count:
            pending.append(asyncio.create_task(ask(client, way, short, 1)))
            await asyncio.wait((pending[-1], reading), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(_GAP_SECONDS)
        during = [(await one).first for one in pending]
        return {"idle": idle, "during": during, "long": [(await reading).first]}


def unseen(messages: Sequence[Any], mark: str) -> list[Any]:
    """The same with a mark in front, so that no way finds a prompt of another in a prefix cache."""
    first, *others = messages
    return [{**first, "content": f"[{mark}] {first['content']}"}, *others]


def measure(ways: Sequence[Way], prompts: Sequence[Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table."""
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    for way in ways:
        asyncio.run(load(way, prompts[:2], 1, given.new))  # warm up
    for turn in range(given.turns):
        for level in given.levels:
            count = max(given.least, given.each * level)
            chosen = [prompts[(turn * count + i) % len(prompts)] for i in range(count)]
            for number, way in list(enumerate(ways))[:: 1 if turn % 2 == 0 else -1]:
                messages = [unseen(one, f"{level}.{turn}.{number}") for one in chosen]
                found.setdefault((level, way.name), []).append(asyncio.run(load(way, messages, level, given.new)))
    rows = []
    for level in given.levels:
        row: dict[str, Any] = {"level": level}
        for way in ways:
            runs = found[level, way.name]
            row[way.name] = {name: spread(run[name] for run in runs) for name in runs[0]}
            row[way.name]["runs"] = [run["tokens_per_second"] for run in runs]
        base = found[level, ways[0].name]
        for way in ways[1:]:
            both = zip(base, found[level, way.name], strict=True)
            row[way.name]["over_" + ways[0].name] = spread(
                b["tokens_per_second"] / a["tokens_per_second"] for a, b in both
            )
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]], ways: Sequence[Way]) -> None:
    first = ways[0].name
    table = Table("level", *(f"{w.name} tok/s" for w in ways), *(f"{w.name} / {first}" for w in ways[1:]))
    for row in rows:
        cells = [row[w.name]["tokens_per_second"] for w in ways] + [row[w.name][f"over_{first}"] for w in ways[1:]]
        table.add_row(str(row["level"]), *(f"{c.median:.2f} [{c.low:.2f}-{c.high:.2f}]" for c in cells))
    Console(width=140).print(table)


def show_first_tokens(found: Mapping[str, Any]) -> None:
    table = Table("first token of a short prompt", "idle p50", "idle p99", "during p50", "during p99", "samples")
    for name, one in found.items():
        cells = [f"{1000 * one[which][at]:.0f} ms" for which in ("idle", "during") for at in ("p50", "p99")]
        table.add_row(name, *cells, str(one["samples"]))
    Console(width=140).print(table)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]}


def measure_first_tokens(ways: Sequence[Way], given: argparse.Namespace) -> dict[str, Any]:
    """For each way, percentiles over all turns."""
    found: dict[str, Any] = {}
    for way in ways:
        idle: list[float] = []
        during: list[float] = []
        for turn in range(given.turns):
            # No prompt is to be found in a prefix cache.
            text = f"{turn} {way.name} " + " ".join(f"word{(i * 7919 + turn) % 997}" for i in range(given.long // 3))
            short = [{"role": "user", "content": f"Say {turn}."}]
            one = asyncio.run(first_tokens(way, short, text, 50))
            idle += one["idle"]
            during += one["during"]
        found[way.name] = {"idle": percentiles(idle), "during": percentiles(during or [0.0]), "samples": len(during)}
    return found


def ways_of(given: argparse.Namespace, stack: ExitStack) -> list[Way]:
    """Start the server, if there is a target; who is to be asked."""
    ways: list[Way] = []
    if given.target is not None:
        options = with_options(
            [
                ("--draft", given.draft),
                ("-k", given.k),
                ("--weights", given.weights),
                ("--draft-weights", given.draft_weights),
                ("--threads", given.threads),
                ("--memory", given.memory),
            ]
        )
        own = stack.enter_context(server(given.target, *options))
        more = {"ignore_eos": True}
        ways.append(Way("plain", own.url, {**more, "speculation": {"enabled": False}}))
        if given.draft != "none":
            ways.append(Way("speculative", own.url, more))
    for named in given.url or []:
        name, _, rest = named.partition("=")
        url, _, model = rest.partition(",")
        ways.append(Way(name, url, {"model": model} if model else {}))
    if not ways:
        raise SystemExit("nobody is to be asked; give TARGET or --url NAME=URL")
    return ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("-k")
    parser.add_argument("--weights")
    parser.add_argument("--draft-weights")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--memory")
    parser.add_argument("--url", action="append", metavar="NAME=URL[,MODEL]")
    parser.add_argument("--levels", default="1,2,4,8,16,32")
    parser.add_argument("--each", type=int, default=2, help="requests of each client at a level")
    parser.add_argument("--least", type=int, default=4, help="requests at a level at least")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", help="as of slipstream bench")
    parser.add_argument("--long", type=int, help="tokens, about, of a prompt that is read while short ones come")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.levels = [int(n) for n in given.levels.split(",")]
    contents = [p.content for p in read_prompts(given.prompts)]
    prompts = [[{"role": "user", "content": c}] if isinstance(c, str) else list(c) for c in contents]
    with ExitStack() as stack:
        ways = ways_of(given, stack)
        rows = measure(ways, prompts, given)
        firsts = measure_first_tokens(ways, given) if given.long else None
    show(rows, ways)
    if firsts is not None:
        show_first_tokens(firsts)
    document = {
        "settings": {name: value for name, value in vars(given).items() if name not in ("out", "prompts", "url")},
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
        "first_tokens": firsts,
    }
    publish(document, given.out)


if __name__ == "__main__":
    main()
