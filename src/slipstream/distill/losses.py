"""What is made small: distances of the draft's distributions from the target's, and the target's tokens.

Each loss takes log-probabilities of both over the same B outcomes at N positions, and gives one number a position:

    kl          sum p log(p / q)                       forward KL: the draft covers all that the target may say
    reverse-kl  sum q log(q / p)                       the draft says only what the target would
    js          (KL(p, m) + KL(q, m)) / 2, m = (p + q) / 2
    tv          1 - sum min(p, q)                      1 - acceptance (DistillSpec, Zhou et al. 2023, arXiv 2310.08461)
    acceptance  - log sum min(p, q)                    with a gradient also where hardly anything is accepted
    ce          - log q(token)                         the text's tokens; needs no target
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

#: (log p (N, B), log q (N, B)) -> (N,)
Loss = Callable[[Tensor, Tensor], Tensor]


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p, q), of log-probabilities."""
    return torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(dim=-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(q, p), of log-probabilities."""
    return forward_kl(q, p)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Half the KL of each to their mean; between 0 and log 2."""
    mean = torch.logaddexp(p, q) - math.log(2)
    return (forward_kl(p, mean) + forward_kl(q, mean)) / 2


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """1 - acceptance."""
    return 1 - _overlap(p, q)


def negative_log_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """-log of the acceptance."""
    return -_overlap(p, q).clamp(min=1e-9).log()


def cross_entropy(q: Tensor, labels: Tensor) -> Tensor:
    """-log q of ``labels`` (N,), which are columns of ``q`` (N, R); 0 for a label of -1, which has none."""
    found = q.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return -found * (labels >= 0)


LOSSES: dict[str, Loss] = {
    "kl": forward_kl,
    "reverse-kl": reverse_kl,
    "js": jensen_shannon,
    "tv": total_variation,
    "acceptance": negative_log_acceptance,
}
CROSS_ENTROPY = "ce"
NAMES = (*LOSSES, CROSS_ENTROPY)


def _overlap(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).exp().sum(dim=-1)
