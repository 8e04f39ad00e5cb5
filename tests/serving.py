"""Servers for tests: a real one on a free port, and a model that says what it is told."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conftest import byte_tokenizer
from fakes import TableModel
from slipstream.answers import Setting
from slipstream.drafters import Drafter, SuffixDrafter
from slipstream.engine import Engine
from slipstream.goodput import Goodput
from slipstream.seats import Limits
from slipstream.serve.app import create_app
from slipstream.serve.run import Binding, Server, configured
from slipstream.serve.service import Options, Service

NAME = "toy"
BOS, START, EOS = 1, 2, 3
V = 300
#: Ends the prompt of a completion: what comes before it is said once more.
AGAIN = "|"
#: Where this is to be said, the model breaks down.
BROKEN = "\a"

TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nCall <tool_call>{...}</tool_call>:"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def parrot_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    return tokenizer


class Parrot:
    """A law that says again what the last user said, or what stands before ``|`` in a completion's prompt.

    What begins with ``^`` is said backwards.
    """

    def __init__(self, tokenizer: Any) -> None:
        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return found

        self._head, self._again, self._broken = ids("assistant\n"), ids(AGAIN)[0], ids(BROKEN)[-1]
        self._user, self._turn = ids("user\n"), ids("^")[0]

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        row = torch.full((V,), -20.0, dtype=torch.float64)
        row[self._next(list(tokens))] = 0.0
        return row * float("nan") if self._next(list(tokens)) == self._broken else row

    def _next(self, tokens: list[int]) -> int:
        if START not in tokens:
            at = tokens.index(self._again) if self._again in tokens else len(tokens)
            text, said = tokens[1:at], tokens[at + 1 :]
        else:
            starts = [i for i, t in enumerate(tokens) if t == START]
            said = tokens[starts[-1] + 1 + len(self._head) :]
            users = [i for i in starts if tokens[i + 1 : i + 1 + len(self._user)] == self._user]
            begin = users[-1] + 1 + len(self._user) if users else 0
            text = tokens[begin : tokens.index(EOS, begin)] if users else []
        if text[:1] == [self._turn]:
            text = text[:0:-1]
        return text[len(said)] if len(said) < len(text) else EOS


def parrot_engine(drafter: Drafter | None = None, **limits: Any) -> Engine:
    """An engine of the model that says what it is told."""
    tokenizer = parrot_tokenizer()
    target = TableModel(Parrot(tokenizer), V, name=NAME, limit=2000, eos=[EOS], tokenizer=tokenizer)
    setting = Setting(target, drafter or SuffixDrafter(), Goodput(), tokenizer, "block", False)
    return Engine(setting, Limits(**{"memory": 1 << 31, **limits}))


@dataclass
class Served:
    """A server that runs."""

    url: str
    service: Service
    server: Server
    seen: Any = None
    thread: threading.Thread = field(default_factory=threading.Thread)

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def client(self, **more: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=self.v1, api_key="none", max_retries=0, timeout=60, **more)

    def quiet(self, seconds: float = 20.0) -> None:
        """Wait until nothing is in the works, and check that nothing is left of anything."""
        wait_for(lambda: not self.service.open and not self.service.engine.unfinished, seconds)
        assert all(not arena.slots for arena in self.service.engine.seats.arenas)
        assert not self.service.worker._tickets


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@contextmanager
def served(engine: Engine, observers: Sequence[Any] = (), **options: Any) -> Iterator[Served]:
    """A real server on a free port, in a thread of this process."""
    service = Service(engine, Options(NAME, **options), observers)
    app = create_app(service)
    server = Server(configured(app, Binding(port=0)), service, drain_seconds=5.0)
    service.crashed = server.crash
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_for(lambda: server.started, 60)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", service, server, thread=thread)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
