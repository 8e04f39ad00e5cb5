"""Logits to probabilities, for target and draft alike, and draws from them.

This is the only place that knows what a temperature or a penalty is. Everything downstream sees distributions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ForbiddenError, InputError, ModelError
from slipstream.types import SamplingParams
from slipstream.verify import sample

#: Up to this many of the likeliest tokens are searched for the nucleus before the whole row is sorted.
_NUCLEUS_GUESS = 1024

#: What a parameter may be an instance of, by its annotation.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "int | None": (int, NoneType),
    "Mapping[int, float]": (Mapping,),
    "Sequence[str]": (Collection,),
    "Sequence[int]": (Collection,),
    "Sequence[LogitsProcessor]": (Collection,),
}


@dataclass(frozen=True)
class Ahead:
    """The next token of a draft, before it is drawn."""

    of: Tensor | int
    """The distribution (V,) that it will be drawn from; at temperature 0 the token itself."""
    confidence: float
    """Probability of the likeliest token; at temperature 0, what it would be at 1."""


class Sampler:
    """The sampling of one request: its parameters, its prompt's length, its random numbers.

    Args:
        params: validated parameters.
        prompt_length: number of leading tokens that are prompt; penalties on the output start after them.
        stop_ids: ids that end the answer; ``min_new_tokens`` keeps them from being sampled.
        seed: seeds the request's own generator.
        coupled: draw position by position with random numbers that depend on seed and position alone, the same for
            draft and target, so that the answer does not depend on the draft at all.
    """

    def __init__(
        self, params: SamplingParams, prompt_length: int, stop_ids: Collection[int], seed: int, *, coupled: bool = False
    ) -> None:
        self.params = params
        self.prompt_length = prompt_length
        self.coupled = coupled
        self.generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self.stop_ids = frozenset(stop_ids)
        self.rewrites_logits = _rewrites_logits(params)
        """Whether logits are changed (by bias, penalties, processors) before temperature and filters."""

    @property
    def greedy(self) -> bool:
        """Whether every distribution is one-hot."""
        return self.params.temperature == 0

    def probs(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        """The distributions that tokens are drawn from.

        Args:
            logits: (n, V); row i belongs to the position after ``tokens[:len(tokens) - n + 1 + i]``.
            tokens: prompt, committed and drafted tokens, up to the position of the last row.

        Returns:
            (n, V) in float32, or float64 for float64 logits; one-hot rows at temperature 0. A row after the first from
            which nothing can be sampled is NaN: it matters only if the draft tokens before it turn out to stand.

        Raises:
            ModelError: the first row holds NaN or +inf, or nothing is left in it to sample from.
        """
        logits = self._process(logits, tokens)
        peaks = logits.amax(dim=-1, keepdim=True)
        unusable = ~torch.isfinite(peaks)
        if not bool(unusable.any()):
            return self._distributions(logits, peaks)
        if bool(unusable[0]):
            raise self._not_samplable(float(peaks[0]), len(tokens) - len(logits) + 1)
        logits, peaks = logits.masked_fill(unusable, 0), peaks.masked_fill(unusable, 0)
        return self._distributions(logits, peaks).masked_fill(unusable, math.nan)

    def choices(self, logits: Tensor, tokens: Sequence[int]) -> list[int]:
        """At temperature 0: the ids that ``probs`` would put everything on, -1 for a row that would be NaN.

        Vocabularies are large and verification is in every round, so no distributions are made.

        Raises:
            ModelError: as ``probs``.
        """
        peaks, ids = self._process(logits, tokens).max(dim=-1)
        usable = peaks.isfinite()
        if not bool(usable[0]):
            raise self._not_samplable(float(peaks[0]), len(tokens) - len(logits) + 1)
        chosen: list[int] = torch.where(usable, ids, -1).tolist()
        return chosen

    def ahead(self, logits: Tensor, tokens: Sequence[int]) -> Ahead:
        """What a draft's next token will be, or will be drawn from; ``logits`` (1, V) are those after ``tokens``.

        Raises:
            ModelError: as ``probs``.
        """
        if not self.greedy:
            row = self.probs(logits, tokens)[0]
            return Ahead(row, float(row.max()))
        logits = self._process(logits, tokens)
        peak, token = logits[0].max(dim=-1)
        if not bool(peak.isfinite()):
            raise self._not_samplable(float(peak), len(tokens))
        # The distribution is sure of itself at temperature 0, so ask the logits.
        return Ahead(int(token), float(torch.exp(peak - logits[0].logsumexp(dim=-1))))

    def take(self, ahead: Ahead, position: int) -> int:
        """The id at ``position`` that comes of ``ahead``; positions as in ``draw``."""
        return ahead.of if isinstance(ahead.of, int) else self.draw(ahead.of, position)

    def draw(self, probs: Tensor, position: int) -> int:
        """Draw the id at ``position`` (counted from the prompt's first token) from ``probs`` (V,)."""
        if self.greedy:
            return int(probs.argmax())
        if not self.coupled:
            return sample(probs, self.generator)
        # A race of exponential clocks with rates P: the first to ring is x with probability P(x), and with the same
        # clocks two similar distributions mostly agree.
        self.generator.manual_seed((self._seed * 1_000_003 + position) % 2**63)
        clocks = torch.empty(len(probs), dtype=torch.float64).exponential_(generator=self.generator)
        return int((probs.to("cpu", torch.float64) / clocks).argmax())

    def _distributions(self, logits: Tensor, peaks: Tensor) -> Tensor:
        """Logits (n, V) with their largest values (n, 1), all finite, to probabilities."""
        if self.greedy:
            best = logits.argmax(dim=-1, keepdim=True)
            return torch.zeros_like(logits).scatter_(-1, best, 1)
        # A temperature that is 0 or infinite in the logits' type would make NaN.
        limits = torch.finfo(logits.dtype)
        temperature = min(max(self.params.temperature, limits.tiny), limits.max)
        return self._filtered(torch.softmax((logits - peaks) / temperature, dim=-1))

    def _process(self, logits: Tensor, tokens: Sequence[int]) -> Tensor:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if not self.rewrites_logits:
            return logits
        first = len(tokens) - len(logits) + 1
        rows = [self._process_row(row.clone(), tokens[: first + i]) for i, row in enumerate(logits)]
        return torch.stack(rows)

    def _process_row(self, row: Tensor, tokens: Sequence[int]) -> Tensor:
        """Apply everything that rewrites logits, in the order that ``SamplingParams`` states, to a row we own."""
        p = self.params
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), device=row.device)
            row[ids] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
        if p.repetition_penalty != 1.0:
            seen = _emittable(torch.tensor(tokens, device=row.device), row).unique()
            scores = row[seen]
            scaled = torch.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
            # A penalty near 0 may leave the logits' type, which is no fault of the model.
            row[seen] = torch.where(scores.isfinite(), scaled.clamp(max=torch.finfo(row.dtype).max), scaled)
        output = tokens[self.prompt_length :]
        if (p.frequency_penalty or p.presence_penalty) and output:
            ids, counts = torch.tensor(output, device=row.device).unique(return_counts=True)
            row[ids] -= p.frequency_penalty * counts.to(row.dtype) + p.presence_penalty
        if p.no_repeat_ngram_size:
            row[_emittable(_repeating(tokens, p.no_repeat_ngram_size, row.device), row)] = -math.inf
        if self.stop_ids and len(output) < p.min_new_tokens:
            row[_emittable(torch.tensor(sorted(self.stop_ids), device=row.device), row)] = -math.inf
        for processor in p.logits_processors:
            row = _checked_row(processor(list(tokens), row), row.shape)
        return row

    def _filtered(self, probs: Tensor) -> Tensor:
        """Temperature is in; keep what top_k, top_p and min_p keep, and renormalise."""
        p, vocab = self.params, probs.shape[-1]
        if p.top_k and p.top_k < vocab:
            border = probs.topk(p.top_k, dim=-1).values[:, -1:]
            probs = _renormalised(probs, probs >= border)
        if p.top_p < 1:
            probs = _renormalised(probs, _nucleus(probs, p.top_p))
        if p.min_p > 0:
            probs = _renormalised(probs, probs >= p.min_p * probs.amax(dim=-1, keepdim=True))
        return probs

    def _not_samplable(self, peak: float, position: int) -> ModelError:
        where = f"no token can be sampled at position {position} (prompt included)"
        if peak == -math.inf:
            why = "every token is forbidden (-inf) after logit_bias, penalties and processors; loosen them"
            return ForbiddenError(f"{where}: {why}")
        found = "NaN" if math.isnan(peak) else "+inf"
        return ModelError(f"{where}: the logits hold {found}; check weights and dtype (try fp32)")


