"""From runs to figures: pure arithmetic.

A ratio is always taken between two answers to the same prompt in the same repeat; then the median of the ratios is
quoted, with their quartiles. Counts (acceptance) are added up before they are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slipstream.measure.runs import PLAIN, Answered, Run
from slipstream.measure.splits import split_at
from slipstream.measure.spread import Spread, spread
from slipstream.types import Round

#: A figure of one answer; None if it has none.
Figure = Callable[[Answered], float | None]


@dataclass(frozen=True)
class Acceptance:
    """What became of drafts; the rate's position j is the j-th token of a draft, from 1."""

    drafted: int
    accepted: int
    rate: float
    mean_accepted_length: float | None
    """Tokens a round, the corrected or bonus token included; None of an engine that does not tell rounds."""
    per_position: tuple[float, ...]
    """Of the drafts that have a token j: the share in which it was accepted."""
    conditional: tuple[float | None, ...]
    """The same, of those in which all tokens before j were accepted."""


@dataclass(frozen=True)
class TimeSplit:
    """Where the time of a token after the first goes, in seconds; the three add up."""

    draft: float
    verify: float
    """Target passes, with sampling and the accept rule."""
    rest: float


@dataclass(frozen=True)
class Figures:
    """What some runs of one contender say."""

    runs: int
    tokens: int
    seconds_per_token: Spread | None
    """After the first token."""
    decode_tokens_per_second: Spread | None
    tokens_per_second: Spread | None
    """Of whole answers, reading the prompt included."""
    total_tokens_per_second: float | None
    """All tokens / all seconds of whole answers."""
    first_token_seconds: Spread | None
    peak_memory_bytes: int | None
    speed_up: Spread | None
    """Plain time per token / this one's."""
    whole_answer_speed_up: Spread | None
    """The same with the time of the whole answer."""
    acceptance: Acceptance | None
    cost_ratio: Spread | None
    """c: time of a drafted token / plain time per token."""
    time_split: TimeSplit | None
    outside_share: Spread | None
    """Of the time after the first token: what passes neither in the target's nor in the draft's forward pass."""
    identical_share: float | None
    """Of the prompts: those whose answers are plain's in every repeat. Of sampled answers it says nothing."""


def figures(runs: Sequence[Run], plain: Sequence[Run]) -> Figures:
    """Figures of ``runs``, all by one contender; ``plain`` holds at least the runs they are compared with."""
    answers = [run.answer for run in runs]
    seconds = sum(a.total_seconds for a in answers)
    tokens = sum(a.num_tokens for a in answers)
    peaks = [a.peak_memory for a in answers if a.peak_memory is not None]
    return Figures(
        runs=len(runs),
        tokens=tokens,
        seconds_per_token=spread(a.seconds_per_token for a in answers),
        decode_tokens_per_second=spread(_inverse(a.seconds_per_token) for a in answers),
        tokens_per_second=spread(_inverse(a.seconds_per_token_of_all) for a in answers),
        total_tokens_per_second=tokens / seconds if seconds else None,
        first_token_seconds=spread(a.first_token_seconds for a in answers),
        peak_memory_bytes=max(peaks, default=None),
        speed_up=ratios(plain, runs, lambda a: a.seconds_per_token),
        whole_answer_speed_up=ratios(plain, runs, lambda a: a.seconds_per_token_of_all),
        acceptance=acceptance(answers),
        cost_ratio=_cost_ratio(runs, plain),
        time_split=_time_split(answers),
        outside_share=spread(_outside_share(a) for a in answers),
        identical_share=_identical_share(runs, plain),
    )


