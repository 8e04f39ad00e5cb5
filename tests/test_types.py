"""The values: which fields were given, where tokens came from, and figures derived from counts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

import slipstream
from slipstream import Draft, Output, Piece, Round, SamplingParams, Stats, Verdict
from slipstream.stats import add_stats, count_rounds


def one_round(tokens: tuple[int, ...], drafted: int, accepted: int, seconds: float = 1.0) -> Round:
    return Round(
        tokens, drafted, accepted, draft_seconds=seconds, verify_seconds=2 * seconds, total_seconds=4 * seconds
    )


def test_the_public_names() -> None:
    assert sorted(slipstream.__all__) == slipstream.__all__
    assert {name: getattr(slipstream, name).__name__ for name in slipstream.__all__} == {
        name: name for name in slipstream.__all__
    }


@pytest.mark.parametrize("kind", [SamplingParams, Draft, Verdict, Round, Stats, Piece, Output])
def test_values_are_frozen(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen


# --- fields that were given -------------------------------------------------------------------------------------------


def test_fields_that_were_not_given_come_from_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.7, top_k=5, stop=["a"])
    merged = SamplingParams(top_k=9, seed=3).over(defaults)
    assert (merged.temperature, merged.top_k, merged.seed, merged.stop) == (0.7, 9, 3, ["a"])


def test_a_field_that_was_given_its_standard_value_counts_as_given() -> None:
    """Comparing with the standard value cannot tell "greedy, please" from "as you like"."""
    merged = SamplingParams(temperature=0.0, ignore_eos=False, seed=None).over(
        SamplingParams(temperature=0.7, ignore_eos=True, seed=4)
    )
    assert (merged.temperature, merged.ignore_eos, merged.seed) == (0.0, False, None)


def test_positional_fields_count_as_given() -> None:
    assert SamplingParams(0.5, 7).given() == {"temperature": 0.5, "top_k": 7}
    assert SamplingParams().given() == {}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_copies_remember_what_was_given(copied: Any) -> None:
    params = SamplingParams(top_p=0.5, stop=["x"])
    assert copied(params) == params
    assert copied(params).given() == {"top_p": 0.5, "stop": ["x"]}


def test_equality_is_of_values() -> None:
    assert SamplingParams(temperature=0.0) == SamplingParams()
    assert SamplingParams(temperature=0.1) != SamplingParams()


# --- origins ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "drafted", "accepted", "origins"),
    [
        ((1,), 0, 0, ("bonus",)),
        ((1,), 3, 0, ("corrected",)),
        ((1, 2, 3), 3, 2, ("accepted", "accepted", "corrected")),
        ((1, 2, 3, 4), 3, 3, ("accepted", "accepted", "accepted", "bonus")),
        # cut by a stop rule: inside the accepted ones, and just before the last token
        ((1, 2), 3, 2, ("accepted", "accepted")),
        ((1, 2, 3), 3, 3, ("accepted", "accepted", "accepted")),
        ((), 3, 0, ()),
    ],
)
def test_origins(tokens: tuple[int, ...], drafted: int, accepted: int, origins: tuple[str, ...]) -> None:
    assert one_round(tokens, drafted, accepted).origins == origins


# --- statistics -------------------------------------------------------------------------------------------------------


def test_counts_of_rounds() -> None:
    stats = count_rounds([one_round((1,), 0, 0, 8.0), one_round((1, 2, 3), 4, 2), one_round((1, 2), 2, 2)])
    assert (stats.rounds, stats.emitted, stats.drafted, stats.accepted) == (3, 6, 6, 4)
    assert stats.drafted_per_position == (2, 2, 1, 1)
    assert stats.accepted_per_position == (2, 2)
    assert stats.acceptance_rate == pytest.approx(4 / 6)
    assert stats.mean_accepted_length == 2


def test_times_of_rounds() -> None:
    """The first round reads the prompt: its pass is prefill and counts in no other figure of passes."""
    stats = count_rounds([one_round((1,), 0, 0, 8.0), one_round((1, 2, 3), 4, 2), one_round((1, 2), 2, 2)])
    assert (stats.prefill_seconds, stats.verify_seconds, stats.draft_seconds) == (16, 4, 10)
    assert (stats.total_seconds, stats.first_token_seconds) == (40, 32)
    assert stats.tokens_per_second == pytest.approx(6 / 40)
    assert stats.seconds_per_token == pytest.approx(8 / 5)


def test_figures_of_nothing_are_zero() -> None:
    for stats in (Stats(), count_rounds([])):
        assert stats.acceptance_rate == stats.mean_accepted_length == 0
        assert stats.tokens_per_second == stats.seconds_per_token == 0


def test_the_time_of_a_single_token_is_no_time_per_token() -> None:
    assert count_rounds([one_round((1,), 0, 0)]).seconds_per_token == 0


def test_answers_add_up() -> None:
    a = count_rounds([one_round((1, 2), 1, 1)])
    b = count_rounds([one_round((1, 2, 3), 4, 2)])
    both = add_stats(a, b)
    assert (both.rounds, both.emitted, both.drafted, both.accepted) == (2, 5, 5, 3)
    assert both.drafted_per_position == (2, 1, 1, 1)
    assert both.accepted_per_position == (2, 1)
    assert both.total_seconds == 8
    assert add_stats(a, Stats()) == a == add_stats(Stats(), a)


def test_every_count_is_added() -> None:
    """A field that was added later was forgotten in the sum."""
    values = {f.name: (3,) if "per_position" in f.name else 3 for f in dataclasses.fields(Stats)}
    doubled = add_stats(Stats(**values), Stats(**values))
    assert doubled == Stats(**{name: (6,) if isinstance(value, tuple) else 6 for name, value in values.items()})
