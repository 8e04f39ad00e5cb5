"""Several candidates for one position: which of them stands, and what small trees of draft tokens are worth.

Not used by the decoder. Pure functions of arrays: P (V,) is the target's distribution, q_i (V,) the distribution that
candidate i was drawn from, given the candidates before it. Candidates are tried in turn; each rejection leaves
P <- norm((P - q_i)+) for the next, so that the token that comes out follows P whatever the candidates are.
Source: Miao et al. 2023 (SpecInfer, arXiv 2305.09781); without replacement: Yang et al. 2024 (arXiv 2401.06706).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import torch
from torch import Tensor

from slipstream.errors import InputError
from slipstream.verify import accept_probs, residual, sample

#: A tree of draft tokens is the trees behind its candidates for the next position, in the order of their trial: ``()``
#: drafts nothing, ``((),)`` one token, ``(((),), ())`` two candidates and one more token behind the first of them.
Tree = tuple["Tree", ...]


@dataclass(frozen=True)
class Choice:
    """The token that comes out, and which candidate it is; ``index`` is None if none of them stands."""

    index: int | None
    token: int


def verify_candidates(
    target_row: Tensor, candidates: Sequence[int], draft_probs: Tensor | None, generator: torch.Generator | None
) -> Choice:
    """Try the candidates for one position in turn; if none stands, draw from what is left.

    Args:
        target_row: P (V,).
        candidates: n ids below V; n may be 0.
        draft_probs: (n, V), row i the distribution that candidate i was drawn from, given those before it; or None if
            each is one-hot (copied, or the likeliest ones).
        generator: source of the random numbers.

    Raises:
        InputError: shapes that do not fit together.
    """
    _check(target_row, candidates, draft_probs)
    row = target_row.to(torch.float64)
    for index, (token, accept, left) in enumerate(_trials(row, candidates, draft_probs)):
        device = row.device if generator is None else generator.device
        if float(torch.rand((), dtype=torch.float64, device=device, generator=generator)) < accept:
            return Choice(index, token)
        row = left
    return Choice(None, sample(row, generator))


def candidate_probs(
    target_row: Tensor, candidates: Sequence[int], draft_probs: Tensor | None
) -> tuple[list[float], Tensor]:
    """P(candidate i stands), for each i, and the law (V,) of the token after none of them did."""
    _check(target_row, candidates, draft_probs)
    row = target_row.to(torch.float64)
    found: list[float] = []
    reached = 1.0
    for _, accept, left in _trials(row, candidates, draft_probs):
        found.append(reached * accept)
        reached *= 1 - accept
        row = left
    return found, row / row.sum()


def without_replacement(draft_row: Tensor, candidates: Sequence[int]) -> Tensor:
    """The distributions (n, V) that different candidates were drawn from, one after the other, from q (V,).

    >>> without_replacement(torch.tensor([0.5, 0.3, 0.2]), [0, 2])
    tensor([[0.5000, 0.3000, 0.2000],
            [0.0000, 0.6000, 0.4000]])

    Raises:
        InputError: q has fewer possible ids than there are candidates.
    """
    rows = draft_row.repeat(len(candidates), 1)
    for i in range(1, len(candidates)):
        rows[i:, candidates[i - 1]] = 0
    mass = rows.sum(dim=1, keepdim=True)
    if not bool((mass > 0).all()):
        raise InputError(f"q has fewer than {len(candidates)} possible ids; draw fewer candidates")
    return rows / mass


# --- what trees are worth ---------------------------------------------------------------------------------------------


def sampled_shares(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> Tensor:
    """How likely each token of a text of the target was to come out as first or second of two candidates: (2, n).

    The candidates are drawn from q without replacement. Averaged over texts of the target, sums of products of these
    shares are the expected numbers of accepted tokens.

    Args:
        target_probs: (n, V).
        draft_probs: (n, V).
        tokens: (n,), drawn from ``target_probs``, row by row.
    """
    index = tokens.unsqueeze(1)
    p, q = (rows.gather(1, index).squeeze(1).to(torch.float64) for rows in (target_probs, draft_probs))
    first = (q / p).clamp(max=1)
    second = torch.zeros_like(first)
    for i, token in enumerate(tokens.tolist()):
        target, draft = target_probs[i].to(torch.float64), draft_probs[i].to(torch.float64)
        rejected = (draft - target).clamp(min=0)  # the first candidate was c, and did not stand: never the token
        left = float((target - draft).clamp(min=0)[token] / rejected.sum()) if bool(rejected.any()) else 0.0
        # Then the token is the second one, and stands; if q was sure of c, there is no second one.
        again = (q[i] / (1 - draft).clamp(min=0)).nan_to_num(nan=0).clamp(max=left)
        second[i] = (rejected * again).sum() / p[i]
    return torch.stack([first, second])


def ranked_shares(draft_probs: Tensor, tokens: Tensor, width: int) -> Tensor:
    """The same for the ``width`` likeliest ids of q (n, V), in order, as candidates: (width, n), each 0 or 1."""
    best = draft_probs.topk(width, dim=1).indices
    return (best == tokens.unsqueeze(1)).T.to(torch.float64)


def expected_accepted(tree: Tree, shares: Tensor) -> Tensor:
    """Expected number of accepted tokens of a tree that is drafted at each position of a text: (n,).

    Positions past the end of the text count nothing: leave out the last ones, as many as the tree is deep.

    Args:
        tree: at most ``len(shares)`` candidates at a position.
        shares: (width, n), from ``sampled_shares`` or ``ranked_shares``.
    """

    @cache
    def value(subtree: Tree) -> Tensor:
        total = torch.zeros_like(shares[0])
        for share, behind in zip(shares, subtree, strict=False):
            total += share * (1 + torch.nn.functional.pad(value(behind)[1:], (0, 1)))
        return total

    return value(tree)


def expected_block(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, k: int) -> Tensor:
    """The same for one chain of k tokens under the block rule: (n - k + 1,), one for each start with k tokens to go.

    With w_i = q(x_1..x_i) / P(x_1..x_i) along the text, E[p_i] is the mean of min(1, w_1, ..., w_i).
    """
    index = tokens.unsqueeze(1)
    p, q = (rows.gather(1, index).squeeze(1).to(torch.float64) for rows in (target_probs, draft_probs))
    ratios = (q / p).unfold(0, k, 1)
    return ratios.cumprod(dim=1).cummin(dim=1).values.clamp(max=1).sum(dim=1)


def chain(k: int) -> Tree:
    """k tokens, one behind the other."""
    return (chain(k - 1),) if k else ()


@cache
def trees(nodes: int, width: int = 2) -> tuple[Tree, ...]:
    """Every tree of ``nodes`` draft tokens with at most ``width`` candidates at a position."""
    return tuple(
        shape
        for count in range(min(nodes, width) + 1)
        for sizes in _splits(nodes - count, count)
        for shape in product(*(trees(size, width) for size in sizes))
    )


def size(tree: Tree) -> int:
    """Number of draft tokens."""
    return sum(1 + size(behind) for behind in tree)


def depth(tree: Tree) -> int:
    """Number of positions ahead, which is the number of draft passes."""
    return max((1 + depth(behind) for behind in tree), default=0)


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to hand out ``total`` to ``parts``."""
    if parts == 0:
        if total == 0:
            yield ()
        return
    for cuts in product(range(total + 1), repeat=parts - 1):
        if all(a <= b for a, b in pairwise(cuts)):
            ends = (0, *cuts, total)
            yield tuple(b - a for a, b in pairwise(ends))


def _trials(row: Tensor, candidates: Sequence[int], draft_probs: Tensor | None) -> Iterator[tuple[int, float, Tensor]]:
    """Each candidate, the probability that it stands after those before it did not, and what is left of P if so."""
    for i, token in enumerate(candidates):
        drafted = torch.tensor([token], device=row.device)
        q = torch.zeros_like(row).index_fill(0, drafted, 1) if draft_probs is None else draft_probs[i]
        accept = float(accept_probs(row[None], drafted, None if draft_probs is None else q[None])[0])
        row = residual(row, q)
        yield token, accept, row


def _check(target_row: Tensor, candidates: Sequence[int], draft_probs: Tensor | None) -> None:
    wanted = (len(candidates), *target_row.shape)
    if target_row.ndim != 1 or (draft_probs is not None and draft_probs.shape != wanted):
        got = None if draft_probs is None else tuple(draft_probs.shape)
        raise InputError(
            f"target_row {tuple(target_row.shape)} and draft_probs {got} do not fit {len(candidates)} candidates; use "
            "(V,) and one row of V a candidate"
        )
