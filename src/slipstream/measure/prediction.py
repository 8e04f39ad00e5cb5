"""What speculation would gain, and whether to do it: acceptance and costs put together. Arithmetic only.

A time is a sum over an answer's rounds: each costs its draft (a call, and a step for each pass of the draft model) and
its verification (by its rows); before the first draft a draft model reads the prompt. See Leviathan et al. 2023
(arXiv 2211.17192) for the rule, Kong 2026 for latency under load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from slipstream.measure import expectation
from slipstream.measure.bootstrap import Interval, bootstrap_ratio
from slipstream.measure.curves import interpolated
from slipstream.measure.expectation import LoadCurve
from slipstream.measure.replay import Start, Walk, walk
from slipstream.plan import AdviceKind, Reason

#: Kind, sentence, speed-up that it would bring.
Advice = tuple[AdviceKind, str, float | None]
#: Draft tokens in a round that are looked at.
KS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
#: A gain below this share is not worth a second model.
WORTH = 0.03
#: Below this acceptance training the draft is the first thing to try.
LOW_ACCEPTANCE = 0.5
#: What fine-tuning a draft may reach, for what it would bring.
TRAINED = 0.72


@dataclass(frozen=True)
class RoundCosts:
    """What rounds take at one context; in seconds, or in whatever unit all of them are."""

    verify: Mapping[int, float]
    """Everything but drafting, by rows: 1 is a plain step."""
    call: float = 0.0
    """A draft, however long."""
    step: float = 0.0
    """A pass of the draft model."""
    read: float = 0.0
    """The draft model's reading of a token of the prompt."""
    prompt: float = 0.0
    """The target's."""
    copied: Mapping[int, float] = field(default_factory=dict)
    """``verify`` behind drafts without a pass; empty: the same."""

    def rows(self, count: int, passes: int | None = None) -> float:
        """A verification of ``count`` rows, of a draft that took so many passes; None: one for each of its tokens."""
        count = min(count, len(self._rows) - 1)
        if passes is None or not self.copied:
            return self._rows[count]
        # What a pass spares or adds is the same for each row, also where it found no token.
        drafted = max(count - 1, 1)
        by_pass = (self._rows[drafted + 1] - self._copied_rows[drafted + 1]) / drafted
        return max(self._copied_rows[count] + by_pass * min(passes, drafted), 0.0)

    @cached_property
    def _rows(self) -> tuple[float, ...]:
        return tuple(interpolated(self.verify, n) for n in range(expectation.MOST + 2))

    @cached_property
    def _copied_rows(self) -> tuple[float, ...]:
        return tuple(interpolated(self.copied or self.verify, n) for n in range(expectation.MOST + 2))

    @property
    def plain(self) -> float:
        """A plain step."""
        return self.rows(1)

    def draft(self, passes: int, count: int) -> float:
        """A draft of ``count`` tokens."""
        return self.call + self.step * passes if count or passes else 0.0

    @property
    def ratios(self) -> expectation.Costs:
        """The same in plain steps, for break-even."""
        verify = {n: seconds / self.plain for n, seconds in self.verify.items()}
        return expectation.Costs(self.step / self.plain, verify)

    def paced(self, plain: float) -> RoundCosts:
        """The same on a machine whose plain step takes ``plain``; as it is if its own is not known."""
        share = plain / self.verify[1] if self.verify.get(1) else 1.0
        verify, copied = ({n: seconds * share for n, seconds in some.items()} for some in (self.verify, self.copied))
        call, step, read, prompt = (seconds * share for seconds in (self.call, self.step, self.read, self.prompt))
        return RoundCosts(verify, call, step, read, prompt, copied)

    def scaled(self, batch: int, target: Callable[[int], float], draft: float) -> RoundCosts:
        """The same where ``batch`` requests share every pass.

        Args:
            batch: number of requests.
            target: passes of the batch over so many rows each / over so many of one request.
            draft: a draft pass of the batch / of one request.
        """
        verify, copied = ({n: seconds * target(n) for n, seconds in c.items()} for c in (self.verify, self.copied))
        return RoundCosts(verify, self.call * batch, self.step * draft, self.read * batch, self.prompt * batch, copied)


