"""The accept rule: what it does slot by slot, and that what comes out follows P exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from fakes import all_outcomes, loaded_dice
from slipstream import InputError, Verdict
from slipstream.sampling import Sampler
from slipstream.types import SamplingParams
from slipstream.verify import RULES, accept_probs, residual, sample, verify

FOUR = (0.5, 0.3, 0.15, 0.05)


def rows(*given: object) -> Tensor:
    return torch.tensor(given, dtype=torch.float64)


def random_rows(count: int, vocab: int, seed: int, spread: float = 1.5, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(spread * torch.randn(count, vocab, generator=generator, dtype=torch.float64), -1).to(dtype)


def one_hot_rows(tokens: list[int], vocab: int) -> Tensor:
    return torch.eye(vocab, dtype=torch.float64)[tokens]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Uniforms:
    """Stands in for ``torch.rand``: hands out the given numbers in order, and notes what was asked for."""

    def __init__(self, *values: float) -> None:
        self._values: Iterator[float] = iter(values)
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, size: tuple[int, ...], *, dtype: torch.dtype, device: object, generator: object) -> Tensor:
        shape = torch.Size(size)
        self.shapes.append(tuple(shape))
        return torch.tensor([next(self._values) for _ in range(shape.numel())], dtype=dtype).reshape(shape)


@pytest.fixture
def uniforms(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Uniforms]:
    """Sets the random numbers that verify() will get."""

    def given(*values: float) -> Uniforms:
        stub = Uniforms(*values)
        monkeypatch.setattr(torch, "rand", stub)
        return stub

    return given


# --- mechanics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_accepts_all_of_a_certain_draft_and_adds_the_bonus_token(k: int, rule: str) -> None:
    wanted = [i % 4 for i in range(k + 1)]
    target = one_hot_rows(wanted, 4)
    for probs in (None, one_hot_rows(wanted[:k], 4), random_rows(k, 4, seed=1)):
        assert verify(target, torch.tensor(wanted[:k]), probs, generator(), rule) == Verdict(k, wanted[k])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("k", "slot"), [(k, slot) for k in (1, 2, 3, 5, 8) for slot in range(k)])
def test_stops_at_the_first_wrong_token_and_corrects_it(k: int, slot: int, rule: str) -> None:
    wanted = [i % 4 for i in range(k + 1)]
    drafted = list(wanted[:k])
    drafted[slot] = (drafted[slot] + 1) % 4
    target = one_hot_rows(wanted, 4)
    for probs in (None, one_hot_rows(drafted, 4), random_rows(k, 4, seed=slot)):
        assert verify(target, torch.tensor(drafted), probs, generator(slot), rule) == Verdict(slot, wanted[slot])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("probs", [None, torch.empty(0, 4, dtype=torch.float64)])
def test_an_empty_draft_samples_from_the_only_row(probs: Tensor | None, rule: str) -> None:
    assert verify(rows((0, 0, 1, 0)), torch.tensor([], dtype=torch.long), probs, generator(), rule) == Verdict(0, 2)
    assert verify(rows((0, 0, 1, 0)), [], probs, None, rule) == Verdict(0, 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_later_token_never_stands_behind_a_rejected_one(rule: str) -> None:
    """Tokens that pass were counted, and not those before the first one that fails."""
    target = one_hot_rows([0, 1, 2, 3, 0], 4)
    assert verify(target, [0, 3, 2, 3], None, generator(), rule) == Verdict(1, 1)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_of_probability_zero_never_passes(rule: str, uniforms: Callable[..., Uniforms]) -> None:
    """Accepting on u <= P/q lets an impossible token through when u is exactly 0."""
    target = rows((0, 0.5, 0.5), (1, 0, 0))
    for probs in (None, rows((1, 0, 0)), rows((0, 0.5, 0.5))):
        uniforms(0.0, 0.0)
        assert verify(target, [0], probs, None, rule).num_accepted == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_that_equals_the_target_is_always_accepted(rule: str, uniforms: Callable[..., Uniforms]) -> None:
    largest = math.nextafter(1, 0)
    for seed in range(20):
        target = random_rows(4, 6, seed)
        uniforms(largest, largest, largest, 0.5)
        assert verify(target, [0, 1, 2], target[:3], None, rule).num_accepted == 3


# --- the law, by enumeration ------------------------------------------------------------------------------------------


def law_by_formula(target: Tensor, proposals: list[float], q_of: Callable[[int], Tensor | None]) -> Tensor:
    """Law of the first token that comes out, over every first draft token x, with its probability."""
    law = torch.zeros_like(target[0])
    for x, probability in enumerate(proposals):
        if probability == 0:
            continue
        drafted, q = torch.tensor([x]), q_of(x)
        accept = float(accept_probs(target, drafted, q)[0])
        row = torch.zeros_like(target[0]).scatter_(0, drafted, 1) if q is None else q[0]
        law[x] += probability * accept
        law += probability * (1 - accept) * residual(target[0], row)
    return law


@pytest.mark.parametrize("seed", range(8))
def test_enumeration_gives_the_target_for_any_draft(seed: int) -> None:
    target, q = random_rows(2, 50, seed), random_rows(1, 50, seed + 100, spread=3)
    assert torch.allclose(law_by_formula(target, q[0].tolist(), lambda x: q), target[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_enumeration_gives_the_target_for_copied_tokens(seed: int) -> None:
    """An argmax or copied draft was verified with a soft q that it had not been sampled from."""
    target, proposals = random_rows(2, 50, seed), random_rows(1, 50, seed + 100, spread=3)[0].tolist()
    assert torch.allclose(law_by_formula(target, proposals, lambda x: None), target[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_an_explicit_one_hot_q_is_the_same_as_none(rule: str) -> None:
    target = random_rows(4, 6, seed=3)
    drafted = torch.tensor([5, 0, 2])
    soft = one_hot_rows(drafted.tolist(), 6)
    assert torch.equal(accept_probs(target, drafted, None), accept_probs(target, drafted, soft))
    for seed in range(200):
        one = verify(target, drafted, None, generator(seed), rule)
        assert one == verify(target, drafted, soft, generator(seed), rule)


def filtered(logits: Tensor, **params: float) -> Tensor:
    return Sampler(SamplingParams(**params), 0, (), 0).probs(logits, [0])


@pytest.mark.parametrize("seed", range(5))
def test_top_k_filtered_draft(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D2. A draft was sampled after its top-k filter, and verified with the q from before it."""
    settings = {"temperature": 0.7, "top_k": 5}
    target_logits = torch.randn(2, 50, generator=generator(seed), dtype=torch.float64)
    draft_logits = target_logits[:1] + torch.randn(1, 50, generator=generator(seed + 50), dtype=torch.float64)
    target = torch.cat([filtered(row[None], **settings) for row in target_logits])
    q = filtered(draft_logits, **settings)
    assert int((q > 0).sum()) == 5
    # q as it is returned, and q as it is really drawn from.
    drawn = all_outcomes(lambda dice: _draw(dice, q[0], monkeypatch, settings))
    sampled = [drawn.get(x, 0.0) for x in range(50)]
    for proposals in (q[0].tolist(), sampled):
        law = law_by_formula(target, proposals, lambda x: q)
        assert torch.allclose(law, target[0], rtol=0, atol=1e-12)
        assert int((law > 1e-12).sum()) == 5


