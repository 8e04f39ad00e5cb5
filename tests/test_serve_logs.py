"""Logs: one object a line, with request ids, and without what people wrote unless that was asked for."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.serve.logs import set_up, tell, tell_visit
from slipstream.serve.visits import Visit, current

NAMES = ("slipstream.serve", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    before = [(logging.getLogger(n), dict(logging.getLogger(n).__dict__)) for n in NAMES]
    handlers = [list(logger.handlers) for logger, _ in before]
    yield
    for (logger, state), kept in zip(before, handlers, strict=True):
        logger.handlers[:] = kept
        logger.propagate, logger.disabled = state["propagate"], state["disabled"]
        logger.setLevel(state["level"])


def visited(**fields: Any) -> Visit:
    visit = Visit("r1", "POST", "/v1/completions", status=200)
    for name, value in fields.items():
        setattr(visit, name, value)
    return visit


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def failure() -> Exception:
    try:
        raise ValueError("what somebody wrote")
    except ValueError as error:
        return error


def test_a_line_is_an_object() -> None:
    out = io.StringIO()
    set_up(out)
    tell("it happened", count=3, text="two\nlines \N{SNOWMAN}")
    (line,) = lines(out)
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "info", "event": "it happened", "count": 3, "text": "two\nlines \N{SNOWMAN}"}


def test_every_line_has_the_request_id() -> None:
    out = io.StringIO()
    set_up(out)

    async def request(name: str) -> None:
        current.set(Visit(name, "GET", "/"))
        await asyncio.sleep(0)
        tell("inside", name=name)

    async def both() -> None:
        await asyncio.gather(request("a"), request("b"))

    asyncio.run(both())
    assert [(line["request_id"], line["name"]) for line in lines(out)] == [("a", "a"), ("b", "b")]


def test_a_request() -> None:
    out = io.StringIO()
    set_up(out)
    tell_visit(visited(key="me", prompt_tokens=5, completion_tokens=7, accepted=3, finish_reasons=["stop"]), 0.5)
    tell_visit(visited(status=429, refused="rate_limit_exceeded"), 0.001)
    first, second = lines(out)
    assert (first["request_id"], first["key"], first["status"], first["level"]) == ("r1", "me", 200, "info")
    assert (first["prompt_tokens"], first["completion_tokens"], first["finish_reasons"]) == (5, 7, ["stop"])
    assert (second["refused"], second["level"]) == ("rate_limit_exceeded", "warning")
    assert "prompt_tokens" not in second


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("prompts", [False, True])
def test_what_people_wrote_is_there_only_if_asked_for(form: str, prompts: bool) -> None:
    """Messages of errors quote prompts, too."""
    out = io.StringIO()
    set_up(out, form=form, prompts=prompts)
    tell_visit(visited(texts={"asked": {"prompt": "what somebody wrote"}}), 0.1)
    tell_visit(visited(status=500, failure=failure()), 0.1)
    logging.getLogger("slipstream.serve").exception("broke down", exc_info=failure())
    logging.getLogger("uvicorn.error").error("broke down", exc_info=failure())
    text = out.getvalue()
    assert len(text.splitlines()) == 4
    assert text.count("ValueError") == 3
    assert text.count("test_serve_logs.py") == 3  # where, in any case
    assert text.count("what somebody wrote") == (4 if prompts else 0)


def test_uvicorn_has_the_same_handler_and_no_access_log() -> None:
    out = io.StringIO()
    set_up(out)
    logging.getLogger("uvicorn.error").info("listening")
    logging.getLogger("uvicorn.access").info("GET /?secret HTTP/1.1")
    assert [line["event"] for line in lines(out)] == ["listening"]


def test_levels() -> None:
    out = io.StringIO()
    set_up(out, level="warning")
    tell("quiet")
    tell("loud", logging.WARNING)
    assert [line["event"] for line in lines(out)] == ["loud"]


def test_text_for_people() -> None:
    out = io.StringIO()
    set_up(out, form="text")
    tell("it\nhappened", count=3, text="two\nlines")
    (line,) = out.getvalue().splitlines()
    assert line.endswith(r'info    it happened count=3 text="two\nlines"')
