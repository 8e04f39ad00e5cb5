"""The application: routes, and what becomes of errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

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


async def _invalid(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(_refusal(error))


def _refusal(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, by its name."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({first.get('ctx', {}).get('error', 'malformed')})")
    if first["type"] == "not_supported":
        return ApiError(400, first["msg"], param=first["ctx"]["name"], code="unsupported_parameter")
    path = ".".join(str(part) for part in first["loc"] if part != "body")
    if not path:
        return ApiError(400, "the body is not a JSON object with the fields of this request")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{path} is not known here; leave it out", param=path, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_parameter")
    return ApiError(400, f"{path} is not usable: {first['msg']}", param=path, code="invalid_value")
