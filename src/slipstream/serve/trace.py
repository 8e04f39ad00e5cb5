"""Which part of a text came from which token, for those who want to see where it came from."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.serve.api.schema import Speculation
from slipstream.serve.visits import bare
from slipstream.types import Origin, Round


class Trace:
    """Follows one answer.

    Text may lag behind its tokens (a character of several tokens, a beginning of a stop string) and be cut in other
    places than tokens are. So it is laid over the bytes of the tokens: a character belongs to the token that its first
    byte is of.

    Args:
        size: how many bytes of text a token stands for; 0 for special ones.
    """

    def __init__(self, size: Callable[[int], int]) -> None:
        self._size = size
        self._left: deque[tuple[int, Origin]] = deque()
        """(bytes that no text has been given for, origin) of each token."""

    def add(self, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """Tokens that came."""
        self._left.extend((size, o) for t, o in zip(tokens, origins, strict=True) if (size := self._size(t)))

    def pieces(self, text: str) -> list[tuple[str, Origin | None]]:
        """Text that came, a piece for each token; None where no token is left for it."""
        out: list[tuple[str, Origin | None]] = []
        piece, rest = "", len(text)
        for character in text:
            rest -= 1
            piece += character
            origin = self._left[0][1] if self._left else None
            if self._take(len(character.encode("utf-8", "replace"))) or not rest:
                out.append((piece, origin))
                piece = ""
        return out

    def _take(self, count: int) -> bool:
        """Give ``count`` bytes away; whether the token that was first is used up."""
        ended = False
        while count and self._left:
            left, origin = self._left.popleft()
            if left > count:
                self._left.appendleft((left - count, origin))
                return ended
            count -= left
            ended = True
        return ended


class Traces:
    """Adds the object ``speculation`` to the chunks of a stream, if it was asked for."""

    def __init__(self, asked: Speculation | None, size: Callable[[int], int]) -> None:
        self._on = asked is not None and bool(asked.tokens)
        self._of: dict[int, Trace] = defaultdict(lambda: Trace(size))

    def wanted(self, done: Round | None) -> bool:
        """Whether a chunk is wanted for a round that brings no text."""
        return self._on and done is not None

    def onto(self, chunk: dict[str, Any], index: int, done: Round | None, text: str) -> dict[str, Any]:
        """The chunk with what there is to say of its tokens."""
        if not self._on:
            return chunk
        about: dict[str, Any] = {}
        if done is not None:
            self._of[index].add(done.tokens, done.origins)
            about = about_round(done)
        return {**chunk, "speculation": {**about, "pieces": self._of[index].pieces(text)}}


def about_round(done: Round) -> dict[str, Any]:
    """What a stream tells of a round."""
    return {
        "tokens": list(done.tokens),
        "origins": list(done.origins),
        "k": done.k,
        "drafted": done.num_drafted,
        "accepted": done.num_accepted,
        "sources": [bare(source) for source in done.sources],
    }
