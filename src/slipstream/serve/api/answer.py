"""What completions and chats have in common: a call, its document, its stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from slipstream.serve.api.parts import Part, Parts, Token, statistics
from slipstream.serve.api.render import now, respond_with_stream, unless_disconnected, usage
from slipstream.serve.api.schema import Generation
from slipstream.serve.observers import Call
from slipstream.serve.service import Service
from slipstream.serve.visits import bare
from slipstream.types import Output, Round


class Answer(ABC):
    """One request's answer. A subclass says what a part becomes."""

    kind: str
    """``object`` of a whole document."""
    chunk_kind: str
    """``object`` of a chunk."""

    def __init__(self, body: Generation, call: Call, service: Service) -> None:
        self.call = call
        self.service = service
        self._created = now()
        wanted = body.speculation
        self._statistics = bool(wanted and wanted.statistics)
        self._tokens = bool(wanted and wanted.tokens)
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._tokenwise = self._tokens or any(r.params.logprobs is not None for r in call.requests)

    async def respond(self, http: HttpRequest) -> Response:
        """The response, streamed if that was asked for."""
        if self.call.stream:
            return await respond_with_stream(http, self.chunks())
        return await unless_disconnected(http, self.whole())

    @abstractmethod
    def take(self, part: Part) -> list[dict[str, Any]]:
        """A part of an answer as choices of a chunk, one after the other; remembers what a document needs."""

    @abstractmethod
    def choices(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        """The choices of a document, from the parts that were taken."""

    async def whole(self) -> dict[str, Any]:
        """The document."""
        async with self.service.run(self.call) as running:
            parts = Parts(running, self.service, tokenwise=self._tokenwise)
            async for part in parts:
                self.take(part)
        document = self._document(self.kind, self.choices(parts.outputs))
        document["usage"] = usage(parts.outputs, self.call.prompt_tokens)
        if self._statistics:
            document["speculation"] = statistics(parts.outputs, parts.story)
        return document

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """The chunks of a stream."""
        async with self.service.run(self.call) as running:
            parts = Parts(running, self.service, tokenwise=self._tokenwise)
            async for part in parts:
                for chunk in self._chunks_of(part):
                    yield chunk
            if self._statistics:
                last = self._chunk([])
                last["speculation"] = statistics(parts.outputs, parts.story)
                yield last
            if self._usage:
                last = self._chunk([])
                last["usage"] = usage(parts.outputs, self.call.prompt_tokens)
                yield last

    def _chunks_of(self, part: Part) -> list[dict[str, Any]]:
        made = [self._chunk([choice]) for choice in self.take(part)]
        if self._tokens and (part.tokens or part.round is not None):
            if not made:
                made = [self._chunk([])]
            # Beside the text, which comes before what only says that the answer is over.
            made[-2 if part.output is not None and len(made) > 1 else -1]["speculation"] = {
                "index": part.index,
                "tokens": [_shown(token) for token in part.tokens],
                **(_of_round(part.round) if part.round is not None else {}),
            }
        return made

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._document(self.chunk_kind, choices)
        if self._usage:
            chunk["usage"] = None
        return chunk

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.call.id,
            "object": kind,
            "created": self._created,
            "model": self.service.options.name,
            "choices": choices,
        }


def _shown(token: Token) -> dict[str, Any]:
    source = None if token.source is None else bare(token.source)
    return {"text": token.text, "origin": token.origin, "source": source}


def _of_round(done: Round) -> dict[str, Any]:
    """Of a chunk that begins what a round brought."""
    return {"k": done.k, "drafted": done.num_drafted, "accepted": done.num_accepted}
