"""Which part of a text came from which token, for those who want to see where it came from."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from slipstream.serve.api.schema import Speculation
from slipstream.serve.visits import bare
from slipstream.types import Origin, Round

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Trace:
    """Follows one answer.

    Text may lag behind its tokens (a character of several tokens, a beginning of a stop string) and be cut in other
    places than tokens are. So it is laid over the bytes of the tokens: a character belongs to the token that its first
    byte is of.

    Args:
        written: the bytes of text that a token stands for; none for special ones.
    """

    def __init__(self, written: Callable[[int], bytes]) -> None:
        self._written = written
        self._left: deque[tuple[bytes, Origin]] = deque()
        """(bytes that no text has been given for, origin) of each token."""
        self._latest: Origin | None = None

    def add(self, tokens: Sequence[int], origins: Sequence[Origin]) -> None:
        """Tokens that came."""
        self._left.extend((part, o) for t, o in zip(tokens, origins, strict=True) if (part := self._written(t)))

    def pieces(self, text: str) -> list[tuple[str, Origin | None]]:
        """Text that came, a piece for each token; None if no token came before it."""
        out: list[tuple[str, Origin | None]] = []
        piece, rest = "", len(text)
        for character in text:
            rest -= 1
            piece += character
            if self._left:
                self._latest = self._left[0][1]
            if self._take(self._size(character)) or not rest:
                out.append((piece, self._latest))
                piece = ""
        return out

    def _size(self, character: str) -> int:
        """How many bytes it stands for; a replacement character for those that are no character."""
        if character != _REPLACEMENT:
            return len(character.encode("utf-8", "replace"))
        coming = b"".join(part for part, _ in islice(self._left, 4))[:4]
        if coming.startswith(_REPLACEMENT.encode()) or not coming:
            return 3
        need = next((n for n, least in ((4, 0xF0), (3, 0xE0), (2, 0xC2)) if coming[0] >= least), 1)
        count = 1
        while count < min(need, len(coming)) and 0x80 <= coming[count] < 0xC0:
            count += 1
        return count

    def _take(self, count: int) -> bool:
        """Give ``count`` bytes away; whether the token that was first is used up."""
        ended = False
        while count and self._left:
            part, origin = self._left.popleft()
            if len(part) > count:
                self._left.appendleft((part[count:], origin))
                return ended
            count -= len(part)
            ended = True
        return ended


class Traces:
    """Adds the object ``speculation`` to the chunks of a stream, if it was asked for."""

    def __init__(self, asked: Speculation | None, written: Callable[[int], bytes]) -> None:
        self._on = asked is not None and bool(asked.tokens)
        self._of: dict[int, Trace] = defaultdict(lambda: Trace(written))

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
