"""The application: routes, and what becomes of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from slipstream.errors import SlipstreamError
from slipstream.serve.api import chat, completions, models
from slipstream.serve.api.render import error_response, failure, now
from slipstream.serve.errors import ApiError
from slipstream.serve.openapi import document
from slipstream.serve.service import Service

ROUTERS: tuple[APIRouter, ...] = (models.router, completions.router, chat.router)


#: Kinds of errors about a field that does not exist: pydantic's, and that of objects that are full of them.
_UNKNOWN = ("extra_forbidden", "unknown_field")
#: More of an unknown field's name is not repeated.
_LONGEST_NAME = 100


def create_app(service: Service, *, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """The ASGI application of ``service``, which begins and ends with it.

    Args:
        service: that nobody else uses; observers are added to ``service.observers``.
        routers: further routes.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(title="Slipstream", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.state.service = service
    app.state.created = now()
    for router in (*ROUTERS, *routers):
        app.include_router(router)
    app.openapi = lambda: document(app)  # type: ignore[method-assign]
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_starlette)
    app.add_exception_handler(ApiError, _failed)
    app.add_exception_handler(SlipstreamError, _failed)
    app.add_exception_handler(Exception, _failed)
    return app


async def _failed(_: HttpRequest, error: Exception) -> Response:
    return error_response(failure(error))


async def _of_starlette(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: f"there is nothing at {http.url.path[:200]!r}", 405: f"{http.method} is not possible here"}
    answer = error_response(ApiError(error.status_code, said.get(error.status_code, str(error.detail))))
    answer.headers.update(error.headers or {})
    return answer


async def _invalid(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_refusal(error, http.headers.get("content-type", "")))


def _refusal(error: RequestValidationError, content_type: str) -> ApiError:
    """What is wrong first, by its name; where a field may have several forms, in the form that it comes closest to."""
    found = error.errors()
    paths = [_path(one) for one in found]
    begin = paths[0][:2]
    _, path, first = max(
        ((len(p), p, one) for p, one in zip(paths, found, strict=True) if p[: len(begin)] == begin),
        key=lambda one: one[0],
    )
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({first.get('ctx', {}).get('error', 'malformed')})")
    if first["type"] == "not_supported":
        return ApiError(400, first["msg"], param=first["ctx"]["name"], code="unsupported_parameter")
    name = ".".join(map(str, path))
    if not name:
        if "json" not in content_type:
            return ApiError(400, "the body is not taken for JSON; send the header Content-Type: application/json")
        return ApiError(400, "the body is not a JSON object with the fields of this request")
    if first["type"] == "none_required":
        return ApiError(400, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    if first["type"] in _UNKNOWN:
        return ApiError(400, f"{name} is not known here; leave it out", param=name, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_parameter")
    said = first["msg"].replace("False", "false")
    return ApiError(400, f"{name} is not usable: {said}", param=name, code="invalid_value")


def _path(error: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Names of fields and numbers of items, without those of the forms that were tried: ``str``, ``list[TextPart]``."""
    parts: list[str | int] = [*error["loc"]]
    if error["type"] == "unknown_field":
        parts.append(error["ctx"]["name"])
    last, named = parts.pop(), error["type"] in _UNKNOWN  # by the client, so it may look like anything
    last = last[:_LONGEST_NAME] if named and isinstance(last, str) else last
    chosen = parts.index("response_format") + 1 if "response_format" in parts else None  # what its type says
    kept = [part for at, part in enumerate(parts) if _is_field(part) and at != chosen]
    return tuple([*kept, last] if named or _is_field(last) else kept)


def _is_field(part: str | int) -> bool:
    return isinstance(part, int) or (part not in ("body", "str", "int") and part.isidentifier() and part.islower())
