"""Another draft for a server that runs: SIGHUP has it opened once more, as it is on disk by then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter

from slipstream.drafters.base import Drafter
from slipstream.engine import Engine
from slipstream.errors import InputError
from slipstream.serve.logs import tell


class Renewal:
    """Opens a draft and hands it to the engine, one at a time; for the event loop.

    Args:
        engine: that is to draft with it.
        load: opens it, on a thread of its own; None: there is nothing to be opened.
        count: is told "renewed" or "failed".
    """

    def __init__(self, engine: Engine, load: Callable[[], Drafter] | None, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._load = load
        self._count = count
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

    async def _renew(self, load: Callable[[], Drafter]) -> None:
        while self._wanted:
            self._wanted = False
            start = perf_counter()
            try:
                self._engine.swap(await asyncio.to_thread(load))
            except Exception as error:  # whatever is wrong with it, there is one that works
                self._count("failed")
                reason = str(error) if isinstance(error, InputError | OSError) else type(error).__name__
                tell("the draft could not be opened again; the old one goes on", logging.ERROR, reason=reason)
            else:
                self._count("renewed")
                tell("the draft was opened again", seconds=round(perf_counter() - start, 3))
