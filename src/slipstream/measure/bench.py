"""Several ways of answering the same prompts, in turn, and what each answer took.

Machines drift: they warm up, others use them. So all ways answer a prompt directly one after the other, in an order
that moves on from prompt to prompt and from repeat to repeat, and what is compared later is always two answers to the
same prompt in the same repeat.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from slipstream.drafters import CascadeDrafter, Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.errors import SlipstreamError
from slipstream.measure.bandwidth import Bandwidth, read_bandwidth, weight_bytes
from slipstream.measure.costs import (
    TURNS,
    PassCost,
    Probe,
    TimedModel,
    make_probes,
    pass_costs,
    run_probes,
    timed,
    usual_context,
)
from slipstream.measure.memory import peak_bytes, reset_peak
from slipstream.measure.prompts import BenchPrompt
from slipstream.measure.runs import PLAIN, Answered, Run
from slipstream.measure.splits import Split, find_splits, with_gap
from slipstream.measure.spread import Spread, spread
from slipstream.models.base import Model
from slipstream.speculative import SpeculativeDecoding
from slipstream.types import SamplingParams

#: What ``Measured`` calls the target; drafts have names of their own.
TARGET = "target"
_WARM_UP_TOKENS = 8


class Contender(Protocol):
    """A way of answering."""

    name: str
    kind: str
    """"slipstream", or what else it is."""
    draft: str | None
    k: int | str | None
    """A number of draft tokens, or what chooses it."""

    def answer(self, prompt: BenchPrompt, params: SamplingParams) -> Answered:
        """Answer once.

        Raises:
            SlipstreamError: it could not.
        """
        ...


class Own:
    """Slipstream with one draft and one k, or plain.

    Args:
        spec: target, drafter and k. Its models are from here on timed ones.
        name: how reports call it.
        spare_bytes: memory of weights that are loaded for other contenders only.
    """

    kind = "slipstream"

    def __init__(self, spec: SpeculativeDecoding, name: str, *, draft: str | None = None, spare_bytes: int = 0) -> None:
        self.name = name
        self.draft = draft
        self.k: int | str | None = _k_of(spec) if draft is not None else 0
        self._spec = spec
        self._spare = spare_bytes
        self._clocks = _time_passes(spec)

    def answer(self, prompt: BenchPrompt, params: SamplingParams) -> Answered:
        """Stream one answer to nobody."""
        device = self._spec.target.device
        reset_peak(device)
        stream = self._spec.stream(list(prompt.ids), params)
        first = in_passes = 0.0
        start = perf_counter()
        for number, _ in enumerate(stream):
            if number == 0:
                first = perf_counter() - start
                in_passes = self._pass_seconds()
        total = perf_counter() - start
        peak = peak_bytes(device)
        output = stream.output
        return Answered(
            text=output.text,
            tokens=output.tokens,
            num_tokens=len(output.tokens),
            first_token_seconds=first,
            total_seconds=total,
            peak_memory=peak if peak is None else max(0, peak - self._spare),
            drafted=output.stats.drafted,
            accepted=output.stats.accepted,
            rounds=stream.rounds,
            pass_seconds=self._pass_seconds() - in_passes if self._clocks else None,
        )

    def _pass_seconds(self) -> float:
        return sum(clock.seconds for clock in self._clocks)


def _k_of(spec: SpeculativeDecoding) -> int | str:
    return int(spec.policy.name) if spec.policy.name.isdecimal() else spec.policy.name


def _time_passes(spec: SpeculativeDecoding) -> list[TimedModel]:
    """Put clocks around the models; none if a drafter may hold models where they are not seen."""
    drafters = model_drafters(spec.drafter)
    if drafters is None:
        return []
    clock, spec.target = timed(spec.target)
    clocks = [clock]
    for drafter in drafters:
        clock, drafter.model = timed(drafter.model)
        clocks.append(clock)
    return clocks


def model_drafters(drafter: Drafter) -> list[ModelDrafter] | None:
    """The parts of ``drafter`` that are models; None if it may hold others where they are not seen."""
    if isinstance(drafter, CascadeDrafter):
        parts = [model_drafters(one) for one in drafter.drafters]
        return None if None in parts else [found for part in parts if part for found in part]
    if isinstance(drafter, ModelDrafter):
        return [drafter]
    return [] if isinstance(drafter, SuffixDrafter | NoDrafter) else None


def interleaved(
    contenders: Sequence[Contender], prompts: Sequence[BenchPrompt], repeats: int
) -> Iterator[tuple[Contender, BenchPrompt, int]]:
    """Who answers what when: each prompt by all, beginning with another one at each prompt and each repeat."""
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            begin = (number + repeat) % len(contenders)
            for contender in (*contenders[begin:], *contenders[:begin]):
                yield contender, prompt, repeat


@dataclass(frozen=True)
class Bench:
    """What is to be measured.

    ``contenders`` begins with plain decoding by ``target``, which all others are compared with.
    """

    target: Model
    drafts: dict[str, Model]
    contenders: tuple[Contender, ...]
    prompts: tuple[BenchPrompt, ...]
    params: SamplingParams
    repeats: int

    @property
    def models(self) -> dict[str, Model]:
        """Slipstream's own ones, by the names that ``Measured`` uses."""
        return {TARGET: self.target, **self.drafts}

    @property
    def steps(self) -> int:
        """How often ``measure`` says what comes next."""
        answers = len(self.contenders) * (1 + len(self.prompts) * self.repeats)
        return 1 + answers + TURNS + 1 + 1


