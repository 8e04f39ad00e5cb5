"""The lean decoder against transformers, architecture by architecture."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream import InputError, load_model
from slipstream.models.base import PREFILL_CHUNK, feed
from slipstream.models.llama import LlamaModel, _Rope, unsupported

SIZES: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
#: Name -> (config class, what is special about it).
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama 2": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama 2, grouped": (LlamaConfig, {}),
    "llama, one key head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": (LlamaConfig, {"head_dim": 24}),
    "llama, other eps and theta": (
        LlamaConfig,
        {"rms_norm_eps": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "llama 3": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama, linear rope": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, yarn": (LlamaConfig, {"rope_parameters": YARN}),
    "llama, yarn with its own settings": (
        LlamaConfig,
        {"rope_parameters": {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.8, "truncate": False}},
    ),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 8}),
    "mistral, window": (MistralConfig, {"sliding_window": 6, "head_dim": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, window": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen2, window in upper layers": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen2, window switched off": (
        Qwen2Config,
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen2, yarn": (Qwen2Config, {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3, tied and biased": (Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, window": (
        Qwen3Config,
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
}

TOKENS = torch.randint(80, (48,), generator=torch.Generator().manual_seed(1)).tolist()


def theirs(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model in transformers, all of its parameters far from what they are initialised to."""
    kind, settings = ARCHITECTURES[name]
    config = kind(**{**SIZES, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0.0 if parameter.ndim == 2 else 0.7, 0.3)
    return model.to(dtype)


def ours(model: Any, weights: str = "fp32") -> LlamaModel:
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]  # as in checkpoints
    return LlamaModel(model.config.to_dict(), state.__getitem__, name="tiny", weights=weights)


@torch.no_grad()
def logits_of(model: Any, tokens: Sequence[int]) -> Tensor:
    out: Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return out


def error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.fixture(params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest, kernels: str) -> tuple[LlamaModel, Tensor]:
    """Our model, and transformers' logits of TOKENS."""
    reference = theirs(request.param)
    return ours(reference), logits_of(reference, TOKENS)


# --- one pass, several passes, and back -------------------------------------------------------------------------------


def test_prefill(pair: tuple[LlamaModel, Tensor]) -> None:
    model, expected = pair
    assert error(model.forward(TOKENS, model.new_cache(), len(TOKENS)), expected) < 1e-5


@pytest.mark.parametrize("steps", [[1], [2], [5], [1, 4, 2, 7, 3], [47, 1], [20, 28]])
def test_cached_steps(pair: tuple[LlamaModel, Tensor], steps: list[int]) -> None:
    model, expected = pair
    cache, rows = model.new_cache(), []
    for count in itertools.cycle(steps):
        start = cache.length
        if start == len(TOKENS):
            break
        part = TOKENS[start : start + count]
        rows.append(model.forward(part, cache, len(part)))
    assert error(torch.cat(rows), expected) < 1e-5


@pytest.mark.parametrize("length", [0, 1, 5, 6, 7, 20, 39, 40])
def test_after_truncation(pair: tuple[LlamaModel, Tensor], length: int) -> None:
    """Rejected tokens left their keys behind, or their positions."""
    model, expected = pair
    cache = model.new_cache()
    model.forward([*TOKENS[:40], 1, 2, 3, 4, 5, 6, 7, 8], cache, 1)
    cache.truncate(length)
    rest = TOKENS[length:]
    got = [model.forward(rest[:3], cache, min(3, len(rest))), model.forward(rest[3:], cache, len(rest[3:]))]
    assert error(torch.cat(got), expected[length:]) < 1e-5


def test_many_small_rounds_with_rejections(pair: tuple[LlamaModel, Tensor]) -> None:
    """As in decoding: five tokens in, some of them out again."""
    model, expected = pair
    cache = model.new_cache()
    for turn in itertools.count():
        start = cache.length
        right = TOKENS[start : start + 1 + turn % 4]
        if not right:
            break
        junk = [(t + 11) % 80 for t in TOKENS[: 5 - len(right)]]
        got = model.forward([*right, *junk], cache, len(right) + len(junk))[: len(right)]
        assert error(got, expected[start : start + len(right)]) < 1e-5
        cache.truncate(start + len(right))


@pytest.mark.parametrize("num_logits", [0, 1, 3, 48])
def test_logits_only_of_the_last_tokens(num_logits: int) -> None:
    reference = theirs("qwen3")
    model = ours(reference)
    cache = model.new_cache()
    got = model.forward(TOKENS, cache, num_logits)
    assert got.shape == (num_logits, 80)
    assert cache.length == len(TOKENS)
    if num_logits:
        assert error(got, logits_of(reference, TOKENS)[-num_logits:]) < 1e-5


