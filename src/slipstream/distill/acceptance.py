"""How much of a draft a target accepts, told from both models' distributions along held-out texts.

At a position the acceptance is sum_x min(P(x), q(x)) at temperature 1, and whether both have the same likeliest token
at temperature 0. What is accepted at draft position j, given that the tokens before it were, is told from products of
neighbouring positions: a_j = E[o_t ... o_(t+j-1)] / E[o_t ... o_(t+j-2)].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.distill.tokens import Encoded
from slipstream.measure.bootstrap import Interval, bootstrap
from slipstream.measure.expectation import Choice, Costs, best
from slipstream.models.base import Model

#: Draft positions that are looked at.
POSITIONS = 8
TEMPERATURES = (0, 1)
#: Of the target's distribution so many of the likeliest tokens are kept where a draft is measured again and again.
_KEPT = 256


@dataclass(frozen=True)
class Overlaps:
    """What is accepted at each scored position of one document's window."""

    document: str
    category: str
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    def at(self, temperature: int) -> tuple[float, ...]:
        """At temperature 0 or 1."""
        return self.sampled if temperature else self.greedy


#: From a window to a draft's log-probabilities (S, R) at its scored positions.
DraftAlong = Callable[[Encoded], Tensor]


def scored_positions(window: Encoded) -> Tensor:
    """Positions of a window whose next id is written, (S,)."""
    return torch.tensor(window.written[1:]).nonzero().squeeze(1)


class Exact:
    """Asks the target anew for each window, and compares all ids."""

    def __init__(self, target: Model, windows: Sequence[Encoded]) -> None:
        self.windows = windows
        self._target = target

    def compare(self, drafts: Sequence[DraftAlong], output_ids: Sequence[Tensor | None]) -> list[list[Overlaps]]:
        """Of each draft; ``output_ids`` are the ids of the rows of each one's output layer."""
        found: list[list[Overlaps]] = [[] for _ in drafts]
        for window in self.windows:
            p = target_log_probs(self._target, window)
            for draft, given, own in zip(drafts, output_ids, found, strict=True):
                q = draft(window)
                ids = torch.arange(min(q.shape[1], p.shape[1])) if given is None else given
                q = q[:, : len(ids)]
                greedy = ids[q.argmax(dim=1)] == p.argmax(dim=1)
                own.append(_overlaps(window, greedy, torch.minimum(p[:, ids], q).exp().sum(dim=1)))
        return found


class Kept:
    """Asks the target once and keeps its likeliest tokens: a little less than the exact overlap, for progress."""

    def __init__(self, target: Model, windows: Sequence[Encoded]) -> None:
        self.windows = windows
        self._kept = [target_log_probs(target, w).topk(min(_KEPT, target.vocab_size), dim=1) for w in windows]

    def overlaps(self, draft: DraftAlong, output_ids: Tensor | None) -> list[Overlaps]:
        """Of a draft."""
        found = []
        for window, kept in zip(self.windows, self._kept, strict=True):
            q = draft(window)
            ids = torch.arange(q.shape[1]) if output_ids is None else output_ids
            rows = torch.full((int(max(kept.indices.max(), ids.max())) + 1,), -1)
            rows[ids] = torch.arange(len(ids))
            at = rows[kept.indices]
            named = q.gather(1, at.clamp(min=0)).exp() * (at >= 0)
            greedy = q.argmax(dim=1) == at[:, 0]
            found.append(_overlaps(window, greedy, torch.minimum(kept.values.exp(), named).sum(dim=1)))
        return found


def target_log_probs(target: Model, window: Encoded) -> Tensor:
    """log P at the scored positions, (S, V)."""
    from slipstream.distill.teacher import chunks

    ids, positions = window.ids[:-1], scored_positions(window)
    parts = []
    for start, logits in chunks(target, ids):
        wanted = positions[(positions >= start) & (positions < start + len(logits))] - start
        parts.append(logits[wanted].float().log_softmax(dim=-1).cpu())
    return torch.cat(parts)


def _overlaps(window: Encoded, greedy: Tensor, sampled: Tensor) -> Overlaps:
    return Overlaps(
        window.document, window.category, tuple(greedy.float().tolist()), tuple(sampled.clamp(max=1).tolist())
    )


def rate(overlaps: Iterable[Overlaps], temperature: int) -> float:
    """Mean acceptance over positions."""
    values = [v for one in overlaps for v in one.at(temperature)]
    return sum(values) / len(values) if values else 0.0


