"""Where a speculative answer leaves the plain one, and how nearly tied the target was there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slipstream.measure.runs import PLAIN, Run
from slipstream.models.base import Model, feed


@dataclass(frozen=True)
class Split:
    """The first token at which an answer differs from plain's answer to the same prompt in the same repeat."""

    contender: str
    prompt: str
    repeat: int
    position: int
    common: tuple[int, ...]
    """The answers' tokens before it."""
    plain_token: int | None
    """None if plain's answer ends there."""
    other_token: int | None
    top2_gap: float | None = None
    """The target's largest logit there less its second largest, teacher-forced in one pass."""
    token_gap: float | None = None
    """Its logit of plain's token less that of the other one."""


def split_at(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token at which two answers differ, also by ending; None if they do not."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, None if len(a) == len(b) else min(len(a), len(b)))


def find_splits(runs: Sequence[Run]) -> Iterator[Split]:
    """The splits of ``runs`` from the plain ones among them."""
    plain = {run.cell: run.answer.tokens for run in runs if run.contender == PLAIN}
    for run in runs:
        mine, reference = run.answer.tokens, plain.get(run.cell)
        if mine is None or reference is None or (at := split_at(reference, mine)) is None:
            continue
        yield Split(
            run.contender,
            run.prompt,
            run.repeat,
            at,
            reference[:at],
            reference[at] if at < len(reference) else None,
            mine[at] if at < len(mine) else None,
        )


def with_gap(split: Split, target: Model, prompt: Sequence[int]) -> Split:
    """The split with the target's logit gaps, from one pass over the prompt and what the answers share."""
    logits = feed(target, [*prompt, *split.common], target.new_cache(), 1)[0].double()
    first, second = logits.topk(2).values.tolist()
    token_gap = None
    if split.plain_token is not None and split.other_token is not None:
        token_gap = float(logits[split.plain_token] - logits[split.other_token])
    return replace(split, top2_gap=first - second, token_gap=token_gap)
