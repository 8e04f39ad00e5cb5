"""Makes a ``Plan`` of what was gathered: predictions for every draft, k and batch, the decision, what supports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import mean
from typing import Any

from slipstream import plan as p
from slipstream.drafters import Drafter, EarlyExitDrafter
from slipstream.measure import expectation
from slipstream.measure.acceptance import RULES, Rule
from slipstream.measure.bootstrap import Interval, bootstrap_ratio
from slipstream.measure.footprint import as_text
from slipstream.measure.planning import (
    PLAIN,
    Gathered,
    Point,
    Subject,
    batched,
    cases,
    collapsed,
    costs_at,
    starts,
)
from slipstream.measure.prediction import (
    KS,
    WORTH,
    Case,
    CostsAt,
    Decision,
    Limits,
    Option,
    Prediction,
    decide,
    full_batch,
    predict,
    times,
    under_load,
)
from slipstream.measure.replay import Walk, walk
from slipstream.measure.texts import Text, has_model, members_of
from slipstream.types import SamplingParams

#: How near a prediction is to be.
WITHIN = 0.10
_POSITIONS = 8
SPEED = "predicted from acceptance (measured here, teacher-forced) and costs (measured here)"
_BATCH = "predicted from acceptance and costs (measured here, passes of the whole batch)"
_LOAD = "predicted from L = C1 / (1 - rate C2), with C1 and C2 predicted from acceptance and costs"


@dataclass(frozen=True)
class Wish:
    """What the plan is for."""

    limits: Limits
    batches: tuple[int, ...]
    prompts_from: str
    members: Mapping[str, tuple[str, ...]]
    target_weights: str
    weights: Mapping[str, str]
    """Of draft models, by path."""
    target: str
    threads: int | None
    notes: tuple[str, ...] = ()
    """What else is to be known."""
    needs: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the target needs together with a draft, by draft, where that can be told."""
    memory: int | None = None
    """Bytes that there are."""


# --- acceptance -------------------------------------------------------------------------------------------------------


def acceptances(subject: Subject, found: Gathered) -> list[p.Acceptance]:
    """Every draft under every rule and sampling."""
    listed = []
    for name, drafter in subject.drafters.items():
        if not _usable(found, drafter):
            continue
        # Whether a copy is right does not depend on the sampling, but for the answer, which is the same.
        for number, params in enumerate(subject.all_samplings if has_model(drafter) else [subject.params]):
            for rule in RULES if _by_model(drafter) and params.temperature > 0 else (subject.rule,):
                listed.append(_acceptance(subject, found, name, number, rule))
    return listed


def _acceptance(subject: Subject, found: Gathered, name: str, number: int, rule: Any) -> p.Acceptance:
    params = subject.all_samplings[number]
    how = _how(found.texts, number, params)
    by_category: dict[str, list[Text]] = {}
    for text in found.texts:
        by_category.setdefault(text.category, []).append(text)
    rates = {t.id: _first_tokens(subject, found, name, number, rule, t) for t in found.texts}
    own = replace(subject, rule=rule)
    walks = {t.id: _walked(own, found, name, number, t) for t in found.texts}
    found_at = [_position(list(walks.values()), j) for j in range(1, _POSITIONS + 1)]
    return p.Acceptance(
        draft=name,
        rule=str(rule),
        sampling=sampling(params),
        rate=estimate(_ratio(list(rates.values())), how),
        positions=tuple(estimate(one, how) for one in found_at if one is not None),
        categories={c: estimate(_ratio([rates[t.id] for t in some]), how) for c, some in by_category.items()},
    )


def _first_tokens(
    subject: Subject, found: Gathered, name: str, number: int, rule: Rule, text: Text
) -> tuple[float, int]:
    """Sum of the acceptance of a first draft token over the answer's positions (after the first), and their number."""
    drafter = subject.drafters[name]
    if _by_model(drafter) and (name, number, text.id) in found.trails:
        rates = found.trails[name, number, text.id].rates(rule)[1:]
        return sum(rates), len(rates)
    look = starts(replace(subject, rule=rule), found, name, text, number)
    rounds = [look(at) for at in range(1, len(text.answer))]
    drafted = [r.reach[0] for r in rounds if r.reach]
    return sum(drafted), len(drafted)


def _walked(subject: Subject, found: Gathered, name: str, number: int, text: Text) -> Walk:
    look = starts(subject, found, name, text, number)
    return walk(look, len(text.answer), _POSITIONS, limited=text.limited)


