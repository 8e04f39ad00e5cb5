"""Whether to speculate: regimes whose answer is known, each input on the side where it decides."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from slipstream.measure import expectation
from slipstream.measure.prediction import (
    KS,
    WORTH,
    Case,
    Limits,
    Option,
    RoundCosts,
    between,
    constant_case,
    decide,
    full_batch,
    load_curves,
    paying_length,
    predict,
    times,
    under_load,
)

#: The published setting: plain 48 ms a token on a GPU. Rows are nearly free while weights stream, dear beyond.
STEP, V = 0.07, {1: 1.0, 2: 1.01, 3: 1.02, 4: 1.03, 5: 1.04, 6: 1.10, 7: 1.18, 9: 1.35, 13: 1.8, 17: 2.4}
ALPHA = 0.72


def costs(plain: float = 48.0, step: float = STEP, **more: Any) -> RoundCosts:
    return RoundCosts({n: plain * v for n, v in V.items()}, step=plain * step, **more)


def option(
    alpha: float = ALPHA,
    of: RoundCosts | None = None,
    *,
    prompt: int = 100,
    tokens: int = 3000,
    batches: tuple[int, ...] = (1,),
    **more: Any,
) -> Option:
    """A draft of one constant acceptance; a batch of b makes b n rows of n, which cost what they cost."""
    of = of or costs()
    cases = [case(alpha, prompt, tokens)]

    def at(batch: int) -> Any:
        return lambda _: of.scaled(batch, lambda n: crowded(n, batch), 1.0 + 0.02 * (batch - 1))

    by_batch = {b: {k: predict(cases, k, at(b)) for k in KS} for b in batches}
    return Option("draft", by_batch, of, cases, **more)


@cache
def case(alpha: float, prompt: int, tokens: int) -> Case:
    """The same object each time, which remembers its rounds."""
    return constant_case(alpha, prompt, tokens)


def crowded(rows: int, batch: int) -> float:
    """Passes of the batch / passes of one: free up to 16 rows in all, then in proportion."""
    return max(1.0, rows * batch / 16) / max(1.0, rows / 16)


def test_the_published_setting_gives_22_milliseconds_at_k_4() -> None:
    found = decide([option()], Limits(1))
    assert (found.speculate, found.reason) == (True, "pays")
    assert found.prediction is not None
    assert found.prediction.k == 4
    assert found.prediction.seconds_per_token == pytest.approx(22, rel=0.001)
    assert found.prediction.speed_up.value == pytest.approx(2.18, abs=0.005)
    assert found.margin == pytest.approx(1.18, abs=0.005)
    assert "k = 4: 2.18x" in found.sentence


def test_a_long_answer_has_the_closed_forms_speed_up() -> None:
    of = costs()
    for k in (1, 2, 4, 8):
        closed = expectation.speed_up(expectation.constant(ALPHA, k), of.ratios)
        assert predict([constant_case(ALPHA, 10, 5000)], k, lambda _: of).speed_up.value == pytest.approx(
            closed, rel=2e-3
        )


def test_low_acceptance() -> None:
    found = decide([option(alpha=0.05)], Limits(1))
    assert (found.speculate, found.reason) == (False, "acceptance")
    assert found.break_even == pytest.approx(0.08, abs=0.005)
    assert "accepted in 5% of cases" in found.sentence
    assert found.margin < 0
    assert found.advice[0][0] == "fine-tune the draft"
    trained = expectation.best(expectation.constant(0.72), costs().ratios)
    assert found.advice[0][2] == pytest.approx(trained.speed_up)


def test_just_above_and_just_below_what_is_worth_it() -> None:
    of = costs(step=0.3)
    above, below = (decide([option(alpha=a, of=of)], Limits(1)) for a in (0.42, 0.30))
    assert (above.speculate, below.speculate) == (True, False)
    assert above.margin > WORTH > below.margin


def test_short_answers_do_not_earn_back_the_prompt() -> None:
    """The draft reads 1000 tokens at 2 ms each; an answer of 30 tokens cannot save 2 s, one of 300 can."""
    of = costs(read=2.0)
    short, long = (decide([option(of=of, prompt=1000, tokens=n)], Limits(1)) for n in (30, 300))
    assert (short.speculate, short.reason, long.speculate) == (False, "short answers", True)
    needed = paying_length(option(of=of, prompt=1000, tokens=30), 4)
    assert needed is not None
    assert f"after {needed:.0f}" in short.sentence
    near = [predict([constant_case(ALPHA, 1000, int(needed) + d)], 4, lambda _: of).speed_up.value for d in (-6, 6)]
    assert near[0] < 1 < near[1]


def test_copying_reads_no_prompt() -> None:
    of = costs(read=2.0)
    short = replace(constant_case(ALPHA, 1000, 30, reads=False), prompt=1000)
    assert times(short, 4, lambda _: of).read == 0
    assert times(replace(short, reads=True), 4, lambda _: of).read == 2000.0


def test_a_large_batch_leaves_no_room_for_drafts() -> None:
    of = option(batches=(1, 2, 4, 8, 16, 32))
    found = [decide([of], Limits(b, throughput=True)) for b in (1, 4, 32)]
    assert [f.speculate for f in found] == [True, True, False]
    assert found[-1].reason == "batch"
    assert "pays up to batch" in found[-1].sentence
    ks = [of.best(b, throughput=True).k for b in (1, 8)]
    assert ks[0] > ks[1]


def test_what_does_not_fit_is_not_recommended() -> None:
    found = decide([option(lacks="9 GB are needed with it, and there are 8 GB")], Limits(1))
    assert (found.speculate, found.reason) == (False, "memory")
    assert "draft: 9 GB are needed with it" in found.sentence
    both = decide([option(lacks="too much"), replace(option(alpha=0.6), draft="small")], Limits(1))
    assert both.option is not None
    assert both.option.draft == "small"
    none = decide([], Limits(1))
    assert (none.reason, none.sentence) == ("no draft", "Do not speculate: none of the drafts could be used.")


def test_above_the_crossing_rate_plain_decoding_is_faster() -> None:
    """Alone twice as fast, in a full server it uses more of it: plain wins from the crossing on.

    The verdict looked at the batch that was asked for and the table of the same plan at the largest one, so they named
    different rates.
    """
    of = option(batches=(1, 32))
    best = of.best(1)
    plain, fast = load_curves(of.by_batch[32][best.k], of.by_batch[1][best.k], 32)
    assert under_load(of, best, Limits(1)) == (plain, fast)
    crossing = expectation.crossing_rate(plain, fast)
    assert crossing is not None
    assert plain.latency(crossing) == pytest.approx(fast.latency(crossing))
    found = [decide([of], Limits(1, rate=crossing * f)) for f in (0.9, 1.1)]
    assert [f.reason for f in found] == ["pays", "load"]
    assert f"pays below {crossing:.3g}" in found[1].sentence


def test_a_server_that_answers_a_few_at_a_time_is_full_with_those() -> None:
    of = option(batches=(1, 4, 32))
    best = of.best(4, throughput=True)
    assert full_batch(of, Limits(4, throughput=True)) == 4
    assert under_load(of, best, Limits(4)) == load_curves(of.by_batch[4][best.k], of.by_batch[1][best.k], 4)
    assert expectation.crossing_rate(*load_curves(of.by_batch[4][best.k], of.by_batch[1][best.k], 4)) is None
    most = [1 / c.capacity_seconds for c in load_curves(of.by_batch[4][best.k], of.by_batch[1][best.k], 4)]
    found = decide([of], Limits(4, rate=2 * max(most)))
    assert f"at most {most[0]:.3g} plainly, {most[1]:.3g} with draft" in found.sentence
    assert "does not answer" not in decide([of], Limits(4, rate=0.9 * max(most))).sentence


def test_no_sentence_contradicts_itself() -> None:
    """It read "accepted in 9% of cases, and 8% would be needed to gain anything" as a reason not to."""
    slight = decide([option(alpha=0.095)], Limits(1))
    assert (slight.reason, 0 < slight.margin < WORTH) == ("acceptance", True)
    assert "gains less than the 3% that are worth the trouble" in slight.sentence
    calls = decide([option(alpha=0.2, of=costs(call=40.0))], Limits(1))
    assert calls.margin < 0
    assert calls.break_even is not None
    assert calls.break_even < 0.2
    assert "would be needed" not in calls.sentence
    assert decide([option(alpha=0.9, of=costs(step=1.5))], Limits(1)).break_even is None


def test_every_no_says_how_far_it_is_from_a_yes() -> None:
    of = option(batches=(1, 2, 4, 8, 16, 32))
    slow = costs(read=2.0)
    found = [
        decide([option(alpha=0.05)], Limits(1)),
        decide([of], Limits(32, throughput=True)),
        decide([option(of=slow, prompt=1000, tokens=30)], Limits(1)),
    ]
    assert [f.reason for f in found] == ["acceptance", "batch", "short answers"]
    for one in found:
        assert one.prediction is not None
        assert f"At its best, k = {one.prediction.k}, it would be {1 + one.margin:.2f}x as fast." in one.sentence


def test_a_large_batch_has_its_own_break_even() -> None:
    """Break-even was that of one request at whatever batch, where rows cost as much as tokens."""
    alone = costs()
    crowd = alone.scaled(32, lambda n: crowded(n, 32), 1.0)
    of = replace(option(batches=(1, 32)), shared={1: alone, 32: crowd})
    one, many = (decide([of], Limits(b, throughput=True)).break_even for b in (1, 32))
    assert one == pytest.approx(0.08, abs=0.005)
    assert many is None or many > 0.5


def test_a_draft_that_would_win_if_it_were_trained_is_named() -> None:
    """Advice was of the winner alone, so a copier in front hid what training the draft model would bring."""
    copier = replace(option(alpha=0.3, of=costs(step=0.0), model=False), draft="suffix")
    model = replace(option(alpha=0.15), draft="small")
    found = decide([copier, model], Limits(1))
    assert found.option is copier
    ((kind, what, up),) = found.advice
    assert (kind, "small has 15%" in what) == ("fine-tune the draft", True)
    assert up == pytest.approx(expectation.best(expectation.constant(0.72), costs().ratios).speed_up)


def test_advice_for_budgets_and_drafts() -> None:
    tight = decide([option(tokens=30)], Limits(1, budget=0.1))
    assert "smaller target" in [kind for kind, _, _ in tight.advice]
    larger = decide([option(alpha=0.5, of=costs(step=0.02))], Limits(1))
    assert "larger draft" in [kind for kind, _, _ in larger.advice]
    dear = decide([option(alpha=0.5, of=costs(step=0.8))], Limits(1))
    assert "smaller draft" in [kind for kind, _, _ in dear.advice]
    copied = decide([option(alpha=0.3, model=False)], Limits(1))
    assert copied.advice == ()


def test_the_best_of_several_drafts_wins() -> None:
    good, poor = option(), replace(option(alpha=0.4), draft="poor")
    found = decide([poor, good], Limits(1))
    assert found.option is good


def test_costs_by_context_are_a_straight_line() -> None:
    short, long = costs(), costs(plain=96.0, read=1.0)
    at = between((100, short), (300, long))
    assert at(200).plain == pytest.approx(72)
    assert at(200).read == pytest.approx(0.5)
    assert at(10_000).plain == at(400).plain  # not beyond them by more than half
    assert between((100, short), (100, short))(7).plain == 48


def test_times_are_sums_over_rounds() -> None:
    """Two certain rounds of two tokens each: everything by hand."""
    one_case = Case("x", "all", 10, 5, True, lambda at: constant_case(1.0, 10, 5).starts(at))
    of = RoundCosts({1: 10.0, 2: 11.0, 3: 13.0}, call=1.0, step=2.0, read=0.5, prompt=0.7)
    found = times(one_case, 1, lambda _: of)
    assert found.rounds.count == 2
    assert (found.plain, found.verify, found.draft, found.read, found.first) == pytest.approx((40, 22, 6, 5, 7))
    one = predict([one_case], 1, lambda _: of)
    assert one.speed_up.value == pytest.approx(40 / 33)
    assert one.whole.value == pytest.approx(47 / 40)
    assert one.seconds_per_token == pytest.approx(33 / 4)
    assert one.draft_seconds + one.verify_seconds + one.read_seconds == pytest.approx(one.seconds_per_token)
