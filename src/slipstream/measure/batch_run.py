"""A short real run of a whole batch: plain and speculative in turn, as an engine answers them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from slipstream.answers import Setting
from slipstream.controller import make_policy
from slipstream.drafters import Drafter, NoDrafter
from slipstream.engine import Engine
from slipstream.measure.planning import Point, Subject
from slipstream.measure.prompts import BenchPrompt
from slipstream.models.base import PREFILL_CHUNK
from slipstream.seats import Limits
from slipstream.types import Event, Request, SamplingParams

#: Both ways are tried so often, in turn; the first one of each is a warm-up of a few tokens.
TURNS = 2
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class BatchRun:
    """What is run for real."""

    draft: str
    k: int
    batch: int
    prompts: Sequence[BenchPrompt]
    turns: int = TURNS

    @property
    def steps(self) -> int:
        """How often ``run_batch`` tells something."""
        return 2 * (1 + self.turns)


@dataclass
class _Full:
    """What the steps took in which every place was taken by a request past its first token."""

    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, seconds: float, events: Sequence[Event]) -> None:
        """Count one step."""
        self.seconds += seconds
        for event in events:
            self.tokens += len(event.piece.tokens) if event.piece is not None else 0
            if event.round is not None:
                self.drafted += event.round.num_drafted
                self.accepted += event.round.num_accepted


def run_batch(subject: Subject, run: BatchRun, into: list[Point]) -> Iterator[str]:
    """One point a turn, where there were full steps of both ways; tells before each way of each turn.

    Prompts follow each other until each place has answered about one, so that the batch stays full; steps in which
    some request reads its prompt do not count. Prompts are read in large parts, so that all are soon past theirs.
    """
    ways = {
        name: Setting(subject.target, drafter, make_policy(k), subject.target.tokenizer, subject.rule, coupled=False)
        for name, drafter, k in _ways(subject, run)
    }
    warm = replace(subject.params, max_new_tokens=_WARM_UP_TOKENS)
    for name, setting in ways.items():
        yield f"warm-up of {run.batch} requests: {name}"
        _answered(setting, run, warm, 0)
    for turn in range(run.turns):
        found = {}
        for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
            yield f"{run.batch} requests at a time: {name}"
            found[name] = _answered(ways[name], run, subject.params, turn * run.batch)
        plain, fast = (found[name] for name in ways)
        if plain.tokens and fast.tokens:
            per_token = plain.seconds / plain.tokens
            drafted, accepted = fast.drafted, fast.accepted
            into.append(
                Point(f"turn {turn}", "all", per_token * fast.tokens, fast.seconds, fast.tokens, drafted, accepted)
            )


def _ways(subject: Subject, run: BatchRun) -> list[tuple[str, Drafter, int]]:
    return [("plain", NoDrafter(), 0), (f"k={run.k}", subject.drafters[run.draft], run.k)]


def _answered(setting: Setting, run: BatchRun, params: SamplingParams, first: int) -> _Full:
    """Answers from prompt ``first`` on, two for each place at most, until there are tokens for about one of them."""
    engine, full = Engine(setting, Limits(requests=run.batch, rows=PREFILL_CHUNK, prefix=0)), _Full()
    for at in range(2 * run.batch):
        engine.add(Request(run.prompts[(first + at) % len(run.prompts)].ids, params))
    begun: set[int] = set()
    enough = run.batch * (params.max_new_tokens - 1)
    while engine.unfinished and full.tokens < enough:
        counts, start = len(begun) == run.batch, perf_counter()
        events = engine.step()
        if counts:
            full.add(perf_counter() - start, events)
        for event in events:
            if event.error is not None:
                raise event.error
            if event.output is not None:
                begun.discard(event.id)
            elif event.piece is not None and event.piece.tokens:
                begun.add(event.id)
    return full
