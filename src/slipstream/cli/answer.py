"""Runs one answer, shows it as it comes, and measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from slipstream.cli.screen import Part, Screen
from slipstream.measure.memory import peak_bytes, reset_peak

if TYPE_CHECKING:
    from slipstream.speculative import SpeculativeDecoding
    from slipstream.types import Origin, Output, Piece, Round, SamplingParams

_WARM_UP_TOKENS = 8
_WARM_UP_PROMPT = 64


@dataclass(frozen=True)
class Answer:
    """One answer, how it was shown, and what it took."""

    output: Output
    parts: tuple[Part, ...]
    peak_memory: int | None
    """Bytes, while this answer was made."""
    interrupted: bool
    rounds: tuple[Round, ...] = ()


class Splitter:
    """Finds which token each character of a stream came from: a piece has the text of a whole round.

    A piece's text may lag behind its tokens, while a character or a possible stop string is incomplete.
    """

    def __init__(self, tokenizer: Any) -> None:
        from slipstream.text import Detokenizer

        self._detokenizer = Detokenizer(tokenizer)
        self._waiting: list[Part] = []
        self._last: Origin | None = None

    def split(self, piece: Piece) -> list[Part]:
        """The piece's text, cut where the origin changes from token to token."""
        for token, origin in zip(piece.tokens, piece.origins, strict=True):
            self._last = origin
            if text := self._detokenizer.push(token):
                self._waiting.append((text, origin))
        return self.take(piece.text)

    def take(self, text: str) -> list[Part]:
        """``text``, which comes next in the stream, with origins; what no token accounts for has the last one's."""
        parts: list[Part] = []
        while text and self._waiting:
            ready, origin = self._waiting.pop(0)
            if len(ready) > len(text):
                self._waiting.insert(0, (ready[len(text) :], origin))
            parts.append((text[: len(ready)], origin))
            text = text[len(ready) :]
        return [*parts, (text, self._last)] if text else parts


def answer(spec: SpeculativeDecoding, prompt: Sequence[int], params: SamplingParams, screen: Screen) -> Answer:
    """Stream one answer to ``screen``. Ctrl-C ends it; what came so far is the answer then."""
    device = spec.target.device
    reset_peak(device)
    splitter = Splitter(spec.tokenizer)
    parts: list[Part] = []
    interrupted = False
    stream = spec.stream(list(prompt), params)
    try:
        for piece in stream:
            fresh = splitter.split(piece)
            parts += fresh
            screen.show(fresh)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        stream.close()
    output = stream.output
    rest = splitter.take(output.text[sum(len(text) for text, _ in parts) :])
    screen.show(rest)
    screen.end()
    return Answer(output, (*parts, *rest), peak_bytes(device), interrupted, stream.rounds)


def warm_up(spec: SpeculativeDecoding, prompt: Sequence[int], params: SamplingParams) -> None:
    """A few tokens that nobody sees, so that no answer pays for what happens only once in a process."""
    few = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens), min_new_tokens=0)
    for _ in spec.stream(list(prompt[-_WARM_UP_PROMPT:]), few):
        pass
