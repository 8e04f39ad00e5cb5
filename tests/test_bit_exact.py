"""Bit-exact mode: a token's logits do not depend on how many tokens share its pass, so answers cannot split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from slipstream import InputError, SamplingParams, SpeculativeDecoding, load_model
from slipstream.models.base import Model
from slipstream.models.linear import make_linear
from slipstream.sampling import Sampler

WEIGHTS = ("fp32", "fp16", "int8")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Products are split among threads, and split otherwise for other numbers of rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(96, 64), (576, 1536), (300, 32)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_layer_gives_a_row_the_same_bits_in_any_company(
    weights: str, shape: tuple[int, int], threads: int, kernels: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = make_linear(torch.randn(shape, generator=generator), None, weights).bit_exact()
    x = torch.randn(70, shape[1], generator=generator)
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in range(1, 71):
        assert torch.equal(layer(x[:rows].contiguous()), alone[:rows])


def passes(model: Model, tokens: list[int], size: int) -> torch.Tensor:
    """Logits of all tokens, read ``size`` at a time."""
    cache = model.new_cache()
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return torch.cat([model.forward(chunk, cache, len(chunk)) for chunk in chunks])


@pytest.mark.parametrize("weights", WEIGHTS)
def test_logits_have_the_same_bits_for_1_to_16_rows(
    tiny_checkpoint: Path, weights: str, threads: int, kernels: str
) -> None:
    model = load_model(tiny_checkpoint, weights=weights).bit_exact()  # type: ignore[attr-defined]
    tokens = torch.randint(270, (48,), generator=torch.Generator().manual_seed(1)).tolist()
    one_by_one = passes(model, tokens, 1)
    for size in range(2, 17):
        assert torch.equal(passes(model, tokens, size), one_by_one)


@pytest.mark.real_weights
@pytest.mark.parametrize("weights", WEIGHTS)
def test_real_weights_have_the_same_bits_for_1_to_16_rows(smollm2: Path, weights: str, kernels: str) -> None:
    model = load_model(smollm2, weights=weights).bit_exact()  # type: ignore[attr-defined]
    tokens = torch.randint(40_000, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    one_by_one = passes(model, tokens, 1)
    for size in (2, 3, 5, 8, 16):
        assert torch.equal(passes(model, tokens, size), one_by_one)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_whole_answers_are_those_of_plain_decoding(
    tiny_checkpoint: Path, tiny_draft_checkpoint: Path, weights: str, temperature: float, kernels: str
) -> None:
    """Seeded sampling too: random numbers belong to positions, so the draft cannot shift them."""
    target = load_model(tiny_checkpoint, weights=weights)
    draft = load_model(tiny_draft_checkpoint)
    params = SamplingParams(temperature=temperature, max_new_tokens=60, seed=11, ignore_eos=True)
    plain = SpeculativeDecoding(target, bit_exact=True).complete([[5, 6, 7]], params)[0]
    for drafter in ("suffix", draft, target):
        for k in (1, 4, 7):
            fast = SpeculativeDecoding(target, drafter, k=k, bit_exact=True).complete([[5, 6, 7]], params)[0]
            assert fast.tokens == plain.tokens
    if weights != "int8":  # as a draft, int8 rounds coarser
        assert fast.stats.acceptance_rate > 0.9  # the target drafted for itself, with the same clocks


def test_coupled_draws_follow_the_distribution_and_mostly_agree() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    q = torch.tensor([0.45, 0.35, 0.1, 0.1], dtype=torch.float64)
    sampler = Sampler(SamplingParams(temperature=1.0), 0, (), seed=3, coupled=True)
    ours = torch.tensor([sampler.draw(p, position) for position in range(20_000)])
    theirs = torch.tensor([sampler.draw(q, position) for position in range(20_000)])
    assert chisquare(ours.bincount(minlength=4), 20_000 * p).pvalue > 1e-3
    overlap = float(torch.minimum(p, q).sum())
    assert float((ours == theirs).double().mean()) > overlap / (2 - overlap) - 0.02


def test_a_model_behind_the_adapter_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(InputError, match="bit_exact"):
        SpeculativeDecoding(model, bit_exact=True)