def _position(some: Sequence[Walk], j: int) -> Interval | None:
    """Acceptance at position ``j`` over all answers; None if no draft gets there."""
    reached = [w.reached[j - 1] if len(w.reached) >= j else 0.0 for w in some]
    stood = [w.stood[j - 1] if len(w.stood) >= j else 0.0 for w in some]
    return bootstrap_ratio(stood, reached, empty=0.0) if any(reached) else None


def _ratio(some: Sequence[tuple[float, int]]) -> Interval:
    return bootstrap_ratio([total for total, _ in some], [float(n) for _, n in some], empty=0.0)


def _how(texts: Sequence[Text], number: int, params: SamplingParams) -> str:
    own = sum(t.own for t in texts)
    whose = "the target's answers" if own == len(texts) else "the given answers" if not own else "given and own answers"
    other = f", sampled otherwise than at temperature {params.temperature:g}" if number else ""
    return f"measured here: teacher-forced on {len(texts)} of {whose}{other}"


# --- predictions ------------------------------------------------------------------------------------------------------


def options(subject: Subject, found: Gathered, wish: Wish) -> list[Option]:
    """Every draft with its predictions."""
    listed = []
    for name, drafter in subject.drafters.items():
        if not _usable(found, drafter):
            continue
        some, at = cases(subject, found, name), costs_at(found, drafter)
        by_batch = {b: {k: predict(some, k, batched(found, drafter, at, b)) for k in KS} for b in wish.batches}
        usual = mean(c.prompt + c.tokens / 2 for c in some)
        shared = {b: batched(found, drafter, at, b)(usual) for b in wish.batches}
        listed.append(Option(name, by_batch, at(usual), some, _lacks(name, wish), has_model(drafter), shared))
    return listed


def _usable(found: Gathered, drafter: Drafter) -> bool:
    return not any(one.name in found.failed for one in members_of(drafter))


def _by_model(drafter: Drafter) -> bool:
    return len(members_of(drafter)) == 1 and has_model(drafter)


def _lacks(name: str, wish: Wish) -> str | None:
    """Why a draft does not fit; None if it does, or if nobody knows."""
    needed = wish.needs.get(name)
    if needed is None or wish.memory is None or needed <= wish.memory:
        return None
    return f"{as_text(needed)} are needed with it, and there are {as_text(wish.memory)}"


def estimate(interval: Interval, how: str) -> p.Estimate:
    """An interval with where it comes from; one without width, as of a single prompt, tells nothing and is left out."""
    if interval.low == interval.high:
        return p.Estimate(interval.value, how)
    return p.Estimate(interval.value, how, interval.low, interval.high)


def sampling(params: SamplingParams) -> p.Sampling:
    """The part of the parameters that decides on acceptance."""
    return p.Sampling(params.temperature, params.top_k, params.top_p, params.min_p)


def _candidate(name: str, batch: int, one: Prediction) -> p.Candidate:
    how = SPEED if batch == 1 else _BATCH
    replayed = "predicted from the draft's replay along the answers"
    return p.Candidate(
        draft=name,
        k=one.k,
        batch=batch,
        speed_up=estimate(one.speed_up, how),
        whole_answer=estimate(one.whole, how),
        tokens_per_round=estimate(one.tokens_per_round, replayed),
        acceptance=None if one.acceptance is None else estimate(one.acceptance, replayed),
        seconds_per_token=p.Estimate(one.seconds_per_token, how),
        draft_seconds=one.draft_seconds,
        verify_seconds=one.verify_seconds,
        prompt_seconds=one.read_seconds,
        categories={c: estimate(interval, how) for c, interval in one.categories.items()},
    )


def _costs(found: Gathered, option: Option, turns: int) -> p.Costs:
    context = ", ".join(str(c) for c, _ in found.rounds[PLAIN])
    how = f"measured here: rounds behind {context} tokens, {turns} turns"
    return p.Costs(
        plain_step=p.Estimate(option.costs.plain, how),
        verify={n: p.Estimate(seconds, how) for n, seconds in option.costs.verify.items()},
        draft=option.draft,
        draft_step=p.Estimate(option.costs.step, how),
        draft_call=p.Estimate(option.costs.call, how),
        draft_prompt_token=p.Estimate(option.costs.read, how),
        prompt_token=p.Estimate(option.costs.prompt, how),
    )


# --- the whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A plan, and what the decision in it was made of."""

    plan: p.Plan
    decision: Decision
    options: Sequence[Option]


