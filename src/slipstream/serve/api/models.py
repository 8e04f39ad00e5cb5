"""``GET /v1/models``, and what a load balancer asks."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.api.params import check_model
from slipstream.serve.api.render import Json
from slipstream.serve.errors import ApiError
from slipstream.serve.service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(http: HttpRequest) -> Response:
    """The model that is served."""
    return Json({"object": "list", "data": [_entry(http)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, http: HttpRequest) -> Response:
    """The same by its name."""
    check_model(name, http.app.state.service)
    return Json(_entry(http))


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health() -> Response:
    """Whether the process answers at all."""
    return Json({"status": "ok"})


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(http: HttpRequest) -> Response:
    """Whether new requests are accepted."""
    service: Service = http.app.state.service
    service.check_open(0)
    if not service.ready:
        raise ApiError(503, "not ready", code="not_ready", retry_after=1)
    return Json({"status": "ready"})


def _entry(http: HttpRequest) -> dict[str, Any]:
    service: Service = http.app.state.service
    return {
        "id": service.options.name,
        "object": "model",
        "created": http.app.state.created,
        "owned_by": "slipstream",
        "max_model_len": service.engine.setting.target.max_positions,
    }
