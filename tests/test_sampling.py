"""Logits to probabilities: each parameter against transformers or a value worked out by hand, and their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream import InputError, ModelError, SamplingParams
from slipstream.sampling import Sampler, validate

INF = math.inf
V = 50
PROMPT = [3, 1, 4, 1, 5]
TOKENS = [*PROMPT, 9, 2, 6, 5, 3, 5, 9, 9]

#: What transformers calls with (ids (1, n), scores (1, V)).
Theirs = Callable[[Tensor, Tensor], Tensor]


def normal(rows: int, vocab: int = V, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampler(stop_ids: Sequence[int] = (), prompt_length: int = len(PROMPT), **params: Any) -> Sampler:
    given = SamplingParams(**{"temperature": 1.0, **params})
    validate(given)
    return Sampler(given, prompt_length, stop_ids, 0)


def probs(logits: Tensor, tokens: Sequence[int] = TOKENS, **settings: Any) -> Tensor:
    return sampler(**settings).probs(logits, tokens)


def theirs(steps: Sequence[Theirs], logits: Tensor, tokens: Sequence[int] = TOKENS) -> Tensor:
    """What transformers makes of one row of logits."""
    processors = LogitsProcessorList(steps)
    return torch.softmax(processors(torch.tensor([list(tokens)]), logits.clone()), dim=-1)


def close(a: Tensor, b: Tensor, atol: float = 1e-12) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


def frequency(penalty: float) -> Theirs:
    """By hand: count in the output, times the penalty, off the logit."""

    def apply(ids: Tensor, scores: Tensor) -> Tensor:
        for token in ids[0, len(PROMPT) :].tolist():
            scores[0, token] -= penalty
        return scores

    return apply


def presence(penalty: float) -> Theirs:
    def apply(ids: Tensor, scores: Tensor) -> Tensor:
        for token in set(ids[0, len(PROMPT) :].tolist()):
            scores[0, token] -= penalty
        return scores

    return apply


def halved(tokens: Sequence[int], row: Tensor) -> Tensor:
    """A processor of the user's own; it does not commute with what adds to logits."""
    return row / 2 + 0.1 * len(tokens)


def halved_theirs(ids: Tensor, scores: Tensor) -> Tensor:
    return scores / 2 + 0.1 * ids.shape[1]


EOS = (7, 8)

#: Every step in the documented order: our parameters, and the same in transformers or by hand.
STEPS: dict[str, tuple[dict[str, Any], Theirs]] = {
    "logit_bias": (
        {"logit_bias": {9: 2.5, 4: -1.5, 11: -INF}},
        SequenceBiasLogitsProcessor(sequence_bias=[[[9], 2.5], [[4], -1.5], [[11], -INF]]),
    ),
    "repetition_penalty": ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(penalty=1.7)),
    "frequency_penalty": ({"frequency_penalty": 0.6}, frequency(0.6)),
    "presence_penalty": ({"presence_penalty": 0.9}, presence(0.9)),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 2}, NoRepeatNGramLogitsProcessor(2)),
    "min_new_tokens": (
        {"min_new_tokens": 9, "stop_ids": EOS},
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 9, list(EOS)),
    ),
    "logits_processors": ({"logits_processors": [halved]}, halved_theirs),
    "temperature": ({"temperature": 0.7}, TemperatureLogitsWarper(0.7)),
    "top_k": ({"top_k": 7}, TopKLogitsWarper(7)),
    "top_p": ({"top_p": 0.8}, TopPLogitsWarper(0.8)),
    "min_p": ({"min_p": 0.15}, MinPLogitsWarper(0.15)),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", STEPS)
def test_each_parameter_means_what_it_means_in_transformers(name: str, seed: int) -> None:
    ours, reference = STEPS[name]
    logits = normal(1, seed=seed)
    expected = theirs([reference], logits)
    assert close(probs(logits, **ours), expected)
    assert not close(expected, torch.softmax(logits, -1)), "the parameter did nothing"


