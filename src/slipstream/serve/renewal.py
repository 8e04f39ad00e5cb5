"""Another draft for a server that runs: SIGHUP has it opened once more, as it is on disk by then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from slipstream.drafters.base import Drafter
from slipstream.engine import Engine
from slipstream.errors import InputError
from slipstream.serve.logs import tell
from slipstream.serve.metrics import Metrics


@dataclass(frozen=True)
class Opened:
    """A draft as it was on disk."""

    drafter: Drafter
    versions: Mapping[str, str]
    """Its labels of ``slipstream_info``; the target stays what it is."""


class Renewal:
    """Opens a draft and hands it to the engine, one at a time; for the event loop.

    Args:
        engine: that is to draft with it.
        load: opens it, on a thread of its own; None: there is nothing to be opened.
        metrics: are told of it.
    """

    def __init__(self, engine: Engine, load: Callable[[], Opened] | None, metrics: Metrics) -> None:
        self._engine = engine
        self._load = load
        self._metrics = metrics
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        """Begin; while one is being opened, it is opened again after that, since it may have changed."""
        if self._load is None:
            tell("there is no draft to open again", logging.WARNING)
            return
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._renew(self._load))

    async def _renew(self, load: Callable[[], Opened]) -> None:
        while self._wanted:
            self._wanted = False
            start = perf_counter()
            try:
                opened = await asyncio.to_thread(load)
                self._engine.swap(opened.drafter)
            except Exception as error:  # whatever is wrong with it, there is one that works
                self._metrics.renewed("failed")
                reason = str(error) if isinstance(error, InputError | OSError) else type(error).__name__
                tell("the draft could not be opened again; the old one goes on", logging.ERROR, reason=reason)
            else:
                self._metrics.renewed("renewed")
                self._metrics.runs(opened.versions)
                tell("the draft was opened again", seconds=round(perf_counter() - start, 3))
