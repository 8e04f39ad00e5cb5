"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.api import logprobs
from slipstream.serve.api.answer import Answer
from slipstream.serve.api.params import Asked, check_model, check_text, naming, prepare
from slipstream.serve.api.parts import Part, Token
from slipstream.serve.api.render import new_id
from slipstream.serve.api.schema import CompletionRequest
from slipstream.serve.errors import ApiError
from slipstream.serve.observers import Call
from slipstream.serve.service import Service
from slipstream.types import Output

router = APIRouter()

#: Length of an answer if the request does not say, as OpenAI has it.
_LENGTH = 16


@router.post("/v1/completions")
async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
    """Text that continues a prompt."""
    service: Service = http.app.state.service
    check_model(body.model, service)
    service.check_open()
    call = await _call(body, service)
    return await CompletionAnswer(body, call, service).respond(http)


async def _call(body: CompletionRequest, service: Service) -> Call:
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo with logprobs is not supported: log-probabilities are of answers", param="echo")
    if body.return_token_ids and body.stream:
        raise ApiError(400, "return_token_ids is not for streams; set stream=false", param="return_token_ids")
    if body.echo:
        check_text("echo", service)
    with naming("prompt", service):
        prompts = [await service.texts.encode(prompt) for prompt in _prompts(body.prompt)]
    most = _LENGTH if body.max_tokens is None else body.max_tokens
    requests = await prepare(body, service, prompts, Asked(most, body.logprobs))
    return Call(
        new_id("cmpl"), "completion", requests, body.model_dump(exclude_unset=True), bool(body.stream), body.user
    )


def _prompts(prompt: Any) -> Sequence[str | list[int]]:
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


class CompletionAnswer(Answer):
    """Continued prompts."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionRequest, call: Call, service: Service) -> None:
        super().__init__(body, call, service)
        self._logprobs = body.logprobs is not None
        self._ids = bool(body.return_token_ids)
        self._echoed = [service.texts.text_of(r.prompt) if body.echo else "" for r in call.requests]
        self._texts = [""] * len(call.requests)
        self._all: list[list[Token]] = [[] for _ in call.requests]
        self._begun: set[int] = set()

    def take(self, part: Part) -> list[dict[str, Any]]:
        """The text it adds; the first one also adds the prompt, if that is to be echoed."""
        text = part.text if part.index in self._begun else self._echoed[part.index] + part.text
        self._begun.add(part.index)
        self._texts[part.index] += text
        self._all[part.index] += part.tokens
        reason = part.output.finish_reason if part.output is not None else None
        shown = self._logprobs and any(token.begins for token in part.tokens)
        if not text and reason is None and not shown:
            return []
        return [self._choice(part.index, text, reason, part.tokens if shown or reason is not None else None)]

    def choices(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        """All of the text."""
        found = [self._choice(i, self._texts[i], o.finish_reason, self._all[i]) for i, o in enumerate(outputs)]
        for choice, output in zip(found, outputs if self._ids else (), strict=False):
            choice["token_ids"] = list(output.tokens)
        return found

    def _choice(self, index: int, text: str, reason: str | None, tokens: Sequence[Token] | None) -> dict[str, Any]:
        shown = None
        if self._logprobs and tokens is not None:
            shown = logprobs.of_completion(tokens, self.service.texts, len(self._echoed[index]))
        return {"index": index, "text": text, "finish_reason": reason, "logprobs": shown}
