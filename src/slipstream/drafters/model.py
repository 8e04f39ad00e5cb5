"""A smaller language model as drafter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Sequence
from math import nan

import torch
from torch import Tensor

from slipstream.drafters.base import DraftSession, Drawn, Gate, Read, Steps, run
from slipstream.errors import ForbiddenError, ModelError
from slipstream.models.base import Cache, Model
from slipstream.sampling import Ahead, Sampler
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
    if view is model:
        return model
    ids = [t for t in model.tokenizer(_SAMPLE)["input_ids"] if t < model.embedding_size][: model.max_positions]
    if not ids:
        return model
    p, q = (m.forward(ids, m.new_cache(), len(ids)).softmax(dim=-1) for m in (model, view))
    overlap = float(torch.minimum(p, q).sum(dim=-1).mean())
    return view if overlap >= _ENOUGH_OVERLAP else model


class OutputMap:
    """Where each row of a draft model's output layer goes among the target's ids; ids without a row get -inf.

    Args:
        ids: (R,) the target's id of each row, -1 for none.
        size: V of the target; rows of ids from there on go nowhere.
    """

    def __init__(self, ids: Tensor, size: int) -> None:
        self._rows = ((ids >= 0) & (ids < size)).nonzero().squeeze(1)
        self._ids = ids[self._rows]
        self._size = size

    def __call__(self, logits: Tensor) -> Tensor:
        """(n, R) -> (n, V)."""
        mapped = logits.new_full((len(logits), self._size), -math.inf)
        mapped[:, self._ids] = logits[:, self._rows]
        return mapped

    def mass(self, logits: Tensor) -> float:
        """The probability, under one row of logits (1, R), of the rows that go somewhere."""
        return float(torch.softmax(logits[0].float(), dim=-1)[self._rows].sum())


class ModelDrafter:
    """Drafts with ``model``, whose ids mean the same as the target's as far as both have them.

    Args:
        model: the draft model. If its output layer covers only some ids (``output_ids``), the others have q = 0.
        target_vocab_size: V of the target. Ids that only one of the two has are padding: the draft never proposes
            them (q = 0), so the output stays exact.
    """

    def __init__(self, model: Model, target_vocab_size: int) -> None:
        self.name = model.name
        self.model = model
        self.target_vocab_size = target_vocab_size

    def start(self, sampler: Sampler) -> DraftSession:
        """Begin one request."""
        return ModelSession(self, sampler)

    def output_map(self) -> OutputMap | None:
        """Where the model's logits go among the target's ids; None if each goes to its own number."""
        ids: Tensor | None = getattr(self.model, "output_ids", None)
        return None if ids is None else OutputMap(ids.to(self.model.device), self.target_vocab_size)


class DrawingSession:
    """A cache of the draft model and the tokens that are in it.

    ``gate``, if set, is asked before each further token with the number drafted so far and the confidence of the next;
    False ends the draft there.
    """

    gate: Gate | None = None
    latest: int | None = None
    """Of a prompt that it has not begun to read, so many of the last tokens are read; None: all, if need be again."""

    def __init__(self, drafter: ModelDrafter, sampler: Sampler) -> None:
        self._model = drafter.model
        self._vocab = drafter.target_vocab_size
        self._map = drafter.output_map()
        self._sampler = sampler
        self._cache = drafter.model.new_cache()
        self._fed: list[int] = []
        self._skipped = 0
        self._committed = 0
        self._suspended = False

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Draw up to ``k`` tokens, fewer at the draft model's context limit, none after it produced NaN."""
        return run(self.steps(tokens, (), k))

    def steps(self, tokens: Sequence[int], given: Sequence[int], k: int) -> Steps:
        """``draft``, a pass at a time, behind ``tokens`` and ``given`` ones, which may yet be rejected."""
        context = [*tokens, *given]
        own = self._part(self._own_ids(context, len(tokens)), context)
        if self._model.max_positions is not None:
            k = min(k, self._model.max_positions - len(own) + 1)
        if self._suspended or k <= 0 or not own:
            return Draft()
        self._roll_back(own)
        drawn = Drawn()
        ended: DraftEnd = "limit"
        try:
            ended = yield from self._draw(context, own, k, drawn)
        except ModelError as error:
            self._suspended = True
            warnings.warn(f"drafting with {self._model.name} is suspended for this request: {error}", stacklevel=2)
        return drawn.draft(ended)

    def lend(self, new_cache: Callable[[Model], Cache]) -> None:
        """Start anew with a cache from ``new_cache``."""
        self._cache = new_cache(self._model)
        self._fed = []

    def catch_up(self, tokens: Sequence[int], most: int) -> Generator[Read, Tensor, int]:
        """Read up to ``most`` of the ``tokens`` that it has not read; returns how many are left but for the last."""
        own = self._part(self._own_ids(tokens, len(tokens)), tokens)
        if self._model.max_positions is not None:
            own = own[: self._model.max_positions]
        if self._suspended or not own:
            return 0
        self._roll_back(own)
        if new := own[len(self._fed) : len(own) - 1][:most]:
            yield Read(self._model, self._known(new), self._cache, 0)
            self._fed.extend(new)
        return len(own) - 1 - len(self._fed)

    def _draw(
        self, tokens: Sequence[int], own: Sequence[int], k: int, drawn: Drawn
    ) -> Generator[Read, Tensor, DraftEnd]:
        """Add up to ``k`` tokens to ``drawn``; why there are no more."""
        while len(drawn.tokens) < k:
            if self._stops(len(drawn.tokens), nan):
                return "controller"
            after = [*own, *map(self._own_id, drawn.tokens)]
            logits = self._target_logits((yield from self._read(after)))
            ahead = None if logits is None else self._ahead(logits, [*tokens, *drawn.tokens])
            if ahead is None:
                return "vocabulary"
            if self._stops(len(drawn.tokens), ahead.confidence):
                return "controller"
            drawn.add(ahead, self._sampler.take(ahead, len(tokens) + len(drawn.tokens)))
            if drawn.tokens[-1] in self._sampler.stop_ids:
                break  # nothing is ever kept after it
        return "limit"

    def _stops(self, drafted: int, confidence: float) -> bool:
        return self.gate is not None and not self.gate(drafted, confidence)

    def _own_ids(self, tokens: Sequence[int], committed: int) -> Sequence[int]:
        """The draft model's ids of the target's ``tokens``, of which ``committed`` stay; sets ``_agreed``."""
        self._agreed = min(self._committed, len(tokens))
        self._committed = committed
        return tokens

    def _own_id(self, token: int) -> int:
        """The draft model's id of a token that it drafted."""
        return token

    def _target_logits(self, logits: Tensor) -> Tensor | None:
        """Logits (1, V) over the target's ids; None if the draft's next token is hardly one of them."""
        return _over_target_ids(logits, self._vocab) if self._map is None else self._map(logits)

    def _ahead(self, logits: Tensor, tokens: Sequence[int]) -> Ahead | None:
        """The next token after ``tokens``; None if the request forbids every id that the draft could propose."""
        try:
            return self._sampler.ahead(logits, tokens)
        except ForbiddenError:  # also behind tokens of other drafters that a grammar does not allow
            if not bool(logits.amax().isfinite()):
                raise
            return None

    def _part(self, own: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
        """What the model is shown of ``own``, its ids of ``tokens``: all, or from shortly before the prompt's end on.

        The place depends on the prompt alone, since q depends on it, and seeded requests are to repeat.
        """
        if self._skipped and self.latest is None:
            self._fed, self._skipped = [], 0
        elif not self._fed:
            prompt = min(self._sampler.prompt_length, len(tokens))
            self._skipped = max(0, self._size(tokens[:prompt]) - self.latest) if self.latest else 0
        return own[self._skipped :] if self._skipped else own

    def _size(self, tokens: Sequence[int]) -> int:
        """Number of the draft model's ids of ``tokens``."""
        return len(tokens)

    def _roll_back(self, own: Sequence[int]) -> None:
        """Keep what agrees with ``own``; at least the last of them is left to be fed."""
        limit = min(len(self._fed), len(own) - 1)
        agree = min(max(0, self._agreed - self._skipped), limit)
        while agree < limit and self._fed[agree] == own[agree]:
            agree += 1
        del self._fed[agree:]
        self._cache.truncate(agree)

    def _read(self, ids: Sequence[int]) -> Generator[Read, Tensor, Tensor]:
        """Feed what of ``ids`` has not been fed yet; logits (1, R) of the position after them."""
        new = ids[len(self._fed) :]
        logits = yield Read(self._model, self._known(new), self._cache)
        self._fed.extend(new)
        return logits

    def _known(self, ids: Sequence[int]) -> list[int]:
        """The target may emit an id that is padding in its vocabulary and has no row in the draft's embedding."""
        return [min(t, self._model.embedding_size - 1) for t in ids]


class ModelSession(DrawingSession):
    """Drafts in ids that draft and target share, so it can go on from others' tokens."""

    def draft_after(self, tokens: Sequence[int], given: Sequence[int], k: int) -> Draft:
        """``draft`` behind ``given`` tokens of other drafters, which may yet be rejected."""
        return run(self.steps(tokens, given, k))


def _over_target_ids(logits: Tensor, vocab: int) -> Tensor:
    """Cut or pad (with -inf) the columns of ``logits`` to the target's ids."""
    own = logits.shape[-1]
    if own >= vocab:
        return logits[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - own), value=float("-inf"))
