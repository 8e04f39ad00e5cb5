"""A process that serves: uvicorn, signals, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import uvicorn

from slipstream.serve.renewal import Renewal
from slipstream.serve.service import Service

logger = logging.getLogger("slipstream.serve")

#: What goes on in Python on one thread makes the others wait for this long at most; a step's kernels are short.
SWITCH_SECONDS = 0.001
#: Time that is left after draining for answers to go out.
_LAST_WORDS = 2.0


@dataclass(frozen=True)
class Binding:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_seconds: float = 30.0
    """After SIGTERM, requests in the works have so long."""
    tls: tuple[str, str] | None = None
    """Files with certificate and key."""


class Server(uvicorn.Server):
    """Drains when it is asked to end, once; a second time it ends at once."""

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_seconds: float, renewal: Renewal | None = None
    ) -> None:
        super().__init__(config)
        self._renewal = renewal
        self._service = service
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.failed = False

    async def startup(self, sockets: Any = None) -> None:
        """Listen."""
        self._loop = asyncio.get_running_loop()
        if self._renewal is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self.hang_up, has_terminal())
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: Any) -> None:
        """A signal: not kept for later, since the exit code is to be ours."""
        if self._loop is None:
            self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Begin to drain; if that goes on already, do not wait any longer."""
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self.force_exit = self.should_exit = True

    def hang_up(self, had_terminal: bool) -> None:
        """SIGHUP: open the draft again; but if it came since the terminal was closed, end."""
        if had_terminal and not has_terminal():
            self.end()
        elif self._renewal is not None and self._draining is None:
            self._renewal.ask()

    def crash(self) -> None:
        """End, and not well."""
        self.failed = self.should_exit = True

    async def _drain(self) -> None:
        self._service.drain()
        logger.info("draining: %d answers in the works", self._service.pending)
        try:
            await asyncio.wait_for(self._service.drained(), self._drain_seconds)
        except TimeoutError:
            logger.warning("%d answers are cut off after %g s", self._service.pending, self._drain_seconds)
            await self._service.stop(_LAST_WORDS)
        self.should_exit = True


def serve(app: Any, service: Service, binding: Binding, renewal: Renewal | None = None) -> int:
    """Serve until told to end; the exit code: 0, or 1 if the generation thread broke down.

    Args:
        app: an ASGI application of ``service``.
        service: what it serves.
        binding: where.
        renewal: what to do at SIGHUP.

    Raises:
        SystemExit: of uvicorn, if it cannot listen.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(configured(app, binding), service, binding.drain_seconds, renewal)
    service.crashed = server.crash
    server.run()
    return 1 if server.failed or not server.started else 0


def configured(app: Any, binding: Binding) -> uvicorn.Config:
    """How uvicorn is to serve ``app``."""
    certificate, key = binding.tls or (None, None)
    return uvicorn.Config(
        app,
        host=binding.host,
        port=binding.port,
        log_config=None,
        ws="none",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(_LAST_WORDS),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def has_terminal() -> bool:
    """Whether this process belongs to a terminal that is there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
