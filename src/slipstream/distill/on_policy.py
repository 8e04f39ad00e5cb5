"""Rows that end as the draft itself would go on: what it meets when it drafts (DistillSpec, arXiv 2310.08461)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.distill.student import Student
from slipstream.models.huggingface import cache_argument

#: Tokens that the draft writes at the end of a row.
WRITTEN = 32


@torch.no_grad()
def continue_rows(student: Student, ids: Tensor, scored: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows ``ids`` (N, L) whose last tokens are drawn from the draft, and which positions are scored: those.

    The draft's prefixes are the rows' own. A row's position is scored where its next token is one that was drawn, the
    last position too, as far as the row was scored at all.
    """
    from transformers import DynamicCache

    reached = drawn_positions(scored)
    written = _written(ids.shape[1])
    prefix = ids[:, : ids.shape[1] - written]
    decoder: Any = student.decoder
    plain = decoder.get_base_model() if hasattr(decoder, "get_base_model") else decoder
    cache = {cache_argument(type(plain)) or "past_key_values": DynamicCache(config=plain.config)}
    new, drawn = prefix, [prefix]
    for _ in range(written):
        states = decoder(input_ids=new, use_cache=True, **cache).last_hidden_state[:, -1]
        states = states if student.adapter is None else student.adapter(states)
        probs = torch.nn.functional.linear(states, student.head).float().softmax(dim=-1)
        rows = torch.multinomial(probs, 1, generator=generator)
        new = rows if student.output_ids is None else student.output_ids[rows]
        drawn.append(new)
    return torch.cat(drawn, dim=1), reached


def drawn_positions(scored: Tensor) -> Tensor:
    """Which positions of rows ``scored`` (N, L) are learned from once the draft has written their ends, (N, L)."""
    reached = torch.zeros_like(scored)
    reached[:, scored.shape[1] - _written(scored.shape[1]) - 1 :] = scored.any(dim=1, keepdim=True)
    return reached


def _written(length: int) -> int:
    return min(WRITTEN, length // 2)
