"""The target drafts for itself: its first layers, and its output layer right behind them.

No second model and no second cache: what the first layers compute while drafting is what the verification would
compute, so it goes on from there. How good such a draft is depends on the model: most must be trained for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from slipstream.drafters.base import Drawn, Gate
from slipstream.errors import InputError, ModelError
from slipstream.models.base import Cache, Model
from slipstream.models.exit_head import ExitHead, read_exit_head
from slipstream.sampling import Sampler
from slipstream.types import Draft, DraftEnd

PREFIX = "early-exit:"


class EarlyExitDrafter:
    """Drafts with the first ``layers`` layers of ``target``.

    Args:
        target: runs in the lean decoder.
        layers: how many.
        head: what was trained to come behind them; None for the target's last norm.

    Raises:
        InputError: the target cannot stop between layers, or does not have so many.
    """

    def __init__(self, target: Model, layers: int, head: ExitHead | None = None) -> None:
        total = getattr(target, "num_layers", None)
        if total is None or not hasattr(target, "exit_early"):
            raise InputError(f"{PREFIX}{layers} needs the lean decoder, and {target.name} runs behind the adapter")
        _check_layers(layers, total, target.name)
        self.name = f"{PREFIX}{layers}"
        self.layers = layers
        lean: Any = target
        self.target = lean
        self.head: ExitHead | None = None if head is None else lean.fit(head)

    def start(self, sampler: Sampler) -> EarlyExitSession:
        """Begin one request."""
        return EarlyExitSession(self, sampler)


class EarlyExitSession:
    """Drafts in the cache of the request's own target."""

    gate: Gate | None = None

    def __init__(self, drafter: EarlyExitDrafter, sampler: Sampler) -> None:
        self._drafter = drafter
        self._sampler = sampler
        self._cache: Cache | None = None

    def share(self, cache: Cache) -> None:
        """``cache`` is the target's cache of this request."""
        self._cache = cache

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Draw up to ``k`` tokens; none while the target's cache lacks more than the last token."""
        return self.draft_after(tokens, (), k)

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        """The same behind ``drafted`` tokens of other drafters; the first layers read those, too, for the target."""
        target, cache = self._drafter.target, self._cache
        if target.max_positions is not None:
            k = min(k, target.max_positions - len(tokens) - len(drafted))
        if cache is None or cache.length != len(tokens) - 1 or k <= 0:
            return Draft()
        drawn = Drawn()
        return drawn.draft(self._draw([*tokens, *drafted], len(tokens), k, drawn))

    def _draw(self, context: list[int], committed: int, k: int, drawn: Drawn) -> DraftEnd:
        """Add up to ``k`` tokens to ``drawn``; why there are no more. The last committed one is read first."""
        target = self._drafter.target
        unread = self._unread(context[committed - 1 :])
        while len(drawn.tokens) < k:
            if self._stops(len(drawn.tokens), nan):
                return "controller"
            if any(token >= target.embedding_size for token in unread):
                break
            logits = target.exit_early(unread, self._cache, self._drafter.layers, head=self._drafter.head)
            try:
                ahead = self._sampler.ahead(logits, context)
            except ModelError:  # the request forbids all tokens behind what was drafted, or they are not usable
                return "vocabulary"
            if self._stops(len(drawn.tokens), ahead.confidence):
                return "controller"
            unread = [self._sampler.take(ahead, len(context))]
            drawn.add(ahead, unread[0])
            context += unread
            if unread[0] in self._sampler.stop_ids:
                break  # nothing is ever kept after it
        return "limit"

    def _unread(self, new: list[int]) -> list[int]:
        """What the first layers have not read of ``new``; what they read of an earlier draft is forgotten."""
        cache: Any = self._cache
        ahead = cache.ahead
        if ahead is None:
            return new
        read = len(ahead.tokens)
        if ahead.layers == self._drafter.layers and read < len(new) and list(ahead.tokens) == new[:read]:
            return new[read:]
        cache.truncate(cache.length)
        return new

    def _stops(self, drafted: int, confidence: float) -> bool:
        return self.gate is not None and not self.gate(drafted, confidence)


def early_exit(name: str, target: Model) -> EarlyExitDrafter:
    """The drafter that ``early-exit:8`` means, or ``early-exit:FOLDER`` with an exit head in it.

    Raises:
        InputError: what follows the colon is neither a number of layers of ``target`` nor such a folder.
    """
    return EarlyExitDrafter(target, *_meant(name))


def check_early_exit(name: str, config: Mapping[str, Any], target: str) -> None:
    """What ``early_exit`` refuses, before weights are read, as far as the target's ``config`` tells.

    Raises:
        InputError: as ``early_exit``.
    """
    layers, _ = _meant(name)
    total = config.get("num_hidden_layers")
    if isinstance(total, int):
        _check_layers(layers, total, target)


def _meant(name: str) -> tuple[int, ExitHead | None]:
    """Number of layers, and the head behind them."""
    given = name.removeprefix(PREFIX)
    if given and Path(given).is_dir():
        head = read_exit_head(Path(given))
        return head.layers, head
    if not given.isdecimal():
        raise InputError(f"the draft {name!r} names no number of layers; write for example {PREFIX}8")
    return int(given), None


def _check_layers(layers: int, total: int, target: str) -> None:
    if not 1 <= layers < total:
        raise InputError(f"{PREFIX}{layers} does not fit {target}: of its {total} layers use 1 to {total - 1}")
