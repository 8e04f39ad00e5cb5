"""The generation thread: it alone steps the engine. Orders come in by a queue, events go out through a function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter

from slipstream.engine import Engine
from slipstream.errors import SlipstreamError
from slipstream.types import Event, Request

logger = logging.getLogger("slipstream.serve")


class CrashedError(SlipstreamError, RuntimeError):
    """The generation thread broke down: nothing can be answered any more."""


class StoppedError(SlipstreamError, RuntimeError):
    """The server went down before this was answered."""


@dataclass(eq=False)
class Ticket:
    """One answer that the generation thread works on."""

    request: Request
    receive: Callable[[Event, float], None]
    """Is given its events, the last one with an output or an error, and when they were made; see ``Worker``."""
    id: int | None = None
    """The engine's number of it, once it has one."""


@dataclass(frozen=True)
class _Order:
    ticket: Ticket | None
    """None: stop."""
    abort: bool = False


#: Events of one step, each with the ticket it is for.
Batch = Sequence[tuple[Ticket, Event, float]]


@dataclass
class Worker:
    """Owns the engine.

    Args:
        engine: that nobody else uses from now on.
        post: is given the events of each step, on the generation thread; it calls ``receive`` of their tickets
            wherever these belong.
        crashed: is told that the thread broke down, on that thread, after all tickets had their last event.
    """

    engine: Engine
    post: Callable[[Batch], None]
    crashed: Callable[[BaseException], None]
    failure: BaseException | None = None
    """Why the thread broke down."""
    _orders: SimpleQueue[_Order] = field(default_factory=SimpleQueue)
    _tickets: dict[int, Ticket] = field(default_factory=dict)
    _gate: Lock = field(default_factory=Lock)
    _over: bool = False
    _thread: Thread | None = None

    def start(self) -> None:
        """Begin to work."""
        self._thread = Thread(target=self._run, name="slipstream-generation", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes orders."""
        return self._thread is not None and self._thread.is_alive() and not self._over

    def submit(self, ticket: Ticket) -> None:
        """Have it answered. From any thread.

        Raises:
            CrashedError, StoppedError: the thread is no more.
        """
        self._order(_Order(ticket))

    def abort(self, ticket: Ticket) -> None:
        """End it with the next step, if it has not ended. From any thread."""
        with suppress(CrashedError, StoppedError):
            self._order(_Order(ticket, abort=True))

    def stop(self, seconds: float) -> bool:
        """End everything that is left, and the thread; False if it did not end in time."""
        with suppress(CrashedError, StoppedError):
            self._order(_Order(None))
        if self._thread is not None:
            self._thread.join(seconds)
            return not self._thread.is_alive()
        return True

    def _order(self, order: _Order) -> None:
        with self._gate:
            if self._over:
                raise self._ending()
            self._orders.put(order)

    def _ending(self) -> CrashedError | StoppedError:
        if self.failure is None:
            return StoppedError("the server is shutting down; try again later")
        return CrashedError(f"the generation thread broke down ({type(self.failure).__name__}); restart the server")

    # --- on the generation thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._step()
        except BaseException as error:
            logger.critical("the generation thread broke down", exc_info=error)
            self.failure = error
        self._close()
        if self.failure is not None:
            self.crashed(self.failure)

    def _take_orders(self) -> bool:
        """Follow all orders, waiting for one if there is nothing to do; False if it is time to stop."""
        refused: list[tuple[Ticket, Event, float]] = []
        idle = not self.engine.unfinished
        try:
            while True:
                order = self._orders.get(block=idle and not refused)
                idle = False
                if order.ticket is None:
                    return False
                if order.abort:
                    if order.ticket.id is not None:
                        self.engine.abort(order.ticket.id)
                    continue
                if (error := self._add(order.ticket)) is not None:
                    refused.append((order.ticket, Event(0, error=error), perf_counter()))
        except Empty:
            return True
        finally:
            if refused:
                self.post(refused)

    def _add(self, ticket: Ticket) -> Exception | None:
        try:
            ticket.id = self.engine.add(ticket.request)
        except Exception as error:  # nothing of it is there yet, so it fails alone
            return error
        self._tickets[ticket.id] = ticket
        return None

    def _step(self) -> None:
        if not self.engine.unfinished:
            return
        events = self.engine.step()
        now = perf_counter()
        batch: list[tuple[Ticket, Event, float]] = []
        for event in events:
            last = event.output is not None or event.error is not None
            ticket = self._tickets.pop(event.id) if last else self._tickets[event.id]
            batch.append((ticket, event, now))
        if batch:
            self.post(batch)

    def _close(self) -> None:
        """Take no more orders; whoever still waits is told that it is over."""
        with self._gate:
            self._over = True
        left = list(self._tickets.values())
        self._tickets.clear()
        while not self._orders.empty():
            order = self._orders.get()
            if order.ticket is not None and not order.abort:
                left.append(order.ticket)
        if self.failure is None:
            for ticket in left:
                if ticket.id is not None:
                    self.engine.abort(ticket.id)
            with suppress(Exception):  # a model that breaks down by now changes nothing: all are told
                while self.engine.unfinished:
                    self.engine.step()
        now = perf_counter()
        if left:
            self.post([(ticket, Event(ticket.id or 0, error=self._ending()), now) for ticket in left])
