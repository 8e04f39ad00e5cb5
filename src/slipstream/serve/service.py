"""The event loop's end of the generation thread: the one place where calls begin, tokens come in, and calls end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from slipstream.engine import Engine
from slipstream.serve.errors import ApiError
from slipstream.serve.observers import Call, End, Observer, Observers, Outcome, Tokens
from slipstream.serve.pace import cut, paced
from slipstream.serve.texts import Texts
from slipstream.serve.worker import Batch, CrashedError, StoppedError, Ticket, Worker
from slipstream.types import Event, Output, Piece, Round

logger = logging.getLogger("slipstream.serve")


@dataclass(frozen=True)
class Options:
    """What a server allows, and how it is called."""

    name: str
    """Of the model, as clients write it."""
    max_tokens: int = 1024
    """Length of answers to requests that do not say."""
    max_n: int = 16
    """Answers that one request may ask for."""
    max_queue: int = 256
    """Answers that may wait for a place beside those in the works; one more is refused with 503."""
    max_prompt: int | None = None
    """Tokens that a prompt may have; None: what the model can read."""
    pace: bool = False
    """Spread tokens of a stream that came together, for somebody who reads along."""


@dataclass(frozen=True)
class Update:
    """What a step brought for one answer of a call."""

    index: int
    piece: Piece | None
    round: Round | None
    output: Output | None
    speed_up: float | None = None

    def apart(self, written: Callable[[int], bytes]) -> list[Update]:
        """One for each token, with a part of the text; the first has the round, the last what is known at the end."""
        piece = self.piece
        if piece is None or len(piece.tokens) < 2:
            return [self]
        texts = cut(piece.text, [len(written(token)) for token in piece.tokens])
        parts = [
            Update(self.index, Piece(text, (token,), (origin,)), None, None)
            for text, token, origin in zip(texts, piece.tokens, piece.origins, strict=True)
        ]
        parts[0] = replace(parts[0], round=self.round)
        parts[-1] = replace(parts[-1], output=self.output, speed_up=self.speed_up)
        return parts


class Service:
    """Runs calls.

    Args:
        engine: that nobody else uses.
        options: what is allowed.
        observers: who watches.
        crashed: is called on the event loop when the generation thread broke down.
    """

    def __init__(
        self,
        engine: Engine,
        options: Options,
        observers: Sequence[Observer] = (),
        crashed: Callable[[], None] = lambda: None,
    ) -> None:
        self.engine = engine
        self.options = options
        self.observers = Observers(observers)
        self.texts = Texts(engine.setting.tokenizer, engine.setting.target)
        self.crashed = crashed
        self.draining = False
        self.open: set[Running] = set()
        """Calls that are in the works."""
        self.worker = Worker(engine, self._post, self._on_crash)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()

    def start(self) -> None:
        """Begin; on the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        self.worker.start()

    async def stop(self, seconds: float = 10.0) -> None:
        """End everything."""
        self.draining = True
        await asyncio.to_thread(self.worker.stop, seconds)
        self.texts.close()

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self.worker.alive and not self.draining

    @property
    def pending(self) -> int:
        """Answers in the works or waiting."""
        return sum(running.left for running in self.open)

    def drain(self) -> None:
        """Accept nothing more."""
        self.draining = True

    async def drained(self) -> None:
        """Wait until nothing is in the works."""
        await self._quiet.wait()

    def check_open(self, answers: int = 1) -> None:
        """Whether so many more answers can be taken on.

        Raises:
            ApiError: 503.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down; try again later", code="shutting_down", retry_after=5)
        if not self.worker.alive:
            raise ApiError(
                503, "the generation thread is not running; restart the server", code="crashed", retry_after=5
            )
        waiting = self.pending + answers - self.engine.limits.requests
        if waiting > self.options.max_queue and self.pending:
            raise ApiError(503, "too many requests are waiting; try again later", code="overloaded", retry_after=1)

    @asynccontextmanager
    async def run(self, call: Call) -> AsyncIterator[Running]:
        """Begin a call; leaving the block ends whatever is left of it.

        Raises:
            ApiError: the server takes no more.
        """
        self.check_open(len(call.requests))
        running = Running(call, self)
        self.open.add(running)
        self._quiet.clear()
        self.observers.on_begin(call)
        try:
            running.submit()
            yield running
        finally:
            running.abort()

    def closed(self, running: Running) -> None:
        """All of its answers are over."""
        self.open.discard(running)
        if not self.open:
            self._quiet.set()

    # --- from the generation thread -----------------------------------------------------------------------------------

    def _post(self, batch: Batch) -> None:
        self._on_loop(_hand_out, batch)

    def _on_crash(self, error: BaseException) -> None:
        self._on_loop(self.crashed)

    def _on_loop(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            assert self._loop is not None
            self._loop.call_soon_threadsafe(function, *args)


def _hand_out(batch: Batch) -> None:
    for ticket, event, at in batch:
        ticket.receive(event, at)


@dataclass(eq=False)
class Running:
    """A call in the works: iterate for its updates, until all its answers are over."""

    call: Call
    service: Service
    outputs: list[Output | None] = field(init=False)
    error: Exception | None = None
    aborted: bool = False
    left: int = field(init=False)
    """Answers that are not over."""
    _tickets: list[Ticket] = field(init=False)
    _updates: asyncio.Queue[Update | None] = field(default_factory=asyncio.Queue)
    """None: nothing more comes."""

    def __post_init__(self) -> None:
        requests = self.call.requests
        self.outputs = [None] * len(requests)
        self.left = len(requests)
        self._tickets = [Ticket(r, partial(self._receive, i)) for i, r in enumerate(requests)]

    def submit(self) -> None:
        """Hand it to the generation thread."""
        for index, ticket in enumerate(self._tickets):
            try:
                self.service.worker.submit(ticket)
            except (CrashedError, StoppedError) as error:
                self._receive(index, Event(0, error=error), self.call.began)

    def abort(self) -> None:
        """End what is left with the next step."""
        if self.left:
            self.aborted = True
            self._abort_others()

    async def updates(self) -> AsyncIterator[Update]:
        """What comes, as it comes.

        Raises:
            Exception: one of its answers failed; the others are given up.
        """
        calm = self.call.stream and self.service.options.pace and len(self._tickets) == 1
        source = self._calmed() if calm else self._coming()
        async with aclosing(source):
            async for update in source:
                yield update
                if self.call.stream and update.piece is not None and update.piece.tokens:
                    self.service.observers.on_sent(self.call, update.index, len(update.piece.tokens))

    async def _coming(self) -> AsyncGenerator[Update]:
        while (update := await self._updates.get()) is not None:
            yield update
        if self.error is not None:
            raise self.error

    async def _calmed(self) -> AsyncGenerator[Update]:
        """The same, token by token, in its own time."""

        async def bursts() -> AsyncGenerator[list[Update]]:
            async with aclosing(self._coming()) as coming:
                async for update in coming:
                    yield update.apart(self.service.texts.written)

        async with aclosing(paced(bursts())) as calm:
            async for some in calm:
                for update in some:
                    yield update

    async def finish(self) -> list[Output]:
        """Wait for all of its answers.

        Raises:
            Exception: one of them failed.
        """
        async for _ in self.updates():
            pass
        return [output for output in self.outputs if output is not None]

    def _receive(self, index: int, event: Event, at: float) -> None:
        if event.round is not None and event.piece is not None:
            self.service.observers.on_tokens(self.call, Tokens(index, event.round, event.piece, at))
        self.outputs[index] = event.output
        if event.error is not None:
            if self.error is None and not self.aborted:
                self.error = event.error
                self._updates.put_nowait(None)
                self._abort_others()
        elif self.error is None:
            self._updates.put_nowait(Update(index, event.piece, event.round, event.output, event.speed_up))
        if event.output is not None or event.error is not None:
            self._over(at)

    def _over(self, at: float) -> None:
        self.left -= 1
        if self.left:
            return
        self._updates.put_nowait(None)
        outcome: Outcome = "failed" if self.error is not None else "aborted" if self.aborted else "finished"
        self.service.closed(self)
        self.service.observers.on_end(self.call, End(outcome, tuple(self.outputs), self.error, at))

    def _abort_others(self) -> None:
        for ticket, output in zip(self._tickets, self.outputs, strict=True):
            if output is None:
                self.service.worker.abort(ticket)
