"""The loop: its cache, its limits, what it tells a drafter, and what happens when something goes wrong."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import (
    INF,
    ForcedDrafter,
    RecurrentCache,
    RecurrentModel,
    TableModel,
    Watched,
    always_wrong,
    constant_law,
    decode,
    ender,
    greedy,
    oracle,
    random_law,
    scripted_law,
    start,
    wrong_at,
)
from slipstream import Draft, InputError, ModelError
from slipstream.drafters import ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.stats import count_rounds

V = 12
LAW = random_law(V, seed=1)
PROMPT = [3, 1, 4]
ANSWER = greedy(LAW, PROMPT, 60)
SEQUENCE = [*PROMPT, *ANSWER]


def model(**settings: Any) -> TableModel:
    return TableModel(LAW, V, **settings)


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "slot"), [(k, slot) for k in (1, 2, 5) for slot in range(k + 1)])
def test_a_wrong_token_at_any_slot(k: int, slot: int) -> None:
    """D3. After a rejection at the last slot (or none at all) the cache was one position too long or too short."""
    script = [2, 5, 1, 1, 7, 3, 0, 9, 11, 4]
    target = TableModel(scripted_law(script, V, prompt_length=1), V)
    drafter = wrong_at([0, *script], V, [slot])
    answer, rounds = decode(target, drafter, [0], k=k, max_new_tokens=10)  # compares the cache after each round
    assert answer == script
    assert {r.num_accepted for r in rounds[:-1] if r.num_drafted == k} <= {slot}


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_the_cache_after_every_kind_of_round(k: int) -> None:
    """A draft model's cache stayed one short after all of its tokens had been accepted."""
    draft = Watched(TableModel(random_law(V, seed=1, spread=2.2), V))
    watched = Watched(model())
    decoder = start(watched, ModelDrafter(draft, V), PROMPT, k=k, max_new_tokens=40)
    committed = list(PROMPT)
    for one in decoder.rounds(PROMPT, ender(decoder, len(PROMPT))):
        committed += one.tokens
        assert watched.caches[0].tokens == committed[:-1]
        drafted = draft.caches[0].tokens
        # What the draft model was fed and what was committed agree, but for a tail that it cuts off itself.
        agreeing = next((i for i, (a, b) in enumerate(zip(drafted, committed, strict=False)) if a != b), len(drafted))
        assert len(drafted) - agreeing <= k
    assert committed == SEQUENCE[:43]


def test_a_draft_model_catches_up_without_reading_anything_twice() -> None:
    """A drafter that starts each round from the prompt is right and slow."""
    draft = model()
    answer, rounds = decode(model(), ModelDrafter(draft, V), PROMPT, k=4, max_new_tokens=40)
    assert answer == ANSWER[:40]
    assert all(r.num_accepted == r.num_drafted for r in rounds)
    assert draft.rows_fed <= len(PROMPT) + 40 + len(rounds)


def test_the_target_reads_each_prompt_token_once() -> None:
    target = model()
    _, rounds = decode(target, oracle(SEQUENCE), PROMPT, k=4, max_new_tokens=40)
    assert target.rows_fed == len(PROMPT) - 1 + sum(1 + r.num_drafted for r in rounds)
    assert [call.num_logits for call in target.calls] == [1 + r.num_drafted for r in rounds]


def test_a_long_prompt_is_read_in_chunks() -> None:
    prompt = [(7 * i) % V for i in range(1300)]
    target = model()
    answer, _ = decode(target, NoDrafter(), prompt, max_new_tokens=3)
    assert answer == greedy(LAW, prompt, 3)
    assert max(call.count for call in target.calls) <= 512
    assert sum(call.count for call in target.calls) == 1300 + 2
    assert [call.num_logits for call in target.calls] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1025])
def test_prompts_about_as_long_as_chunks(length: int) -> None:
    prompt = [(5 * i) % V for i in range(length)]
    answer, _ = decode(model(), oracle([*prompt, *greedy(LAW, prompt, 8)]), prompt, k=3, max_new_tokens=8)
    assert answer == greedy(LAW, prompt, 8)


