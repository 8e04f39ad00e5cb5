"""What the server knows of the HTTP request that it is answering."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import perf_counter

from slipstream.serve.limits import Meter

_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(eq=False)
class Visit:
    """One HTTP request, from its first byte to its last."""

    id: str
    method: str
    path: str
    key: str | None = None
    """Name of the API key; None without one."""
    meter: Meter | None = None
    began: float = field(default_factory=perf_counter)
    status: int = 0
    """0 until a response has begun."""
    call: str | None = None
    """The id of what was answered, as in the response."""
    user: str | None = None
    """What the client says of its own user."""
    refused: str | None = None
    """Why the gate did not let it in."""
    failure: BaseException | None = None
    prompt_tokens: int = 0
    """The prompt of several answers counts once."""
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    first_token_seconds: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    texts: dict[str, object] = field(default_factory=dict)
    """Prompt and answers, if they are to be logged."""


def bare(name: str) -> str:
    """What the outside may know of a drafter that is called by the path of its model.

    >>> bare("/srv/models/draft/"), bare("suffix")
    ('draft', 'suffix')
    """
    return name.rstrip("/").rpartition("/")[2]


#: The visit that the present task belongs to.
current: ContextVar[Visit | None] = ContextVar("slipstream_visit", default=None)


def request_id(given: bytes | None) -> str:
    """The caller's X-Request-Id if it can stand in a log and a header, otherwise a new one.

    >>> request_id(b"abc-123")
    'abc-123'
    >>> len(request_id(b"two words"))
    32
    """
    if given is not None and _ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