def between(short: tuple[int, RoundCosts], long: tuple[int, RoundCosts]) -> Callable[[float], RoundCosts]:
    """Costs at any context from those at two, in a straight line; not beyond them by more than half."""
    (a, low), (b, high) = short, long

    def at(context: float) -> RoundCosts:
        return low if a == b else mixed(low, high, min(max((context - a) / (b - a), -0.5), 1.5))

    return at


def mixed(low: RoundCosts, high: RoundCosts, share: float) -> RoundCosts:
    """``low`` for a share of 0, ``high`` for 1, in a straight line; of the rows that both know."""

    def along(x: float, y: float) -> float:
        return max(x + (y - x) * share, 0.0)

    curves = ((low.verify, high.verify), (low.copied, high.copied))
    verify, copied = ({n: along(x[n], y[n]) for n in x if n in y} for x, y in curves)
    names = ("call", "step", "read", "prompt")
    call, step, read, prompt = (along(getattr(low, name), getattr(high, name)) for name in names)
    return RoundCosts(verify, call, step, read, prompt, copied)


@dataclass(frozen=True)
class Case:
    """One answer to one prompt."""

    id: str
    category: str
    prompt: int
    """Tokens."""
    tokens: int
    """Of the answer."""
    limited: bool
    """Whether it ended because it was long enough."""
    starts: Callable[[int], Start] = field(compare=False)
    """The round that begins after so many tokens of it."""
    reads: bool = True
    """Whether a draft model has to read the prompt."""
    known: dict[int, Walk] = field(default_factory=dict, compare=False, repr=False)

    def walk(self, k: int) -> Walk:
        """The rounds with ``k`` draft tokens."""
        if k not in self.known:
            self.known[k] = walk(self.starts, self.tokens, k, limited=self.limited)
        return self.known[k]


@dataclass(frozen=True)
class Times:
    """One answer's time, plainly and speculatively."""

    case: Case
    rounds: Walk
    plain: float
    """After the first token."""
    draft: float
    verify: float
    read: float
    """The draft model's reading of the prompt."""
    first: float
    """Until the first token, both ways."""

    @property
    def fast(self) -> float:
        """After the first token."""
        return self.draft + self.verify + self.read


CostsAt = Callable[[float], RoundCosts]


def times(case: Case, k: int, costs_at: CostsAt) -> Times:
    """What the answer takes with ``k`` draft tokens."""
    costs = costs_at(case.prompt + case.tokens / 2)
    rounds = case.walk(k)
    reads = case.reads and any(passes for passes, _ in rounds.rounds)
    return Times(
        case=case,
        rounds=rounds,
        plain=costs.plain * rounds.emitted,
        draft=sum(costs.draft(p, n) * often for (p, n), often in rounds.rounds.items()),
        verify=sum(costs.rows(n + 1, p) * often for (p, n), often in rounds.rounds.items()),
        read=costs.read * case.prompt if reads else 0.0,
        first=costs.prompt * case.prompt,
    )


@dataclass(frozen=True)
class Prediction:
    """A draft with one k, over some answers."""

    k: int
    speed_up: Interval
    """Plain time / speculative time, after the first token."""
    whole: Interval
    """The same with the first token."""
    tokens_per_round: Interval
    acceptance: Interval | None
    seconds_per_token: float
    draft_seconds: float
    """Of it."""
    verify_seconds: float
    read_seconds: float
    categories: Mapping[str, Interval]
    answer_seconds: float
    """Mean, first token included."""
    plain_answer_seconds: float


def predict(cases: Sequence[Case], k: int, costs_at: CostsAt) -> Prediction:
    """What ``k`` draft tokens bring for ``cases``, with intervals over them."""
    found = [times(case, k, costs_at) for case in cases]
    tokens = sum(t.rounds.emitted for t in found) or 1.0
    groups: dict[str, list[Times]] = {}
    for one in found:
        groups.setdefault(one.case.category, []).append(one)
    drafted = [t.rounds.drafted for t in found]
    return Prediction(
        k=k,
        speed_up=_speed_up(found),
        whole=bootstrap_ratio([t.first + t.plain for t in found], [t.first + t.fast for t in found]),
        tokens_per_round=bootstrap_ratio([t.rounds.emitted for t in found], [t.rounds.count for t in found]),
        acceptance=bootstrap_ratio([t.rounds.accepted for t in found], drafted) if any(drafted) else None,
        seconds_per_token=sum(t.fast for t in found) / tokens,
        draft_seconds=sum(t.draft for t in found) / tokens,
        verify_seconds=sum(t.verify for t in found) / tokens,
        read_seconds=sum(t.read for t in found) / tokens,
        categories={name: _speed_up(some) for name, some in groups.items()},
        answer_seconds=sum(t.first + t.fast for t in found) / len(found),
        plain_answer_seconds=sum(t.first + t.plain for t in found) / len(found),
    )


