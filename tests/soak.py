"""Many requests of many clients at once, good and bad, against a server whose answers are known."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

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


class Known(Protocol):
    """What to ask, and what the answer is."""

    extra: Mapping[str, Any]
    """Further fields of each request."""

    def text(self, number: int, rng: random.Random) -> str: ...

    def chat(self, text: str) -> str: ...

    def completion(self, text: str) -> tuple[str, str]: ...


class Parrot:
    """Answers are what was said."""

    extra: Mapping[str, Any] = {}

    def text(self, number: int, rng: random.Random) -> str:
        words = ["the cat ", "and ", "é", "日本", "\U0001f600", "x" * rng.randrange(9)]
        return f"{number}: {''.join(rng.choice(words) for _ in range(rng.randrange(1, 9)))} {number}."

    def chat(self, text: str) -> str:
        return text

    def completion(self, text: str) -> tuple[str, str]:
        return text + "|", text


@dataclass
class Done:
    """What came of it."""

    sent: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by kind."""
    faults: list[str] = field(default_factory=list)
    """What was not as it should be."""


async def soak(url: str, known: Known, *, requests: int, clients: int, seed: int, seconds: float = 300.0) -> Done:
    """Send ``requests`` in all; every answer has to be the one to its own request, and be there in ``seconds``."""
    done = Done()
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=seconds, limits=limits, trust_env=False) as http:
        numbers = iter(range(requests))
        each = [_Client(http, known, random.Random(seed * 1000 + i)) for i in range(clients)]
        await asyncio.gather(*(one.work(numbers, done) for one in each))
    return done


class _Client:
    """One of many."""

    def __init__(self, http: httpx.AsyncClient, known: Known, rng: random.Random) -> None:
        self._http = http
        self._known = known
        self._rng = rng
        self._kinds = {
            "whole": self._whole,
            "stream": self._stream,
            "stop": self._stop,
            "completion": self._completion,
            "bad": self._bad,
            "leaves": self._leaves,
        }

    async def work(self, numbers: Iterator[int], done: Done) -> None:
        """One request after the other, while there are any."""
        for number in numbers:
            kind = self._rng.choice(list(self._kinds))
            done.sent += 1
            done.counts[kind] += 1
            try:
                fault = await self._kinds[kind](self._known.text(number, self._rng))
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault is not None:
                done.faults.append(f"{number} {kind}: {fault}")

    def _body(self, text: str, **more: Any) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], **self._known.extra, **more}
        if self._rng.random() < 0.3:
            body["n"] = self._rng.randrange(1, 4)
        if self._rng.random() < 0.3:
            body["speculation"] = self._rng.choice([{"enabled": False}, {"k": 3}, {"k": 1, "statistics": True}])
        return body

    async def _whole(self, text: str) -> str | None:
        body, wanted = self._body(text), self._known.chat(text)
        response = await self._http.post(CHAT, json=body)
        said = [c["message"]["content"] for c in response.json()["choices"]]
        return None if said == [wanted] * body.get("n", 1) else f"said {said}, not {wanted!r}"

    async def _stop(self, text: str) -> str | None:
        wanted = self._known.chat(text)
        at = self._rng.randrange(1, max(2, len(wanted) - 1))
        stop = wanted[at : at + self._rng.randrange(1, 4)] or "."
        response = await self._http.post(CHAT, json=self._body(text, stop=[stop]))
        said = {c["message"]["content"] for c in response.json()["choices"]}
        return None if said == {wanted.partition(stop)[0]} else f"said {said}, not {wanted!r} until {stop!r}"

    async def _stream(self, text: str) -> str | None:
        body, wanted = self._body(text, stream=True), self._known.chat(text)
        said = [""] * body.get("n", 1)
        ended = False
        async with self._http.stream("POST", CHAT, json=body) as response:
            async for line in response.aiter_lines():
                if ended and line:
                    return f"{line} after the end"
                if line == "data: [DONE]":
                    ended = True
                elif line:
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        said[choice["index"]] += choice["delta"].get("content") or ""
        return None if ended and set(said) == {wanted} else f"said {said}, not {wanted!r}, ended: {ended}"

    async def _completion(self, text: str) -> str | None:
        prompt, wanted = self._known.completion(text)
        body = {"prompt": [prompt, prompt], "max_tokens": 150, **self._known.extra}
        response = await self._http.post(TEXTS, json=body)
        said = [c["text"] for c in response.json()["choices"]]
        return None if said == [wanted, wanted] else f"said {said}, not {wanted!r}"

    async def _bad(self, text: str) -> str | None:
        response = await self._http.post(CHAT, json=self._rng.choice(_BAD))
        return None if response.status_code == 400 and response.json()["error"] else f"status {response.status_code}"

    async def _leaves(self, text: str) -> str | None:
        """Goes away, at any moment."""
        if self._rng.random() < 0.5:
            with suppress(httpx.TimeoutException):
                await self._http.post(CHAT, json=self._body(text * 9), timeout=self._rng.random() * 0.2)
            return None
        async with self._http.stream("POST", CHAT, json=self._body(text * 9, stream=True)) as response:
            left = self._rng.randrange(6)
            async for _ in response.aiter_lines():
                left -= 1
                if left <= 0:
                    break
        return None