@pytest.mark.parametrize("accepted", [0, 1, 4, 5, None])
@pytest.mark.parametrize("drafter", ["forced", "model"])
def test_a_recurrent_target_that_replays(drafter: str, accepted: int | None) -> None:
    """C3. A state that cannot be rolled back kept what it had seen of rejected tokens."""
    target = RecurrentModel(V)
    plain, _ = decode(target, NoDrafter(), PROMPT, max_new_tokens=30)
    k = 5
    forced = wrong_at([*PROMPT, *plain], V, [0, 1, 4, 5] if accepted is None else [accepted])
    watched = Watched(target)
    made = forced if drafter == "forced" else ModelDrafter(RecurrentModel(V, seed=3), V)
    decoder = start(watched, made, PROMPT, k=k, max_new_tokens=30)
    committed = list(PROMPT)
    for one in decoder.rounds(PROMPT, ender(decoder, len(PROMPT))):
        committed += one.tokens
        fresh = RecurrentCache()
        for token in committed[:-1]:
            fresh.append(token)
        assert watched.caches[0].state == fresh.state
    assert committed == [*PROMPT, *plain]


def test_an_abandoned_request_leaves_nothing() -> None:
    """C4. A generator that was dropped half-way left rejected tokens in the cache of the next request."""
    target, draft = model(), TableModel(random_law(V, seed=9), V)
    drafter = ModelDrafter(draft, V)
    for stop_after in range(6):
        decoder = start(target, drafter, PROMPT, k=4, max_new_tokens=30)
        rounds = decoder.rounds(PROMPT, lambda t: False)
        for _ in range(stop_after):
            next(rounds)
        rounds.close()
        del rounds, decoder
        assert decode(target, drafter, PROMPT, k=4, max_new_tokens=30)[0] == ANSWER[:30]
    gc.collect()
    assert target.live_caches() == draft.live_caches() == []


def test_an_interrupt_inside_a_pass_leaves_nothing() -> None:
    """Ctrl-C in the middle of a forward pass, or of a draft, left models that could not be used again."""
    for times in range(1, 7):
        target, draft = model(), model()
        for interrupted in (target, draft):
            law, calls = interrupted.law, iter(range(times))

            def interrupt(tokens: Sequence[int], law: Any = law, calls: Any = calls) -> Tensor:
                if next(calls, None) is None:
                    raise KeyboardInterrupt
                return law(tokens)

            interrupted.law = interrupt
            with pytest.raises(KeyboardInterrupt):
                decode(target, ModelDrafter(draft, V), PROMPT, k=3, max_new_tokens=30)
            interrupted.law = law
            assert decode(target, ModelDrafter(draft, V), PROMPT, k=3, max_new_tokens=30)[0] == ANSWER[:30]


