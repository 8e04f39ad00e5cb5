"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.api import params as given
from slipstream.serve.api.render import event_stream, new_id, now, statistics, unless_disconnected, usage
from slipstream.serve.api.schema import CompletionRequest
from slipstream.serve.observers import Call
from slipstream.serve.service import Running, Service
from slipstream.serve.trace import Traces
from slipstream.types import Output

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
    """Text that continues a prompt."""
    service: Service = http.app.state.service
    given.check_model(body.model, service)
    service.check_open()
    call = await _call(body, service)
    answer = _Answer(body, call, service)
    if body.stream:
        return event_stream(answer.chunks())
    return await unless_disconnected(http, answer.whole())


async def _call(body: CompletionRequest, service: Service) -> Call:
    prompts = [await service.texts.encode(prompt) for prompt in _prompts(body.prompt)]
    n = given.answers(body, service, prompts)
    most = 16 if body.max_tokens is None else body.max_tokens
    params = [[given.sampling_params(body, service, prompt, most, logprobs=body.logprobs)] * n for prompt in prompts]
    requests = given.requests(prompts, n, params, given.draft_length(body.speculation, service))
    return Call(
        new_id("cmpl"), "completion", requests, body.model_dump(exclude_unset=True), bool(body.stream), body.user
    )


def _prompts(prompt: Any) -> Sequence[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


class _Answer:
    """The document or the chunks of one request."""

    def __init__(self, body: CompletionRequest, call: Call, service: Service) -> None:
        self.body = body
        self.call = call
        self.service = service
        self.created = now()

    async def whole(self) -> dict[str, Any]:
        """The document."""
        async with self.service.run(self.call) as running:
            outputs = await running.finish()
        choices = [self._choice(i, self._echo(i) + o.text, o.finish_reason) for i, o in enumerate(outputs)]
        document = self._document(choices)
        document["usage"] = usage(outputs, self.call.prompt_tokens)
        if self.body.speculation is not None and self.body.speculation.statistics:
            document["speculation"] = [statistics(o.stats) for o in outputs]
        return document

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        async with AsyncExitStack() as stack:
            running = await stack.enter_async_context(self.service.run(self.call))
            traces = Traces(self.body.speculation, self.service.texts.written)
            begun: set[int] = set()
            async for update in running.updates():
                text = "" if update.index in begun else self._echo(update.index)
                begun.add(update.index)
                text += update.piece.text if update.piece is not None else ""
                reason = update.output.finish_reason if update.output is not None else None
                if text or reason is not None or traces.wanted(update.round):
                    chunk = self._document([self._choice(update.index, text, reason)])
                    yield traces.onto(chunk, update.index, update.round, text)
            if self.body.stream_options is not None and self.body.stream_options.include_usage:
                yield {**self._document([]), "usage": self._usage(running)}

    def _usage(self, running: Running) -> dict[str, Any]:
        outputs: list[Output] = [o for o in running.outputs if o is not None]
        return usage(outputs, self.call.prompt_tokens)

    def _echo(self, index: int) -> str:
        return self.service.texts.text_of(self.call.requests[index].prompt) if self.body.echo else ""

    def _document(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.options.name,
            "choices": choices,
        }

    @staticmethod
    def _choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
