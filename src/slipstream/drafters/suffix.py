"""Copying: propose what followed the longest earlier occurrence of the latest tokens.

Costs almost nothing, and pays wherever an answer repeats its prompt, itself, or an earlier answer: editing,
summarising, code, agents. Sources: SuffixDecoding (arXiv 2411.04975), SAM-Decoding (arXiv 2411.10666).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from slipstream.drafters.automaton import Follower, SuffixAutomaton
from slipstream.drafters.base import Gate
from slipstream.drafters.store import SuffixStore
from slipstream.errors import InputError
from slipstream.sampling import Sampler
from slipstream.types import Draft, DraftEnd

#: How often, in doubt, something else is taken to have followed a match of one token; of n tokens, an n-th of it.
DOUBT = 3.0


class SuffixDrafter:
    """Copies from prompt and output, from earlier requests if it has a store, and from a prediction if it has one.

    Args:
        store: what earlier requests left; each request whose ``SamplingParams.share`` is True reads it, and leaves
            its prompt and output there when it ends.
        min_probability: a draft ends before the token at which the product of the confidences falls below it.
        factor: a draft has at most this many tokens for each token of the match.
        prediction: a text that its requests will probably repeat in part. If it begins with the last tokens of their
            prompt, its first token can be proposed at once.
    """

    name = "suffix"

    def __init__(
        self,
        store: SuffixStore | None = None,
        *,
        min_probability: float = 0.1,
        factor: float = 2.0,
        prediction: Sequence[int] = (),
    ) -> None:
        if store is not None and not isinstance(store, SuffixStore):
            raise InputError(f"store= is a {type(store).__name__}; use a SuffixStore or None")
        if not 0 <= min_probability <= 1:
            raise InputError(f"min_probability={min_probability!r} is not usable; use a number in [0, 1]")
        if not 0 < factor <= inf:
            raise InputError(f"factor={factor!r} is not usable; use a positive number")
        self.store = store
        self.min_probability = min_probability
        self.factor = factor
        self.predicted: SuffixAutomaton | None = None
        """Of the prediction; nothing is added to it."""
        if prediction:
            self.predicted = SuffixAutomaton()
            self.predicted.extend(prediction)

    def predicting(self, prediction: Sequence[int]) -> SuffixDrafter:
        """The same with another prediction."""
        return SuffixDrafter(
            self.store, min_probability=self.min_probability, factor=self.factor, prediction=prediction
        )

    def start(self, sampler: Sampler) -> SuffixSession:
        """Begin one request."""
        return SuffixSession(self, sampler)


@dataclass
class _Path:
    """Tokens to propose, and how sure each is given those before it."""

    ended: DraftEnd = "no match"
    tokens: list[int] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    expected: float = 0.0
    """How many tokens will be right: the sum of the products of confidences."""


class SuffixSession:
    """An automaton of the committed tokens; drafts, of whomever, leave nothing in it."""

    gate: Gate | None = None
    copies = True
    """It needs no passes of a model."""

    def __init__(self, drafter: SuffixDrafter, sampler: Sampler) -> None:
        self._drafter = drafter
        self._stop_ids = sampler.stop_ids
        self._store = drafter.store if sampler.params.share else None
        self._own = SuffixAutomaton()

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Up to ``k`` copied tokens, with one-hot q."""
        return self.draft_after(tokens, (), k)

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        """The same behind ``drafted`` tokens of other drafters, which may yet be rejected."""
        self._own.extend(tokens[self._own.size :])
        paths = [self._path(self._own.continuation(self._own.find(drafted, self._own.end)), k)]
        latest = [*tokens[-SuffixStore.window :], *drafted]
        if (predicted := self._drafter.predicted) is not None:
            paths.append(self._path(predicted.continuation(predicted.find(latest)), k))
        if self._store is not None:
            with self._store.reading() as automata:
                paths += [self._path(found.continuation(found.find(latest)), k) for found in automata]
        return self._gated(max(paths, key=lambda path: (path.expected, path.ended == "confidence")))

    def close(self, tokens: Sequence[int]) -> None:
        """The request is over, with ``tokens`` (prompt + output): leave them to others if it shares."""
        if self._store is not None:
            self._store.add(tokens)
            self._store = None

    def _path(self, followers: Iterable[Follower], k: int) -> _Path:
        path, probability, most = _Path(), 1.0, 0.0
        for follower in followers:
            most = most or self._drafter.factor * follower.length
            sure = confidence(follower)
            probability *= sure
            if probability < self._drafter.min_probability or len(path.tokens) >= most:
                path.ended = "confidence"
                break
            path.tokens.append(follower.token)
            path.confidence.append(sure)
            path.expected += probability
            if len(path.tokens) == k or follower.token in self._stop_ids:  # nothing is ever kept after a stop id
                path.ended = "limit"
                break
        return path

    def _gated(self, path: _Path) -> Draft:
        count, ended = len(path.tokens), path.ended
        if self.gate is not None:
            for number, sure in enumerate(path.confidence):
                if not self.gate(number, sure):
                    count, ended = number, "controller"
                    break
        return Draft(tuple(path.tokens[:count]), ended=ended, confidence=tuple(path.confidence[:count]))


def confidence(follower: Follower) -> float:
    """count / (total + 3 / length): the conditional frequency, as far as so many sightings of so long a match tell.

    >>> [round(confidence(Follower(7, count, count, length)), 2) for count, length in ((1, 1), (1, 8), (9, 1))]
    [0.25, 0.73, 0.75]
    """
    return follower.count / (follower.total + DOUBT / follower.length)