def _speed_up(some: Sequence[Times]) -> Interval:
    return bootstrap_ratio([t.plain for t in some], [t.fast for t in some])


# --- the decision -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A draft with all that was predicted for it."""

    draft: str
    by_batch: Mapping[int, Mapping[int, Prediction]]
    """Predictions by batch and k."""
    costs: RoundCosts
    """At the usual context, one request at a time."""
    cases: Sequence[Case]
    lacks: str | None = None
    """Why it does not fit the memory; None if it does."""
    model: bool = True
    """Whether it drafts with a model of its own, which could be trained."""
    shared: Mapping[int, RoundCosts] = field(default_factory=dict)
    """``costs`` by batch, where requests share the passes."""

    def costs_of(self, batch: int) -> RoundCosts:
        """What rounds take where so many requests share the passes."""
        return self.shared.get(batch, self.costs)

    def best(self, batch: int, throughput: bool = False) -> Prediction:
        """The best k at a batch; the smallest of equals."""
        some = self.by_batch[batch].values()
        return max(some, key=lambda p: ((p.speed_up if throughput else p.whole).value, -p.k))


@dataclass(frozen=True)
class Limits:
    """What is asked for."""

    batch: int
    throughput: bool = False
    """Whether throughput counts rather than the latency of an answer."""
    rate: float | None = None
    """Requests a second."""
    budget: float | None = None
    """Seconds that an answer may take."""


@dataclass(frozen=True)
class Decision:
    """What to do and why."""

    speculate: bool
    option: Option | None
    """The best one, also where it does not pay; None if there is no draft that fits."""
    prediction: Prediction | None
    """Its best k at the batch that is asked for."""
    reason: Reason
    sentence: str
    margin: float
    """Its speed-up less 1."""
    margin_low: float
    margin_high: float
    break_even: float | None
    advice: tuple[Advice, ...]


def decide(options: Sequence[Option], limits: Limits) -> Decision:
    """Pick the best draft and k, or say why none pays."""
    fitting = [o for o in options if o.lacks is None]
    if not fitting:
        return _nothing(options)
    gain = _gain(limits)
    option = max(fitting, key=lambda o: gain(o.best(limits.batch, limits.throughput)).value)
    best = option.best(limits.batch, limits.throughput)
    margin = gain(best)
    reason, sentence = _reason(option, best, limits, margin)
    sentence += _overfull(option, best, limits)
    return Decision(
        speculate=reason == "pays",
        option=option,
        prediction=best,
        reason=reason,
        sentence=sentence,
        margin=margin.value - 1,
        margin_low=margin.low - 1,
        margin_high=margin.high - 1,
        break_even=expectation.break_even(option.costs_of(limits.batch).ratios),
        advice=tuple(_advice(fitting, option, best, limits)),
    )


def _nothing(options: Sequence[Option]) -> Decision:
    """No draft is left to choose from."""
    reason: Reason = "memory" if options else "no draft"
    said = "none of the drafts could be used"
    if options:
        said = f"no draft fits beside the target ({'; '.join(f'{o.draft}: {o.lacks}' for o in options)})"
    return Decision(False, None, None, reason, f"Do not speculate: {said}.", 0.0, 0.0, 0.0, None, ())


def _gain(limits: Limits) -> Callable[[Prediction], Interval]:
    return lambda prediction: prediction.speed_up if limits.throughput else prediction.whole