def test_many_requests_return_to_the_start() -> None:
    """M1. Each request, or each rejection, left a few tensors or a cache behind."""
    target, draft = model(), TableModel(random_law(V, seed=9), V)
    drafters = [ModelDrafter(draft, V), oracle(SEQUENCE), always_wrong(SEQUENCE, V), SuffixDrafter(min_probability=0)]

    def some(count: int) -> None:
        for i in range(count):
            answer, _ = decode(target, drafters[i % 4], PROMPT, k=3, max_new_tokens=6, seed=i)
            assert answer == ANSWER[:6]

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    some(8)
    before = tensors()
    some(200)
    assert tensors() == before
    assert target.live_caches() == draft.live_caches() == []


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 9))
def test_max_new_tokens_and_k(k: int) -> None:
    """S5. A draft went past the cap, and more (or fewer) tokens were delivered or counted than were asked for."""
    for cap in range(1, 2 * k + 3):
        for drafter in (oracle(SEQUENCE), always_wrong(SEQUENCE, V), wrong_at(SEQUENCE, V, [k // 2, k])):
            target = model()
            answer, rounds = decode(target, drafter, PROMPT, k=k, max_new_tokens=cap)
            assert answer == ANSWER[:cap]
            assert count_rounds(rounds).emitted == cap
            # Nothing was drafted or verified that could not be delivered.
            assert max((call.start + call.count for call in target.calls), default=0) <= len(PROMPT) + cap - 1


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_context_limit(k: int) -> None:
    """X1. Near the end of the context a draft reached past it."""
    limit = 20
    for length in range(limit - k - 1, limit):
        prompt = SEQUENCE[:length]
        for drafter in (oracle(SEQUENCE), always_wrong(SEQUENCE, V), ModelDrafter(model(limit=limit), V)):
            answer, _ = decode(model(limit=limit), drafter, prompt, k=k, max_new_tokens=100)  # the model asserts
            assert [*prompt, *answer] == SEQUENCE[:limit]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9, 16])
def test_the_draft_has_a_shorter_context(limit: int, k: int) -> None:
    """X2. The draft model was fed positions that it does not have."""
    draft = model(limit=limit)  # asserts that no position at or above its limit is fed
    answer, rounds = decode(model(), ModelDrafter(draft, V), PROMPT, k=k, max_new_tokens=30)
    assert answer == ANSWER[:30]
    # It was used as far as it goes: the last position that it can draft for is its limit.
    assert draft.rows_fed >= (limit if limit >= 4 else 0) - 1
    drafted = sum(r.num_drafted for r in rounds)
    assert (drafted > 0) == (limit >= len(PROMPT) + 1)


def test_a_drafter_is_asked_only_for_what_fits() -> None:
    forced = oracle(SEQUENCE)
    decode(model(), forced, PROMPT, k=4, max_new_tokens=12)
    # The first token comes from reading the prompt; then 4 + 1 and 4 + 1; one is left, and no draft helps with that.
    assert forced.asked == [(4, 4), (9, 4)]
    forced = oracle(SEQUENCE)
    decode(model(), forced, PROMPT, k=4, max_new_tokens=9)
    assert forced.asked == [(4, 4), (9, 2)]


@pytest.mark.parametrize("k", [0, 4])
def test_no_draft_is_asked_for_with_k_0(k: int) -> None:
    forced = oracle(SEQUENCE)
    decode(model(), forced, PROMPT, k=k, max_new_tokens=12)
    assert bool(forced.asked) == bool(k)


@pytest.mark.parametrize("sizes", [[0], [0, 3], [1, 0, 4, 2], [4, 3, 2, 1, 0]])
def test_a_draft_may_be_shorter_than_asked_for(sizes: list[int]) -> None:
    turn = iter(sizes * 50)
    forced = ForcedDrafter(lambda tokens, k: SEQUENCE[len(tokens) : len(tokens) + min(k, next(turn))])
    assert decode(model(), forced, PROMPT, k=4, max_new_tokens=30)[0] == ANSWER[:30]


def test_a_one_token_prompt() -> None:
    answer = greedy(LAW, [5], 12)
    for drafter in (oracle([5, *answer]), ModelDrafter(model(), V), SuffixDrafter(min_probability=0), NoDrafter()):
        assert decode(model(), drafter, [5], k=3, max_new_tokens=12)[0] == answer


@pytest.mark.parametrize(
    "draft",
    [Draft((1, 2, 3, 4)), Draft((-1,)), Draft((V,), torch.full((1, V), 1 / V)), Draft((1, V + 3), torch.ones(2, V))],
)
def test_a_drafter_that_breaks_the_rules_is_named(draft: Draft) -> None:
    with pytest.raises(InputError, match="ForcedDrafter"):
        decode(model(), ForcedDrafter(lambda tokens, k: draft), PROMPT, k=3, max_new_tokens=9)


@pytest.mark.parametrize("shape", [(1, V), (2, V - 1), (3, V), (2, V + 1)])
def test_a_draft_whose_probabilities_do_not_fit_is_refused(shape: tuple[int, int]) -> None:
    draft = Draft((1, 2), torch.full(shape, 1 / V))
    with pytest.raises(InputError, match="draft_probs"):
        decode(model(), ForcedDrafter(lambda tokens, k: draft), PROMPT, k=3, max_new_tokens=9)


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("at", range(1, 13))
def test_eos_at_every_slot(at: int, k: int) -> None:
    """S1. An end inside a block was noticed only after the block, or not at all in the bonus position."""
    script = [1] * at + [9] + [2] * 20
    target = TableModel(scripted_law(script, V, prompt_length=1), V)
    for drafter in (oracle([0, *script]), NoDrafter(), always_wrong([0, *script], V)):
        answer, rounds = decode(target, drafter, [0], k=k, max_new_tokens=30, stop_ids=[9])
        assert answer == script[: at + 1]
        assert count_rounds(rounds).emitted == at + 1


def test_the_draft_proposes_eos_where_the_target_goes_on() -> None:
    """S2. Generation ended because the draft said so."""
    forced = ForcedDrafter(lambda tokens, k: [9] * k)
    law = constant_law([0.3, 0.6, *[0.1 / 7] * 7, 0.0, 0.0, 0.0])
    answer, rounds = decode(TableModel(law, V), forced, [0], k=3, max_new_tokens=12, stop_ids=[9])
    assert answer == [1] * 12
    assert count_rounds(rounds).accepted == 0


def test_the_target_wants_eos_where_the_draft_goes_on_with_junk() -> None:
    """S2, the mirror."""
    script = [1, 1, 1, 1, 9]
    target = TableModel(scripted_law(script, V, prompt_length=1), V)
    forced = ForcedDrafter(lambda tokens, k: [1] * k)
    for k in (1, 2, 3, 4, 5, 8):
        answer, _ = decode(target, forced, [0], k=k, max_new_tokens=40, stop_ids=[9])
        assert answer == script


def test_a_model_stops_drafting_after_an_end() -> None:
    script = [1, 1, 9, 2, 2, 2, 2]
    draft = TableModel(scripted_law(script, V, prompt_length=1), V)
    target = TableModel(scripted_law(script, V, prompt_length=1), V)
    answer, rounds = decode(target, ModelDrafter(draft, V), [0], k=6, max_new_tokens=40, stop_ids=[9])
    assert answer == [1, 1, 9]
    assert [(r.num_drafted, r.num_accepted, len(r.tokens)) for r in rounds] == [(3, 3, 3)]


def test_a_scripted_run_counts_right() -> None:
    """T1. Bonus tokens counted as accepted, drafted ones that a stop cut off not counted, or the end counted twice."""
    script = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 9, 4, 4, 4, 4]
    target = TableModel(scripted_law(script, V, prompt_length=1), V)
    # A prompt of one token needs no reading, so the first round drafts already: 4 + 1, 2 + 1, 0 + 1, then eos inside.
    forced = wrong_at([0, *script], V, [4, 2, 0, 4])
    answer, rounds = decode(target, forced, [0], k=4, max_new_tokens=40, stop_ids=[9])
    assert answer == script[:12]
    assert [(r.num_drafted, r.num_accepted, len(r.tokens)) for r in rounds] == [
        (4, 4, 5),
        (4, 2, 3),
        (4, 0, 1),
        (4, 3, 3),
    ]
    assert [r.origins[-1] for r in rounds] == ["bonus", "corrected", "corrected", "accepted"]
    stats = count_rounds(rounds)
    assert stats.drafted == sum(map(len, forced.proposed)) == 16
    assert stats.accepted == sum(o == "accepted" for r in rounds for o in r.origins) == 9
    assert stats.emitted == len(answer) == stats.accepted + 3  # one for each round that did not end the answer
    assert stats.drafted_per_position == (4, 4, 4, 4)
    assert stats.accepted_per_position == (3, 3, 2, 1)
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.mean_accepted_length == 3


