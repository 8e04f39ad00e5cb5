"""Parts that several answers have in common."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from slipstream.serve.errors import ApiError, api_error
from slipstream.types import Output

logger = logging.getLogger("slipstream.serve")


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


async def respond_with_stream(http: HttpRequest, chunks: AsyncGenerator[dict[str, Any]]) -> Response:
    """Server-sent events. A failure before the first one is a response of its own; later on it is the last event.

    Raises:
        Exception: the failure.
    """
    found = await _unless_disconnected(http, anext(chunks))
    if found is None:
        await chunks.aclose()
        return Response(status_code=499)  # which nobody reads
    return _EventStream(found, chunks)


class _EventStream(StreamingResponse):
    """Ends what makes the chunks, however it ends itself."""

    def __init__(self, first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any]]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_events(first, chunks), media_type="text/event-stream", headers=headers)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()


async def _events(first: dict[str, Any], chunks: AsyncGenerator[dict[str, Any]]) -> AsyncIterator[bytes]:
    yield b"data: " + dumps(first) + b"\n\n"
    try:
        async for chunk in chunks:
            yield b"data: " + dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except Exception as error:
        yield b"data: " + dumps(failure(error).body) + b"\n\n"


def failure(error: Exception) -> ApiError:
    """What a client is told of a failure; what it must not see goes to the log."""
    told = api_error(error)
    if told.status == 500:
        logger.error("a request failed", exc_info=error)
    return told


async def unless_disconnected(http: HttpRequest, document: Awaitable[dict[str, Any]]) -> Response:
    """``document`` as a response; it is cancelled if the client goes away first.

    Raises:
        Exception: the failure.
    """
    found = await _unless_disconnected(http, document)
    return Response(status_code=499) if found is None else Json(found)


async def _unless_disconnected(http: HttpRequest, answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer; None if the client went away before it was there."""
    task = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            if not one.done():
                one.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await one


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