def _reason(option: Option, best: Prediction, limits: Limits, margin: Interval) -> tuple[Reason, str]:
    if margin.value > 1 + WORTH:
        return _gains(option, best, limits, margin)
    at_best = f"At its best, k = {best.k}, it would be {margin.value:.2f}x as fast."
    if limits.batch > 1 and (most := paying_batch(option, limits)) is not None and most < limits.batch:
        return "batch", (
            f"Do not speculate at batch {limits.batch}: rows of a verification are as dear as tokens there; "
            f"{option.draft} pays up to batch {most}. {at_best}"
        )
    needed = paying_length(option, best.k or 1, limits.batch)
    mean = sum(c.tokens for c in option.cases) / len(option.cases)
    if needed is not None and needed > mean:
        return "short answers", (
            f"Do not speculate: answers have {mean:.0f} tokens on average, and {option.draft} has earned back its "
            f"reading of the prompt after {needed:.0f}. {at_best}"
        )
    return "acceptance", f"Do not speculate: {_too_little(option, limits, margin)}. {at_best}"


def _gains(option: Option, best: Prediction, limits: Limits, margin: Interval) -> tuple[Reason, str]:
    """It pays, unless more requests come than it pays for."""
    curves = under_load(option, best, limits)
    crossing = None if curves is None else expectation.crossing_rate(*curves)
    if limits.rate is not None and crossing is not None and limits.rate > crossing:
        return "load", (
            f"Do not speculate: at {limits.rate:g} requests a second plain decoding is faster; "
            f"{option.draft} pays below {crossing:.3g}."
        )
    acceptance = best.acceptance.value if best.acceptance else 0.0
    limit = expectation.break_even(option.costs_of(limits.batch).ratios)
    enough = "" if limit is None else f"; {limit:.0%} would be enough to gain anything"
    unsure = f" Over prompts like these it is anything from {margin.low:.2f}x on." if margin.low < 1 else ""
    return "pays", (
        f"Speculate with {option.draft} at k = {best.k}: {margin.value:.2f}x as fast "
        f"({acceptance:.0%} of draft tokens stand, {best.tokens_per_round.value:.1f} tokens a round{enough}).{unsure}"
    )


def _too_little(option: Option, limits: Limits, margin: Interval) -> str:
    """Why it does not pay, if neither the batch nor the prompt is to blame."""
    first, limit = _first(option), expectation.break_even(option.costs_of(limits.batch).ratios)
    stands = f"a first draft token of {option.draft} is accepted in {first:.0%} of cases"
    if margin.value > 1:
        return f"{option.draft} gains less than the {WORTH:.0%} that are worth the trouble"
    if limit is None:
        return f"{stands}, and no acceptance is enough"
    if first < limit:
        digits = 0 if limit - first > 0.015 else 1
        return f"{stands}, and {limit:.{digits}%} would be needed to gain anything"
    return f"{stands}, which does not carry what drafts cost here"


def _first(option: Option) -> float:
    """Acceptance of a first draft token, with k = 1 where it is known."""
    some = next(iter(option.by_batch.values()))
    shortest = some[min(k for k in some if k)] if any(some) else None
    return shortest.acceptance.value if shortest is not None and shortest.acceptance else 0.0


def paying_batch(option: Option, limits: Limits) -> int | None:
    """The largest batch that was looked at up to which the draft pays; None if it pays at none."""
    gain, most = _gain(limits), None
    for batch in sorted(option.by_batch):
        if gain(option.best(batch, limits.throughput)).value <= 1 + WORTH:
            break
        most = batch
    return most


def paying_length(option: Option, k: int, batch: int = 1) -> float | None:
    """Tokens of an answer from which reading the prompt with the draft model is earned back; None if never."""
    costs = option.costs_of(batch)
    found = [times(case, k, lambda _: costs) for case in option.cases]
    emitted = sum(t.rounds.emitted for t in found)
    if not emitted:
        return None
    saved = sum(t.plain - t.draft - t.verify for t in found) / emitted
    read = sum(t.read for t in found) / len(found)
    return 1 + read / saved if saved > 0 else None


def full_batch(option: Option, limits: Limits) -> int:
    """How many requests a full server answers at a time: as many as were asked for, else as many as were looked at."""
    return limits.batch if limits.batch > 1 else max(option.by_batch)


