"""Many requests of many clients at once, good and bad, against a server of the model that says what it is told."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
_BAD: list[Any] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "a"}], "foo": 1},
    {"messages": [{"role": "user", "content": "a"}], "n": 0},
    {"messages": [{"role": "user", "content": "a"}], "guided_regex": "["},
    {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10**9},
    [1, 2],
]


@dataclass
class Done:
    """What came of it."""

    sent: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by kind."""
    faults: list[str] = field(default_factory=list)
    """What was not as it should be."""


async def soak(url: str, *, requests: int, clients: int, seed: int) -> Done:
    """Send ``requests`` in all; every answer has to be the one to its own request."""
    done = Done()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        numbers = iter(range(requests))
        await asyncio.gather(*(_client(client, numbers, random.Random(seed * 1000 + i), done) for i in range(clients)))
    return done


async def _client(client: httpx.AsyncClient, numbers: Any, rng: random.Random, done: Done) -> None:
    kinds = {
        "whole": _whole,
        "stream": _stream,
        "stop": _stop,
        "completion": _completion,
        "bad": _bad,
        "leaves": _leaves,
    }
    for number in numbers:
        kind = rng.choice(list(kinds))
        done.sent += 1
        done.counts[kind] += 1
        words = ["the cat ", "and ", "é", "日本", "\U0001f600", "x" * rng.randrange(9)]
        text = f"{number}: {''.join(rng.choice(words) for _ in range(rng.randrange(1, 9)))} {number}."
        try:
            fault = await kinds[kind](client, text, rng)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            done.faults.append(f"{number} {kind}: {fault}")


def _body(text: str, rng: random.Random, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], **more}
    if rng.random() < 0.3:
        body["n"] = rng.randrange(1, 4)
    if rng.random() < 0.3:
        body["speculation"] = rng.choice([{"enabled": False}, {"k": 3}, {"k": 1, "statistics": True}])
    return body


async def _whole(client: httpx.AsyncClient, text: str, rng: random.Random) -> str | None:
    body = _body(text, rng)
    response = await client.post(CHAT, json=body)
    said = [c["message"]["content"] for c in response.json()["choices"]]
    return None if said == [text] * body.get("n", 1) else f"said {said} to {text!r}"


async def _stop(client: httpx.AsyncClient, text: str, rng: random.Random) -> str | None:
    at = rng.randrange(1, len(text) - 1)
    stop = text[at : at + rng.randrange(1, 4)]
    response = await client.post(CHAT, json=_body(text, rng, stop=[stop]))
    said = {c["message"]["content"] for c in response.json()["choices"]}
    return None if said == {text[: text.index(stop)]} else f"said {said} to {text!r} until {stop!r}"


async def _stream(client: httpx.AsyncClient, text: str, rng: random.Random) -> str | None:
    body = _body(text, rng, stream=True)
    said = [""] * body.get("n", 1)
    ended = False
    async with client.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if ended and line:
                return f"{line} after the end"
            if line == "data: [DONE]":
                ended = True
            elif line:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    said[choice["index"]] += choice["delta"].get("content") or ""
    return None if ended and set(said) == {text} else f"said {said} to {text!r}, ended: {ended}"


async def _completion(client: httpx.AsyncClient, text: str, rng: random.Random) -> str | None:
    response = await client.post(TEXTS, json={"prompt": [text + "|", "a|"], "max_tokens": 150})
    said = [c["text"] for c in response.json()["choices"]]
    return None if said == [text, "a"] else f"said {said} to {text!r}"


async def _bad(client: httpx.AsyncClient, text: str, rng: random.Random) -> str | None:
    response = await client.post(CHAT, json=rng.choice(_BAD))
    return None if response.status_code == 400 and response.json()["error"] else f"status {response.status_code}"


async def _leaves(client: httpx.AsyncClient, text: str, rng: random.Random) -> str | None:
    """Goes away, at any moment."""
    if rng.random() < 0.5:
        with suppress(httpx.TimeoutException):
            await client.post(CHAT, json=_body(text * 20, rng), timeout=rng.random() * 0.2)
        return None
    async with client.stream("POST", CHAT, json=_body(text * 20, rng, stream=True)) as response:
        left = rng.randrange(6)
        async for _ in response.aiter_lines():
            left -= 1
            if left <= 0:
                break
    return None
