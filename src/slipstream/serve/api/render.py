"""Parts that several answers have in common."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from slipstream.serve.errors import ApiError, api_error
from slipstream.serve.visits import bare
from slipstream.types import Output, Stats

#: What stands for a log-probability of minus infinity, which JSON does not have.
LEAST = -9999.0


class Json(Response):
    """A JSON document."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Its bytes; ASCII, so that nothing in it cannot be encoded."""
        return dumps(content)


def dumps(content: Any) -> bytes:
    """A document's bytes."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def error_response(error: ApiError) -> Response:
    """What a client is told of a failure."""
    return Json(error.body, status_code=error.status, headers=error.headers)


def new_id(kind: str) -> str:
    """An id that nobody can guess."""
    return f"{kind}-{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def usage(outputs: Sequence[Output], prompt_tokens: int) -> dict[str, Any]:
    """Tokens of a request; of drafts, how many were accepted and rejected."""
    completion = sum(len(o.tokens) for o in outputs)
    accepted = sum(o.stats.accepted for o in outputs)
    drafted = sum(o.stats.drafted for o in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def statistics(stats: Stats) -> dict[str, Any]:
    """How an answer was speculated on."""
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "drafted_per_position": list(stats.drafted_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "drafted_by": {bare(name): count for name, count in stats.drafted_by.items()},
        "accepted_by": {bare(name): count for name, count in stats.accepted_by.items()},
    }


def event_stream(chunks: AsyncIterator[Mapping[str, Any]]) -> Response:
    """Server-sent events; a failure on the way is the last one."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(chunks), media_type="text/event-stream", headers=headers)


async def _events(chunks: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield b"data: " + dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield b"data: " + dumps(api_error(error).body) + b"\n\n"


async def unless_disconnected(http: HttpRequest, document: Awaitable[Any]) -> Response:
    """``document`` as a response; it is cancelled if the client goes away first."""
    task = asyncio.ensure_future(document)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return Json(task.result()) if task.done() else Response(status_code=499)  # which nobody reads
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