def make_plan(subject: Subject, found: Gathered, wish: Wish, about: Mapping[str, Any], turns: int) -> Made:
    """The plan, yet without a validation; ``about`` has created, slipstream, machine."""
    listed = options(subject, found, wish)
    decision = decide(listed, wish.limits)
    notes = [f"{o.draft} does not fit: {o.lacks}." for o in listed if o.lacks is not None]
    plan = p.Plan(
        **about,
        notes=(*notes, *wish.notes),
        target=_target(subject, wish),
        drafts=tuple(_draft(name, wish, found, subject) for name in subject.drafters),
        asked=_asked(subject, found, wish),
        verdict=verdict(decision, wish.limits.batch),
        candidates=tuple(
            _candidate(o.draft, b, one) for o in listed for b, some in o.by_batch.items() for one in some.values()
        ),
        acceptance=tuple(acceptances(subject, found)),
        costs=tuple(_costs(found, o, turns) for o in listed),
        batches=_batches(decision, wish),
        load=load(decision, wish),
        memory_bytes=_memory(decision, wish),
    )
    return Made(plan, decision, listed)


def _memory(decision: Decision, wish: Wish) -> p.Estimate | None:
    """Of the target and the best draft, or the heaviest if none is left."""
    if not wish.needs:
        return None
    draft = decision.option.draft if decision.option is not None else None
    return p.Estimate(float(wish.needs.get(draft or "", max(wish.needs.values()))), "predicted from shapes")


def _target(subject: Subject, wish: Wish) -> p.Target:
    model = subject.target
    return p.Target(
        wish.target, wish.target_weights, str(model.device), wish.threads, model.max_positions, model.vocab_size
    )


def _draft(name: str, wish: Wish, found: Gathered, subject: Subject) -> p.Draft:
    parts = []
    for one, drafter in zip(wish.members[name], members_of(subject.drafters[name]), strict=True):
        if one == "suffix":
            parts.append(p.Member("suffix"))
        elif isinstance(drafter, EarlyExitDrafter):
            parts.append(p.Member("early-exit", layers=drafter.layers))
        else:
            parts.append(p.Member("model", one, wish.weights.get(one)))
    reasons = [found.failed[m.name] for m in members_of(subject.drafters[name]) if m.name in found.failed]
    return p.Draft(name, tuple(parts), reasons[0] if reasons else None)


def _asked(subject: Subject, found: Gathered, wish: Wish) -> p.Asked:
    counts: dict[str, int] = {}
    for text in found.texts:
        counts[text.category] = counts.get(text.category, 0) + 1
    limits = wish.limits
    rate = None if limits.rate is None else p.Estimate(limits.rate, "assumed: --requests-per-second")
    budget = None if limits.budget is None else p.Estimate(limits.budget, "assumed: --latency-budget")
    own = {t.own for t in found.texts}
    whose = "measured here: the target's answers" if own == {True} else "assumed: the given answers"
    if len(own) > 1:
        whose = "measured here: the given answers and the target's"
    return p.Asked(
        objective="throughput" if limits.throughput else "latency",
        batch=limits.batch,
        max_new_tokens=subject.params.max_new_tokens,
        rule=subject.rule,
        sampling=sampling(subject.params),
        prompts=len(found.texts),
        prompts_from=wish.prompts_from,
        categories=counts,
        requests_per_second=rate,
        prompt_tokens=p.Estimate(mean(len(t.prompt) for t in found.texts), "measured here: the prompts"),
        answer_tokens=p.Estimate(mean(len(t.answer) for t in found.texts), whose),
        latency_budget_seconds=budget,
    )


def verdict(decision: Decision, batch: int = 1) -> p.Verdict:
    """The decision as it is written down."""
    best, option = decision.prediction, decision.option
    how = SPEED if batch == 1 else _BATCH
    gain = estimate(Interval(decision.margin, decision.margin_low, decision.margin_high), how)
    speed = p.Estimate(1.0, "predicted from plain decoding")
    if decision.speculate and best is not None:
        speed = estimate(Interval(1 + decision.margin, 1 + decision.margin_low, 1 + decision.margin_high), how)
    limit = decision.break_even
    advice = tuple(
        p.Advice(kind, what, None if up is None else p.Estimate(up, "predicted from costs and an assumed acceptance"))
        for kind, what, up in decision.advice
    )
    replayed = "predicted from the draft's replay along the answers"
    return p.Verdict(
        action="speculate" if decision.speculate else "plain",
        draft=option.draft if decision.speculate and option is not None else None,
        k=best.k if decision.speculate and best is not None else 0,
        reason=decision.reason,
        sentence=decision.sentence,
        speed_up=speed,
        margin=gain,
        acceptance=estimate(best.acceptance, replayed) if best is not None and best.acceptance is not None else None,
        break_even=None
        if limit is None
        else p.Estimate(limit, "predicted from the costs: constant acceptance, best k"),
        advice=advice,
    )


