"""The accept rules: which draft tokens stand, and what follows them. Pure functions of arrays.

P (k+1, V) holds the target's distribution at each draft position and after the last; q (k, V) the distribution each
draft token was drawn from. Whatever q is, the tokens that come out follow P exactly.

The *token rule* decides on one token after the other (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318), the *block rule* on the draft as a whole, so that a token that P likes more than q does makes up for one
that it likes less (Sun et al. 2024, arXiv 2403.10444). The block rule never accepts fewer tokens in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.errors import InputError
from slipstream.types import Verdict

#: The accept rules by name, the default first.
RULES = ("block", "token")


def verify(
    target_probs: Tensor,
    draft_tokens: Tensor | Sequence[int],
    draft_probs: Tensor | None,
    generator: torch.Generator | None,
    rule: str = RULES[0],
) -> Verdict:
    """Decide how many draft tokens stand and draw the token after them.

    Args:
        target_probs: (k+1, V), rows sum to 1. A row i >= 1 may be NaN, if nothing can be sampled there: whether
            it is reached has the same probability as in plain decoding, and if ``num_accepted`` is i, then
            ``next_token`` means nothing.
        draft_tokens: (k,), ids below V; k may be 0.
        draft_probs: (k, V), the distributions the draft tokens were drawn from, or None if each is one-hot.
        generator: source of the random numbers; must not be shared with a concurrent request.
        rule: ``"block"`` or ``"token"``; the law of what comes out is the same.

    Returns:
        ``Verdict(num_accepted, next_token)``. The inputs are not changed.

    Raises:
        InputError: shapes that do not fit together, or an unknown rule.
    """
    drafted = torch.as_tensor(draft_tokens, dtype=torch.long, device=target_probs.device)
    check_rule(rule)
    _check(target_probs, drafted, draft_probs)
    # 1. Token rule: accept each token with probability min(1, P/q), until the first rejection.
    #    Block rule: of the blocks x_1..x_i that pass, each with probability h_i, accept the longest.
    if rule == "token":
        num_accepted = _count_accepted(accept_probs(target_probs, drafted, draft_probs), generator)
        weight = 1.0
    else:
        weights = block_weights(target_probs, drafted, draft_probs)
        num_accepted = _longest_accepted(block_probs(target_probs, draft_probs, weights), generator)
        weight = weights[num_accepted]
    # 2. After a rejection the next token comes from what P has and q lacks; after k acceptances, from P.
    row = target_probs[num_accepted]
    if num_accepted < len(drafted):
        q = _one_hot(drafted[num_accepted], row) if draft_probs is None else draft_probs[num_accepted]
        row = residual(row, q, weight)
    return Verdict(num_accepted, sample(row, generator))


def check_rule(rule: str) -> None:
    """Raise InputError if there is no accept rule of this name."""
    if rule not in RULES:
        raise InputError(f"rule {rule!r} is not known; use {' or '.join(map(repr, RULES))}")


def check_draft_probs(draft_probs: Tensor, count: int, vocab: int) -> None:
    """Raise InputError unless there is a distribution over ``vocab`` ids for each of ``count`` draft tokens."""
    if draft_probs.shape != (count, vocab):
        raise InputError(
            f"draft_probs must have shape {(count, vocab)}, one row a draft token over the target's vocabulary; got "
            f"{tuple(draft_probs.shape)}"
        )


def match(draft_tokens: Sequence[int], choose: Callable[[int], int]) -> Verdict:
    """The rule for choices that are already made: accept draft tokens while they are what the target takes.

    Args:
        draft_tokens: k ids.
        choose: the target's own choice at slot 0..k; called up to the first slot that differs.
    """
    for slot, token in enumerate(draft_tokens):
        chosen = choose(slot)
        if chosen != token:
            return Verdict(slot, chosen)
    return Verdict(len(draft_tokens), choose(len(draft_tokens)))


def accept_probs(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> Tensor:
    """min(1, P(x)/q(x)) for each draft token x: shape (k,). A token that P gives no probability gets 0."""
    index = draft_tokens.unsqueeze(1)
    p = target_probs[: len(draft_tokens)].gather(1, index).squeeze(1)
    if draft_probs is None:
        return p.clamp(max=1)
    q = draft_probs.gather(1, index).squeeze(1)
    return torch.where(p >= q, (p > 0).to(p.dtype), p / q)


def block_weights(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> list[float]:
    """p_0 = 1, p_i = min(1, p_{i-1} P(x_i) / q(x_i)), for i = 0..k.

    p_i is the probability that at least i tokens stand, given that the draft begins with x_1..x_i.
    """
    index = draft_tokens.unsqueeze(1)
    p = target_probs[: len(draft_tokens)].gather(1, index).squeeze(1).tolist()
    q = [1.0] * len(p) if draft_probs is None else draft_probs.gather(1, index).squeeze(1).tolist()
    weights = [1.0]
    for wanted, drawn in zip(p, q, strict=True):
        # Nothing stands behind a row from which nothing can be sampled.
        joint = 0.0 if math.isnan(wanted) else weights[-1] * wanted
        weights.append(float(joint > 0) if joint >= drawn else joint / drawn)
    return weights


def block_probs(target_probs: Tensor, draft_probs: Tensor | None, weights: Sequence[float]) -> list[float]:
    """h_i with which the block x_1..x_i passes if no longer one does, for i = 1..k.

    h_k = p_k; before it h_i = R_i / (R_i + 1 - p_i) with R_i = sum_x (p_i P(x) - q(x))+ at the position after x_i.

    Args:
        target_probs: (k+1, V).
        draft_probs: (k, V), or None if each row is one-hot.
        weights: p_0..p_k, from ``block_weights``.
    """
    probs = list(weights[1:])
    for i in range(1, len(probs)):
        p = weights[i]
        if not 0 < p < 1:
            continue  # h_i = p_i; also where P = q and R_i = 0: a longer block passes then
        if draft_probs is None:
            left = max(p - weights[i + 1], 0.0)
        else:
            left = float(_excess(target_probs[i], draft_probs[i], p).sum())
        if not math.isnan(left):  # where nothing can be sampled the draft ends, as it were
            probs[i - 1] = left / (left + 1 - p)
    return probs


def residual(target_row: Tensor, draft_row: Tensor, weight: float = 1.0) -> Tensor:
    """norm((weight P - q)+), shape (V,); P itself where nothing is left, since then P = q.

    ``weight`` is p_i of the block rule; for the token rule it is 1.
    """
    left = _excess(target_row, draft_row, weight)
    mass = left.sum()
    return left / mass if mass > 0 else target_row


def sample(probs: Tensor, generator: torch.Generator | None) -> int:
    """Draw one id from ``probs`` (V,), which need not sum to 1, by inverting its cumulative sum in float64.

    An id of probability 0 is never drawn.
    """
    cumulative = probs.to(torch.float64).cumsum(0)
    u = torch.rand((), dtype=torch.float64, device=_device(generator, probs), generator=generator).to(probs.device)
    index = torch.searchsorted(cumulative, u * cumulative[-1], right=True)
    # Rounding can lift u * total to the total itself, past the last id of positive probability.
    last = torch.searchsorted(cumulative, cumulative[-1])
    return int(torch.minimum(index, last))


def _count_accepted(accept: Tensor, generator: torch.Generator | None) -> int:
    if not len(accept):
        return 0
    u = torch.rand(accept.shape, dtype=torch.float64, device=_device(generator, accept), generator=generator)
    passed = u.to(accept.device) < accept
    return int(passed.long().cumprod(0).sum())


def _longest_accepted(probs: Sequence[float], generator: torch.Generator | None) -> int:
    device = torch.device("cpu") if generator is None else generator.device
    u = torch.rand((len(probs),), dtype=torch.float64, device=device, generator=generator).tolist()
    return max((i for i, p in enumerate(probs, start=1) if u[i - 1] < p), default=0)


def _excess(target_row: Tensor, draft_row: Tensor, weight: float) -> Tensor:
    return (weight * target_row.to(torch.float64) - draft_row).clamp(min=0)


def _one_hot(token: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(0, token.unsqueeze(0), 1)


def _device(generator: torch.Generator | None, fallback: Tensor) -> torch.device:
    return generator.device if generator is not None else fallback.device


def _check(target_probs: Tensor, draft_tokens: Tensor, draft_probs: Tensor | None) -> None:
    if target_probs.ndim != 2 or draft_tokens.ndim != 1 or len(target_probs) != len(draft_tokens) + 1:
        raise InputError(
            f"target_probs must have one row more than there are draft tokens; got {tuple(target_probs.shape)} "
            f"for draft_tokens {tuple(draft_tokens.shape)}"
        )
    if draft_probs is not None:
        check_draft_probs(draft_probs, len(draft_tokens), target_probs.shape[1])
