"""The OpenAPI document: FastAPI's, with what errors look like here, and streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_DOCUMENT = {
    "type": "object",
    "required": ["id", "object", "created", "model", "choices", "usage"],
    "properties": {
        "choices": {"type": "array", "minItems": 1},
        "usage": {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]},
    },
}
_ANSWERS = {"/v1/completions", "/v1/chat/completions"}
_ERRORS = {"400": "Not usable as asked", "404": "No such model", "500": "Failed", "503": "Busy, or shutting down"}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of ``app``."""
    made = FastAPI.openapi(app)
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    for path, operations in made["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, description in _ERRORS.items():
                shape = {"schema": {"$ref": "#/components/schemas/Error"}}
                responses.setdefault(status, {"description": description, "content": {"application/json": shape}})
            if path in _ANSWERS:
                responses["200"]["content"] = {
                    "application/json": {"schema": _DOCUMENT},
                    "text/event-stream": {"schema": {"type": "string"}},
                }
    return made
