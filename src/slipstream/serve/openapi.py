"""The OpenAPI document: FastAPI's, with what errors look like here, and streams."""

from __future__ import annotations

import copy
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
_ERRORS = {
    "400": "Not usable as asked",
    "401": "No API key, or none that is known",
    "403": "Addressed by another name, or from another site",
    "404": "No such model",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "429": "A limit of the API key is reached",
    "500": "Failed",
    "503": "Busy, or shutting down",
}


def document(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of ``app``."""
    made = copy.deepcopy(FastAPI.openapi(app))  # which keeps its own
    schemas = made.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = _ERROR
    options = app.state.service.options
    for request in ("CompletionRequest", "ChatRequest"):
        fields = schemas[request]["properties"]
        fields["model"] = {"anyOf": [{"const": options.name}, {"type": "null"}], "title": "Model"}
        _not_null(fields["n"])["maximum"] = options.max_n
        _not_null(fields["logit_bias"])["propertyNames"] = {"pattern": "^[0-9]{1,9}$"}
    for form in schemas["CompletionRequest"]["properties"]["prompt"]["anyOf"]:
        for text in (form, form.get("items", {})):
            text |= {"minLength": 1} if text.get("type") == "string" else {}
    schemas["Message"] = _messages(schemas["Message"])
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


def _not_null(field: dict[str, Any]) -> dict[str, Any]:
    """What a field may be beside null."""
    return next(form for form in field["anyOf"] if form.get("type") != "null")


def _messages(message: dict[str, Any]) -> dict[str, Any]:
    """What a message of each role has to have and may have."""
    fields: dict[str, Any] = message["properties"]
    said = {**fields, "content": {"anyOf": [f for f in fields["content"]["anyOf"] if f.get("type") != "null"]}}
    calls, answered = _not_null(fields["tool_calls"]), _not_null(fields["tool_call_id"])
    others = said.keys() - {"role", "content", "tool_calls", "tool_call_id"}
    null = {"type": "null"}

    def form(*roles: str, required: tuple[str, ...], **own: Any) -> dict[str, Any]:
        known = {name: said[name] for name in others} | {"tool_calls": null, "tool_call_id": null}
        return {
            "type": "object",
            "required": ["role", *required],
            "properties": {**known, "content": said["content"], **own, "role": {"enum": list(roles)}},
            "additionalProperties": False,
        }

    forms = [
        form("system", "developer", "user", "assistant", required=("content",)),
        form("assistant", required=("tool_calls",), content=fields["content"], tool_calls=calls),
        form("tool", required=("content", "tool_call_id"), tool_call_id=answered),
    ]
    return {"title": message["title"], "description": message.get("description", ""), "anyOf": forms}
