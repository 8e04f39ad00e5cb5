"""An answer in parts, as its rounds come in: the one way from tokens to documents and to streams."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.serve.service import Running, Service
from slipstream.serve.visits import bare
from slipstream.stats import add_stats
from slipstream.text import Detokenizer
from slipstream.types import Output, Request, Round, Stats, TokenLogprob


@dataclass(frozen=True)
class Token:
    """A token's share of a part's text. One that a stop string may have begun in comes in two shares."""

    id: int
    text: str
    offset: int
    """Characters of the answer before it."""
    origin: str
    source: str | None
    """The drafter of an accepted one."""
    logprob: TokenLogprob | None
    begins: bool = True
    """Whether it is the first share."""


@dataclass(frozen=True)
class Part:
    """What one round adds to one answer."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    """Those whose text this is; none unless asked for."""
    round: Round | None
    output: Output | None
    """Set in the answer's last part."""


@dataclass
class Story:
    """What is told of each answer at the end."""

    drafted: list[list[int]]
    """Of each answer, draft tokens in each round."""
    speed_ups: list[float | None]


class Parts:
    """Iterate for the parts of a call, in the order in which they come.

    Args:
        running: the call.
        tokenwise: tell tokens apart.
    """

    def __init__(self, running: Running, service: Service, *, tokenwise: bool) -> None:
        self._running = running
        requests = running.call.requests
        self.story = Story([[] for _ in requests], [None] * len(requests))
        self._shares = [_Shares(service.texts.tokenizer, _ends(service, r)) for r in requests] if tokenwise else []

    @property
    def outputs(self) -> list[Output]:
        """Of the answers that are over."""
        return [output for output in self._running.outputs if output is not None]

    async def __aiter__(self) -> AsyncIterator[Part]:
        async for update in self._running.updates():
            i, r, text = update.index, update.round, update.piece.text if update.piece is not None else ""
            if r is not None:
                self.story.drafted[i].append(r.num_drafted)
            self.story.speed_ups[i] = update.speed_up
            tokens: tuple[Token, ...] = ()
            if self._shares:
                tokens = self._shares[i].of(text, r, update.output)
            yield Part(i, text, tokens, r, update.output)


def statistics(outputs: list[Output], story: Story) -> dict[str, Any]:
    """The object ``speculation`` of an answer; counts are of all choices."""
    stats = Stats()
    for output in outputs:
        stats = add_stats(stats, output.stats)
    known = [s for s in story.speed_ups if s is not None]
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_rate": stats.acceptance_rate,
        "mean_accepted_length": stats.mean_accepted_length,
        "drafted_per_position": list(stats.drafted_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "drafted_by": {bare(name): count for name, count in stats.drafted_by.items()},
        "accepted_by": {bare(name): count for name, count in stats.accepted_by.items()},
        "drafted_per_round": story.drafted,
        "speed_up": sum(known) / len(known) if known else None,
    }


@dataclass
class _Shares:
    """Which characters of an answer belong to which of its tokens."""

    tokenizer: Any
    ends: Collection[int]
    """Ids that end the answer and stand for no text."""
    _waiting: deque[tuple[Token, int]] = field(default_factory=deque)
    """Tokens whose text is not out, each with the place behind it."""
    _decoded: int = 0
    _out: int = 0

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    def of(self, text: str, r: Round | None, output: Output | None) -> tuple[Token, ...]:
        """The shares in ``text``, which a round has released; of the last one if there is an output."""
        if r is not None:
            self._take(r)
        start, self._out = self._out, self._out + len(text)
        if output is not None and self._waiting:
            token, end = self._waiting.pop()  # an incomplete character comes out with the last token
            self._waiting.append((token, end + len(self._detokenizer.flush())))
        found: list[Token] = []
        while self._waiting and (self._waiting[0][1] <= self._out or self._waiting[0][0].offset < self._out):
            token, end = self._waiting.popleft()
            to = min(end, self._out)
            found.append(replace(token, text=text[token.offset - start : to - start]))
            if to < end:
                self._waiting.appendleft((replace(token, offset=to, begins=False), end))
                break
        return tuple(found)

    def _take(self, r: Round) -> None:
        for i, (token, origin) in enumerate(zip(r.tokens, r.origins, strict=True)):
            if token in self.ends:
                continue
            start = self._decoded
            self._decoded += len(self._detokenizer.push(token))
            source = r.sources[i] if origin == "accepted" and i < len(r.sources) else None
            logprob = r.logprobs[i] if r.logprobs is not None else None
            self._waiting.append((Token(token, "", start, origin, source, logprob), self._decoded))


def _ends(service: Service, request: Request) -> set[int]:
    params = request.params
    eos = () if params.ignore_eos else service.engine.setting.target.eos_token_ids
    return {*params.stop_token_ids, *eos}
