"""What a token's law has to be, computed apart from the engines: logits to probabilities, and those to cells.

This is a second implementation of what ``slipstream.sampling`` does, on purpose: an audit must not take the engine's
word for what a temperature or a penalty means.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.models.base import Model, feed
from slipstream.types import SamplingParams

Row = NDArray[np.float64]
#: Tokens with a cell of their own; the others share one.
_OWN_CELLS = 8
#: At most this much probability is granted to all tokens that must not occur.
IMPOSSIBLE = 1e-6


class Scorer(Protocol):
    """A target whose logits are known."""

    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Any | None

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Row:
        """Logits behind the prompt and behind each token of the answer, (len(answer) + 1, V)."""
        ...


class ModelScorer:
    """A loaded model, asked with one pass over prompt and answer."""

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.vocab_size = model.vocab_size
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.tokenizer = model.tokenizer
        self._model = model

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Row:
        with torch.inference_mode():
            rows = feed(self._model, [*prompt, *answer], self._model.new_cache(), len(answer) + 1)
        return np.asarray(rows.to("cpu", torch.float64).numpy())


def processed(
    logits: Row, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, stop: Collection[int]
) -> Row:
    """Logits (V,) behind ``answer`` after bias, penalties and minimum length; before the temperature.

    Args:
        stop: ids that may not occur before ``min_new_tokens``.
    """
    row = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        row[token] += bias
    for token in set(prompt) | set(answer) if params.repetition_penalty != 1 else ():
        if token < len(row):
            row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    for token in set(answer):
        row[token] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token)
    if len(answer) < params.min_new_tokens:
        row[sorted(stop)] = -np.inf
    return row


def distribution(row: Row, params: SamplingParams) -> Row:
    """Probabilities (V,) of processed logits: temperature (above 0), then top_k, top_p and min_p."""
    weights = np.exp((row - row.max()) / params.temperature)
    probs: Row = weights / weights.sum()
    order = np.argsort(-probs, kind="stable")
    if 0 < params.top_k < len(probs):
        probs = _kept(probs, probs >= probs[order[params.top_k - 1]])
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        mask = np.zeros(len(probs), dtype=bool)
        mask[order[: max(1, int((before < params.top_p).sum()))]] = True
        probs = _kept(probs, mask)
    if params.min_p > 0:
        probs = _kept(probs, probs >= params.min_p * probs.max())
    return np.asarray(probs)


def _kept(probs: Row, mask: NDArray[np.bool_]) -> Row:
    kept = probs * mask
    return np.asarray(kept / kept.sum())


def ceiling(row: Row, params: SamplingParams, tolerance: float) -> Row:
    """The most that each token's probability can be if logits are off by ``tolerance``, (V,).

    A filter's border may then fall on either side of a token that lies on it.
    """
    variants = [params]
    if 0 < params.top_k < len(row):
        top = np.sort(row)[::-1]
        if top[params.top_k - 1] - top[params.top_k] < 2 * tolerance:
            variants += [replace(params, top_k=params.top_k + 1)]
    if params.top_p < 1:
        variants += [replace(params, top_p=p) for p in (params.top_p - tolerance, min(1, params.top_p + tolerance))]
    if params.min_p > 0:
        variants += [replace(params, min_p=params.min_p * (1 + s * 2 * tolerance)) for s in (-1, 1)]
    most = np.max([distribution(row, one) for one in variants], axis=0)
    return np.asarray(np.minimum(1.0, most * np.exp(2 * tolerance / params.temperature)))


@dataclass(frozen=True)
class Cells:
    """One position's law in few cells: its likeliest tokens, all others that may occur, and those that must not."""

    ids: tuple[int, ...]
    """Likeliest first."""
    probs: tuple[float, ...]
    """(len(ids) + 2,), sums to 1; the last one is 0."""
    ceilings: tuple[float, ...]
    """(len(ids) + 2,): what each may be at most."""
    allowed: bytes
    """A bit for each token that may occur."""

    def of(self, token: int) -> int:
        """The cell that ``token`` is in."""
        if token in self.ids:
            return self.ids.index(token)
        known = 0 <= token < 8 * len(self.allowed)
        if known and self.allowed[token // 8] >> (7 - token % 8) & 1:
            return len(self.ids)
        return len(self.ids) + 1


def cells(row: Row, params: SamplingParams, eos: Sequence[int], tolerance: float) -> Cells:
    """The cells of processed logits (V,). All end-of-sequence ids count as the first of them."""
    probs, most = distribution(row, params), ceiling(row, params, tolerance)
    for one in (probs, most):
        if len(eos) > 1:
            one[eos[0]] = min(1.0, float(one[list(eos)].sum()))
            one[list(eos[1:])] = 0
    order = np.argsort(-probs, kind="stable")[:_OWN_CELLS]
    ids = tuple(int(i) for i in order if probs[i] > 0.002)
    others = max(0.0, 1.0 - float(probs[list(ids)].sum()))
    others = others if others > 1e-12 else 0.0
    rest = min(1.0, float(most.sum() - most[list(ids)].sum()))
    return Cells(
        ids=ids,
        probs=(*map(float, probs[list(ids)]), others, 0.0),
        ceilings=(*map(float, most[list(ids)]), max(rest, others, IMPOSSIBLE), IMPOSSIBLE),
        allowed=np.packbits(most > 1e-12).tobytes(),
    )


class LawTable:
    """The laws behind one prompt under one set of parameters, each computed when it is first asked for."""

    def __init__(self, scorer: Scorer, prompt: tuple[int, ...], params: SamplingParams, tolerance: float) -> None:
        self.prompt = prompt
        self.params = params
        self.eos = () if params.ignore_eos else scorer.eos_token_ids
        self._scorer = scorer
        self._tolerance = tolerance
        self._cells: dict[tuple[int, ...], Cells] = {}

    def along(self, answer: tuple[int, ...]) -> list[Cells]:
        """The cells at each position of ``answer``, (len(answer),)."""
        before = [answer[:i] for i in range(len(answer))]
        if any(prefix not in self._cells for prefix in before):
            rows = self._scorer.logits(self.prompt, answer[:-1])
            for prefix, row in zip(before, rows, strict=True):
                if prefix not in self._cells:
                    self._cells[prefix] = self._of(row, prefix)
        return [self._cells[prefix] for prefix in before]

    @property
    def known(self) -> dict[tuple[int, ...], Cells]:
        """What was computed so far, by the tokens before."""
        return self._cells

    def _of(self, row: Row, prefix: tuple[int, ...]) -> Cells:
        stop = {*self.eos, *self.params.stop_token_ids}
        changed = processed(row, self.prompt, prefix, self.params, stop)
        return cells(changed, self.params, self.eos, self._tolerance)
