"""Prompt lookup: propose what followed the last earlier occurrence of the latest tokens.

Costs almost nothing, and pays wherever an answer repeats its prompt or itself: editing, summarising, code.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import InputError
from slipstream.sampling import Sampler
from slipstream.types import Draft


class NgramDrafter:
    """Matches the latest ``longest`` to ``shortest`` tokens, longer matches first."""

    name = "ngram"

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise InputError(f"shortest={shortest} and longest={longest} do not fit; use 1 <= shortest <= longest")
        self.longest = longest
        self.shortest = shortest

    def start(self, sampler: Sampler) -> NgramSession:
        """Begin one request."""
        return NgramSession(self.longest, self.shortest)


class NgramSession:
    """An index from each n-gram to the position after its last occurrence."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Up to ``k`` copied tokens, with one-hot q."""
        self._index(tokens)
        for size in self._sizes:
            if (start := self._after.get(tuple(tokens[-size:]))) is not None:
                return Draft(tuple(tokens[start : start + k]))
        return Draft()

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that something follows; committed tokens never change, so each is added once."""
        for end in range(self._indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
