"""Structured logs: one JSON object a line on stderr.

Prompts, answers and messages of errors (which may quote a prompt) are left out unless ``prompts`` is set.
"""

from __future__ import annotations

import json
import logging
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO

from slipstream.serve.visits import Visit, current

#: Everything that the server has to say.
log = logging.getLogger("slipstream.serve")
_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")
FORMATS = ("json", "text")
#: What is asked for every few seconds; such requests are logged at level debug, unless they fail.
_POLLED = ("/health", "/ready", "/metrics")


def set_up(stream: TextIO, *, form: str = "json", prompts: bool = False, level: str = "info") -> None:
    """Send what the server and uvicorn log to ``stream``; ``form`` is one of ``FORMATS``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines(prompts) if form == "json" else Sentences(prompts))
    for name in ("slipstream.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    for name in _UVICORN[1:]:
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # requests have a line of ours


def tell(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log that something happened."""
    log.log(level, event, extra={"fields": fields})


def tell_visit(visit: Visit, seconds: float) -> None:
    """The line of one HTTP request; requests that failed are warnings, or errors if it was our fault."""
    level = logging.DEBUG if visit.path in _POLLED else logging.INFO
    if visit.status >= 400:
        level = logging.ERROR if visit.failure else logging.WARNING
    fields: dict[str, Any] = {
        "request_id": visit.id,
        "key": visit.key,
        "method": visit.method,
        "path": visit.path,
        "status": visit.status,
        "seconds": round(seconds, 6),
    }
    if visit.refused:
        fields["refused"] = visit.refused
    if visit.prompt_tokens:
        fields |= {
            "answer_id": visit.call,
            "user": visit.user,
            "prompt_tokens": visit.prompt_tokens,
            "completion_tokens": visit.completion_tokens,
            "drafted_tokens": visit.drafted,
            "accepted_tokens": visit.accepted,
            "first_token_seconds": _rounded(visit.first_token_seconds),
            "finish_reasons": visit.finish_reasons,
        }
    log.log(level, "request", exc_info=visit.failure, extra={"fields": fields, "texts": visit.texts})


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, event, request_id, and the fields of the event."""

    def __init__(self, prompts: bool) -> None:
        super().__init__()
        self._prompts = prompts

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record), ensure_ascii=False, default=str)

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """What the line holds."""
        visit = current.get()
        out: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        if visit is not None:
            out["request_id"] = visit.id
        out |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            out |= described(record.exc_info[1], message=self._prompts)
        if self._prompts:
            out |= getattr(record, "texts", {})
        return out


class Sentences(JsonLines):
    """The same for people: time, level, event, and ``name=value`` for each field."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        head = f"{fields.pop('time')} {fields.pop('level'):<7} {' '.join(str(fields.pop('event')).split())}"
        rest = [f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in fields.items()]
        return " ".join([head, *rest])


def described(error: BaseException, *, message: bool = False) -> dict[str, Any]:
    """What went wrong and where, without what it was about: messages may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-8:]
    out: dict[str, Any] = {
        "error": type(error).__name__,
        "where": [f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames],
    }
    if message:
        out["message"] = str(error)
    return out


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
