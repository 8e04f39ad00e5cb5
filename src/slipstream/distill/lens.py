"""An output layer for a decoder whose other layers were taken out, in closed form.

The first layers of a target lead to states that its output layer cannot read, but a linear map of them can be (tuned
lens, Belrose et al. 2023, arXiv 2303.08112). Behind such a map W h is W M h, so the map is part of a new output layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.distill.student import Student
from slipstream.distill.teacher import Teacher
from slipstream.distill.tokens import Rows

_RIDGE = 1e-2


@torch.no_grad()
def fit_output_layer(student: Student, teacher: Teacher, rows: Rows, count: int) -> None:
    """Give ``student`` the output layer that comes nearest to the target's logits along ``count`` rows.

    Least squares; of logits only differences matter, so those of a position are taken from their mean.

    Args:
        student: with an output layer of its own.
        teacher: its targets are over all rows of that layer.
        rows: text.
        count: how many of them are asked about.
    """
    width, outputs = student.head.shape[1], student.head.shape[0]
    gram, wanted = torch.zeros(width, width, dtype=torch.float64), torch.zeros(width, outputs)
    for row in range(min(count, len(rows))):
        positions = rows.scored[row].nonzero().squeeze(1)
        if not len(positions):
            continue
        states = student.states(rows.ids[row : row + 1])[0, positions].float()
        logits = teacher.targets(row, rows.ids[row].tolist(), positions).log_probs
        gram += states.double().T @ states.double()
        wanted += states.T @ _centred(logits).to(states.device)
    gram += _RIDGE * gram.diagonal().mean() * torch.eye(width, dtype=torch.float64)
    student.head.copy_(torch.linalg.solve(gram, wanted.double()).T)


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(dim=1, keepdim=True)
