"""How many tokens to draft for each of many requests: as many as yield the most tokens a second, over all of them.

Liu et al. 2024 (arXiv 2406.14066). Rows of a pass are cheap while there are few of them and dear once arithmetic is the
limit, so as the batch fills, k falls by itself, first where acceptance is low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

#: Seconds of a pass over so many rows.
PassCost = Callable[[int], float]


def choose(rates: Sequence[Sequence[float]], others: int, verify: PassCost, draft: PassCost | None) -> list[int]:
    """k of each request, 0 included.

    Args:
        rates: for each request the acceptance at every position that it has room for, given the ones before.
        others: rows that are in the target's pass anyway, beside one for each request.
        verify: of the target.
        draft: of the draft model, whose passes serve all requests that still draft; None if drafts cost nothing.

    Returns:
        The numbers that maximise (tokens of all requests) / (draft passes + target's pass).

    >>> alone, crowd = [[0.8, 0.6]], [[0.8, 0.6]] * 12
    >>> cost = lambda rows: max(8.0, rows)  # arithmetic is the limit from 8 rows on
    >>> choose(alone, 0, cost, None), choose(crowd, 0, cost, None) == [0] * 12
    ([2], True)
    """
    slots = [(s, -j, r) for r, some in enumerate(rates) for j, s in enumerate(accumulate(some, mul))]
    slots.sort(key=lambda slot: (-slot[0], -slot[1], slot[2]))  # of equals, earlier positions first
    certain, rows = len(rates), len(rates) + others
    tokens, drafting = float(certain), 0.0
    level: list[int] = []
    best, count = tokens / verify(rows), 0
    for n, (expected, negative, _) in enumerate(slots, start=1):
        at = -negative
        tokens += expected
        if draft is not None:
            level += [0] * (at + 1 - len(level))
            drafting += draft(level[at] + 1) - (draft(level[at]) if level[at] else 0.0)
            level[at] += 1
        if (rate := tokens / (drafting + verify(rows + n))) > best:
            best, count = rate, n
    ks = [0] * len(rates)
    for _, _, r in slots[:count]:
        ks[r] += 1
    return ks