def _draw(dice: object, q: Tensor, monkeypatch: pytest.MonkeyPatch, settings: dict[str, float]) -> int:
    with monkeypatch.context() as patch:
        loaded_dice(patch, dice)
        return Sampler(SamplingParams(**settings), 0, (), 0).draw(q, 0)


@pytest.mark.parametrize("missing", [[0], [1, 3], [0, 1, 2, 3]])
def test_ids_that_the_draft_does_not_have(missing: list[int]) -> None:
    target, q = random_rows(2, 6, seed=11), random_rows(1, 6, seed=12)
    q[0, missing] = 0
    q /= q.sum()
    assert torch.allclose(law_by_formula(target, q[0].tolist(), lambda x: q), target[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("missing", [[0], [1, 3], [0, 1, 2, 3]])
def test_ids_that_the_target_does_not_want(missing: list[int]) -> None:
    target, q = random_rows(2, 6, seed=11), random_rows(1, 6, seed=12)
    target[0, missing] = 0
    target[0] /= target[0].sum()
    law = law_by_formula(target, q[0].tolist(), lambda x: q)
    assert torch.allclose(law, target[0], rtol=0, atol=1e-12)
    assert not law[missing].any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_enumeration_of_whole_rounds(k: int, soft: bool, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joint law of a round's tokens, run on to k + 1 with the target, is the product of the target's rows."""
    target, q = random_rows(k + 1, 3, seed=k), random_rows(k, 3, seed=k + 9, spread=3)

    def one_round(dice: object) -> tuple[int, ...]:
        drafted = [dice.choose(q[i].tolist()) for i in range(k)]
        with monkeypatch.context() as patch:
            loaded_dice(patch, dice)
            verdict = verify(target, torch.tensor(drafted), q if soft else None, None, rule)
        out = [*drafted[: verdict.num_accepted], verdict.next_token]
        while len(out) <= k:
            out.append(dice.choose(target[len(out)].tolist()))
        return tuple(out)

    law = all_outcomes(one_round)
    assert len(law) == 3 ** (k + 1)
    for tokens, probability in law.items():
        assert probability == pytest.approx(math.prod(float(target[i, t]) for i, t in enumerate(tokens)), abs=1e-12)


# --- verify() draws with these probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_verify_accepts_and_corrects_at_the_exact_thresholds(
    seed: int, soft: bool, uniforms: Callable[..., Uniforms]
) -> None:
    """verify() itself, driven with uniforms on both sides of every threshold that the formulas give."""
    target, q = random_rows(2, 6, seed), random_rows(1, 6, seed + 20, spread=3) if soft else None
    for x in range(6):
        drafted = torch.tensor([x])
        accept = float(accept_probs(target, drafted, q)[0])
        one_hot = one_hot_rows([x], 6)
        left = residual(target[0], one_hot[0] if q is None else q[0])
        for u, accepted in [(0.0, 1), (accept - 1e-12, 1), (accept, 0), (accept + 1e-12, 0)]:
            if u >= 1:
                continue
            for point, token in thresholds(target[1] if accepted else left):
                uniforms(u, point)
                assert verify(target, drafted, q, None, "token") == Verdict(accepted, token)


def thresholds(row: Tensor) -> list[tuple[float, int]]:
    """Uniforms just inside both ends of each token's share of [0, 1), with that token."""
    ends = (row / row.sum()).cumsum(0).tolist()
    starts = [0.0, *ends[:-1]]
    shares = [(a, b, t) for t, (a, b) in enumerate(zip(starts, ends, strict=True)) if b - a > 1e-9]
    return [(u, t) for a, b, t in shares for u in (a + 1e-12, b - 1e-12)]


@pytest.mark.parametrize("rule", RULES)
def test_each_decision_has_a_random_number_of_its_own(rule: str, uniforms: Callable[..., Uniforms]) -> None:
    """The residual was sampled with the very number that had decided the rejection: the draws must be independent."""
    target = random_rows(4, 5, seed=2)
    stub = uniforms(0.999, 0.999, 0.999, 0.3)
    verify(target, [0, 1, 2], None, None, rule)
    assert sum(math.prod(shape) for shape in stub.shapes) == 4


@pytest.mark.parametrize("rule", RULES)
def test_draws_come_from_the_generator_alone(rule: str) -> None:
    target, drafted = random_rows(4, 5, seed=2), [0, 1, 2]
    torch.manual_seed(1)
    first = [verify(target, drafted, None, generator(s), rule) for s in range(100)]
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    assert [verify(target, drafted, None, generator(s), rule) for s in range(100)] == first
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(set(first)) > 5


@pytest.mark.parametrize("rule", RULES)
def test_without_a_generator_the_global_one_is_used(rule: str) -> None:
    target = random_rows(4, 5, seed=2)
    torch.manual_seed(5)
    first = [verify(target, [0, 1, 2], None, None, rule) for _ in range(20)]
    torch.manual_seed(5)
    assert [verify(target, [0, 1, 2], None, None, rule) for _ in range(20)] == first


@pytest.mark.parametrize("rule", RULES)
def test_acceptance_and_correction_are_independent(rule: str) -> None:
    """Which token a draft proposed, whether it passes, and what follows: each pair of slots is independent."""
    target = rows(FOUR, FOUR, FOUR)
    one = generator(3)
    pairs: Counter[tuple[int, int]] = Counter()
    for _ in range(3000):
        verdict = verify(target, [0, 1], None, one, rule)
        out = [*range(verdict.num_accepted), verdict.next_token]
        if len(out) > 1:
            pairs[(out[0], out[1])] += 1
    second = [pairs[(0, t)] for t in range(4)]
    # Behind an accepted first token, the second still follows the target.
    assert chisquare(second, [p * sum(second) for p in FOUR]).pvalue > 1e-3


@pytest.mark.parametrize(
    "wanted", [pytest.param(20_000, id="20k"), pytest.param(200_000, id="200k", marks=pytest.mark.slow)]
)
def test_draft_that_always_proposes_the_same_symbol(wanted: int) -> None:
    """D1. An argmax draft was verified as though it had been sampled: its token came out too often."""
    target, drafted, one = rows(*[FOUR] * 9), torch.zeros(8, dtype=torch.long), generator(17)
    counts: Counter[int] = Counter()
    while counts.total() < wanted:
        verdict = verify(target, drafted, None, one)
        counts.update([0] * verdict.num_accepted)
        counts[verdict.next_token] += 1
    observed = [counts[t] for t in range(4)]
    assert chisquare(observed, [p * sum(observed) for p in FOUR]).pvalue > 1e-3


def test_draft_that_always_proposes_the_same_symbol_by_enumeration() -> None:
    """D1."""
    target = rows(FOUR, FOUR)
    assert torch.allclose(law_by_formula(target, [1, 0, 0, 0], lambda x: None), target[0], rtol=0, atol=1e-12)


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("soft", [True, False])
def test_inputs_are_unchanged(soft: bool, rule: str) -> None:
    """D5. A residual computed in place left the next request with a damaged distribution."""
    target, q, drafted = random_rows(4, 5, 1), random_rows(3, 5, 2) if soft else None, torch.tensor([0, 1, 2])
    copies = target.clone(), None if q is None else q.clone(), drafted.clone()
    for seed in range(30):
        verify(target, drafted, q, generator(seed), rule)
    assert torch.equal(target, copies[0])
    assert torch.equal(drafted, copies[2])
    assert q is None or torch.equal(q, copies[1])


@pytest.mark.parametrize("rule", RULES)
def test_read_only_arrays_are_enough(rule: str) -> None:
    """D5. Inference tensors cannot be written to: nothing may try."""
    with torch.inference_mode():
        target, q = random_rows(4, 5, 1), random_rows(3, 5, 2)
    assert verify(target, [0, 1, 2], q, generator(), rule).num_accepted <= 3


@pytest.mark.parametrize("temperature", [0.2, 1.0, 2.0])
def test_entropy_of_what_is_drawn(temperature: float) -> None:
    """D6. Output was more uniform (or more certain) than the temperature says."""
    p = torch.tensor([0.25] * 4 + [0.0] * 2, dtype=torch.float64)
    skewed = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    uniform = filtered(p.log()[None], temperature=temperature)[0]
    assert entropy(uniform) == pytest.approx(2.0, abs=1e-12)
    powered = skewed ** (1 / temperature)
    tempered = filtered(skewed.log()[None], temperature=temperature)[0]
    assert entropy(tempered) == pytest.approx(entropy(powered / powered.sum()), abs=1e-12)
    one, target = generator(4), torch.stack([tempered, tempered])
    out = Counter(_first(verify(target, [3], None, one), 3) for _ in range(1000))
    assert all(out[t] for t in range(4) if tempered[t] > 0.01)
    observed = torch.tensor([out[t] / out.total() for t in range(4)], dtype=torch.float64)
    assert entropy(observed) == pytest.approx(entropy(tempered), abs=0.06)


def _first(verdict: Verdict, drafted: int) -> int:
    return drafted if verdict.num_accepted else verdict.next_token


def entropy(p: Tensor) -> float:
    """In bits."""
    return float(-(p * p.clamp(min=1e-300).log2()).sum())


def test_entropies_by_hand() -> None:
    """D6. The values for p = (.4, .3, .2, .1), computed elsewhere to nine places."""
    skewed = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    assert entropy(filtered(skewed.log(), temperature=1.0)[0]) == pytest.approx(1.846439345, abs=1e-9)
    # squares of square roots: (.4, .3, .2, .1)^(1/2) / sum, and fifth powers / sum
    roots = [math.sqrt(x) for x in (0.4, 0.3, 0.2, 0.1)]
    fifth = [x**5 for x in (0.4, 0.3, 0.2, 0.1)]
    for temperature, weights in ((2.0, roots), (0.2, fifth)):
        by_hand = -sum(w / sum(weights) * math.log2(w / sum(weights)) for w in weights)
        assert entropy(filtered(skewed.log(), temperature=temperature)[0]) == pytest.approx(by_hand, abs=1e-12)


# --- edges of arithmetic ----------------------------------------------------------------------------------------------


def test_a_residual_of_zero_mass_is_the_target() -> None:
    p = random_rows(1, 5, seed=1)[0]
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, p * 1.5), p)


def test_residual_is_a_distribution_without_what_the_draft_covers() -> None:
    p, q = rows(FOUR)[0], rows((0.1, 0.6, 0.3, 0.0))[0]
    assert torch.allclose(residual(p, q), rows((0.4, 0, 0, 0.05))[0] / 0.45, rtol=0, atol=1e-15)


@pytest.mark.parametrize("target_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draft_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mixed_dtypes(target_dtype: torch.dtype, draft_dtype: torch.dtype) -> None:
    target, q = random_rows(4, 6, 1, dtype=target_dtype), random_rows(3, 6, 2, dtype=draft_dtype)
    exact = accept_probs(target.double(), torch.tensor([0, 1, 2]), q.double())
    got = accept_probs(target, torch.tensor([0, 1, 2]), q)
    coarse = min((target_dtype, draft_dtype), key=lambda d: -torch.finfo(d).eps)
    assert torch.allclose(got.double(), exact, rtol=2 * torch.finfo(coarse).eps, atol=0)
    for seed in range(20):
        verdict = verify(target, [0, 1, 2], q, generator(seed), RULES[seed % 2])
        assert 0 <= verdict.num_accepted <= 3
        assert 0 <= verdict.next_token < 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_an_impossible_token_is_never_drawn(dtype: torch.dtype, uniforms: Callable[..., Uniforms]) -> None:
    """A cumulative sum that rounding leaves short of u fell through to the last id of the vocabulary."""
    probs = torch.tensor([0, 0.1, 0, 0.7, 0.2, 0, 0], dtype=dtype)
    for u, token in [(0.0, 1), (math.nextafter(1, 0), 4), (0.5, 3)]:
        uniforms(u)
        assert sample(probs, None) == token
    long = torch.zeros(100_001, dtype=dtype)
    long[1:-1] = 1e-5
    uniforms(math.nextafter(1, 0))
    assert sample(long, None) == 99_999


def test_sampling_reaches_small_probabilities_in_a_large_vocabulary(uniforms: Callable[..., Uniforms]) -> None:
    """Summing 150k float32 probabilities in float32 loses the tail, and a float32 uniform has only 2^24 values."""
    probs = torch.full((150_000,), 1e-9, dtype=torch.float32)
    probs[0] = 1 - 150_000 * 1e-9
    total = probs.double().cumsum(0)
    for token in (1, 777, 149_999):
        uniforms(float((total[token] - 0.5e-9) / total[-1]))
        assert sample(probs, None) == token


def test_unnormalised_rows_are_drawn_in_proportion(uniforms: Callable[..., Uniforms]) -> None:
    for u, token in [(0.24, 0), (0.26, 1)]:
        uniforms(u)
        assert sample(rows((2, 6))[0], None) == token


# --- misuse -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "drafted", "probs", "names"),
    [
        ((3, 4), [0, 1, 2], None, "(3, 4)"),
        ((5, 4), [0, 1, 2], None, "(5, 4)"),
        ((4,), [0, 1, 2], None, "(4,)"),
        ((2, 4, 1), [0], None, "(2, 4, 1)"),
        ((2, 4), [[0]], None, "(1, 1)"),
        ((4, 4), [0, 1, 2], (2, 4), "(2, 4)"),
        ((4, 4), [0, 1, 2], (3, 5), "(3, 5)"),
        ((4, 4), [0, 1, 2], (4, 4), "(4, 4)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    target: tuple[int, ...], drafted: list[int], probs: tuple[int, ...] | None, names: str
) -> None:
    q = None if probs is None else torch.full(probs, 0.25)
    with pytest.raises(InputError) as error:
        verify(torch.full(target, 0.25), drafted, q, generator())
    assert names in str(error.value)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("token", [4, -1, 7])
def test_an_id_outside_the_vocabulary_is_an_error(token: int, soft: bool, rule: str) -> None:
    """A negative id would quietly be read from the end of the row."""
    with pytest.raises((InputError, RuntimeError), match=str(token)):
        verify(torch.full((2, 4), 0.25), [token], torch.full((1, 4), 0.25) if soft else None, generator(), rule)


def test_an_unknown_rule_is_named() -> None:
    with pytest.raises(InputError, match="rule 'tokens' is not known; use 'block' or 'token'"):
        verify(rows(FOUR), [], None, generator(), rule="tokens")