def test_an_end_at_slot_1_after_accepting_one() -> None:
    """T1. The end is the draft's second token: two accepted, and the round adds nothing of its own."""
    script = [1, 2, 3, 4, 5, 1, 2, 3, 4, 1, 9, 7, 7, 7, 7, 7]
    target = TableModel(scripted_law(script, V, prompt_length=1), V)
    forced = wrong_at([0, *script], V, [4, 2, 0, 4])
    answer, rounds = decode(target, forced, [0], k=4, max_new_tokens=40, stop_ids=[9])
    assert answer == script[:11]
    assert [r.num_accepted for r in rounds] == [4, 2, 0, 2]
    stats = count_rounds(rounds)
    assert (stats.drafted, stats.accepted, stats.emitted) == (16, 8, 11)


def test_times_are_counted_where_they_are_spent() -> None:
    _, rounds = decode(model(), ModelDrafter(model(), V), PROMPT, k=3, max_new_tokens=20)
    stats = count_rounds(rounds)
    assert stats.prefill_seconds == rounds[0].verify_seconds > 0
    assert stats.draft_seconds > 0
    assert stats.verify_seconds > 0
    assert stats.first_token_seconds <= stats.total_seconds
    assert stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds <= stats.total_seconds


# --- processors -------------------------------------------------------------------------------------------------------


