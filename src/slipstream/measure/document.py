"""A measurement as one JSON document, for other programs and for later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import isfinite
from statistics import median
from typing import Any

from slipstream.measure.bench import TARGET, Bench, Measured, Own
from slipstream.measure.runs import PLAIN, Run
from slipstream.measure.spread import Spread, spread
from slipstream.measure.summary import Figures, Summary, draft_step, same_answer
from slipstream.types import SamplingParams

#: Raised when a reader of the document would have to change.
FORMAT = 1


@dataclass(frozen=True)
class Limit:
    """What memory allows one model, and what it does."""

    weight_bytes: int
    seconds: float
    """weight_bytes / bandwidth: no step can take less."""
    step: Spread | None
    """Seconds of a step in the runs: of the target a plain token, of a draft a drafted token."""
    share: Spread | None
    """seconds / step."""
    pass_share: Spread | None
    """The same of a bare pass over one token, with the bandwidth of the same turn."""


def limits(bench: Bench, measured: Measured) -> dict[str, Limit]:
    """The memory-bandwidth limit of each model; empty before the bandwidth is known."""
    if not measured.bandwidth:
        return {}
    bandwidth = median(measured.bandwidth)
    found = {}
    for name, size in measured.weight_bytes.items():
        steps = list(_steps(bench, measured.runs, name))
        least = size / bandwidth
        found[name] = Limit(
            weight_bytes=size,
            seconds=least,
            step=spread(steps),
            share=spread(least / s for s in steps),
            pass_share=measured.pass_shares.get(name),
        )
    return found


def _steps(bench: Bench, runs: Sequence[Run], model: str) -> list[float]:
    if model == TARGET:
        found = [run.answer.seconds_per_token for run in runs if run.contender == PLAIN]
    else:
        users = {c.name for c in bench.contenders if c.kind == Own.kind and c.draft == model}
        found = [draft_step(run.answer) for run in runs if run.contender in users]
    return [seconds for seconds in found if seconds]


def document(bench: Bench, measured: Measured, summary: Summary, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured; ``about`` says on what and how, and goes first. Times in seconds."""
    categories = Counter(p.category for p in bench.prompts)
    document = {
        "format": FORMAT,
        **about,
        "sampling": sampling(bench.params),
        "prompts": {
            "count": len(bench.prompts),
            "categories": dict(categories),
            "tokens": spread(len(p.ids) for p in bench.prompts),
        },
        "repeats": bench.repeats,
        "contenders": [{"name": c.name, "kind": c.kind, "draft": c.draft, "k": c.k} for c in bench.contenders],
        "failures": measured.failures,
        "best": summary.best,
        "best_peer": summary.best_peer,
        "bandwidth": {
            "bytes_per_second": median(measured.bandwidth) if measured.bandwidth else None,
            "measured": measured.bandwidth,
        },
        "limits": limits(bench, measured),
        "passes": measured.passes,
        "overall": summary.overall,
        "peers": summary.peers,
        "categories": summary.categories,
        "by_prompt": {p: {c: _medians(f) for c, f in some.items()} for p, some in summary.prompts.items()},
        "splits": [_without(asdict(split), "common") for split in measured.splits],
        "records": records(measured.runs),
    }
    tidied: dict[str, Any] = tidy(document)
    return tidied


def sampling(params: SamplingParams) -> dict[str, Any]:
    """The parameters that ``bench`` lets one choose."""
    return {name: getattr(params, name) for name in ("max_new_tokens", "temperature", "seed", "ignore_eos")}


def records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One entry an answer, with plain's times on the same prompt in the same repeat beside its own."""
    plain = {run.cell: run.answer for run in runs if run.contender == PLAIN}
    return [_record(run, plain.get(run.cell)) for run in runs]


def _record(run: Run, plain: Any) -> dict[str, Any]:
    answer = run.answer
    later = answer.rounds[1:]
    return {
        "contender": run.contender,
        "prompt": run.prompt,
        "category": run.category,
        "repeat": run.repeat,
        "tokens": answer.num_tokens,
        "seconds": answer.total_seconds,
        "first_token_seconds": answer.first_token_seconds,
        "seconds_per_token": answer.seconds_per_token,
        "peak_memory_bytes": answer.peak_memory,
        "draft_seconds": sum(r.draft_seconds for r in later) if answer.rounds else None,
        "verify_seconds": sum(r.verify_seconds for r in later) if answer.rounds else None,
        "pass_seconds": answer.pass_seconds,
        "drafted": [r.num_drafted for r in later] if answer.drafted else [],
        "accepted": [r.num_accepted for r in later] if answer.drafted else [],
        "plain_seconds": plain and plain.total_seconds,
        "plain_seconds_per_token": plain and plain.seconds_per_token,
        "same_as_plain": same_answer(answer, plain) if plain else None,
    }


def _medians(some: Figures) -> dict[str, Any]:
    values = {f.name: getattr(some, f.name) for f in fields(some)}
    return {name: value.median if isinstance(value, Spread) else value for name, value in values.items()}


def _without(entries: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if key != name}


def tidy(value: Any) -> Any:
    """``value`` in JSON's types, with six digits: more would be noise, and the document is long.

    >>> tidy({1: (0.12345678, None)})
    {'1': [0.123457, None]}
    """
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): tidy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(entry) for entry in value]
    if hasattr(value, "__dataclass_fields__"):
        return {name: tidy(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
