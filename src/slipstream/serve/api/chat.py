"""``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.api import params as given
from slipstream.serve.api.render import event_stream, new_id, now, statistics, unless_disconnected, usage
from slipstream.serve.api.schema import ChatRequest, Message
from slipstream.serve.errors import ApiError
from slipstream.serve.observers import Call
from slipstream.serve.service import Service
from slipstream.serve.trace import Traces

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, http: HttpRequest) -> Response:
    """The next message of a chat."""
    service: Service = http.app.state.service
    given.check_model(body.model, service)
    service.check_open()
    call = await _call(body, service)
    answer = _Answer(body, call, service)
    if body.stream:
        return event_stream(answer.chunks())
    return await unless_disconnected(http, answer.whole())


async def _call(body: ChatRequest, service: Service) -> Call:
    prompt = await service.texts.encode_chat([_message(m) for m in body.messages])
    n = given.answers(body, service, [prompt])
    params = given.sampling_params(body, service, prompt, _most(body))
    requests = given.requests([prompt], n, [[params] * n], given.draft_length(body.speculation, service))
    return Call(new_id("chatcmpl"), "chat", requests, body.model_dump(exclude_unset=True), bool(body.stream), body.user)


def _most(body: ChatRequest) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens are the same; give one", param="max_tokens")
    return body.max_completion_tokens if body.max_tokens is None else body.max_tokens


def _message(given: Message) -> dict[str, Any]:
    content = given.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    role = "system" if given.role == "developer" else given.role
    return {"role": role, "content": text}


class _Answer:
    """The document or the chunks of one request."""

    def __init__(self, body: ChatRequest, call: Call, service: Service) -> None:
        self.body = body
        self.call = call
        self.service = service
        self.created = now()

    async def whole(self) -> dict[str, Any]:
        """The document."""
        async with self.service.run(self.call) as running:
            outputs = await running.finish()
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": o.text, "refusal": None},
                "finish_reason": o.finish_reason,
                "logprobs": None,
            }
            for i, o in enumerate(outputs)
        ]
        document = self._document("chat.completion", choices)
        document["usage"] = usage(outputs, self.call.prompt_tokens)
        if self.body.speculation is not None and self.body.speculation.statistics:
            document["speculation"] = [statistics(o.stats) for o in outputs]
        return document

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        async with self.service.run(self.call) as running:
            traces = Traces(self.body.speculation, self.service.texts.written)
            for index in range(len(self.call.requests)):
                yield self._chunk(index, {"role": "assistant", "content": ""}, None)
            async for update in running.updates():
                text = update.piece.text if update.piece is not None else ""
                if text or traces.wanted(update.round):
                    chunk = self._chunk(update.index, {"content": text}, None)
                    yield traces.onto(chunk, update.index, update.round, text)
                if update.output is not None:
                    yield self._chunk(update.index, {}, update.output.finish_reason)
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                outputs = [o for o in running.outputs if o is not None]
                document = self._document("chat.completion.chunk", [])
                yield {**document, "usage": usage(outputs, self.call.prompt_tokens)}

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        return self._document("chat.completion.chunk", [choice])

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.id,
            "object": kind,
            "created": self.created,
            "model": self.service.options.name,
            "choices": choices,
        }