def _batches(decision: Decision, wish: Wish) -> tuple[p.BatchPoint, ...]:
    option = decision.option
    if option is None:
        return ()
    points = []
    for batch in wish.batches:
        best = option.best(batch, wish.limits.throughput)
        gain = best.speed_up if wish.limits.throughput else best.whole
        pays = gain.value > 1 + WORTH  # as for the verdict
        how = SPEED if batch == 1 else _BATCH
        up = estimate(gain, how) if pays else p.Estimate(1.0, how)
        points.append(p.BatchPoint(batch, option.draft, best.k if pays else 0, up))
    return tuple(points)


def load(decision: Decision, wish: Wish) -> p.Load | None:
    """Latency under load of the best draft, if there is one."""
    option, best = decision.option, decision.prediction
    found = None if option is None or best is None else under_load(option, best, wish.limits)
    if option is None or found is None:
        return None
    plain, fast = found
    crossing = expectation.crossing_rate(plain, fast)
    curves = [
        p.LoadCurve(p.Estimate(c.idle_seconds, _LOAD), p.Estimate(c.capacity_seconds, _LOAD)) for c in (plain, fast)
    ]
    known = None if crossing is None or crossing == inf else p.Estimate(crossing, _LOAD)
    return p.Load(curves[0], curves[1], known, full_batch(option, wish.limits))


def validation(made: Made, subject: Subject, found: Gathered, points: Sequence[Point]) -> p.Validation | None:
    """Predicted and measured, over the prompts that were run; of a batch over all of them."""
    option, best, batch = made.decision.option, made.decision.prediction, made.plan.asked.batch
    if option is None or best is None or not points:
        return None
    if batch > 1:
        whole = checked("all", best.speed_up, points, batch)
        return p.Validation(option.draft, best.k, whole, abs(whole.error) <= WITHIN)
    at = costs_at(found, subject.drafters[option.draft])
    ran = {point.prompt for point in points}
    some = [case for case in option.cases if case.id in ran]
    if not some:
        return None
    whole = checked("all", as_long(some, best.k, at, points), points)
    by_category = []
    for category in dict.fromkeys(point.category for point in points):
        own = [point for point in points if point.category == category]
        mine = as_long([c for c in some if c.category == category], best.k, at, own)
        by_category.append(checked(category, mine, own))
    return p.Validation(option.draft, best.k, whole, abs(whole.error) <= WITHIN, tuple(by_category))


def as_long(cases: Sequence[Case], k: int, at: CostsAt, points: Sequence[Point]) -> Interval:
    """The predicted speed-up of ``cases``, had their answers been as long as in a real run.

    A user's answers may be longer or shorter than those that the target gives, and long answers count for more.
    """
    ran = {point.prompt: max(point.tokens - 1, 0) for point in points}
    found = [(t, ran[t.case.id] / (t.rounds.emitted or 1.0)) for t in (times(case, k, at) for case in cases)]
    fast = [(t.draft + t.verify) * share + (t.read if share else 0.0) for t, share in found]
    return bootstrap_ratio([t.plain * share for t, share in found], fast)


def contradiction(plan: p.Plan) -> list[str]:
    """What is to be said if the short real run does not bear the prediction out."""
    if plan.validation is None or plan.validation.within:
        return []
    seen = plan.validation.overall
    said = (
        f"The short real run measured {seen.measured.value:.2f}x where {seen.predicted.value:.2f}x was predicted "
        f"({seen.error:+.0%}): go by the measurement, or make the plan anew while the machine is quiet."
    )
    if plan.verdict.action == "speculate" and seen.measured.value < 1:
        said += " As measured, speculation does not pay."
    return [said]


def checked(category: str, predicted: Interval, points: Sequence[Point], batch: int = 1) -> p.Checked:
    """One prediction beside its measurement; of a batch there is a point a turn."""
    some = collapsed(points)
    measured = bootstrap_ratio([one.plain for one in some], [one.fast for one in some])
    if batch > 1:
        how = f"measured here: {_count(len(points), 'turn')} of {batch} requests at a time"
    else:
        how = f"measured here: {_count(len(points), 'answer')} to {_count(len(some), 'prompt')}, one at a time"
    return p.Checked(
        category,
        estimate(predicted, SPEED if batch == 1 else _BATCH),
        estimate(measured, f"{how}, plain and speculative in turn"),
        predicted.value / measured.value - 1,
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
