"""Drafts of many requests at once: whoever waits for a pass of the same model shares it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

from torch import Tensor

from slipstream.drafters.base import Read, passed
from slipstream.models.base import Item, forward_each

Key = TypeVar("Key")
Passes = Generator[Read, Tensor, Any]


def together(
    steps: Mapping[Key, Passes], fits: Callable[[Key, Read], bool], took: Callable[[int, int, float], None]
) -> dict[Key, Any]:
    """Run all of ``steps`` to their ends.

    Args:
        steps: drafts, and whatever else waits for passes.
        fits: whether there is memory for a pass; if there is not, those steps end there, and come to nothing.
        took: is told the requests, the rows and the seconds of each pass.

    Returns:
        What each returned, None if it did not fit, or the exception that ended it.
    """
    results: dict[Key, Any] = {}
    waiting: dict[Key, Read] = {}
    for key, one in steps.items():
        _resume(key, lambda one=one: next(one), waiting, results)  # type: ignore[misc]
    while waiting:
        first = next(iter(waiting.values()))
        batch = {key: r for key, r in waiting.items() if r.model is first.model and r.exit is first.exit}
        waiting = {key: read for key, read in waiting.items() if key not in batch}
        for key in [key for key, read in batch.items() if not fits(key, read)]:
            results[key] = None
            steps[key].close()
            del batch[key]
        if not batch:
            continue
        start = perf_counter()
        logits = _passed(list(batch.values()))
        took(len(batch), sum(len(r.tokens) for r in batch.values()), perf_counter() - start)
        for key, rows in zip(batch, logits, strict=True):
            one = steps[key]
            _resume(key, lambda one=one, rows=rows: _sent(one, rows), waiting, results)  # type: ignore[misc]
    return results


def _passed(reads: Sequence[Read]) -> list[Tensor | Exception]:
    """One pass for all of ``reads``, which are of one model and end at one layer."""
    model, leave = reads[0].model, reads[0].exit
    items = [Item(r.tokens, r.cache, r.num_logits) for r in reads]
    if leave is None:
        return forward_each(model, items)
    before = [r.cache.ahead for r in reads]
    try:
        lean: Any = model
        return list(lean.exit_early_batch(items, leave.layers, leave.head))
    except Exception:  # whose fault it is shows one by one
        for read, ahead in zip(reads, before, strict=True):
            read.cache.ahead = ahead
    return [_alone(read) for read in reads]


def _alone(read: Read) -> Tensor | Exception:
    try:
        return passed(read)
    except Exception as error:
        return error


def _sent(one: Passes, rows: Tensor | Exception) -> Read:
    return one.throw(rows) if isinstance(rows, Exception) else one.send(rows)


def _resume(key: Key, resume: Callable[[], Read], waiting: dict[Key, Read], results: dict[Key, Any]) -> None:
    try:
        waiting[key] = resume()
    except StopIteration as done:
        results[key] = done.value
    except Exception as error:
        results[key] = error
