"""The target drafts for itself: its first layers, and its output layer right behind them.

No second model and no second cache: what the first layers compute while drafting is what the verification would
compute, so it goes on from there. How good such a draft is depends on the model: most must be trained for it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import nan
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.drafters.base import Drawn, Gate, Read, Steps, run
from slipstream.errors import InputError
from slipstream.models.base import Cache, Model
from slipstream.models.exit_head import Exit, ExitHead, read_exit_head
from slipstream.sampling import Sampler
from slipstream.types import Draft, DraftEnd

PREFIX = "early-exit:"


class EarlyExitDrafter:
    """Drafts with the first ``layers`` layers of ``target``; ``left`` is the share of them that verification adds.

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
        if not 1 <= layers < total:
            raise InputError(f"{PREFIX}{layers} does not fit {target.name}: of its {total} layers use 1 to {total - 1}")
        self.name = f"{PREFIX}{layers}"
        self.layers = layers
        self.left = 1 - layers / total
        lean: Any = target
        self.target = lean
        self.exit = Exit(layers, None if head is None else lean.fit(head))

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
        return run(self.steps(tokens, (), k))

    def steps(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Steps:
        """``draft``, a pass at a time; nothing behind tokens that others drafted."""
        target, cache = self._drafter.target, self._cache
        if drafted:
            return Draft()
        if target.max_positions is not None:
            k = min(k, target.max_positions - len(tokens))
        if cache is None or cache.length != len(tokens) - 1 or k <= 0:
            return Draft()
        cache.truncate(cache.length)  # nothing of an earlier draft is left
        drawn = Drawn()
        return drawn.draft((yield from self._draw(tokens, cache, k, drawn)))

    def _draw(self, tokens: Sequence[int], cache: Cache, k: int, drawn: Drawn) -> Generator[Read, Tensor, DraftEnd]:
        """Add up to ``k`` tokens to ``drawn``; why there are no more."""
        target = self._drafter.target
        while len(drawn.tokens) < k:
            if self._stops(len(drawn.tokens), nan):
                return "controller"
            context = [*tokens, *drawn.tokens]
            if context[-1] >= target.embedding_size:
                break
            logits = yield Read(target, context[-1:], cache, exit=self._drafter.exit)
            if bool(logits.isnan().any()):
                break
            ahead = self._sampler.ahead(logits, context)
            if self._stops(len(drawn.tokens), ahead.confidence):
                return "controller"
            drawn.add(ahead, self._sampler.take(ahead, len(context)))
            if drawn.tokens[-1] in self._sampler.stop_ids:
                break  # nothing is ever kept after it
        return "limit"

    def _stops(self, drafted: int, confidence: float) -> bool:
        return self.gate is not None and not self.gate(drafted, confidence)


def early_exit(name: str, target: Model) -> EarlyExitDrafter:
    """The drafter that ``early-exit:8`` means, or ``early-exit:FOLDER`` with an exit head in it.

    Raises:
        InputError: what follows the colon is neither a number of layers of ``target`` nor such a folder.
    """
    given = name.removeprefix(PREFIX)
    if given and Path(given).is_dir():
        head = read_exit_head(Path(given))
        return EarlyExitDrafter(target, head.layers, head)
    if not given.isdecimal():
        raise InputError(f"the draft {name!r} names no number of layers; write for example {PREFIX}8")
    return EarlyExitDrafter(target, int(given))