def drafters(sequence: Sequence[int]) -> list[Any]:
    """Every kind, for a target that answers ``sequence``."""
    return [
        ModelDrafter(model(), V),
        ModelDrafter(TableModel(random_law(V, seed=9), V), V),
        oracle(sequence),
        always_wrong(sequence, V),
        SuffixDrafter(min_probability=0),
    ]


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"frequency_penalty": 1.5},
        {"presence_penalty": 2.5},
        {"repetition_penalty": 3.0},
        {"no_repeat_ngram_size": 2},
        {"logit_bias": {ANSWER[0]: -INF, ANSWER[1]: -2.0}},
        {"logits_processors": [lambda tokens, row: row.index_fill(0, torch.tensor(tokens[-4:]), -INF)]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_give_what_plain_decoding_gives(settings: dict[str, Any], k: int) -> None:
    """P1, P3. Penalties knew only of tokens from before the round, or also of rejected ones."""
    plain, _ = decode(model(), NoDrafter(), PROMPT, max_new_tokens=25, **settings)
    assert plain != ANSWER[:25], "the processor changed nothing"
    for drafter in drafters([*PROMPT, *plain]):
        assert decode(model(), drafter, PROMPT, k=k, max_new_tokens=25, **settings)[0] == plain


@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_penalties_count_what_was_really_said(k: int) -> None:
    """P1. Seen from behind the penalty: with logits of 0, what is subtracted is the count of each token so far."""
    flat = TableModel(lambda tokens: torch.zeros(V, dtype=torch.float64), V)
    rows: dict[tuple[int, ...], list[float]] = {}

    def record(tokens: Sequence[int], row: Tensor) -> Tensor:
        rows[tuple(tokens)] = row.tolist()
        return row

    settings = {"frequency_penalty": 1.0, "temperature": 1.0, "logits_processors": [record]}
    draft = ModelDrafter(TableModel(random_law(V, seed=9), V), V)
    answer, _ = decode(flat, draft, PROMPT, k=k, max_new_tokens=30, seed=4, **settings)
    for i in range(30):
        before = answer[:i]
        assert rows[(*PROMPT, *before)] == [-before.count(t) for t in range(V)]


@pytest.mark.parametrize("k", range(9))
def test_min_new_tokens(k: int) -> None:
    """P2. The end was forbidden by the round's first position: it came early, or as late as the next round."""
    eager = TableModel(constant_law([0.05] * 9 + [0.4, 0.1, 0.05]), V)  # wants 9, the end, at once
    for drafter in drafters([*PROMPT, *[10] * 7, 9]):
        answer, _ = decode(eager, drafter, PROMPT, k=k, max_new_tokens=40, min_new_tokens=7, stop_ids=[9])
        assert answer == [10] * 7 + [9]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_processors_see_prompt_and_committed_and_drafted_tokens(k: int) -> None:
    """P3. With n tokens so far, a round of k draft tokens asks for the lengths n, n+1, ..., n+k, in order."""
    seen: list[list[int]] = []

    def record(tokens: Sequence[int], row: Tensor) -> Tensor:
        seen.append(list(tokens))
        return row

    forced = wrong_at(SEQUENCE, V, [0, k, 1])
    _, rounds = decode(model(), forced, PROMPT, k=k, max_new_tokens=20, logits_processors=[record])
    committed, at = list(PROMPT), 0
    proposals = iter(forced.proposed)
    for one in rounds:
        drafted = next(proposals) if one.num_drafted else ()
        expected = [[*committed, *drafted[:i]] for i in range(len(drafted) + 1)]
        assert seen[at : at + len(expected)] == expected
        committed, at = [*committed, *one.tokens], at + len(expected)
    assert at == len(seen)


@pytest.mark.parametrize("settings", [{"logit_bias": {5: -INF}}, {"min_p": 0.2}, {"top_k": 3}])
@pytest.mark.parametrize("k", [1, 4])
def test_a_forbidden_symbol_that_the_draft_always_proposes(k: int, settings: dict[str, Any]) -> None:
    """P4. The filter was applied to the bonus token only."""
    law = constant_law([0.2, 0.2, 0.2, 0.1, 0.1, 0.02, *[0.03] * 6])
    forced = ForcedDrafter(lambda tokens, k: [5] * k)
    answer, rounds = decode(TableModel(law, V), forced, PROMPT, k=k, max_new_tokens=100, temperature=1.0, **settings)
    assert 5 not in answer
    assert sum(r.num_accepted for r in rounds) == 0 < sum(r.num_drafted for r in rounds)


# --- bad numbers ------------------------------------------------------------------------------------------------------


def spoiled(law: Any, value: float, when: Any) -> Any:
    """A law with one bad logit wherever ``when(tokens so far)``."""

    def bad(tokens: Sequence[int]) -> Tensor:
        row = law(tokens)
        if when(tokens):
            row[3] = value
        return row

    return bad


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, INF])
def test_bad_logits_of_the_draft_suspend_it_with_one_warning(value: float, temperature: float) -> None:
    """NaN from a draft in half precision crashed the request, or turned all of its text into one token."""
    draft = TableModel(spoiled(LAW, value, lambda tokens: len(tokens) >= 12), V, name="shaky")
    settings = {"k": 4, "max_new_tokens": 30, "temperature": temperature, "seed": 5}
    with pytest.warns(UserWarning, match=r"shaky is suspended.*position 12 ") as caught:
        answer, rounds = decode(model(), ModelDrafter(draft, V), PROMPT, **settings)
    assert len(caught) == 1
    assert len(answer) == 30
    if temperature == 0:
        assert answer == ANSWER[:30]
    # What it had drafted before is verified; nothing is drafted later; the next request begins anew.
    assert sum(r.num_drafted for r in rounds) > 0
    assert all(r.num_drafted == 0 for r in rounds[-10:])
    with pytest.warns(UserWarning, match="suspended"):
        decode(model(), ModelDrafter(draft, V), PROMPT, **settings)