@dataclass
class Measured:
    """What has been measured so far; its one owner is ``measure``."""

    weight_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that a step streams, by model: "target", or the draft's name."""
    bandwidth: list[float] = field(default_factory=list)
    """Bytes per second: beside the passes, and once more after all answers."""
    passes: dict[str, tuple[PassCost, ...]] = field(default_factory=dict)
    """By model."""
    pass_shares: dict[str, Spread | None] = field(default_factory=dict)
    """By model: memory's limit / time of a pass over one token, in the same turn."""
    runs: list[Run] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    """Contenders that dropped out, and why."""


def measure(bench: Bench, into: Measured) -> Iterator[str]:
    """Measure everything, telling before each of ``bench.steps`` steps what it is.

    Whenever the caller stops, ``into`` holds what was measured by then.

    Raises:
        SlipstreamError: plain decoding failed. Another contender that fails drops out.
    """
    yield "sizes of the models"
    into.weight_bytes.update({name: weight_bytes(model) for name, model in bench.models.items()})
    params = replace(bench.params, max_new_tokens=min(_WARM_UP_TOKENS, bench.params.max_new_tokens))
    for contender in bench.contenders:
        yield f"warm-up: {contender.name}"
        _answer(contender, bench.prompts[0], params, into)
    yield from _measure_passes(bench, into)
    for contender, prompt, repeat in interleaved(bench.contenders, bench.prompts, bench.repeats):
        yield f"{contender.name}: {prompt.id}"
        # Sampled answers to one prompt differ from repeat to repeat, and all ways get the same seeds.
        seed = None if bench.params.seed is None else bench.params.seed + repeat
        answer = _answer(contender, prompt, replace(bench.params, seed=seed), into)
        if answer is not None:
            into.runs.append(Run(contender.name, prompt.id, prompt.category, repeat, answer))
    yield "memory bandwidth"
    into.bandwidth.append(read_bandwidth(bench.target.device))
    yield "comparing answers"
    if bench.params.temperature == 0:
        _find_splits(bench, into)


def _find_splits(bench: Bench, into: Measured) -> None:
    own = {c.name for c in bench.contenders if c.kind == Own.kind}
    prompts = {p.id: p.ids for p in bench.prompts}
    known: dict[object, Split] = {}
    for split in find_splits([run for run in into.runs if run.contender in own]):
        place = (split.prompt, split.common, split.plain_token, split.other_token)
        if place not in known:
            known[place] = with_gap(split, bench.target, prompts[split.prompt])
        same = known[place]
        into.splits.append(replace(split, top2_gap=same.top2_gap, token_gap=same.token_gap))


def _answer(contender: Contender, prompt: BenchPrompt, params: SamplingParams, into: Measured) -> Answered | None:
    """One answer; None from a contender that has failed, now or before."""
    if contender.name in into.failures:
        return None
    gc.collect()  # so that nobody's garbage is collected in another's time
    try:
        return contender.answer(prompt, params)
    except SlipstreamError as error:
        if contender.name == PLAIN:
            raise
        into.failures[contender.name] = str(error)
        return None


def _measure_passes(bench: Bench, into: Measured) -> Iterator[str]:
    """Passes of target and drafts in the same turns, behind the same context, as a usual answer has it."""
    models = bench.models
    limit = min((m.max_positions for m in models.values() if m.max_positions is not None), default=None)
    context = usual_context([len(p.ids) for p in bench.prompts], bench.params.max_new_tokens, limit)
    tokens = bench.prompts[0].ids
    probes: dict[str, list[Probe]] = {name: make_probes(model, tokens, context) for name, model in models.items()}
    turns: list[list[float]] = []
    together = [probe for some in probes.values() for probe in some]
    runner = run_probes(together)
    memory = Bandwidth(bench.target.device)
    for _ in range(TURNS):
        yield "passes over 1 to 16 tokens"
        turns.append(next(runner))
        into.bandwidth.append(memory.once())
    at = 0
    for name, some in probes.items():
        own_turns = [turn[at : at + len(some)] for turn in turns]
        into.passes[name] = pass_costs(some, own_turns)
        if some:
            least = [into.weight_bytes[name] / bandwidth for bandwidth in into.bandwidth]
            into.pass_shares[name] = spread(a / turn[0] for a, turn in zip(least, own_turns, strict=True))
        at += len(some)
