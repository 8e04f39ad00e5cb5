"""The native kernels against float64, against torch's own operations, and where they cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.models.llama import LlamaModel
from slipstream.models.native import build
from slipstream.models.native.panels import PanelLinear
from slipstream.models.native.stack import Rows
from test_llama import ARCHITECTURES, TOKENS, error, ours, theirs

needs_native = pytest.mark.skipif(build.library() is None, reason=f"no native kernels here: {build.why_not()}")
TOLERANCE = {"fp32": 1e-6, "fp16": 4e-4, "int8": 1e-2}
SHAPES = [(5, 7), (40, 24), (33, 1500), (160, 577)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_native
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_right_for_every_number_of_rows(kind: str, shape: tuple[int, int], with_bias: bool) -> None:
    weight, bias = random(*shape), random(shape[0], seed=1)
    layer = PanelLinear.pack(weight, bias if with_bias else None, kind)
    for rows in (*range(1, 14), 40):
        x = random(rows, shape[1], seed=rows)
        expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
        assert float((layer(x) - expected).norm() / expected.norm()) < TOLERANCE[kind]


@needs_native
def test_int8_rounds_each_group_of_inputs_by_itself() -> None:
    """One large weight must not cost the others, 256 inputs away, their digits."""
    weight = random(16, 512) / 100
    weight[:, 0] = 100
    x = random(3, 512)
    x[:, :256] = 0
    got, expected = PanelLinear.pack(weight, None, "int8")(x), x.double() @ weight.double().T
    assert float((got - expected).norm() / expected.norm()) < 8e-3


@needs_native
def test_int8_sums_do_not_overflow() -> None:
    layer = PanelLinear.pack(torch.ones(16, 9000), None, "int8")
    assert torch.allclose(layer(torch.full((2, 9000), 3.0)), torch.tensor(27_000.0), rtol=1e-5)


@needs_native
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 24])
def test_what_is_not_finite_shows_and_stays_in_its_row(kind: str, odd: float, at: int) -> None:
    layer, x = PanelLinear.pack(random(20, 25), None, kind), random(3, 25)
    expected = layer(x)
    x[1, at] = odd
    got = layer(x)
    assert not got[1].isfinite().any()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


@needs_native
@pytest.mark.parametrize("kind", TOLERANCE)
def test_a_row_of_zeros_is_the_bias(kind: str) -> None:
    bias = random(20)
    assert torch.equal(PanelLinear.pack(random(20, 25), bias, kind)(torch.zeros(1, 25))[0], bias)


@needs_native
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_has_the_same_bits_in_any_chunk(name: str, threads: int) -> None:
    """Of a prompt too, so that a cached prefix changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = ours(theirs(name))
        whole = model.forward(TOKENS, model.new_cache(), len(TOKENS))
        for size in (1, 3, 7, 20):
            cache = model.new_cache()
            parts = [TOKENS[i : i + size] for i in range(0, len(TOKENS), size)]
            assert torch.equal(torch.cat([model.forward(part, cache, len(part)) for part in parts]), whole)
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_small_weights_agree_with_torch_own_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = theirs("qwen3, window")
    native = ours(reference, kind)
    with monkeypatch.context() as patch:
        patch.setattr("slipstream.models.linear.library", lambda: None)
        fallback = ours(reference, kind)
    got, expected = (m.forward(TOKENS, m.new_cache(), len(TOKENS)) for m in (native, fallback))
    assert error(got, expected) < (1e-5 if kind == "fp16" else 0.05)


def stacked(model: LlamaModel, tokens: list[int], rows: Rows) -> Tensor:
    """One pass over rows of several sequences."""
    assert model._stack is not None
    return model._stack.forward(model._embed(tokens), rows, model._rope.by_position(64), len(tokens))


@needs_native
def test_rows_of_several_sequences_share_a_pass() -> None:
    model = ours(theirs("qwen2"))
    caches = [model.new_cache() for _ in range(3)]
    prompts = [TOKENS[:5], TOKENS[5:25], TOKENS[30:41]]
    for cache, prompt in zip(caches, prompts, strict=True):
        model.forward(prompt, cache, 1)
        cache.reserve(64)
    alone = [model.forward([1, 2], cache, 2) for cache in caches]
    for cache, prompt in zip(caches, prompts, strict=True):
        cache.truncate(len(prompt))
    rows = [(cache, cache.length + i) for cache in caches for i in range(2)]
    together = stacked(model, [1, 2] * 3, Rows([c for c, _ in rows], [p for _, p in rows]))
    assert torch.equal(together, torch.cat(alone))


@needs_native
def test_layers_can_be_run_in_two_parts() -> None:
    model = ours(theirs("qwen3"))
    whole = model.forward(TOKENS, model.new_cache(), len(TOKENS))
    stack, cache = model._stack, model.new_cache()
    assert stack is not None
    cache.reserve(64)
    x = model._embed(TOKENS)
    rows, turns = Rows([cache] * len(TOKENS), range(len(TOKENS))), model._rope.by_position(64)
    assert len(stack.forward(x, rows, turns, 0, layers=(0, 2))) == 0
    assert torch.equal(stack.forward(x, rows, turns, len(TOKENS), layers=(2, 3)), whole)


def test_nan_weights_give_nan_logits_as_torch_does() -> None:
    reference = theirs("llama 2")
    with torch.no_grad():
        reference.model.layers[1].mlp.down_proj.weight[3, 4] = float("nan")
    model = ours(reference)
    assert model.forward(TOKENS, model.new_cache(), len(TOKENS)).isnan().all()


# --- where the kernels come from --------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], str | None]:
    """Why there are no kernels, found out anew, with an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def ask() -> str | None:
        build.library.cache_clear()
        return build.why_not()

    yield ask
    monkeypatch.undo()
    build.library.cache_clear()


def test_the_switch(fresh: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "0")
    assert fresh() == "SLIPSTREAM_NATIVE=0 is set"


def test_without_a_compiler(fresh: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert fresh() == "there is no C++ compiler (c++, g++ or clang++)"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert fresh() == "CXX=no-such-compiler is not found"


def test_with_a_compiler_that_fails(
    fresh: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "broken"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no disk" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    reason = fresh()
    assert reason is not None
    assert reason.endswith("failed: error: no disk")
    assert not list((tmp_path / "cache").rglob("*kernels-*"))  # nothing half made is left


@needs_native
def test_they_are_compiled_once(fresh: Callable[[], str | None], tmp_path: Path) -> None:
    assert fresh() is None
    (made,) = (tmp_path / "cache" / "slipstream-kernels").iterdir()
    before = made.stat().st_mtime_ns
    assert fresh() is None
    assert made.stat().st_mtime_ns == before


def test_a_model_says_when_it_does_without(
    fresh: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    from slipstream import load_model

    monkeypatch.setenv("CXX", "no-such-compiler")
    assert fresh() is not None
    with pytest.warns(UserWarning, match=r"CXX=no-such-compiler is not found, so decoding uses torch's own kernels"):
        assert load_model(tiny_checkpoint).weights == "fp16"
