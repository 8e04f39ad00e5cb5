"""How much of a draft model's tokens a target would accept, from one pass of each model over the same text.

No speculation is run: at each position of a text both distributions are known, so the probability that a first draft
token stands is sum_x min(P(x), q(x)), without the noise of counting. Arithmetic only, for four ways of verifying:
the *token* and the *block rule*, a *greedy draft* (argmax proposed, accepted with probability P), and *exact match*
(both sample by themselves, a token stands if both chose it: what an engine does that knows no rejection sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["block", "token", "greedy draft", "exact match"]
#: In the order in which tables show them.
RULES: tuple[Rule, ...] = ("block", "token", "greedy draft", "exact match")
_TINY = 1e-300


@dataclass(frozen=True)
class Trail:
    """What two models say of a text, token by token; each (n,)."""

    alpha: tuple[float, ...]
    """sum_x min(P(x), q(x)): acceptance of a first draft token."""
    ratio: tuple[float, ...]
    """q(x) / P(x) of the text's token x."""
    greedy: tuple[float, ...]
    """P of q's likeliest token."""
    hit: tuple[bool, ...]
    """Whether that is the text's token."""
    exact: tuple[float, ...]
    """sum_x P(x) q(x)."""
    draft: tuple[float, ...]
    """q(x)."""
    target: tuple[float, ...]
    """P(x)."""
    sure: tuple[float, ...] = ()
    """How sure the draft is of its likeliest token; empty: not known, so it is taken to be."""

    def rates(self, rule: Rule) -> tuple[float, ...]:
        """Acceptance of a first draft token at each position; of any text."""
        return {"block": self.alpha, "token": self.alpha, "greedy draft": self.greedy, "exact match": self.exact}[rule]

    def reach(self, rule: Rule, start: int, k: int, *, own: bool) -> tuple[float, ...]:
        """Probability that at least 1, 2, ... tokens of a draft of up to ``k`` that begins at ``start`` stand.

        Args:
            rule: how they are verified.
            start: position in the text.
            k: number of draft tokens; no more than the text has left are looked at.
            own: the text was sampled from P. Then these are the probabilities given that the answer is this text:
                under the token rule the products of min(1, q/P), under the block rule the running minimum of
                q(x_1..x_i) / P(x_1..x_i), capped at 1. Of another's text: products of ``rates``, as if tokens were
                independent.
        """
        end = min(start + k, len(self.alpha))
        found, joint, least = [], 1.0, 1.0
        for at in range(start, end):
            if not own:
                joint *= self.rates(rule)[at]
                least = joint
            elif rule == "block":
                joint *= self.ratio[at]
                least = min(least, joint)
            else:
                joint *= self._share(rule, at)
                least = joint
            found.append(least)
        return tuple(found)

    def _share(self, rule: Rule, at: int) -> float:
        if rule == "token":
            return min(1.0, self.ratio[at])
        return float(self.hit[at]) if rule == "greedy draft" else self.draft[at]


def trail(
    target_probs: Tensor, draft_probs: Tensor, tokens: Sequence[int], sure: Sequence[float] | None = None
) -> Trail:
    """What P (n, V) and q (n, V) say of the text ``tokens`` (n,), row by row; a q of zeros proposes nothing.

    ``sure`` (n,) is how sure the draft is, if that is not the largest q, as of a greedy one.
    """
    p, q = target_probs.to(torch.float64), draft_probs.to(torch.float64)
    index = torch.tensor(tokens, dtype=torch.long, device=p.device).unsqueeze(1)
    at_p, at_q = (rows.gather(1, index).squeeze(1) for rows in (p, q))
    best, proposes = q.argmax(dim=1, keepdim=True), q.amax(dim=1) > 0
    return Trail(
        alpha=_row(torch.minimum(p, q).sum(dim=1)),
        ratio=_row(at_q / at_p.clamp(min=_TINY)),
        greedy=_row(p.gather(1, best).squeeze(1) * proposes),
        hit=tuple(((best == index).squeeze(1) & proposes).tolist()),
        exact=_row((p * q).sum(dim=1)),
        draft=_row(at_q),
        target=_row(at_p),
        sure=_row(q.amax(dim=1)) if sure is None else tuple(sure),
    )


def joined(parts: Sequence[Trail]) -> Trail:
    """Pieces of one text, one behind the other."""
    names = ("alpha", "ratio", "greedy", "hit", "exact", "draft", "target", "sure")
    return Trail(*(tuple(value for part in parts for value in getattr(part, name)) for name in names))


def _row(values: Tensor) -> tuple[float, ...]:
    found: list[float] = values.tolist()
    return tuple(found)
