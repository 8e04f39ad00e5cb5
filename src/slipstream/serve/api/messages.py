"""Messages and tools, as chat templates take them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.serve.api.schema import AsJson, AsSchema, AsText, ChatRequest, ChosenTool, Message, TextPart, Tool
from slipstream.serve.calling import ANYTHING, NOTHING, Tags, forced_call, free_call
from slipstream.serve.errors import ApiError
from slipstream.serve.texts import GrammarKind
from slipstream.serve.tools import CallParser, Style


@dataclass(frozen=True)
class Demand:
    """A grammar that answers have to follow."""

    name: str
    """The field that demands it."""
    kind: GrammarKind
    rules: str


@dataclass(frozen=True)
class Offer:
    """The tools that a model may call."""

    style: Style
    shown: list[dict[str, Any]]
    """As its chat template takes them."""
    names: tuple[str, ...]
    grammar: Demand | None
    """Of what it has to write; None if that is its own choice."""

    def parser(self) -> CallParser:
        """Finds calls in one answer."""
        return CallParser(self.style, self.names)


def offer(body: ChatRequest, style: Style | None, tags: Tags) -> Offer | None:
    """The tools of a request; None if there are none that may be called.

    Raises:
        ApiError: they contradict each other, or the model knows of none.
    """
    choice, tools = body.tool_choice, body.tools or []
    names = [tool.function.name for tool in tools]
    if not tools and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice asks for a call, but there are no tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    if style is None:
        raise ApiError(400, "the model's chat template knows no tools; leave tools out", param="tools")
    if len(set(names)) < len(names):
        raise ApiError(400, "two tools have the same name; rename one", param="tools")
    if isinstance(choice, ChosenTool) and choice.function.name not in names:
        what = f"tool_choice names {choice.function.name!r}, which is none of the tools"
        raise ApiError(400, what, param="tool_choice.function.name")
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    return Offer(style, shown, tuple(names), _demand(body, tools, style, tags))


def _demand(body: ChatRequest, tools: Sequence[Tool], style: Style, tags: Tags) -> Demand | None:
    choice, several = body.tool_choice, body.parallel_tool_calls is not False
    free = choice in (None, "auto")
    schemas = {tool.function.name: _schema(i, tool, forced=not free) for i, tool in enumerate(tools)}
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        return Demand("tool_choice", "lark", forced_call(style, {name: schemas[name]}, tags, several=False))
    if not free:
        return Demand("tool_choice", "lark", forced_call(style, schemas, tags, several=several))
    answer = schema_of(body.response_format)
    if answer is None and several and not any(tool.function.strict for tool in tools):
        return None
    name = "tools" if answer is None else "response_format"
    return Demand(name, "lark", free_call(style, schemas, tags, several=several, answer=answer))


def schema_of(form: AsText | AsJson | AsSchema | None) -> dict[str, Any] | None:
    """What a ``response_format`` has answers follow; None if that is any text."""
    if isinstance(form, AsJson):
        return ANYTHING
    if isinstance(form, AsSchema):
        return form.json_schema.schema_ or {}
    return None


def _schema(index: int, tool: Tool, *, forced: bool) -> dict[str, Any]:
    """What the arguments of a tool follow."""
    given, where = tool.function.parameters, f"tools.{index}.function.parameters"
    kind = "object" if given is None else given.get("type", "object")
    if kind != "object":
        raise ApiError(400, f'{where} is not usable: its type has to be "object"', param=where)
    if not (forced or tool.function.strict):
        return ANYTHING
    return NOTHING if given is None else {**given, "type": "object"}


def rendered(messages: Sequence[Message], *, tools: bool) -> list[dict[str, Any]]:
    """Messages for a chat template that knows of tools, or does not.

    Raises:
        ApiError: a message that makes no sense, or would be dropped by the template.
    """
    return [_rendered(message, f"messages.{i}", tools=tools) for i, message in enumerate(messages)]


def _rendered(message: Message, where: str, *, tools: bool) -> dict[str, Any]:
    _check(message, where, tools=tools)
    made: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, where)},
            }
            for call in message.tool_calls
        ]
    return made


def _check(message: Message, where: str, *, tools: bool) -> None:
    if message.tool_calls is not None and message.role != "assistant":
        raise ApiError(400, f"{where}.tool_calls belong to assistant messages", param=f"{where}.tool_calls")
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise ApiError(400, f"{where}.tool_call_id belongs to tool messages, each of them", param=where)
    if message.content is None and message.tool_calls is None:
        raise ApiError(400, f"{where}.content is missing", param=f"{where}.content")
    if not tools and (message.tool_calls is not None or message.role == "tool"):
        raise ApiError(400, f"{where} is of a tool, of which the model's chat template does not know", param=where)


def text_of(content: str | Sequence[TextPart] | None) -> str:
    """The text of a message or a prediction."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _arguments(given: str, where: str) -> dict[str, Any]:
    """As templates take them, which write JSON themselves."""
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}.tool_calls have arguments that are no JSON object", param=where)
    return arguments
