"""The gate in front of the application: who may ask, how much, from where, and how big.

Plain ASGI, so that nothing of a request is parsed before it was let in. In order: request id, where it comes from, API
key, size of the body, how busy the server is, limits of the key, time. Everything that is refused here looks like an
error of the API, and has a line in the log and a count.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from slipstream.serve.errors import TYPES
from slipstream.serve.keys import KeyRing, bearer
from slipstream.serve.limits import Allowance, Meter, Refusal
from slipstream.serve.logs import tell_visit
from slipstream.serve.metrics import Metrics
from slipstream.serve.visits import Visit, current, request_id

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: What needs no key: they tell nothing of anybody's requests.
OPEN = frozenset({"/", "/health", "/ready"})
#: What generates, and is counted.
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]", "::1")


@dataclass(frozen=True)
class GateSettings:
    """What the gate lets through."""

    keys: KeyRing = field(default_factory=KeyRing)
    allowance: Allowance = field(default_factory=Allowance)
    """Of all those together who need no key, if there are no keys."""
    body_bytes: int = 4 * 2**20
    body_seconds: float = 30.0
    """How long a body may take to arrive."""
    timeout: float | None = 600.0
    """Seconds from a request's arrival to its end; None lets it take as long as it takes."""
    at_once: int = 256
    """Requests that generate or wait; more are sent away."""
    hosts: tuple[str, ...] = ()
    """Host names that requests may be addressed to; none: any."""
    origins: tuple[str, ...] = ()
    """Other sites whose pages may ask, as ``https://name``."""
    open_metrics: bool = False
    """/metrics needs no key."""


def loopback_hosts(host: str) -> tuple[str, ...]:
    """The names that a server bound to ``host`` goes by, if only this machine can reach it.

    A page of another site can have its own name resolve to this machine, and so talk to a server here as if it were its
    own; the name in the Host header gives that away.

    >>> loopback_hosts("0.0.0.0")
    ()
    """
    return _LOOPBACK if host in _LOOPBACK else ()