def by_contender(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of each contender."""
    return grouped(runs, lambda run: run.contender)


def grouped(runs: Iterable[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    """The runs by what ``key`` says of them, in the order in which that first occurs."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def ratios(above: Iterable[Run], below: Iterable[Run], figure: Figure) -> Spread | None:
    """figure of ``above`` / figure of ``below``, for each prompt and repeat that both have."""
    numerators = {run.cell: figure(run.answer) for run in above}
    found = ((numerators.get(run.cell), figure(run.answer)) for run in below)
    return spread(a / b if a is not None and b else None for a, b in found)


def acceptance(answers: Sequence[Answered]) -> Acceptance | None:
    """Of all drafts of ``answers``; None if nothing was drafted."""
    drafted = sum(a.drafted or 0 for a in answers)
    if not drafted:
        return None
    accepted = sum(a.accepted or 0 for a in answers)
    rounds = [r for a in answers for r in a.rounds]
    longest = max((r.num_drafted for r in rounds), default=0)
    emitted = sum(len(r.tokens) for r in rounds)
    return Acceptance(
        drafted=drafted,
        accepted=accepted,
        rate=accepted / drafted,
        mean_accepted_length=emitted / len(rounds) if rounds else None,
        per_position=tuple(_accepted_share(rounds, j) or 0.0 for j in range(1, longest + 1)),
        conditional=tuple(_accepted_share([r for r in rounds if _judged(r, j)], j) for j in range(1, longest + 1)),
    )


def _accepted_share(rounds: Sequence[Round], position: int) -> float | None:
    drafted = [r for r in rounds if r.num_drafted >= position]
    return sum(r.num_accepted >= position for r in drafted) / len(drafted) if drafted else None


def _judged(r: Round, position: int) -> bool:
    """Whether all tokens before ``position`` were accepted, and no stop rule ended the answer before it."""
    ended_before = len(r.tokens) == r.num_accepted
    return r.num_accepted >= position - (0 if ended_before else 1)


def _inverse(value: float | None) -> float | None:
    return 1 / value if value else None


def _cost_ratio(runs: Sequence[Run], plain: Sequence[Run]) -> Spread | None:
    steps = {run.cell: run.answer.seconds_per_token for run in plain}
    found = ((draft_step(run.answer), steps.get(run.cell)) for run in runs)
    return spread(step / plain_step if step is not None and plain_step else None for step, plain_step in found)


def draft_step(answer: Answered) -> float | None:
    """Seconds of a drafted token. The first draft is left out, since a draft model reads the prompt for it."""
    rounds = answer.rounds[2:]
    drafted = sum(r.num_drafted for r in rounds)
    return sum(r.draft_seconds for r in rounds) / drafted if drafted else None


def _time_split(answers: Sequence[Answered]) -> TimeSplit | None:
    told = [a for a in answers if len(a.rounds) > 1]
    tokens = sum(a.num_tokens - len(a.rounds[0].tokens) for a in told)
    if not tokens:
        return None
    later = [r for a in told for r in a.rounds[1:]]
    draft = sum(r.draft_seconds for r in later)
    verify = sum(r.verify_seconds for r in later)
    rest = sum(a.decode_seconds for a in told) - draft - verify
    return TimeSplit(draft / tokens, verify / tokens, max(rest, 0.0) / tokens)


def _outside_share(answer: Answered) -> float | None:
    if answer.pass_seconds is None or answer.seconds_per_token is None:
        return None
    return max(0.0, 1 - answer.pass_seconds / answer.decode_seconds)


def _identical_share(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    references = {run.cell: run.answer for run in plain}
    same: dict[str, bool] = {}
    for run in runs:
        reference = references.get(run.cell)
        if reference is not None:
            same[run.prompt] = same.get(run.prompt, True) and same_answer(run.answer, reference)
    return sum(same.values()) / len(same) if same else None


def same_answer(a: Answered, b: Answered) -> bool:
    """Whether two answers are the same tokens, or, where an engine tells text only, the same text."""
    if a.tokens is not None and b.tokens is not None:
        return split_at(a.tokens, b.tokens) is None
    return a.text.strip() == b.text.strip()


@dataclass(frozen=True)
class Comparison:
    """How many times as long a peer takes; above 1 it is the slower one."""

    time_per_token: Spread | None
    whole_answer: Spread | None
    """Time per token of whole answers."""
    first_token: Spread | None


def against(peer: Sequence[Run], own: Sequence[Run]) -> Comparison:
    """A peer against one of Slipstream's settings."""
    return Comparison(
        time_per_token=ratios(peer, own, lambda a: a.seconds_per_token),
        whole_answer=ratios(peer, own, lambda a: a.seconds_per_token_of_all),
        first_token=ratios(peer, own, lambda a: a.first_token_seconds),
    )


@dataclass(frozen=True)
class Summary:
    """All figures of a measurement; contenders by name, in their order."""

    overall: dict[str, Figures]
    categories: dict[str, dict[str, Figures]]
    prompts: dict[str, dict[str, Figures]]
    peers: dict[str, dict[str, Comparison]]
    """By peer, then by the setting of Slipstream that it is compared with."""
    best: str | None
    """Slipstream's setting with the least time per token; plain if nothing beats it, None if nothing was measured."""
    best_peer: str | None
    """The peer with the least time per token of whole answers, against plain."""


def summarise(runs: Sequence[Run], own: Sequence[str], peers: Sequence[str]) -> Summary:
    """Figures of ``runs``.

    Args:
        runs: in any order.
        own: names of Slipstream's contenders, plain first.
        peers: names of the others.
    """
    names = [*own, *peers]
    overall = _figures_of(runs, names)
    of = by_contender(runs)
    return Summary(
        overall=overall,
        categories={c: _figures_of(some, names) for c, some in grouped(runs, lambda r: r.category).items()},
        prompts={p: _figures_of(some, names) for p, some in grouped(runs, lambda r: r.prompt).items()},
        peers={p: {o: against(of[p], of[o]) for o in own if o in of} for p in peers if p in of},
        best=_best(overall, own, lambda f: f.speed_up),
        best_peer=_best(overall, peers, lambda f: f.whole_answer_speed_up),
    )


def _figures_of(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Figures]:
    of = by_contender(runs)
    return {name: figures(of[name], of.get(PLAIN, [])) for name in names if name in of}


def _best(
    overall: Mapping[str, Figures], names: Iterable[str], speed_up: Callable[[Figures], Spread | None]
) -> str | None:
    found = {name: s.median for name in names if name in overall and (s := speed_up(overall[name])) is not None}
    return max(found, key=lambda name: found[name], default=None)
