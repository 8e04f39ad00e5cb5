"""What rounds take: the decoder's own rounds, run again and again at one place of a text, and taken back each time.

Passes alone are not the whole of a round: sampling, the accept rule and the making of text belong to it, and are more
than a tenth of it for small models. So this times what an answer really does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

from slipstream.answers import Setting
from slipstream.controller import Fixed
from slipstream.decode import Decoder, Progress
from slipstream.drafters import Drafter, EarlyExitDrafter, NoDrafter, SuffixDrafter
from slipstream.estimates import fitted_line
from slipstream.measure.costs import synchronize
from slipstream.measure.prediction import RoundCosts
from slipstream.measure.texts import has_model, reads_prompt
from slipstream.models.base import Model, feed
from slipstream.sampling import Sampler
from slipstream.types import Draft, Round, SamplingParams

#: Rows of verifications that are timed, 1 being a plain step; and draft lengths.
ROWS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17)
LENGTHS = (1, 2, 4, 8)
#: The same where each length has verifications of its own.
OWN_LENGTHS = (1, 2, 3, 4, 6, 8, 16)
TURNS = 7
_PLENTY = 10**6


class Forced:
    """Proposes the tokens of a text, drawn from a distribution over the whole vocabulary if ``drawn``."""

    name = "forced"

    def __init__(self, text: Sequence[int], vocab: int, *, drawn: bool) -> None:
        self._text = tuple(text)
        self._rows = torch.full((max(ROWS), vocab), 1.0 / vocab) if drawn else None

    def start(self, sampler: Sampler) -> Forced:
        """Its own session."""
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """The next ``k``."""
        at = len(tokens)
        return Draft(self._text[at : at + k], None if self._rows is None else self._rows[:k])


@dataclass
class Place:
    """A request in the middle of its answer, to which one can come back."""

    decoder: Decoder
    progress: Progress
    tokens: tuple[int, ...]

    @classmethod
    def make(cls, target: Model, drafter: Drafter, tokens: Sequence[int], params: SamplingParams, rule: str) -> Place:
        """Read all of ``tokens`` but the last."""
        params = replace(params, ignore_eos=True, max_new_tokens=_PLENTY, seed=0)
        setting = Setting(target, drafter, Fixed(1), target.tokenizer, rule, coupled=False)
        decoder, answer = setting.start(tuple(tokens), params)

        def ended(token: int) -> bool:
            answer.push(token)
            return False

        progress = decoder.begin(tokens, ended, target.new_cache())
        feed(target, tokens[:-1], progress.cache, 0)
        progress.reading = False
        decoder.share(progress)
        return cls(decoder, progress, tuple(tokens))

    def round(self, k: int) -> Round:
        """One round with ``k`` draft tokens, taken back afterwards."""
        decoder = replace(self.decoder, controller=Fixed(k))
        try:
            return decoder.round(self.progress)
        finally:
            self.progress.tokens = list(self.tokens)
            self.progress.done = False
            self.progress.cache.truncate(len(self.tokens) - 1)


@dataclass
class Timed:
    """Seconds of rounds, a list of turns each."""

    verify: dict[int, list[float]] = field(default_factory=dict)
    """Without drafting, by rows."""
    draft: dict[int, list[float]] = field(default_factory=dict)
    """By number of draft tokens."""
    own: dict[int, list[float]] = field(default_factory=dict)
    """In the drafter's turns: plain steps, and verifications behind drafts that change what these take, by rows."""
    read: list[float] = field(default_factory=list)
    """Of the draft model: the prompt, for each token."""
    prompt: list[float] = field(default_factory=list)
    """Of the target."""

    def costs(self) -> RoundCosts:
        """Medians; ``verify`` is ``own`` of a drafter."""
        verify = {n: median(some) for n, some in (self.own or self.verify).items() if some}
        points = [(k, seconds) for k, some in self.draft.items() for seconds in some]
        call, step = fitted_line(points) or (0.0, 0.0)
        read, prompt = (median(some) if some else 0.0 for some in (self.read, self.prompt))
        return RoundCosts(verify, call, step, read, prompt)


@dataclass(frozen=True)
class Timing:
    """What is timed."""

    target: Model
    drafter: Drafter
    text: tuple[int, ...]
    """Longer than ``context`` by the longest draft."""
    context: int
    params: SamplingParams
    rule: str
    turns: int = TURNS
    drawn: bool = False
    """Whether forced drafts have distributions, as those of a model that samples."""

    @property
    def verifies(self) -> bool:
        """Whether it is there for verifications, which do not depend on the drafter."""
        return isinstance(self.drafter, NoDrafter)


def time_rounds(timing: Timing, into: Timed) -> Iterator[str]:
    """Time everything turn by turn, each turn beginning at another number of rows; tells before each turn.

    The first turn is not counted: it pays for what happens only once.
    """
    start = timing.text[: timing.context]
    forced = Forced(timing.text, timing.target.vocab_size, drawn=timing.drawn)
    make: Any = lambda drafter: Place.make(timing.target, drafter, start, timing.params, timing.rule)  # noqa: E731
    verifying, drafting = make(forced), make(timing.drafter)
    longest = len(timing.text) - timing.context
    rows = [n for n in ROWS if n - 1 <= longest] if timing.verifies else []
    for turn in range(-1, timing.turns):
        yield f"{'plain' if timing.verifies else timing.drafter.name}: rounds behind {timing.context} tokens"
        keep = turn >= 0
        for i in range(len(rows)):
            n = rows[(i + turn) % len(rows)]
            done = verifying.round(n - 1)
            into.verify.setdefault(n, []).extend([done.total_seconds - done.draft_seconds] * keep)
        if not timing.verifies:
            _time_drafts(drafting, timing, into, keep=keep)
        if turn in (-1, 0, timing.turns - 1):
            _time_reading(timing, into, keep=keep)


def _time_drafts(place: Place, timing: Timing, into: Timed, *, keep: bool) -> None:
    own = isinstance(timing.drafter, EarlyExitDrafter)
    for k in OWN_LENGTHS if own else LENGTHS:
        plain = place.round(0)  # beside each draft, so that a busy moment makes both slow
        into.own.setdefault(1, []).extend([plain.total_seconds] * keep)
        done = place.round(k)
        if not keep or not (done.num_drafted or isinstance(timing.drafter, SuffixDrafter)):
            continue
        into.draft.setdefault(done.num_drafted if has_model(timing.drafter) else 1, []).append(done.draft_seconds)
        if own:
            into.own.setdefault(done.num_drafted + 1, []).append(done.total_seconds - done.draft_seconds)


def _time_reading(timing: Timing, into: Timed, *, keep: bool) -> None:
    """How long target and draft model read a prompt as long as the context."""
    tokens = timing.text[: timing.context]
    if timing.verifies:
        start = perf_counter()
        feed(timing.target, tokens, timing.target.new_cache(), 1)
        synchronize(timing.target.device)
        into.prompt.extend([(perf_counter() - start) / len(tokens)] * keep)
    if not reads_prompt(timing.drafter):
        return
    session = timing.drafter.start(Sampler(replace(timing.params, seed=0), len(tokens), (), 0))
    times = []
    for _ in range(2):  # the second draft has everything read
        start = perf_counter()
        session.draft(tokens, 1)
        times.append(perf_counter() - start)
    into.read.extend([max(0.0, times[0] - times[1]) / len(tokens)] * keep)