def by_position(overlaps: Sequence[Overlaps], temperature: int, count: int = POSITIONS) -> tuple[float, ...]:
    """a_1..a_count, conditional on what is before; shorter if no window is as long.

    >>> by_position([Overlaps("a", "all", (1.0, 1.0, 0.0, 1.0), ())], 0, 2)
    (0.75, 0.5)
    """
    reached, chosen = _chain(overlaps, temperature, count)
    found: list[float] = []
    for j in range(count):
        # of the starts from which j + 1 tokens can be looked at
        if not chosen[j] or not reached[j][0]:
            break
        found.append(min(1.0, reached[j][1] / reached[j][0]))
    return tuple(found)


def _chain(overlaps: Sequence[Overlaps], temperature: int, count: int) -> tuple[list[tuple[float, float]], list[int]]:
    """For each j sums over all starts: of the product of j overlaps and of the product of j + 1; number of starts."""
    sums, starts = [(0.0, 0.0)] * count, [0] * count
    for one in overlaps:
        values = torch.tensor(one.at(temperature), dtype=torch.float64)
        product = torch.ones_like(values)
        for j in range(min(count, len(values))):
            before = product[: len(values) - j]
            product = before * values[j:]
            sums[j] = (sums[j][0] + float(before.sum()), sums[j][1] + float(product.sum()))
            starts[j] += len(before)
    return sums, starts


def predicted(overlaps: Sequence[Overlaps], temperature: int, costs: Costs) -> Choice:
    """The best k and its speed-up, from what is accepted by position and what passes cost."""
    return best(by_position(overlaps, temperature), costs)


@dataclass(frozen=True)
class Figures:
    """Acceptances of one draft, with intervals over documents."""

    tokens: int
    documents: int
    rate: Mapping[int, Interval]
    """By temperature."""
    categories: Mapping[str, Mapping[int, Interval]]
    sizes: Mapping[str, int]
    """Documents of each category."""
    positions: Mapping[int, tuple[Interval, ...]]
    """By temperature, a_1, a_2, ..."""
    speed_up: Mapping[int, Choice]


def figures(overlaps: Sequence[Overlaps], costs: Costs) -> Figures:
    """Everything that is told of a draft."""
    documents = by_document(overlaps)
    categories = sorted({one.category for one in overlaps})
    of = {c: [d for d in documents if d[0].category == c] for c in categories}
    return Figures(
        tokens=sum(len(one.sampled) for one in overlaps),
        documents=len(documents),
        rate={t: _rate_interval(documents, t) for t in TEMPERATURES},
        categories={c: {t: _rate_interval(some, t) for t in TEMPERATURES} for c, some in of.items()},
        sizes={c: len(some) for c, some in of.items()},
        positions={t: _position_intervals(documents, t) for t in TEMPERATURES},
        speed_up={t: predicted(overlaps, t, costs) for t in TEMPERATURES},
    )


def by_document(overlaps: Sequence[Overlaps]) -> list[list[Overlaps]]:
    """The windows of each document."""
    found: dict[str, list[Overlaps]] = {}
    for one in overlaps:
        found.setdefault(one.document, []).append(one)
    return list(found.values())


def _rate_interval(documents: Sequence[Sequence[Overlaps]], temperature: int) -> Interval:
    sums = [(sum(map(sum, values)), sum(map(len, values))) for values in _values(documents, temperature)]
    return bootstrap(sums, _ratio)


def _position_intervals(documents: Sequence[Sequence[Overlaps]], temperature: int) -> tuple[Interval, ...]:
    chains = [_chain(some, temperature, POSITIONS)[0] for some in documents]
    found = []
    for j in range(POSITIONS):
        pairs = [(one[j][1], one[j][0]) for one in chains]
        if sum(before for _, before in pairs) > 0:
            found.append(bootstrap(pairs, _ratio))
    return tuple(found)


def _values(documents: Sequence[Sequence[Overlaps]], temperature: int) -> list[list[tuple[float, ...]]]:
    return [[one.at(temperature) for one in some] for some in documents]


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    total = sum(below for _, below in pairs)
    return sum(above for above, _ in pairs) / total if total else 0.0


def gain(before: Sequence[Overlaps], after: Sequence[Overlaps], temperature: int) -> Interval:
    """How much the acceptance has risen on the same windows, with a paired interval over documents."""
    pairs = zip(_values(by_document(before), temperature), _values(by_document(after), temperature), strict=True)
    items = [(sum(map(sum, b)) - sum(map(sum, a)), float(sum(map(len, a)))) for a, b in pairs]
    return bootstrap(items, _ratio)
