"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.api import logprobs
from slipstream.serve.api.answer import Answer
from slipstream.serve.api.messages import Offer, offer, rendered
from slipstream.serve.api.params import Asked, check_model, naming, prepare
from slipstream.serve.api.parts import Part, Token
from slipstream.serve.api.render import new_id
from slipstream.serve.api.schema import ChatRequest
from slipstream.serve.errors import ApiError
from slipstream.serve.observers import Call
from slipstream.serve.service import Service
from slipstream.serve.tools import Called, CallParser, Found, Said
from slipstream.types import Output

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, http: HttpRequest) -> Response:
    """The next message of a chat."""
    service: Service = http.app.state.service
    check_model(body.model, service)
    service.check_open()
    tools = offer(body, service.texts.tool_style, service.texts.tags)
    call = await _call(body, service, tools)
    return await ChatAnswer(body, call, service, tools).respond(http)


async def _call(body: ChatRequest, service: Service, tools: Offer | None) -> Call:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    messages = rendered(body.messages, tools=service.texts.tool_style is not None)
    with naming("messages", service):
        prompt = await service.texts.encode_chat(messages, None if tools is None else tools.shown)
    top = (body.top_logprobs or 0) if body.logprobs else None
    asked = Asked(_most(body), top, None if tools is None else tools.grammar)
    requests = await prepare(body, service, [prompt], asked)
    return Call(new_id("chatcmpl"), "chat", requests, body.model_dump(exclude_unset=True), bool(body.stream), body.user)


def _most(body: ChatRequest) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; give one", param="max_tokens")
    return body.max_completion_tokens if body.max_tokens is None else body.max_tokens


class _Message:
    """One answer so far."""

    def __init__(self, parser: CallParser | None) -> None:
        self.parser = parser
        self.begun = False
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[Token] = []

    def found(self, part: Part) -> list[Found]:
        """What a part of the text turns out to be."""
        if self.parser is None:
            return [Said(part.text)] if part.text else []
        found = self.parser.push(part.text)
        return found + self.parser.flush() if part.output is not None else found

    def delta(self, one: Found) -> dict[str, Any]:
        """The same for a stream; it is kept."""
        if isinstance(one, Said):
            self.content += one.text
            return {"content": one.text}
        if isinstance(one, Called):
            self.calls.append(
                {"id": new_id("call"), "type": "function", "function": {"name": one.name, "arguments": ""}}
            )
            begun = {**self.calls[-1], "function": {"name": one.name, "arguments": ""}}
            return {"tool_calls": [{"index": len(self.calls) - 1, **begun}]}
        self.calls[-1]["function"]["arguments"] += one.text
        return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": one.text}}]}

    def reason(self, output: Output) -> str | None:
        """Why it ended."""
        return "tool_calls" if self.calls and output.finish_reason == "stop" else output.finish_reason

    def whole(self) -> dict[str, Any]:
        """All of it."""
        content = self.content if self.content or not self.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class ChatAnswer(Answer):
    """Messages."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, call: Call, service: Service, tools: Offer | None) -> None:
        super().__init__(body, call, service)
        self._logprobs = bool(body.logprobs)
        self._messages = [_Message(None if tools is None else tools.parser()) for _ in call.requests]

    def take(self, part: Part) -> list[dict[str, Any]]:
        """The deltas that it adds."""
        message = self._messages[part.index]
        deltas: list[dict[str, Any]] = []
        if not message.begun:
            message.begun = True
            deltas.append({"role": "assistant", "content": "", "refusal": None})
        deltas += [message.delta(one) for one in message.found(part)]
        message.tokens += part.tokens
        if self._logprobs and part.tokens and (not deltas or "role" in deltas[-1]):
            deltas.append({"content": ""})
        choices = [self._choice(part.index, delta, None) for delta in deltas]
        if self._logprobs and part.tokens:
            choices[-1]["logprobs"] = logprobs.of_chat(part.tokens, self.service.texts)
        if part.output is not None:
            choices.append(self._choice(part.index, {}, message.reason(part.output)))
            if self._logprobs and not message.tokens:  # as in a document: there are none, not: none were asked for
                choices[-1]["logprobs"] = logprobs.of_chat((), self.service.texts)
        return choices

    def choices(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        """Whole messages."""
        made = []
        for index, (message, output) in enumerate(zip(self._messages, outputs, strict=True)):
            shown = logprobs.of_chat(message.tokens, self.service.texts) if self._logprobs else None
            reason = message.reason(output)
            made.append({"index": index, "message": message.whole(), "finish_reason": reason, "logprobs": shown})
        return made

    @staticmethod
    def _choice(index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