def test_a_draft_that_is_bad_from_the_start() -> None:
    draft = TableModel(spoiled(LAW, math.nan, lambda tokens: True), V)
    with pytest.warns(UserWarning, match="suspended") as caught:
        answer, rounds = decode(model(), ModelDrafter(draft, V), PROMPT, k=4, max_new_tokens=20)
    assert (answer, len(caught), len(rounds)) == (ANSWER[:20], 1, 20)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("coupled", [False, True])
def test_bad_logits_of_the_target_are_an_error_that_names_the_position(
    coupled: bool, k: int, value: float, temperature: float
) -> None:
    """An argmax over NaN is a token like any other, and a draft that proposes just that token went on from there."""
    settings = {"k": k, "max_new_tokens": 30, "temperature": temperature, "coupled": coupled}
    sequence = [*PROMPT, *decode(model(), NoDrafter(), PROMPT, **settings)[0]]
    for bad in (3, 4, 7, 10):
        target = TableModel(spoiled(LAW, value, lambda tokens, bad=bad: len(tokens) == bad), V)
        for token in range(V):
            forced = oracle([*sequence[:bad], token, *sequence[bad + 1 :]])
            with pytest.raises(ModelError, match=f"position {bad} "):
                decode(target, forced, PROMPT, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_behind_a_rejected_token_do_not_matter(temperature: float) -> None:
    """Plain decoding never gets there, so speculative decoding may not fail there."""
    right = TableModel(scripted_law(ANSWER, V, prompt_length=3), V)
    target = TableModel(spoiled(right.law, math.nan, lambda tokens: list(tokens) != SEQUENCE[: len(tokens)]), V)
    for slot in range(4):
        forced = wrong_at(SEQUENCE, V, [slot])
        answer, _ = decode(target, forced, PROMPT, k=4, max_new_tokens=30, temperature=temperature)
        assert answer == ANSWER[:30]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_that_allows_nothing_behind_a_rejected_token_does_not_matter(temperature: float) -> None:
    """A grammar has no continuation for a token that it forbids: its mask of that slot failed the whole request."""

    def grammar(tokens: Sequence[int], row: Tensor) -> Tensor:
        """Ids must go up by one each time, from the prompt's last."""
        legal = all(b == (a + 1) % V for a, b in pairwise(tokens[2:]))
        allowed = torch.full_like(row, -INF)
        if legal:
            allowed[(tokens[-1] + 1) % V] = 0
        return row + allowed

    settings = {"max_new_tokens": 20, "temperature": temperature, "logits_processors": [grammar]}
    plain, _ = decode(model(), NoDrafter(), PROMPT, **settings)
    assert plain == [(4 + 1 + i) % V for i in range(20)]
    for slot in range(5):
        answer, rounds = decode(model(), wrong_at([*PROMPT, *plain], V, [slot]), PROMPT, k=4, **settings)
        assert answer == plain
        assert rounds[1].num_accepted == slot


def test_a_mask_that_allows_nothing_is_an_error_where_plain_decoding_has_one() -> None:
    def dead_end(tokens: Sequence[int], row: Tensor) -> Tensor:
        return row if len(tokens) < 9 else torch.full_like(row, -INF)

    for drafter in (NoDrafter(), oracle(SEQUENCE), always_wrong(SEQUENCE, V)):
        with pytest.raises(ModelError, match=r"position 9 .*forbidden"):
            decode(model(), drafter, PROMPT, k=4, max_new_tokens=30, logits_processors=[dead_end])


# --- ids that only one side has ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
def test_a_draft_with_fewer_ids_than_the_target(k: int) -> None:
    """V1. The target emitted an id that the draft cannot embed, and the draft's lookup failed."""
    script = [127, 5, 127, 127, 99, 100, 6, 7, 127]
    target = TableModel(scripted_law(script, 128, prompt_length=1), 128)
    draft = TableModel(random_law(100, seed=2), 100)
    for temperature in (0.0, 1.0):
        answer, rounds = decode(target, ModelDrafter(draft, 128), [127], k=k, max_new_tokens=9, temperature=temperature)
        assert answer == script
        assert sum(r.num_drafted for r in rounds) > 0


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_with_more_ids_than_the_target(k: int, temperature: float) -> None:
    """V1, the reverse. The draft's favourite is an id that the target does not have."""

    def favourite(tokens: Sequence[int]) -> Tensor:
        row = random_law(128, seed=2)(tokens)
        row[127] = 50.0
        return row

    law = random_law(100, seed=4)
    answer, rounds = decode(
        TableModel(law, 100),
        ModelDrafter(TableModel(favourite, 128), 100),
        [99],
        k=k,
        max_new_tokens=20,
        temperature=temperature,
    )
    assert max(answer) < 100
    assert sum(r.num_drafted for r in rounds) > 0
    if temperature == 0:
        assert answer == greedy(law, [99], 20)


def test_copied_ids_that_the_target_reads_but_cannot_emit() -> None:
    """A prompt may hold ids (such as an image's) beyond the output layer; prompt lookup proposed them."""
    prompt = [1, 2, 6, V + 1, 3, 5]
    script = [1, 2, 6, 7, 8, 1, 2, 6, 9]
    target = TableModel(scripted_law(script, V, prompt_length=len(prompt)), V, embedding=V + 2)
    answer, rounds = decode(target, SuffixDrafter(min_probability=0), prompt, k=4, max_new_tokens=9)
    assert answer == script
    # Behind "1" the prompt goes on with 2, 6, and then with the id that cannot be: two are left of that draft.
    assert max(r.num_drafted for r in rounds) == 2


def test_caches_are_released_with_the_generator() -> None:
    watched = Watched(model())
    decoder = start(watched, NoDrafter(), PROMPT, max_new_tokens=5)
    rounds = decoder.rounds(PROMPT, lambda t: False)
    next(rounds)
    ref = weakref.ref(watched.caches.pop())
    rounds.close()
    assert ref() is None