@pytest.mark.parametrize("seed", range(5))
def test_parameters_together_apply_in_the_documented_order(seed: int) -> None:
    everything = {name: value for ours, _ in STEPS.values() for name, value in ours.items()}
    everything.pop("min_new_tokens"), everything.pop("no_repeat_ngram_size")
    order = [step for name, (_, step) in STEPS.items() if name not in ("min_new_tokens", "no_repeat_ngram_size")]
    logits = normal(1, seed=seed)
    assert close(probs(logits, **everything), theirs(order, logits))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("logit_bias", "repetition_penalty"),
        ("repetition_penalty", "frequency_penalty"),
        ("repetition_penalty", "presence_penalty"),
        ("presence_penalty", "logits_processors"),
        ("temperature", "top_p"),
        ("temperature", "min_p"),
        ("top_k", "top_p"),
        ("top_p", "min_p"),
    ],
)
def test_order_of_two_that_do_not_commute(first: str, second: str) -> None:
    settings = {**STEPS[first][0], **STEPS[second][0]}
    steps = [STEPS[first][1], STEPS[second][1]]
    differing = 0
    for seed in range(40):
        logits = normal(1, seed=seed)
        expected = theirs(steps, logits)
        assert close(probs(logits, **settings), expected)
        differing += not close(expected, theirs(steps[::-1], logits))
    assert differing, "the order did not matter on any of these logits"


def test_penalties_by_hand() -> None:
    """Frequency counts the output's occurrences, presence whether there is one; the prompt counts for neither."""
    logits = torch.zeros(1, 6, dtype=torch.float64)
    tokens = [0, 0, 1, 2, 2, 3]  # prompt 0 0 1; output 2 2 3
    one = probs(logits, tokens, prompt_length=3, frequency_penalty=0.5)
    weights = torch.tensor([1, 1, math.exp(-1), math.exp(-0.5), 1, 1], dtype=torch.float64)
    assert close(one[0], weights / weights.sum())
    one = probs(logits, tokens, prompt_length=3, presence_penalty=0.5)
    weights = torch.tensor([1, 1, math.exp(-0.5), math.exp(-0.5), 1, 1], dtype=torch.float64)
    assert close(one[0], weights / weights.sum())