def test_a_sequence_longer_than_the_first_cache() -> None:
    """Keys and positions were lost, or made for other positions, when cache and rotation table grew."""
    reference = theirs("mistral, window")
    reference.config.max_position_embeddings = 4096
    model = ours(reference)
    tokens = torch.randint(80, (700,), generator=torch.Generator().manual_seed(2)).tolist()
    expected, cache, rows = logits_of(reference, tokens), model.new_cache(), []
    for part in (tokens[:250], tokens[250:255], tokens[255:258], tokens[258:600], tokens[600:]):
        rows.append(model.forward(part, cache, len(part)))
    assert error(torch.cat(rows), expected) < 1e-5
    cache.truncate(255)
    assert error(model.forward(tokens[255:], cache, 100), expected[-100:]) < 1e-5


def test_feeding_in_chunks() -> None:
    reference = theirs("llama 2, grouped")
    model = ours(reference)
    tokens = torch.randint(80, (2 * PREFILL_CHUNK + 77,), generator=torch.Generator().manual_seed(2)).tolist()
    cache = model.new_cache()
    assert error(feed(model, tokens, cache, 4), logits_of(reference, tokens)[-4:]) < 1e-5
    assert cache.length == len(tokens)


def test_caches_of_one_model_are_apart() -> None:
    reference = theirs("llama 3")
    model = ours(reference)
    expected, other = logits_of(reference, TOKENS), logits_of(reference, TOKENS[::-1])
    one, two = model.new_cache(), model.new_cache()
    model.forward(TOKENS[:30], one, 1), model.forward(TOKENS[::-1][:30], two, 1)
    assert error(model.forward(TOKENS[30:], one, 18), expected[30:]) < 1e-5
    assert error(model.forward(TOKENS[::-1][30:], two, 18), other[30:]) < 1e-5


def test_a_pass_that_fails_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between two layers left the first ones a token ahead."""
    monkeypatch.setattr("slipstream.models.linear.library", lambda: None)
    reference = theirs("llama 2")
    model = ours(reference)
    cache = model.new_cache()
    model.forward(TOKENS[:20], cache, 1)
    head, model._head = model._head, _interrupt
    with pytest.raises(KeyboardInterrupt):
        model.forward([1, 2, 3], cache, 1)
    model._head = head
    cache.truncate(20)
    assert error(model.forward(TOKENS[20:], cache, 28), logits_of(reference, TOKENS)[20:]) < 1e-5


def _interrupt(_: Tensor) -> Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("length", [-1, 11])
def test_a_cache_cannot_be_cut_to_what_it_never_was(length: int) -> None:
    model = ours(theirs("llama 2"))
    cache = model.new_cache()
    model.forward(TOKENS[:10], cache, 1)
    with pytest.raises(InputError, match=f"cut to {length}"):
        cache.truncate(length)


# --- what makes each architecture different, makes a difference here --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("llama 3", {"rope_parameters": None}),
        ("llama, linear rope", {"rope_parameters": None}),
        ("llama, yarn", {"rope_parameters": None}),
        ("llama, yarn", {"rope_parameters": {**YARN, "attention_factor": 1.0}}),
        ("llama, other eps and theta", {"rms_norm_eps": 1e-6}),
        ("mistral, window", {"sliding_window": None}),
        ("mistral, window", {"sliding_window": 7}),
        ("qwen2, window", {"use_sliding_window": False}),
        ("qwen2, window in upper layers", {"layer_types": ["sliding_attention"] * 3}),
        ("qwen3, window", {"layer_types": None, "max_window_layers": 2}),
    ],
)
def test_each_setting_matters(name: str, without: dict[str, Any]) -> None:
    """The tests above would pass without the setting if these logits did not depend on it."""
    reference = theirs(name)
    config = {**reference.config.to_dict(), **without}
    model = LlamaModel(config, reference.state_dict().__getitem__, name="tiny")
    assert error(model.forward(TOKENS, model.new_cache(), 48), logits_of(reference, TOKENS)) > 1e-4


@pytest.mark.parametrize("part", ["q_proj.bias", "v_proj.bias", "q_norm.weight", "k_norm.weight", "lm_head.weight"])
def test_each_optional_weight_matters(part: str) -> None:
    name = "qwen3" if "norm" in part or "head" in part else "qwen2"
    reference = theirs(name)
    state = {key: value * 2 if key.endswith(part) else value for key, value in reference.state_dict().items()}
    model = LlamaModel(reference.config.to_dict(), state.__getitem__, name="tiny")
    assert error(model.forward(TOKENS, model.new_cache(), 48), logits_of(reference, TOKENS)) > 1e-3


def test_older_spellings_of_a_config() -> None:
    """rope_theta and rope_scaling with "type", as in checkpoints from before transformers 5."""
    reference = theirs("llama, linear rope")
    config = reference.config.to_dict()
    del config["rope_parameters"]
    config |= {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    model = LlamaModel(config, reference.state_dict().__getitem__, name="tiny")
    assert error(model.forward(TOKENS, model.new_cache(), 48), logits_of(reference, TOKENS)) < 1e-5


REAL_ROPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Llama 2 7B": (LlamaConfig, {"head_dim": 128}),
    "Llama 3 8B": (LlamaConfig, {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "Llama 3.1 8B": (
        LlamaConfig,
        {
            "head_dim": 128,
            "rope_parameters": {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
        },
    ),
    "Llama 3.2 1B": (
        LlamaConfig,
        {
            "head_dim": 64,
            "rope_parameters": {**LLAMA3, "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 8192},
        },
    ),
    "SmolLM2": (LlamaConfig, {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "Mistral 7B": (MistralConfig, {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen 2.5": (Qwen2Config, {"hidden_size": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "Qwen 2.5, long": (
        Qwen2Config,
        {
            "hidden_size": 512,
            "rope_parameters": {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
        },
    ),
    "yarn by 10": (
        LlamaConfig,
        {"head_dim": 96, "rope_parameters": {**YARN, "factor": 10.0, "original_max_position_embeddings": 4096}},
    ),
    "linear by 3": (
        LlamaConfig,
        {"head_dim": 80, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    ),
}


@pytest.mark.parametrize("name", REAL_ROPES)
def test_rotations_of_real_models_at_far_positions(name: str) -> None:
    """A frequency that is off in its last bit turns a key by a wrong 1e-3 at position 16,000; short tests miss it."""
    kind, settings = REAL_ROPES[name]
    config = kind(**{**SIZES, "num_attention_heads": 4, "max_position_embeddings": 131072, **settings})
    positions = torch.tensor([[0, 1, 255, 256, 4095, 16_000, 40_000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    values = config.to_dict()
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    rope = _Rope(values, head_dim, torch.float32, torch.device("cpu"))
    for column, position in enumerate(positions[0].tolist()):
        table = rope.rows(position, position + 1)
        half = head_dim // 2
        assert torch.allclose(table[0, 0], cos[0, column], rtol=0, atol=1e-6)
        assert torch.allclose(table[1, 0, half:], sin[0, column, half:], rtol=0, atol=1e-6)
        assert torch.allclose(table[1, 0, :half], -sin[0, column, :half], rtol=0, atol=1e-6)


# --- other types ------------------------------------------------------------------------------------------------------


def exact_norm(self: Any, x: Tensor) -> Tensor:
    """RMSNorm in the type of its input; transformers computes it in float32 whatever that is."""
    eps = getattr(self, "variance_epsilon", None)
    normed: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.weight
    return normed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not an accident of rounding: in float64 the two agree to 1e-9."""
    reference = theirs(name, torch.float64)
    for module in reference.modules():
        if type(module).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(module), "forward", exact_norm)
    model = ours(reference, "fp64")
    got = model.forward(TOKENS, model.new_cache(), 48)
    assert got.dtype == torch.float64
    assert error(got, logits_of(reference, TOKENS)) < 1e-9