class Refused(Exception):  # noqa: N818 (no error of the program)
    """A request that goes no further."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class Gate:
    """Wraps ``app``.

    Args:
        app: what answers.
        settings: what is let through.
        metrics: what counts.
        ready: says why nothing can be generated now (draining, broken down); None if it can.
    """

    def __init__(
        self, app: App, settings: GateSettings, metrics: Metrics, ready: Callable[[], str | None] = lambda: None
    ) -> None:
        self.app = app
        self.settings = settings
        self._metrics = metrics
        self._ready = ready
        self._running = 0
        self._everybody = Meter(settings.allowance)
        self._meters = {key.name: Meter(key.allowance) for key in settings.keys.keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or what else a server asks its application."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await self._visit(scope, receive, send)
        else:
            raise ValueError("slipstream speaks HTTP, nothing else")

    async def _visit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        visit = Visit(request_id(headers.get(b"x-request-id")), scope["method"], scope["path"])
        token = current.set(visit)
        answer = _Response(send, visit)
        try:
            await self._answer(scope, headers, receive, answer)
        except Refused as refused:
            visit.refused = refused.code
            self._metrics.refused(refused.code)
            await answer.fail(refused)
        except asyncio.CancelledError:  # the client went away, unless it is the server that ends
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
        except Exception as error:  # the log tells where; whoever asked learns that it was not their fault
            visit.failure = error
            await answer.fail(Refused(500, "internal_error", "the server failed; its log says where"))
        finally:
            seconds = perf_counter() - visit.began
            self._metrics.http(visit.method, visit.path, visit.status or 499, seconds)
            visit.status = visit.status or 499  # went away before anything was said
            tell_visit(visit, seconds)
            current.reset(token)

    async def _answer(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: _Response) -> None:
        visit = answer.visit
        self._check_source(scope, headers)
        self._check_key(visit, headers)
        if visit.method != "POST":
            await self.app(scope, receive, answer)
            return
        receive = await self._body(headers, receive)
        if visit.path not in GENERATING:
            await self.app(scope, receive, answer)
            return
        with self._place(visit):
            await self._in_time(scope, receive, answer)

    # --- where from ---------------------------------------------------------------------------------------------------

    def _check_source(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse names that are not ours, and pages of other sites."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.settings.hosts and _name(host) not in self.settings.hosts:
            raise Refused(403, "unknown_host", f"this server does not go by the name {host[:100]!r}; see --allow-host")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if origin and _site(origin) != host and origin not in self.settings.origins:
            raise Refused(403, "unknown_origin", f"pages of {origin[:100]!r} may not ask here; see --cors-origin")

    def _check_key(self, visit: Visit, headers: dict[bytes, bytes]) -> None:
        visit.meter = self._everybody
        keys = self.settings.keys
        if not keys or visit.path in OPEN or (visit.path == "/metrics" and self.settings.open_metrics):
            return
        if visit.method == "OPTIONS":  # a browser asks without the key whether it may ask
            return
        secret = bearer(headers.get(b"authorization"))
        found = None if secret is None else keys.find(secret)
        if found is None:
            message = "no API key was given; send Authorization: Bearer KEY" if secret is None else "no such API key"
            raise Refused(401, "invalid_api_key", message, www_authenticate="Bearer")
        visit.key = found.name
        visit.meter = self._meters[found.name]

    # --- how much -----------------------------------------------------------------------------------------------------

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Read the body, up to the limit, and hand it on in one piece."""
        most = self.settings.body_bytes
        too_large = Refused(413, "body_too_large", f"the body may have up to {most} bytes", connection="close")
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return _replay(message, receive)
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise Refused(408, "body_too_slow", "the body did not arrive in time", connection="close") from None
        return _replay({"type": "http.request", "body": bytes(body), "more_body": False}, receive)

    def _place(self, visit: Visit) -> _Place:
        """A place among those who generate."""
        if reason := self._ready():
            raise Refused(503, "unavailable", f"nothing is generated here now: {reason}", retry_after="5")
        if self._running >= self.settings.at_once:
            message = f"{self._running} requests are being answered or wait, which is as many as may"
            raise Refused(503, "overloaded", message, retry_after="1")
        assert visit.meter is not None
        refusal: Refusal | None = visit.meter.enter()
        if refusal is not None:
            raise Refused(429, "rate_limit_exceeded", refusal.message, retry_after=str(refusal.seconds))
        return _Place(self, visit.meter)

    def come(self, count: int) -> None:
        """So many more requests generate."""
        self._running += count

    async def _in_time(self, scope: Scope, receive: Receive, answer: _Response) -> None:
        left = self.settings.timeout
        if left is not None:
            left -= perf_counter() - answer.visit.began
        try:
            async with asyncio.timeout(left):
                await self.app(scope, receive, answer)
        except TimeoutError:
            message = f"the answer took more than {self.settings.timeout:g} s; ask for less, or try again later"
            raise Refused(503, "timeout", message, retry_after="5") from None


class _Place:
    """Entered while a request generates."""

    def __init__(self, gate: Gate, meter: Meter) -> None:
        self._gate, self._meter = gate, meter
        gate.come(1)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._gate.come(-1)
        self._meter.leave()


class _Response:
    """Sends a response, with the headers that all have; knows whether it has begun."""

    def __init__(self, send: Send, visit: Visit) -> None:
        self._send = send
        self.visit = visit
        self._over = False
        self._streams = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.visit.status = message["status"]
            headers = list(message.get("headers", ()))
            self._streams = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
            headers += [(b"x-request-id", self.visit.id.encode()), (b"x-content-type-options", b"nosniff")]
            message["headers"] = headers
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, refused: Refused) -> None:
        """Answer with an error; in the middle of a stream, as its last event."""
        if self._over:
            return
        body = json.dumps({"error": _error(refused)}).encode()
        if self.visit.status == 0:
            names = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
            headers = [(name.encode(), value.encode()) for name, value in names.items()]
            await self({"type": "http.response.start", "status": refused.status, "headers": headers})
            await self({"type": "http.response.body", "body": body, "more_body": False})
        elif self._streams:
            with suppress(Exception):  # whoever listened may be gone
                await self({"type": "http.response.body", "body": b"data: " + body + b"\n\n", "more_body": False})
        else:
            raise refused


def _error(refused: Refused) -> dict[str, Any]:
    kind = TYPES.get(refused.status, "invalid_request_error")
    return {"message": str(refused), "type": kind, "param": None, "code": refused.code}


def _headers(scope: Scope) -> dict[bytes, bytes]:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return {name.lower(): value for name, value in headers}


def _name(host: str) -> str:
    """A Host header without the port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _site(origin: str) -> str | None:
    """The host of an Origin header; None of one that names none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _replay(first: Message, receive: Receive) -> Receive:
    waiting = [first]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