def test_a_negative_penalty_attracts() -> None:
    row = probs(torch.zeros(1, 4, dtype=torch.float64), [0, 2], prompt_length=1, frequency_penalty=-1.0)[0]
    assert row[2] == pytest.approx(math.e / (math.e + 3), abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_no_repeat_ngram_of_every_size(size: int) -> None:
    for length in range(1, len(TOKENS) + 1):
        logits = normal(1)
        expected = theirs([NoRepeatNGramLogitsProcessor(size)], logits, TOKENS[:length])
        assert close(probs(logits, TOKENS[:length], no_repeat_ngram_size=size), expected)


@pytest.mark.parametrize("top_k", [1, 2, V - 1, V, V + 1, 10**9])
def test_top_k_at_its_borders(top_k: int) -> None:
    logits = normal(1)
    assert close(probs(logits, top_k=top_k), theirs([TopKLogitsWarper(min(top_k, V))], logits))


@pytest.mark.parametrize("top_p", [1e-12, 0.01, 0.5, 0.999999, 1.0])
def test_top_p_at_its_borders(top_p: float) -> None:
    logits = normal(1)
    expected = torch.softmax(logits, -1) if top_p == 1 else theirs([TopPLogitsWarper(top_p)], logits)
    assert close(probs(logits, top_p=top_p), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_smallest_top_p_keeps_the_likeliest_token(dtype: torch.dtype) -> None:
    """A number that is 0 in the logits' type left a nucleus of no token at all, and an index of -1."""
    row = probs(normal(1).to(dtype), top_p=1e-300)[0]
    assert int(row.argmax()) == int(normal(1).argmax())
    assert float(row.max()) == 1


@pytest.mark.parametrize("min_p", [1e-9, 0.3, 1.0])
def test_min_p_at_its_borders(min_p: float) -> None:
    logits = normal(1)
    assert close(probs(logits, min_p=min_p), theirs([MinPLogitsWarper(min_p)], logits))


def test_ties() -> None:
    """top_k and min_p keep all equals at the border, as in transformers; top_p the smallest set, lower ids first."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    assert probs(logits, top_k=2)[0].gt(0).tolist() == [False, True, True, True, True, False]
    assert close(probs(logits, top_k=2), theirs([TopKLogitsWarper(2)], logits))
    share = torch.softmax(logits, -1)[0]
    nucleus = probs(logits, top_p=float(share[1] + 1.5 * share[2]))[0]
    assert nucleus.gt(0).tolist() == [False, True, True, True, False, False]
    assert probs(logits, min_p=math.exp(-1) * (1 - 1e-9))[0].gt(0).tolist() == [False, True, True, True, True, False]
    assert probs(logits, temperature=0.0)[0].tolist() == [0, 1, 0, 0, 0, 0]


def test_a_nucleus_ends_where_it_reaches_top_p() -> None:
    """One token too many was kept where the sum hits top_p exactly."""
    for top_p, kept in [(0.25, 1), (0.5, 2), (0.51, 3), (0.75, 3)]:
        row = probs(torch.zeros(1, 4, dtype=torch.float64), top_p=top_p)[0]
        assert row.tolist() == [1 / kept] * kept + [0] * (4 - kept)


def test_a_greedy_tie_is_one_token() -> None:
    row = probs(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), temperature=0.0)[0]
    assert row.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("vocab", [3000, 40_000])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_nucleus_of_a_large_vocabulary(vocab: int, top_p: float, spread: float) -> None:
    """The likeliest 1024 tokens are searched first; a flat row needs them all."""
    logits = normal(3, vocab, seed=4, spread=spread)
    logits[1] *= 50  # one certain row among uncertain ones
    expected = torch.cat([theirs([TopPLogitsWarper(top_p)], row[None]) for row in logits])
    assert close(probs(logits, [0] * 9, top_p=top_p), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_distributions(dtype: torch.dtype) -> None:
    given = normal(4, 3000).to(dtype)
    row = probs(given, [0] * 9, temperature=0.8, top_k=100, top_p=0.95, min_p=0.01)
    assert row.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(row.sum(-1).double(), torch.ones(4, dtype=torch.float64), atol=1e-6)
    assert row.min() >= 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-40, 1e-10, 1e-4])
def test_a_tiny_temperature_is_greedy(temperature: float, dtype: torch.dtype) -> None:
    """Below 1e-45 a temperature is 0 in float32, and 0 / 0 is NaN."""
    logits = normal(3).to(dtype)
    logits[0, 5] = -INF
    row = probs(logits, temperature=temperature)
    assert close(row, probs(logits, temperature=0.0), atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("temperature", [1e10, 1e39, 1e308])
def test_a_huge_temperature_is_uniform_over_what_is_allowed(temperature: float, dtype: torch.dtype) -> None:
    """Above 3e38 a temperature is infinite in float32, and -inf / inf is NaN."""
    logits = normal(2).to(dtype)
    logits[:, 5] = -INF
    row = probs(logits, temperature=temperature)
    expected = torch.full((2, V), 1 / (V - 1), dtype=dtype)
    expected[:, 5] = 0
    assert close(row, expected, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e30, 1e30, -1e30], [-3e38, -3e38, -3.2e38]])
    row = probs(logits, temperature=1.0)
    assert torch.equal(row, torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0]]))


def test_forbidden_tokens_have_no_probability_at_any_setting() -> None:
    """P4. Top-k took over a row in which fewer than k tokens are allowed, and let forbidden ones in."""
    logits = torch.full((1, V), -INF, dtype=torch.float64)
    logits[0, [3, 4]] = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for settings in ({"top_k": 10}, {"top_p": 0.9999999}, {"min_p": 0.001}, {"top_k": 10, "top_p": 0.99, "min_p": 0.1}):
        row = probs(logits, **settings)[0]
        assert row.nonzero().flatten().tolist() == [3, 4]
    assert probs(normal(1), logit_bias={int(normal(1).argmax()): -INF}, temperature=0.0)[0, normal(1).argmax()] == 0


# --- many rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_each_row_sees_the_tokens_before_it(name: str) -> None:
    """P3. All slots of a round were processed with the history of the first one (or of the last)."""
    ours, reference = STEPS[name]
    logits = normal(5, seed=2)
    rows = probs(logits, **ours)
    for i in range(5):
        before = TOKENS[: len(TOKENS) - 4 + i]
        assert close(rows[i : i + 1], theirs([reference], logits[i : i + 1], before))


def test_processors_are_called_once_for_each_row_with_its_prefix() -> None:
    """P3."""
    seen: list[list[int]] = []

    def record(tokens: Sequence[int], row: Tensor) -> Tensor:
        seen.append(list(tokens))
        return row

    probs(normal(4), logits_processors=[record])
    assert seen == [TOKENS[: len(TOKENS) - 3 + i] for i in range(4)]


def test_processors_apply_in_their_order() -> None:
    row = probs(
        torch.ones(1, 3, dtype=torch.float64),
        logits_processors=[lambda _, row: row * torch.tensor([1, 2, 3]), lambda _, row: row.masked_fill(row > 2, -INF)],
    )[0]
    assert close(row, torch.softmax(torch.tensor([1, 2, -INF], dtype=torch.float64), -1))


@pytest.mark.parametrize(
    ("returned", "word"),
    [
        (lambda row: None, "NoneType"),
        (lambda row: row.numpy(), "ndarray"),
        (lambda row: row[:3], r"shape \(3,\)"),
        (lambda row: row.unsqueeze(0), r"shape \(1, "),
    ],
)
def test_a_processor_that_returns_no_row_is_refused(returned: Any, word: str) -> None:
    """A shorter row was sampled from; others ended in errors about arrays that the user never saw."""
    with pytest.raises(InputError, match=f"logits_processors.*{word}"):
        probs(normal(1), logits_processors=[lambda _, row: returned(row)])


def test_the_logits_are_left_alone() -> None:
    """A penalty computed in place changed the logits that log-probabilities are read from."""

    def spoil(tokens: Sequence[int], row: Tensor) -> Tensor:
        row[:] = 0
        return row

    for dtype in (torch.float64, torch.float32):
        logits = normal(3).to(dtype)
        before = logits.clone()
        everything = {name: value for ours, _ in STEPS.values() for name, value in ours.items()}
        probs(logits, **{**everything, "logits_processors": [spoil]})
        assert torch.equal(logits, before)


def test_a_draft_row_and_a_target_row_are_made_alike() -> None:
    """Draft and target differ in where their logits come from, and in nothing else."""
    everything = {name: value for ours, _ in STEPS.values() for name, value in ours.items()}
    logits = normal(5, seed=3)
    together = probs(logits, **everything)
    for i in range(5):
        assert close(probs(logits[i : i + 1], TOKENS[: len(TOKENS) - 4 + i], **everything), together[i : i + 1])


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}])
def test_prompt_ids_that_the_output_layer_does_not_have(settings: dict[str, float]) -> None:
    """Some models embed more ids than they can emit (such as an image token): a penalty indexed past the row."""
    row = probs(normal(1), [V + 3, 2, V + 3], **settings)
    assert close(row, probs(normal(1), [2], **settings))


@pytest.mark.parametrize("stop_id", [-1, V, V + 100])
def test_stop_ids_that_the_output_layer_does_not_have(stop_id: int) -> None:
    """Configs say -1 for none, or name ids beyond a cut vocabulary: the last id was forbidden, or indexing failed."""
    assert close(probs(normal(1), stop_ids=[stop_id], min_new_tokens=100), torch.softmax(normal(1), -1))


# --- rows that cannot be sampled from ---------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (INF, "+inf")])
def test_bad_logits_are_an_error_that_names_the_position(value: float, word: str, temperature: float) -> None:
    logits = normal(1)
    logits[0, 17] = value
    with pytest.raises(ModelError) as error:
        probs(logits, temperature=temperature)
    assert f"position {len(TOKENS)} " in str(error.value)
    assert word in str(error.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_sample_is_an_error_that_names_the_position(temperature: float) -> None:
    with pytest.raises(ModelError, match=f"position {len(TOKENS)} .*forbidden"):
        probs(normal(1), temperature=temperature, logit_bias=dict.fromkeys(range(V), -INF))


# --- validation -------------------------------------------------------------------------------------------------------

NUMBERS = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "max_new_tokens",
    "n",
]
INTEGERS = ["top_k", "no_repeat_ngram_size", "min_new_tokens", "max_new_tokens", "n", "seed", "logprobs"]
OTHERS = ["logit_bias", "stop", "stop_token_ids", "logits_processors", "ignore_eos"]


def refused(name: str, value: Any, **others: Any) -> str:
    """The one sentence with which validate() refuses a value."""
    with pytest.raises(InputError) as error:
        validate(SamplingParams(**{name: value, **others}), vocab_size=V)
    message = str(error.value)
    assert name in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", [True, "1", None, math.nan, [1], 1j, torch.tensor(1.0)])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, 2.0, True, "3"])
def test_what_is_no_integer_is_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", INF),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", -0.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", INF),
        ("frequency_penalty", INF),
        ("presence_penalty", -INF),
        ("no_repeat_ngram_size", -1),
        ("min_new_tokens", -1),
        ("max_new_tokens", -1),
        ("n", 0),
        ("n", -2),
        ("logprobs", -1),
        ("logit_bias", {0: math.nan}),
        ("logit_bias", {0: INF}),
        ("logit_bias", {V: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: "1"}),
        ("logit_bias", {1: None}),
        ("logit_bias", [1, 2]),
        ("stop_token_ids", [V]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("stop", "text"),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", 5),
        ("logits_processors", ["f"]),
        ("logits_processors", print),
        ("ignore_eos", "no"),
        ("ignore_eos", 1),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, value: Any) -> None:
    refused(name, value)


@pytest.mark.parametrize("name", OTHERS)
def test_none_is_no_list(name: str) -> None:
    refused(name, None)


def test_min_above_max_is_refused() -> None:
    assert "max_new_tokens" in refused("min_new_tokens", 10, max_new_tokens=9)


def test_many_greedy_samples_are_refused() -> None:
    assert "temperature" in refused("n", 2)
    validate(SamplingParams(n=2, temperature=0.1))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0, "top_p": 1, "min_p": 1},
        {"temperature": 5, "top_k": V + 1, "repetition_penalty": 3, "frequency_penalty": -2, "presence_penalty": 2.0},
        {"max_new_tokens": 0},
        {"min_new_tokens": 4, "max_new_tokens": 4},
        {"logprobs": 0},
        {"seed": -3},
        {"seed": 2**70},
        {"stop": ("a", "b"), "stop_token_ids": (0, V - 1), "logit_bias": {0: -INF, V - 1: -100}},
        {"ignore_eos": True, "logits_processors": (halved,)},
    ],
)
def test_values_with_a_meaning_pass(params: dict[str, Any]) -> None:
    validate(SamplingParams(**params), vocab_size=V)


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("vocab", [7, 1000, 50_001])
def test_greedy_choices_are_what_distributions_would_say(rows: int, vocab: int) -> None:
    """Of equal logits the lowest id, however many rows there are; nothing behind a row that cannot be sampled."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).round()
    logits[:, [3, vocab - 2]] = 9.0
    greedy = Sampler(SamplingParams(temperature=0), 1, (), 0)
    tokens = list(range(rows))
    assert greedy.choices(logits, tokens) == [3] * rows == greedy.probs(logits, tokens).argmax(dim=-1).tolist()
    alone = [greedy.choices(row[None], [0])[0] for row in logits]
    assert alone == [3] * rows == [greedy.ahead(row[None], [0]).of for row in logits]
    for broken in (float("nan"), float("inf")):
        spoilt = logits.clone()
        spoilt[-1, 5] = broken
        if rows > 1:
            assert greedy.choices(spoilt, tokens) == [3] * (rows - 1) + [-1]
        else:
            with pytest.raises(ModelError, match="logits hold"):
                greedy.choices(spoilt, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_near_nothing_is_no_fault_of_the_model(dtype: torch.dtype, temperature: float) -> None:
    """It took logits out of their type, which was told as weights that are broken (500 over HTTP)."""
    sampler = Sampler(SamplingParams(repetition_penalty=5e-324, temperature=temperature), 2, (), 0)
    probs = sampler.probs(torch.tensor([[1.0, 2.0, -3.0]], dtype=dtype), [1, 2])
    assert probs.tolist() == [[0.0, 1.0, 0.0]]
    with pytest.raises(ModelError, match="inf"):
        sampler.probs(torch.tensor([[1.0, INF, -3.0]], dtype=dtype), [1, 2])
