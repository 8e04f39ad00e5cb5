"""Gathers what a plan is made of: answers, acceptance, costs, a short real run. Each step is kept until it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from statistics import mean, median
from typing import Any

from slipstream.drafters import CascadeDrafter, Drafter, EarlyExitDrafter, NoDrafter, SuffixDrafter
from slipstream.errors import SlipstreamError
from slipstream.fields import from_json, to_json
from slipstream.measure.acceptance import Trail
from slipstream.measure.bench import Own
from slipstream.measure.curves import Curve, Kept, grid, keep, measure_curve, steps
from slipstream.measure.ledger import Ledger
from slipstream.measure.prediction import Case, CostsAt, RoundCosts, between, mixed
from slipstream.measure.prompts import BenchPrompt
from slipstream.measure.replay import Start
from slipstream.measure.rounds import ROWS, Timed, Timing, time_rounds
from slipstream.measure.rounds import TURNS as ROUND_TURNS
from slipstream.measure.texts import (
    Text,
    answered,
    check_texts,
    draft_logits,
    given_answers,
    groups,
    has_model,
    in_order,
    members_of,
    reads_prompt,
    replayed_trail,
    starts_of,
    target_logits,
    trail_of,
)
from slipstream.models.base import Model
from slipstream.speculative import SpeculativeDecoding
from slipstream.types import SamplingParams

#: Name of the rounds without a draft.
PLAIN = "plain"
#: The same with forced drafts that have distributions, if a model's drafts are sampled.
DRAWN = "plain, drawn"


@dataclass(frozen=True)
class Subject:
    """What a plan is about."""

    target: Model
    drafters: Mapping[str, Drafter]
    """By the name that ``--draft`` takes."""
    prompts: Sequence[BenchPrompt]
    """Encoded."""
    params: SamplingParams
    """How answers are sampled; the greedy ones at temperature 0."""
    samplings: Sequence[SamplingParams] = ()
    """Others, for acceptance only."""
    rule: str = "block"

    @property
    def bases(self) -> dict[str, Drafter]:
        """Every drafter that is no cascade, members of cascades included, by name."""
        return {one.name: one for drafter in self.drafters.values() for one in members_of(drafter)}

    @property
    def all_samplings(self) -> list[SamplingParams]:
        """The one in question first."""
        return [self.params, *(one for one in self.samplings if one != self.params)]


@dataclass
class Gathered:
    """What is known so far."""

    texts: list[Text] = field(default_factory=list)
    trails: dict[tuple[str, int, str], Trail] = field(default_factory=dict)
    """By base drafter, number of the sampling, text."""
    rounds: dict[str, list[tuple[int, RoundCosts]]] = field(default_factory=dict)
    """By base drafter, with the context."""
    curves: dict[str, Curve] = field(default_factory=dict)
    """By base drafter; ``PLAIN`` is the target."""
    failed: dict[str, str] = field(default_factory=dict)
    """Base drafters that dropped out, and why."""


# --- texts and acceptance ---------------------------------------------------------------------------------------------


def gather_texts(subject: Subject, ledger: Ledger, into: Gathered) -> Iterator[str]:
    """Answers: the user's, and the target's own to those prompts that have none."""
    tokenizer = subject.target.tokenizer
    found = given_answers(subject.prompts, tokenizer, subject.params.max_new_tokens)
    for number, some in enumerate(groups(subject.prompts)):
        yield f"answering {len(some)} prompts plainly"
        name = f"answers {number}"
        if name not in ledger:
            ledger.put(name, [to_json(text) for text in answered(subject.target, some, subject.params)])
        found += [from_json(Text, entry, name) for entry in ledger[name]]
    into.texts = check_texts(list(in_order(found, subject.prompts)))


def text_steps(subject: Subject) -> int:
    """How often ``gather_texts`` tells something."""
    return len(groups(subject.prompts))


def gather_trails(subject: Subject, ledger: Ledger, into: Gathered) -> Iterator[str]:
    """One pass of each model over each text; acceptance at every position, for every sampling."""
    bases = {name: one for name, one in subject.bases.items() if not isinstance(one, SuffixDrafter)}
    for text in into.texts:
        yield f"reading {text.id} with {1 + len(bases)} models"
        name = f"trails {text.id}"
        if name not in ledger:
            ledger.put(name, {"trails": to_json(_trails(subject, bases, text, into)), "failed": into.failed})
        into.failed |= ledger[name]["failed"]
        for key, entry in ledger[name]["trails"].items():
            base, _, number = key.rpartition(" ")
            into.trails[base, int(number), text.id] = from_json(Trail, entry, name)


def _trails(subject: Subject, bases: Mapping[str, Drafter], text: Text, into: Gathered) -> dict[str, Trail]:
    found: dict[str, Trail] = {}
    if not bases:
        return found
    rows = target_logits(subject.target, text)
    for name, drafter in bases.items():
        try:
            own = draft_logits(drafter, text)
            for number, params in enumerate(subject.all_samplings):
                if own is None:
                    found[f"{name} {number}"] = replayed_trail(rows, drafter, text, params)
                else:
                    found[f"{name} {number}"] = trail_of(rows, own, text, params)
        except SlipstreamError as error:
            into.failed[name] = str(error)
    return found


def starts(subject: Subject, found: Gathered, name: str, text: Text, number: int = 0) -> Callable[[int], Start]:
    """The rounds of a draft along a text, under sampling ``number``."""
    drafter, params = subject.drafters[name], subject.all_samplings[number]
    trails = [found.trails.get((one.name, number, text.id)) for one in members_of(drafter)]
    if number:
        text = replace(text, own=False)  # it was sampled otherwise
    rule: Any = subject.rule
    return starts_of(drafter, trails, text, params, rule)


def cases(subject: Subject, found: Gathered, name: str) -> list[Case]:
    """The answers as cases of a draft."""
    reads = reads_prompt(subject.drafters[name])
    return [
        Case(t.id, t.category, len(t.prompt), len(t.answer), t.limited, starts(subject, found, name, t), reads)
        for t in found.texts
    ]


# --- costs ------------------------------------------------------------------------------------------------------------


def contexts(texts: Sequence[Text], limit: int | None) -> list[int]:
    """One or two contexts between which the middles of the answers lie."""
    middles = sorted(len(t.prompt) + len(t.answer) // 2 for t in texts)
    low, high = middles[len(middles) // 8], middles[-1 - len(middles) // 8]
    most = None if limit is None else limit - max(ROWS) - 1
    found = [low, high] if high > 1.5 * low else [int(median(middles))]
    return [max(2, n if most is None else min(n, most)) for n in found]


def gather_rounds(
    subject: Subject, ledger: Ledger, into: Gathered, turns: int = ROUND_TURNS, *, again: int = 0
) -> Iterator[str]:
    """What rounds take: of every base drafter, and without one. All are in each other's turns.

    A machine that is shared has slow and fast minutes, and one row slows down more than five. ``again`` is how often
    they were timed before: costs are then the mean of all times.
    """
    bases: dict[str, Drafter] = {PLAIN: NoDrafter(), **subject.bases}
    if subject.params.temperature > 0 and any(map(has_model, bases.values())):
        bases[DRAWN] = NoDrafter()
    bases = {name: one for name, one in bases.items() if name not in into.failed}
    for context in contexts(into.texts, _limit(subject)):
        name = f"rounds {context}" + (f", again {again}" if again else "")
        if name in ledger:
            yield f"rounds behind {context} tokens: known"
        else:
            timed = {base: Timed() for base in bases}
            yield from _time_together(subject, bases, context, timed, into, turns)
            done = {b: to_json(t.costs()) for b, t in timed.items()}
            ledger.put(name, {b: costs for b, costs in done.items() if b not in into.failed})
        for base, entry in ledger[name].items():
            _keep_costs(into.rounds.setdefault(base, []), context, from_json(RoundCosts, entry, name), again)


def round_steps(subject: Subject) -> int:
    """How often ``gather_rounds`` tells something, at most: at two contexts."""
    return 2 * (ROUND_TURNS + 1) * (1 + len(subject.bases))


def _keep_costs(known: list[tuple[int, RoundCosts]], context: int, costs: RoundCosts, again: int) -> None:
    for i, (place, earlier) in enumerate(known):
        if place == context:
            known[i] = (context, mixed(earlier, costs, 1 / (again + 1)))
            return
    known.append((context, costs))


def _time_together(
    subject: Subject, bases: Mapping[str, Drafter], context: int, timed: dict[str, Timed], into: Gathered, turns: int
) -> Iterator[str]:
    text = _long_text(into.texts, context + max(ROWS))
    running = {
        base: time_rounds(_timing(subject, one, text, context, turns, drawn=base == DRAWN), timed[base])
        for base, one in bases.items()
    }
    while running:
        for base in list(running):
            try:
                yield next(running[base])
            except StopIteration:
                del running[base]
            except SlipstreamError as error:
                into.failed[base] = str(error)
                del running[base]


def _timing(
    subject: Subject, drafter: Drafter, text: tuple[int, ...], context: int, turns: int, *, drawn: bool
) -> Timing:
    return Timing(subject.target, drafter, text, context, subject.params, subject.rule, turns, drawn)


def _limit(subject: Subject) -> int | None:
    models = [subject.target, *(one.model for one in subject.bases.values() if hasattr(one, "model"))]
    return min((m.max_positions for m in models if m.max_positions is not None), default=None)


def _long_text(texts: Sequence[Text], length: int) -> tuple[int, ...]:
    """Texts one behind the other, up to ``length``, the middle one first."""
    ids: list[int] = []
    order = sorted(texts, key=lambda t: abs(len(t.tokens) - length))
    while len(ids) < length:
        for text in order:
            ids += text.tokens
    return tuple(ids[:length])


def costs_at(found: Gathered, drafter: Drafter) -> CostsAt:
    """The costs of a draft by context; of a cascade those of its members together."""
    places = [(context, _together(found, drafter, i, costs)) for i, (context, costs) in enumerate(found.rounds[PLAIN])]
    return between(places[0], places[-1])


def _together(found: Gathered, drafter: Drafter, place: int, plain: RoundCosts) -> RoundCosts:
    parts = [found.rounds[one.name][place][1].paced(plain.plain) for one in members_of(drafter)]
    models = [p for p, one in zip(parts, members_of(drafter), strict=True) if not isinstance(one, SuffixDrafter)]
    copying = sum(p.call + p.step for p in parts if p not in models)
    own = next((p.verify for p in models if len(p.verify) > 1), {})
    drawn = found.rounds[DRAWN][place][1].paced(plain.plain) if models and DRAWN in found.rounds else plain
    # A copier is asked again behind each token of a model.
    return RoundCosts(
        verify={**(own or drawn.verify), 1: plain.plain},
        call=sum(p.call for p in models) + copying,
        step=(mean(p.step for p in models) + copying) if models else 0.0,
        read=sum(p.read for p in models),
        prompt=plain.prompt,
        copied=plain.verify if models else {},
    )


def gather_curves(subject: Subject, ledger: Ledger, into: Gathered, batches: Sequence[int]) -> Iterator[str]:
    """Passes by rows and batch of the target and the draft models; also kept where the controller looks."""
    models = {PLAIN: subject.target} | {n: one.model for n, one in subject.bases.items() if hasattr(one, "model")}
    context = contexts(into.texts, _limit(subject))[0]
    for base, model in models.items():
        name = f"curve {base} {batches}"
        if name not in ledger:
            cells = grid(batches=batches) if base == PLAIN else grid((1, 2, 3, 4, 5, 9), batches)
            text = _long_text(into.texts, context)
            timing = yield from measure_curve(model, text, context, cells, kept=Kept(ledger, name))
            curve = timing.curve(model, context, now(), f"measured here: passes behind {context} tokens")
            keep(curve)
            ledger.put(name, to_json(curve))
        else:
            yield f"passes of {base}: known"
        into.curves[base] = from_json(Curve, ledger[name], name)


def curve_steps(subject: Subject) -> int:
    """How often ``gather_curves`` tells something, at most."""
    return steps() * (1 + sum(hasattr(one, "model") for one in subject.bases.values()))


def batched(found: Gathered, drafter: Drafter, at: CostsAt, batch: int) -> CostsAt:
    """The same costs where ``batch`` requests share the passes."""
    if batch == 1:
        return at
    target = found.curves[PLAIN]
    models = [found.curves[one.name] for one in members_of(drafter) if one.name in found.curves]
    early = any(isinstance(one, EarlyExitDrafter) for one in members_of(drafter))  # drafts are passes of the target
    models += [target] if early else []
    step = max((c.seconds(1, batch) / c.seconds(1) for c in models), default=float(batch))

    def rows(n: int) -> float:
        """Passes grow as measured; what a round does beside them grows with the batch."""
        beside = max(at(target.context).rows(n, 0 if early else n - 1) - target.seconds(n), 0.0)
        return (target.seconds(n, batch) + beside * batch) / (target.seconds(n) + beside)

    return lambda context: at(context).scaled(batch, rows, step)


# --- a short real run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """What one answer took, both ways, after the first token; seconds."""

    prompt: str
    category: str
    plain: float
    fast: float
    tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class RealRun:
    """What is run for real."""

    draft: str
    ks: tuple[int, ...]
    prompts: Sequence[BenchPrompt]
    repeats: int = 1

    @property
    def steps(self) -> int:
        """How often ``run_for_real`` tells something."""
        return (1 + len(self.ks)) * (1 + self.repeats * len(self.prompts))


def run_for_real(subject: Subject, real: RealRun, into: dict[int, list[Point]]) -> Iterator[str]:
    """Plain and speculative in turn on the same prompts; tells before each answer. A warm-up comes first."""
    drafter, ks, prompts = _copied(subject.drafters[real.draft]), real.ks, real.prompts
    plain = Own(SpeculativeDecoding(subject.target), PLAIN)
    fast = {k: Own(SpeculativeDecoding(subject.target, drafter, k, rule=subject.rule), f"k={k}") for k in ks}
    warm = replace(subject.params, max_new_tokens=min(8, subject.params.max_new_tokens))
    for one in (plain, *fast.values()):
        yield f"warm-up: {one.name}"
        one.answer(prompts[0], warm)
    for repeat in range(real.repeats):
        for number, prompt in enumerate(prompts):
            order: list[tuple[int, Own]] = [(0, plain), *fast.items()]
            shift = (number + repeat) % len(order)
            answers = {}
            for k, one in order[shift:] + order[:shift]:
                yield f"{one.name}: {prompt.id}"
                seed = subject.params.seed
                params = replace(subject.params, seed=None if seed is None else seed + repeat)
                answers[k] = one.answer(prompt, params)
            for k in ks:
                into.setdefault(k, []).append(_point(prompt, answers[0], answers[k]))


def collapsed(points: Sequence[Point]) -> list[Point]:
    """One point a prompt: of its repeats the medians, so that a bad moment of the machine does not count."""
    by_prompt: dict[str, list[Point]] = {}
    for point in points:
        by_prompt.setdefault(point.prompt, []).append(point)
    return [
        replace(some[0], plain=median(p.plain for p in some), fast=median(p.fast for p in some))
        for some in by_prompt.values()
    ]


def _copied(drafter: Drafter) -> Drafter:
    """The same with places of its own for clocks around its models."""
    if isinstance(drafter, CascadeDrafter):
        return CascadeDrafter([copy(one) for one in drafter.drafters], min_confidence=drafter.min_confidence)
    return copy(drafter)


def _point(prompt: BenchPrompt, plain: Any, fast: Any) -> Point:
    # Sampled answers differ in length, so plain's time is for as many tokens as the other one has.
    per_token = plain.seconds_per_token or 0.0
    later = max(fast.num_tokens - 1, 0)
    same = plain.num_tokens == fast.num_tokens
    seconds = plain.decode_seconds if same else per_token * later
    return Point(
        prompt.id, prompt.category, seconds, fast.decode_seconds, fast.num_tokens, fast.drafted or 0, fast.accepted or 0
    )


def now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def job_of(subject: Subject, models: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """What the results of ``gather_...`` depend on, for a ledger."""
    params = [{k: v for k, v in asdict(p).items() if k != "logits_processors"} for p in subject.all_samplings]
    prompts = [[p.id, p.category, list(p.ids), p.answer] for p in subject.prompts]
    drafts = {name: [one.name for one in members_of(d)] for name, d in subject.drafters.items()}
    return {"models": models, "drafts": drafts, "params": params, "prompts": prompts, "rule": subject.rule, **about}


def is_cascade(drafter: Drafter) -> bool:
    """Whether several drafters share the drafts."""
    return isinstance(drafter, CascadeDrafter)
