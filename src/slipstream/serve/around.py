"""Everything around the application: what is put together here is what ``slipstream serve`` listens with."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from slipstream.measure.machine import package_version
from slipstream.serve import page
from slipstream.serve.app import create_app
from slipstream.serve.capture import Capture, CaptureSettings
from slipstream.serve.gate import App, Gate, GateSettings
from slipstream.serve.metrics import CONTENT_TYPE, Metrics
from slipstream.serve.service import Service
from slipstream.serve.watch import Accounts, Captured, Counts, state_of


@dataclass(frozen=True)
class Around:
    """What is around the application."""

    gate: GateSettings = field(default_factory=GateSettings)
    capture: CaptureSettings | None = None
    log_prompts: bool = False
    model: str = ""
    """What metrics and captures call the model."""
    draft: str = ""


class Surroundings:
    """What can be had before any model is loaded.

    Raises:
        InputError: the folder for captures cannot be used, or its redaction not be found.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self.metrics = Metrics(package_version(), around.model, around.draft)
        self.capture = None if around.capture is None else Capture(around.capture, self.metrics.captured)

    def surround(self, service: Service) -> App:
        """The whole ASGI application of ``service``."""
        around = self._around
        service.observers.add(Accounts(texts=around.log_prompts))
        service.observers.add(Counts(self.metrics))
        if self.capture is not None:
            service.observers.add(Captured(self.capture, around.model, service.texts.text_of))
        self.metrics.watch(state_of(service, self.capture))
        app = create_app(service, routers=(page.router, _metrics_route(self.metrics)))
        gate = Gate(app, around.gate, self.metrics)
        return _with_cors(gate, around.gate.origins) if around.gate.origins else gate

    def close(self) -> None:
        """Write what waits to be captured."""
        if self.capture is not None:
            self.capture.close()


def _with_cors(app: App, origins: tuple[str, ...]) -> App:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("Authorization", "Content-Type", "X-Request-Id"),
        expose_headers=("X-Request-Id", "Retry-After"),
        max_age=600,
    )


def _metrics_route(metrics: Metrics) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router
