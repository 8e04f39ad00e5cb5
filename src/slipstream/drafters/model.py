"""A smaller language model as drafter."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from slipstream.drafters.base import Gate
from slipstream.errors import ModelError
from slipstream.models.base import Model, feed
from slipstream.sampling import Sampler
from slipstream.types import Draft, DraftEnd

#: A sample to try cheaper arithmetic on, and how much of the distributions must agree for it to be worth its errors.
_SAMPLE = (
    'def mean(values):\n    """The arithmetic mean of a list of numbers."""\n    return sum(values) / len(values)\n\n'
    "The tides are the rise and fall of sea levels caused by the pull of the Moon and, to a lesser degree, of the Sun."
)
_ENOUGH_OVERLAP = 0.88


def for_drafting(model: Model) -> Model:
    """``model`` with the cheapest arithmetic for its weights that leaves its distributions nearly what they are.

    Whatever it is, answers stay exact; coarser arithmetic may only cost acceptance. Models differ widely in how well
    they bear it (by the outliers of their activations), so it is tried on a sample: one pass each way.
    """
    quick = getattr(model, "quick", None)
    if quick is None or getattr(model, "weights", None) != "int8" or model.tokenizer is None:
        return model
    view: Model = quick()
    ids = [t for t in model.tokenizer(_SAMPLE)["input_ids"] if t < model.embedding_size][: model.max_positions]
    if not ids:
        return model
    p, q = (m.forward(ids, m.new_cache(), len(ids)).softmax(dim=-1) for m in (model, view))
    overlap = float(torch.minimum(p, q).sum(dim=-1).mean())
    return view if overlap >= _ENOUGH_OVERLAP else model


class ModelDrafter:
    """Drafts with ``model``, whose ids mean the same as the target's as far as both have them.

    Args:
        model: the draft model.
        target_vocab_size: V of the target. Ids that only one of the two has are padding: the draft never proposes
            them (q = 0), so the output stays exact.
    """

    def __init__(self, model: Model, target_vocab_size: int) -> None:
        self.name = model.name
        self.model = model
        self.target_vocab_size = target_vocab_size

    def start(self, sampler: Sampler) -> ModelSession:
        """Begin one request."""
        return ModelSession(self, sampler)


class ModelSession:
    """A cache of the draft model and the tokens that are in it."""

    def __init__(self, drafter: ModelDrafter, sampler: Sampler) -> None:
        self._model = drafter.model
        self._vocab = drafter.target_vocab_size
        self._sampler = sampler
        self._cache = drafter.model.new_cache()
        self._fed: list[int] = []
        self._committed = 0
        self._suspended = False
        self.gate: Gate | None = None

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Draw up to ``k`` tokens, fewer at the draft model's context limit, none after it produced NaN."""
        if self._model.max_positions is not None:
            k = min(k, self._model.max_positions - len(tokens) + 1)
        if self._suspended or k <= 0:
            return Draft()
        self._roll_back(tokens)
        drafted: list[int] = []
        rows: list[Tensor] = []
        sure: list[float] = []
        ended: DraftEnd = "limit"
        try:
            while len(drafted) < k:
                if self._stops(len(drafted), nan):
                    ended = "controller"
                    break
                q, confidence = self._next(tokens, drafted)
                if self._stops(len(drafted), confidence):
                    ended = "controller"
                    break
                drafted.append(self._sampler.draw(q, len(tokens) + len(drafted)))
                rows.append(q)
                sure.append(confidence)
                if drafted[-1] in self._sampler.stop_ids:
                    break  # nothing is ever kept after it
        except ModelError as error:
            self._suspended = True
            warnings.warn(f"drafting with {self._model.name} is suspended for this request: {error}", stacklevel=2)
        probs = torch.stack(rows) if rows and not self._sampler.greedy else None
        return Draft(tuple(drafted), probs, ended, confidence=tuple(sure) if self.gate is not None else ())

    def _stops(self, drafted: int, confidence: float) -> bool:
        return self.gate is not None and not self.gate(drafted, confidence)

    def _roll_back(self, tokens: Sequence[int]) -> None:
        """Keep what agrees with ``tokens``; at least the last of them is left to be fed."""
        limit = min(len(self._fed), len(tokens) - 1)
        agree = min(self._committed, limit)
        while agree < limit and self._fed[agree] == tokens[agree]:
            agree += 1
        del self._fed[agree:]
        self._cache.truncate(agree)
        self._committed = len(tokens)

    def _next(self, tokens: Sequence[int], drafted: Sequence[int]) -> tuple[Tensor, float]:
        """q (V,) of the position after ``tokens + drafted``, over the target's ids, and the confidence in its token."""
        extended = [*tokens, *drafted]
        new = extended[len(self._fed) :]
        self._fed.extend(new)
        # The target may emit an id that is padding in its vocabulary and has no row in the draft's embedding.
        known = [min(t, self._model.embedding_size - 1) for t in new]
        logits = _over_target_ids(feed(self._model, known, self._cache, 1), self._vocab)
        q = self._sampler.probs(logits, extended)[0]
        if self.gate is None:
            return q, nan
        # At temperature 0 every q is sure of itself, so ask the logits.
        return q, float(logits[0].softmax(dim=-1).amax() if self._sampler.greedy else q.amax())


def _over_target_ids(logits: Tensor, vocab: int) -> Tensor:
    """Cut or pad (with -inf) the columns of ``logits`` to the target's ids."""
    own = logits.shape[-1]
    if own >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - own), value=float("-inf"))