def under_load(option: Option, best: Prediction, limits: Limits) -> tuple[LoadCurve, LoadCurve] | None:
    """Plain and speculative latency under load at ``best``'s k; None if that is not known for a request alone.

    C1 is what a request takes alone, C2 what it uses up of a server that answers ``full_batch`` at a time.
    """
    alone, full = option.by_batch.get(1, {}).get(best.k), full_batch(option, limits)
    crowded = option.by_batch.get(full, {}).get(best.k)
    return None if alone is None or crowded is None else load_curves(crowded, alone, full)


def _overfull(option: Option, best: Prediction, limits: Limits) -> str:
    """That more requests come than a server answers, if so."""
    curves = under_load(option, best, limits)
    if limits.rate is None or curves is None or limits.rate < max(most := [c.most for c in curves]):
        return ""
    return (
        f" One server does not answer {limits.rate:g} requests a second: at most {most[0]:.3g} plainly, {most[1]:.3g} "
        f"with {option.draft}."
    )


def load_curves(prediction: Prediction, alone: Prediction, batch: int) -> tuple[LoadCurve, LoadCurve]:
    """Plain and speculative latency under load: C1 alone, C2 what an answer uses up where ``batch`` share the passes.

    Args:
        prediction: at ``batch``.
        alone: at a batch of 1, with the same k.
        batch: how many are answered at a time when the server is full.
    """
    plain = LoadCurve(alone.plain_answer_seconds, prediction.plain_answer_seconds / batch)
    return plain, LoadCurve(alone.answer_seconds, prediction.answer_seconds / batch)


def _advice(options: Sequence[Option], option: Option, best: Prediction, limits: Limits) -> list[Advice]:
    """What would help more: of any draft that could be trained, else of the best one."""
    gain, costs = _gain(limits)(best).value, option.costs_of(limits.batch).ratios
    found = _trained(options, limits, gain)
    if option.model and _first(option) < TRAINED and costs.draft_step < 0.1:
        dearer = expectation.Costs(2 * costs.draft_step, costs.verify)
        if (needed := expectation.acceptance_for(max(gain, 1 + WORTH), dearer)) is not None and needed < 0.95:
            found.append((
                "larger draft",
                f"A draft step costs {costs.draft_step:.2f} of a plain step; a draft twice as dear gains more from an "
                f"acceptance of {needed:.0%} on.",
                None,
            ))  # fmt: skip
    if option.model and costs.draft_step > LOW_ACCEPTANCE:
        found.append((
            "smaller draft", f"A draft step costs {costs.draft_step:.2f} of a plain step; take a smaller draft.", None
        ))  # fmt: skip
    if limits.budget is not None and (spent := min(best.answer_seconds, best.plain_answer_seconds)) > limits.budget:
        found.append((
            "smaller target",
            f"An answer takes {spent:.3g} s at best and may take {limits.budget:.3g} s: take a target "
            f"{spent / limits.budget:.1f} times as fast.",
            None,
        ))  # fmt: skip
    return found


def _trained(options: Sequence[Option], limits: Limits, gain: float) -> list[Advice]:
    """The draft of low acceptance that would bring most if it were fine-tuned, if that is more than ``gain``."""
    low = [o for o in options if o.model and _first(o) < LOW_ACCEPTANCE]
    choices = [
        (expectation.best(expectation.constant(TRAINED), o.costs_of(limits.batch).ratios), _first(o), o.draft)
        for o in low
    ]
    trained, first, draft = max(choices, key=lambda c: c[0].speed_up, default=(expectation.Choice(0, 1.0), 0.0, ""))
    if trained.speed_up <= max(gain, 1 + WORTH):
        return []
    said = (
        f"{draft} has {first:.0%} of its first tokens accepted; fine-tuned to {TRAINED:.0%} it would bring "
        f"{trained.speed_up:.2f}x at k = {trained.k}."
    )
    return [("fine-tune the draft", said, trained.speed_up)]


def constant_case(acceptance: float, prompt: int, tokens: int, *, category: str = "all", reads: bool = True) -> Case:
    """An answer in which every draft token is accepted with the same probability: for what-if questions and tests."""
    reach = tuple(acceptance**j for j in range(1, expectation.MOST + 1))

    def starts(at: int) -> Start:
        return Start(reach[: tokens - at])

    return Case("constant", category, prompt, tokens, False, starts, reads)