def validate(params: SamplingParams, vocab_size: int | None = None) -> None:
    """Refuse values without a meaning, naming the first one.

    Raises:
        InputError: one sentence with the parameter, its value and what is allowed.
    """
    _check_types(params)
    p = params
    rules: list[tuple[bool, str, str]] = [
        (0 <= p.temperature < math.inf, "temperature", "use 0 for greedy or a positive number"),
        (p.top_k >= 0, "top_k", "use 0 to keep all tokens or a positive number"),
        (0 < p.top_p <= 1, "top_p", "use a number in (0, 1]"),
        (0 <= p.min_p <= 1, "min_p", "use a number in [0, 1]"),
        (0 < p.repetition_penalty < math.inf, "repetition_penalty", "use a positive number; 1 switches it off"),
        (math.isfinite(p.frequency_penalty), "frequency_penalty", "use a finite number; 0 switches it off"),
        (math.isfinite(p.presence_penalty), "presence_penalty", "use a finite number; 0 switches it off"),
        (p.no_repeat_ngram_size >= 0, "no_repeat_ngram_size", "use 0 to switch it off or a positive number"),
        (p.min_new_tokens >= 0, "min_new_tokens", "use 0 or a positive number"),
        (p.max_new_tokens >= 0, "max_new_tokens", "use 0 or a positive number"),
        (p.min_new_tokens <= p.max_new_tokens, "min_new_tokens", f"max_new_tokens is only {p.max_new_tokens}"),
        (p.n >= 1, "n", "use 1 or more"),
        (p.n == 1 or p.temperature > 0, "n", "greedy answers are all the same; set a temperature above 0"),
        (p.logprobs is None or p.logprobs >= 0, "logprobs", "use None or a number of alternatives, 0 or more"),
        (not isinstance(p.stop, str), "stop", "use a list of strings"),
        (all(isinstance(s, str) and s for s in p.stop), "stop", "use non-empty strings"),
        (all(_is_id(t) for t in p.stop_token_ids), "stop_token_ids", "use a list of token ids"),
        (all(callable(f) for f in p.logits_processors), "logits_processors", "use callables of (tokens, logits row)"),
        (all(map(_is_id, p.logit_bias)), "logit_bias", "use token ids as its keys"),
        (all(map(_is_bias, p.logit_bias.values())), "logit_bias", "use numbers or -inf"),
    ]
    for holds, name, advice in rules:
        if not holds:
            raise InputError(f"{name}={getattr(params, name)!r} is not usable: {advice}")
    if vocab_size is not None:
        for name, ids in (("logit_bias", p.logit_bias), ("stop_token_ids", p.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InputError(
                        f"{name} names token id {token}, but ids go from 0 to {vocab_size - 1}; correct it"
                    )


def _check_types(params: SamplingParams) -> None:
    """A bool, a string or None in place of a number or list would pass or break the rules above in odd ways."""
    for f in fields(params):
        value, kinds = getattr(params, f.name), _TYPES[str(f.type)]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise InputError(f"{f.name}={value!r} is a {type(value).__name__}; use {f.type}")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bias(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value < math.inf


def _checked_row(row: Any, shape: torch.Size) -> Tensor:
    """What a processor returned, if it is a row of logits."""
    if isinstance(row, Tensor) and row.shape == shape:
        return row
    what = f"a tensor of shape {tuple(row.shape)}" if isinstance(row, Tensor) else f"a {type(row).__name__}"
    raise InputError(f"a function in logits_processors returned {what}; return the row of logits, shape {tuple(shape)}")


def _emittable(ids: Tensor, row: Tensor) -> Tensor:
    """Those of ``ids`` that ``row`` has: a model may read ids that it cannot emit, and -1 may stand for none."""
    return ids[(ids >= 0) & (ids < len(row))]


def _rewrites_logits(p: SamplingParams) -> bool:
    return bool(
        p.logit_bias
        or p.repetition_penalty != 1.0
        or p.frequency_penalty
        or p.presence_penalty
        or p.no_repeat_ngram_size
        or p.min_new_tokens
        or p.logits_processors
    )


def _repeating(tokens: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Ids that would complete an n-gram of ``size`` that already occurs in ``tokens``."""
    if len(tokens) < size:
        return torch.empty(0, dtype=torch.long, device=device)
    windows = torch.tensor(tokens, device=device).unfold(0, size, 1)
    prefix = windows.new_tensor(list(tokens[len(tokens) - size + 1 :]))
    return windows[(windows[:, :-1] == prefix).all(dim=1), -1]


def _renormalised(probs: Tensor, keep: Tensor) -> Tensor:
    kept = probs * keep
    return kept / kept.sum(dim=-1, keepdim=True)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Mask (n, V) of each row's likeliest tokens up to the one that reaches ``top_p``; of equals, lower ids first."""
    vocab = probs.shape[-1]
    likeliest = probs.topk(min(_NUCLEUS_GUESS, vocab), dim=-1).values
    if likeliest.shape[-1] < vocab and bool((likeliest.sum(dim=-1) < top_p).any()):
        likeliest = probs.sort(dim=-1, descending=True).values
    before = likeliest.cumsum(dim=-1) - likeliest
    kept = (before < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    border = likeliest.gather(-1, kept - 1)
    above, at = probs > border, probs == border
    room = kept - above.sum(dim=-1, keepdim=True)
    return above | (at & (at.cumsum(dim=-1) <= room))