def test_bfloat16() -> None:
    reference = theirs("qwen2")
    model = ours(reference, "bf16")
    got = model.forward(TOKENS, model.new_cache(), 48)
    assert got.dtype == torch.bfloat16
    assert error(got, logits_of(reference, TOKENS)) < 0.1
    assert error(got, logits_of(theirs("qwen2", torch.bfloat16), TOKENS)) < 0.1


# --- what it is not made for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "gemma"}, "gemma"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {**YARN, "mscale": 0.7}}, "mscale"),
        ({"partial_rotary_factor": 0.5}, "rotary"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_what_it_cannot_run_is_named(change: dict[str, Any], word: str) -> None:
    config = LlamaConfig(**SIZES).to_dict()
    assert unsupported(config) is None
    reason = unsupported({**config, **change})
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_it_can_run(name: str) -> None:
    kind, settings = ARCHITECTURES[name]
    assert unsupported(kind(**{**SIZES, **settings}).to_dict()) is None


# --- real weights -----------------------------------------------------------------------------------------------------


@pytest.mark.real_weights
def test_smollm2(smollm2: Path) -> None:
    """SmolLM2-135M: prefill, cached steps and after truncation, within 1e-5 of transformers' float32."""
    if not smollm2.is_dir():
        pytest.skip("only the .gguf file is in the cache, and transformers takes half a minute to read it")
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model: Any = load_model(smollm2, weights="fp32")
    text = "The capital of France is Paris, and the capital of Germany is Berlin; the capital of Italy is"
    tokens = model.tokenizer(text)["input_ids"]
    expected = logits_of(reference, tokens)
    assert error(model.forward(tokens, model.new_cache(), len(tokens)), expected) < 1e-5
    cache = model.new_cache()
    model.forward([*tokens[:10], 5, 6, 7], cache, 1)
    cache.truncate(10)
    rows = [model.forward(tokens[i : i + 3], cache, len(tokens[i : i + 3])) for i in range(10, len(tokens), 3)]
    assert error(torch.cat(rows), expected[10:]) < 1e-5
    assert model.tokenizer.decode([int(rows[-1][-1].argmax())]) == " Rome"
