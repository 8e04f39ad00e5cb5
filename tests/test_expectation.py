"""Expected gains against the published table, against simulation, and at their edges."""

from __future__ import annotations

import random
from math import inf

import pytest

from slipstream import InputError
from slipstream.measure.expectation import (
    Costs,
    LoadCurve,
    acceptance_for,
    best,
    break_even,
    constant,
    crossing_rate,
    expected_tokens,
    speed_up,
)

#: Best k and speed-up by acceptance, for c + b = .05, .10, .20, .30, .50, .70.
TABLE = {
    0.5: ((3, 1.63), (2, 1.46), (2, 1.25), (1, 1.15), (1, 1.00), (0, 1.0)),
    0.6: ((4, 1.92), (3, 1.67), (2, 1.40), (1, 1.23), (1, 1.07), (0, 1.0)),
    0.7: ((6, 2.35), (4, 1.98), (3, 1.58), (2, 1.37), (1, 1.13), (0, 1.0)),
    0.8: ((8, 3.09), (6, 2.47), (4, 1.87), (3, 1.55), (2, 1.22), (1, 1.06)),
    0.9: ((13, 4.67), (10, 3.43), (7, 2.37), (5, 1.87), (3, 1.38), (2, 1.13)),
}
PRICES = (0.05, 0.10, 0.20, 0.30, 0.50, 0.70)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("alpha", "row"), TABLE.items())
def test_the_table_of_best_k(alpha: float, row: tuple[tuple[int, float], ...], share: float) -> None:
    """Only c + b matters where v is linear, however it is split into draft and verification."""
    for price, (k, gain) in zip(PRICES, row, strict=True):
        costs = Costs.linear(price * share, price * (1 - share))
        choice = best(constant(alpha), costs)
        assert choice.speed_up == pytest.approx(gain, abs=0.0051)
        # Where two are equal the table writes the larger and best() takes the cheaper: .5 at .20 and at .50.
        tied = speed_up(constant(alpha, k), costs) == pytest.approx(choice.speed_up, abs=1e-9)
        assert choice.k == k or (tied and choice.k < k)


def test_constant_acceptance_has_a_closed_form() -> None:
    for alpha in (0.0, 0.3, 0.77, 0.999):
        for k in (0, 1, 4, 9):
            assert expected_tokens(constant(alpha, k)) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert expected_tokens(constant(1.0, 5)) == 6


def test_expected_tokens_are_those_of_a_simulation() -> None:
    draws, acceptances, rounds = random.Random(5), (0.9, 0.6, 0.8), 100_000
    emitted = 0
    for _ in range(rounds):
        emitted += 1 + next((j for j, a in enumerate(acceptances) if draws.random() >= a), len(acceptances))
    assert emitted / rounds == pytest.approx(expected_tokens(acceptances), abs=0.015)


def test_a_published_setting() -> None:
    """Plain 48 ms a token; k = 4 gives 22 ms: 2.18 x."""
    costs = Costs(draft_step=0.1, verify={1: 1.0, 5: 1.25})
    acceptances = constant(acceptance_for(48 / 22, costs, k=4) or 0, 4)
    assert 48 / speed_up(acceptances, costs) == pytest.approx(22, abs=1e-4)


@pytest.mark.parametrize(("c", "b"), [(0.1, 0.05), (0.3, 0.2), (0.0, 0.4), (0.5, 0.45)])
def test_break_even_is_c_plus_b(c: float, b: float) -> None:
    assert break_even(Costs.linear(c, b)) == pytest.approx(c + b, abs=1e-6)
    assert best(constant(c + b + 0.02), Costs.linear(c, b)).k > 0
    assert best(constant(c + b - 0.02), Costs.linear(c, b)).k == 0


def test_what_never_pays_has_no_break_even() -> None:
    assert break_even(Costs.linear(0.9, 0.2)) is None
    assert acceptance_for(50.0, Costs.linear(0.1, 0.1)) is None
    assert break_even(Costs(0.0)) == 0.0
    alpha = break_even(Costs.linear(0.2, 0.1), k=4)
    assert alpha is not None
    assert alpha + alpha**2 + alpha**3 + alpha**4 == pytest.approx(0.2 * 4 + 0.1 * 4)


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = Costs(0.2, {1: 1.0, 3: 1.2, 5: 2.0})
    assert [costs.v(n) for n in (1, 2, 3, 4, 5, 7)] == pytest.approx([1.0, 1.1, 1.2, 1.6, 2.0, 2.8])
    assert costs.round(2) == pytest.approx(0.4 + 1.2)
    assert Costs(0.2, {4: 1.3}).v(2) == pytest.approx(1.1)


def test_a_step_in_the_cost_of_verification_moves_the_best_k() -> None:
    cliff = Costs(0.05, {1: 1.0, 4: 1.05, 5: 3.0})
    assert best(constant(0.9), cliff).k == 3


@pytest.mark.parametrize(
    ("make", "fragment"),
    [
        (lambda: Costs(-0.1), "draft step of -0.1"),
        (lambda: Costs(inf), "draft step of inf"),
        (lambda: Costs(0.1, {0: 1.0}), r"v\(0\)"),
        (lambda: Costs(0.1, {2: 0.0}), r"v\(2\)"),
        (lambda: expected_tokens([0.5, 1.2]), "acceptance of 1.2"),
        (lambda: LoadCurve.fit([(1, 2.0), (1, 3.0)]), "two different"),
        (lambda: LoadCurve.fit([(1, 2.0), (2, 1.0)]), "do not rise"),
    ],
)
def test_numbers_without_a_meaning(make: object, fragment: str) -> None:
    with pytest.raises(InputError, match=fragment):
        make()  # type: ignore[operator]


def test_load_curves_cross_where_both_latencies_are_equal() -> None:
    plain, fast = LoadCurve(4.0, 0.10), LoadCurve(2.0, 0.15)
    rate = crossing_rate(plain, fast)
    assert rate is not None
    assert plain.latency(rate) == pytest.approx(fast.latency(rate))
    assert fast.latency(rate - 0.1) < plain.latency(rate - 0.1)
    assert fast.latency(rate + 0.1) > plain.latency(rate + 0.1)
    assert (plain.latency(10.0), plain.most) == (inf, 10.0)


def test_load_curves_that_do_not_cross() -> None:
    assert crossing_rate(LoadCurve(4.0, 0.1), LoadCurve(2.0, 0.05)) is None
    assert crossing_rate(LoadCurve(4.0, 0.1), LoadCurve(2.0, 0.05 + 1e-9)) is None
    assert crossing_rate(LoadCurve(2.0, 0.1), LoadCurve(3.0, 0.05)) == 0.0


def test_a_load_curve_from_measurements() -> None:
    true = LoadCurve(1.5, 0.2)
    found = LoadCurve.fit([(rate, true.latency(rate)) for rate in (0.5, 1.0, 2.0, 4.0)])
    assert (found.idle_seconds, found.capacity_seconds) == pytest.approx((1.5, 0.2))
