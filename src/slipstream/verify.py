"""The accept rule: which draft tokens stand, and what follows them. Pure functions of arrays.

P (k+1, V) holds the target's distribution at each draft position and after the last; q (k, V) the distribution each
draft token was drawn from. Whatever q is, the tokens that come out follow P exactly.
Source: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.errors import InputError
from slipstream.types import Verdict


def verify(
    target_probs: Tensor,
    draft_tokens: Tensor | Sequence[int],
    draft_probs: Tensor | None,
    generator: torch.Generator | None,
    rule: str = "token",
) -> Verdict:
    """Decide how many draft tokens stand and draw the token after them.

    Args:
        target_probs: (k+1, V), rows sum to 1.
        draft_tokens: (k,), ids below V; k may be 0.
        draft_probs: (k, V), the distributions the draft tokens were drawn from, or None if each is one-hot.
        generator: source of the random numbers; must not be shared with a concurrent request.
        rule: ``"token"``.

    Returns:
        ``Verdict(num_accepted, next_token)``. The inputs are not changed.

    Raises:
        InputError: shapes that do not fit together, or an unknown rule.
    """
    drafted = torch.as_tensor(draft_tokens, dtype=torch.long, device=target_probs.device)
    check_rule(rule)
    _check(target_probs, drafted, draft_probs)
    # 1. Accept each token with probability min(1, P/q), until the first rejection.
    accept = accept_probs(target_probs, drafted, draft_probs)
    num_accepted = _count_accepted(accept, generator)
    # 2. After a rejection the next token comes from what P has and q lacks; after k acceptances, from P.
    row = target_probs[num_accepted]
    if num_accepted < len(drafted):
        row = residual(row, _one_hot(drafted[num_accepted], row) if draft_probs is None else draft_probs[num_accepted])
    return Verdict(num_accepted, sample(row, generator))


def check_rule(rule: str) -> None:
    """Raise InputError if there is no accept rule of this name."""
    if rule != "token":
        raise InputError(f"rule {rule!r} is not known; use 'token'")


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


def residual(target_row: Tensor, draft_row: Tensor) -> Tensor:
    """norm((P - q)+), shape (V,); P itself where nothing is left, since then P = q."""
    left = (target_row - draft_row).clamp(min=0)
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
    if draft_probs is not None and draft_probs.shape != (len(draft_tokens), target_probs.shape[1]):
        raise InputError(
            f"draft_probs must have shape {(len(draft_tokens), target_probs.shape[1])}, one row a draft token over "
            f"the target's vocabulary; got {tuple(draft_probs.shape)}"
        )
