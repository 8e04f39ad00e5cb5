"""The adapter for any causal LM of transformers: tiny random models, compared with transformers' own passes.

The reference is always the model itself on the whole text at once and without a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.models.huggingface import HuggingFaceModel, cannot_roll_back, why_unsupported

V = 96
WINDOW = 16
LIMIT = 128
JUNK = (5, 6, 7, 8, 9)
COMMON = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LLAMA_LIKE = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LIMIT,
}
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Architecture:
    """A model class by its family's prefix, the arguments of a tiny config, and how exact its own arithmetic is."""

    prefix: str
    config: dict[str, Any] = field(default_factory=lambda: dict(LLAMA_LIKE))
    #: Passes of different widths agree to this in float64. 1e-9 unless the family's own code computes its attention
    #: weights or positional biases in float32 whatever the model's type is.
    tolerance: float = 1e-9
    suffix: str = "ForCausalLM"
    config_suffix: str = "Config"


def llama_like(prefix: str, tolerance: float = 1e-9, **changes: Any) -> Architecture:
    return Architecture(prefix, LLAMA_LIKE | changes, tolerance)


GPT2 = COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LIMIT}
FALCON = COMMON | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LIMIT,
}
ARCHITECTURES = {
    "llama": llama_like("Llama"),
    "qwen2": llama_like("Qwen2"),
    "qwen2-window": llama_like("Qwen2", use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    "qwen3": llama_like("Qwen3", head_dim=8),
    "mistral": llama_like("Mistral", sliding_window=WINDOW),
    "gemma2": llama_like("Gemma2", 1e-5, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=MIXED),
    "gemma3": Architecture(
        "Gemma3",
        LLAMA_LIKE | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED},
        config_suffix="TextConfig",
    ),
    "phi": llama_like("Phi", partial_rotary_factor=0.5),
    "phi3": llama_like("Phi3"),
    "phi3-window": llama_like("Phi3", sliding_window=WINDOW),
    "olmo": llama_like("Olmo"),
    "olmo2": llama_like("Olmo2"),
    "granite": llama_like("Granite", logits_scaling=2.0, attention_multiplier=0.3),
    "cohere": llama_like("Cohere", logit_scale=1.0),
    "cohere2": llama_like("Cohere2", logit_scale=1.0, sliding_window=WINDOW, layer_types=MIXED),
    "mixtral": llama_like("Mixtral", num_local_experts=4, experts_implementation="eager"),
    "gpt2": Architecture("GPT2", GPT2, suffix="LMHeadModel"),
    "gpt-neox": Architecture(
        "GPTNeoX", {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}
    ),
    "falcon": Architecture("Falcon", FALCON),
    "falcon-alibi": Architecture("Falcon", FALCON | {"alibi": True}),
    "bloom": Architecture("Bloom", COMMON | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, 1e-5),
    "mpt": Architecture("Mpt", COMMON | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": LIMIT}, 1e-5),
    "opt": Architecture(
        "OPT",
        COMMON
        | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"word_embed_proj_dim": 32, "max_position_embeddings": LIMIT},
    ),
}
WINDOWED = ["qwen2-window", "mistral", "gemma2", "gemma3", "phi3-window", "cohere2"]


@torch.no_grad()
def randomise(model: Any) -> Any:
    """Large weights in the layers and small embeddings, so that greedy text is not an echo of its last token."""
    generator = torch.Generator().manual_seed(0)
    embedding = model.get_input_embeddings().weight
    for parameter in model.parameters():
        if parameter.dim() > 1:
            scale = 0.1 if parameter is embedding else 0.4
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def build(architecture: Architecture, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    config_class = getattr(transformers, architecture.prefix + architecture.config_suffix)
    model_class = getattr(transformers, architecture.prefix + architecture.suffix)
    return randomise(model_class(config_class(**architecture.config | changes)).to(dtype)).eval()


@cache
def model_of(name: str) -> Any:
    """One shared model a family: the adapter must leave it as it is anyway."""
    return build(ARCHITECTURES[name])


def text(length: int, seed: int = 1) -> list[int]:
    return torch.randint(3, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference(model: Any, tokens: list[int]) -> Tensor:
    """Logits (len(tokens), V) of one pass over everything."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def junk_round(adapter: HuggingFaceModel, kv: Any, size: int) -> None:
    """A round whose tokens are all rejected."""
    length = kv.length
    adapter.forward(JUNK[:size], kv, size)
    kv.truncate(length)
    assert kv.length == length


def read(adapter: HuggingFaceModel, kv: Any, tokens: list[int], step: int, junk: int) -> Tensor:
    """Logits of all ``tokens``, read ``step`` at a time with a rejection of ``junk`` tokens before each step."""
    rows = []
    for start in range(0, len(tokens), step):
        if junk:
            junk_round(adapter, kv, junk)
        part = tokens[start : start + step]
        rows.append(adapter.forward(part, kv, len(part)))
    return torch.cat(rows)


def greedy(adapter: HuggingFaceModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Plain greedy decoding, disturbed by a rejected draft of another size before each token."""
    kv, tokens = adapter.new_cache(), list(prompt)
    adapter.forward(tokens[:-1], kv, 1)
    for step in range(new_tokens):
        junk_round(adapter, kv, 1 + step % len(JUNK))
        tokens.append(int(adapter.forward(tokens[-1:], kv, 1)[-1].argmax()))
    return tokens[len(prompt) :]


def generate(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small only lose by threads, and lose much on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=ARCHITECTURES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# --- exactness -------------------------------------------------------------------------------------------------------


def test_greedy_equals_transformers_generate(name: str) -> None:
    model, prompt = model_of(name), text(7, seed=2)
    expected = generate(model, prompt, 40)
    assert len(set(expected)) > 3, "the model repeats itself: the comparison says little"
    assert greedy(HuggingFaceModel(model), prompt, 40) == expected


def test_cached_steps_equal_a_full_pass(name: str) -> None:
    model, tokens, tolerance = model_of(name), text(50), ARCHITECTURES[name].tolerance
    adapter = HuggingFaceModel(model)
    kv = adapter.new_cache()
    logits = read(adapter, kv, tokens, step=3, junk=4)
    assert logits.dtype == torch.float64
    assert logits.shape == (50, adapter.vocab_size) == (50, V)
    torch.testing.assert_close(logits, reference(model, tokens), rtol=0, atol=tolerance)
    assert kv.length == 50

    kv.truncate(0)
    assert kv.length == 0
    other = text(20, seed=2)
    torch.testing.assert_close(read(adapter, kv, other, 20, 0), reference(model, other), rtol=0, atol=tolerance)


def test_two_caches_do_not_disturb_each_other(name: str) -> None:
    model, tolerance = model_of(name), ARCHITECTURES[name].tolerance
    adapter = HuggingFaceModel(model)
    texts = [text(24, seed=3), text(24, seed=4)]
    caches, rows = [adapter.new_cache(), adapter.new_cache()], [[], []]
    for start in range(0, 24, 4):
        for which in (0, 1):
            rows[which].append(adapter.forward(texts[which][start : start + 4], caches[which], 4))
        junk_round(adapter, caches[0], 2)
    for which in (0, 1):
        torch.testing.assert_close(torch.cat(rows[which]), reference(model, texts[which]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("junk", [1, 5])
@pytest.mark.parametrize("name", WINDOWED)
def test_rejections_around_the_window(name: str, junk: int) -> None:
    """A cache of transformers drops what leaves the window, and a rejected token pushes out keys that are needed again.

    Every position of 4 W tokens is reached by a rejection and a step of one, W - k .. W + k included.
    """
    model, tokens = model_of(name), text(4 * WINDOW)
    adapter = HuggingFaceModel(model)
    logits = read(adapter, adapter.new_cache(), tokens, step=1, junk=junk)
    torch.testing.assert_close(logits, reference(model, tokens), rtol=0, atol=ARCHITECTURES[name].tolerance)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_window_is_still_applied(attention: str) -> None:
    """With one layer, the token W - 1 before a position counts there, and the one W before does not."""
    adapter = HuggingFaceModel(build(ARCHITECTURES["mistral"], num_hidden_layers=1, attn_implementation=attention))
    tokens, last = text(40), 39

    def logits(changed: int | None) -> Tensor:
        ids = [(V - 1 if i == changed else token) for i, token in enumerate(tokens)]
        return read(adapter, adapter.new_cache(), ids, step=3, junk=2)[last]

    assert torch.equal(logits(last - WINDOW), logits(None))
    assert not torch.allclose(logits(last - WINDOW + 1), logits(None))


# --- rotary frequencies that change with the length ------------------------------------------------------------------

SWITCH = 20
LONGROPE = {
    "original_max_position_embeddings": SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": LIMIT / SWITCH,
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
}


@pytest.fixture(scope="module")
def longrope() -> Any:
    return build(ARCHITECTURES["phi3"], **LONGROPE)


@pytest.mark.parametrize("step", [1, 3, 7, 40])
@pytest.mark.parametrize("junk", [0, 3])
def test_a_rope_switch_inside_a_step(longrope: Any, step: int, junk: int) -> None:
    """Phi-3's long-context models rotate all keys anew once a text is longer than the original context.

    A verification pass across that border gave every row the long frequencies and old keys the short ones; each row
    must come out as if its token had been the last.
    """
    tokens = text(40)
    adapter = HuggingFaceModel(longrope)
    expected = torch.stack([reference(longrope, tokens[: end + 1])[-1] for end in range(40)])
    kv = adapter.new_cache()
    torch.testing.assert_close(read(adapter, kv, tokens, step, junk), expected, rtol=0, atol=1e-9)

    kv.truncate(SWITCH - 2)  # back to the short frequencies
    torch.testing.assert_close(adapter.forward(tokens[SWITCH - 2 :], kv, 5), expected[-5:], rtol=0, atol=1e-9)
    kv.truncate(SWITCH - 2)
    row = adapter.forward(tokens[SWITCH - 2 : SWITCH], kv, 1)
    torch.testing.assert_close(row, expected[SWITCH - 1 : SWITCH], rtol=0, atol=1e-9)


def test_a_rope_switch_as_in_generate(longrope: Any) -> None:
    assert greedy(HuggingFaceModel(longrope), text(7), 30) == generate(longrope, text(7), 30)


# --- the contract of forward and of the cache ------------------------------------------------------------------------


@pytest.fixture
def llama() -> HuggingFaceModel:
    return HuggingFaceModel(model_of("llama"))


def test_only_the_wanted_rows(llama: HuggingFaceModel) -> None:
    tokens = text(6)
    expected = reference(llama.model, tokens)
    for wanted in range(7):
        logits = llama.forward(tokens, llama.new_cache(), wanted)
        assert logits.shape == (wanted, V)
        torch.testing.assert_close(logits, expected[6 - wanted :], rtol=0, atol=1e-9)


def test_the_output_layer_sees_only_the_wanted_rows() -> None:
    """transformers takes 0 for "all", which for a long prompt is gigabytes of logits that nobody wants."""
    model, seen = build(ARCHITECTURES["llama"]), []
    model.lm_head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
    adapter = HuggingFaceModel(model)
    for wanted in (0, 1, 3):
        adapter.forward(text(6), adapter.new_cache(), wanted)
    assert seen == [1, 1, 3]


def test_only_the_wanted_rows_where_forward_cannot_choose(llama: HuggingFaceModel) -> None:
    tokens = text(6)
    llama._has_logits_to_keep = False
    for wanted in (0, 2):
        logits = llama.forward(tokens, llama.new_cache(), wanted)
        torch.testing.assert_close(logits, reference(llama.model, tokens)[6 - wanted :], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("tokens", "wanted"), [([], 0), ([1, 2], 3), ([1, 2], -1)])
def test_wrong_number_of_rows(llama: HuggingFaceModel, tokens: list[int], wanted: int) -> None:
    with pytest.raises(ValueError, match="rows of logits"):
        llama.forward(tokens, llama.new_cache(), wanted)


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_to_an_impossible_length(llama: HuggingFaceModel, length: int) -> None:
    kv = llama.new_cache()
    llama.forward([3, 4, 5], kv, 1)
    with pytest.raises(ValueError, match="cannot truncate a cache of 3 tokens"):
        kv.truncate(length)
    assert kv.length == 3


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_pass_leaves_the_cache_usable(layer: int) -> None:
    """Ctrl-C in the middle of a pass: some layers have appended the new keys, others not."""
    model, tokens = build(ARCHITECTURES["gemma3"]), text(30)
    adapter = HuggingFaceModel(model)
    kv = adapter.new_cache()
    adapter.forward(tokens[:20], kv, 1)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[layer].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        adapter.forward(JUNK, kv, 1)
    hook.remove()
    assert kv.length == 20
    kv.truncate(19)
    logits = adapter.forward(tokens[19:], kv, 11)
    torch.testing.assert_close(logits, reference(model, tokens)[19:], rtol=0, atol=1e-9)


def test_an_interrupt_between_a_key_and_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is left with more keys than values, and no cut by a number of tokens puts that right."""
    model, tokens = model_of("llama"), text(20)
    adapter = HuggingFaceModel(model)
    kv = adapter.new_cache()
    adapter.forward(tokens[:10], kv, 1)

    def half_an_update(layer: Any, keys: Tensor, *_: Any, **__: Any) -> None:
        layer.keys = torch.cat([layer.keys, keys], dim=-2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DynamicLayer, "update", half_an_update)
        with pytest.raises(KeyboardInterrupt):
            adapter.forward(JUNK, kv, 1)
    assert kv.length == 10
    logits = adapter.forward(tokens[10:], kv, 10)
    torch.testing.assert_close(logits, reference(model, tokens)[10:], rtol=0, atol=1e-9)


def test_logits_keep_the_floating_type_of_the_model() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        adapter = HuggingFaceModel(build(ARCHITECTURES["llama"], dtype))
        assert adapter.forward([3, 4], adapter.new_cache(), 1).dtype == dtype


def test_logits_are_ordinary_tensors_and_torch_is_left_alone(llama: HuggingFaceModel) -> None:
    logits = llama.forward([3, 4], llama.new_cache(), 2)
    assert not logits.requires_grad
    assert not logits.is_inference()
    assert torch.is_grad_enabled()
    logits.requires_grad_().sum().backward()


def dropout_modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_dropout_is_off_and_training_mode_is_given_back() -> None:
    model = build(ARCHITECTURES["gpt2"])
    expected = reference(model, text(10))
    model.train()
    model.transformer.h[1].eval()  # a part that its owner has frozen
    before = dropout_modes(model)
    adapter = HuggingFaceModel(model)
    logits = adapter.forward(text(10), adapter.new_cache(), 10)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)
    assert dropout_modes(model) == before
    with pytest.raises(IndexError):
        adapter.forward([V], adapter.new_cache(), 1)
    assert dropout_modes(model) == before


# --- what the model says of itself -----------------------------------------------------------------------------------


def test_the_adapter_is_a_model(llama: HuggingFaceModel) -> None:
    model: Model = llama
    assert (model.name, model.vocab_size, model.embedding_size) == ("LlamaForCausalLM", V, V)
    assert (model.device, model.tokenizer, model.eos_token_ids) == (torch.device("cpu"), None, ())
    named = HuggingFaceModel(llama.model, name="tiny", tokenizer="a tokenizer")
    assert (named.name, named.tokenizer) == ("tiny", "a tokenizer")


def test_rows_are_counted_not_read_from_the_config() -> None:
    model = build(ARCHITECTURES["llama"])
    model.resize_token_embeddings(V + 32, mean_resizing=False)
    model.config.vocab_size = V
    adapter = HuggingFaceModel(model)
    assert (adapter.vocab_size, adapter.embedding_size) == (V + 32, V + 32)
    assert adapter.forward([V + 31], adapter.new_cache(), 1).shape == (1, V + 32)


@pytest.mark.parametrize(
    ("name", "limit"), [("llama", LIMIT), ("gpt2", LIMIT), ("mpt", LIMIT), ("bloom", None), ("falcon-alibi", None)]
)
def test_max_positions(name: str, limit: int | None) -> None:
    assert HuggingFaceModel(model_of(name)).max_positions == limit


def test_bloom_has_no_limit_though_its_config_tells_a_training_length() -> None:
    assert HuggingFaceModel(build(ARCHITECTURES["bloom"], seq_length=2048)).max_positions is None


@dataclass
class FakeTokenizer:
    eos_token_id: int | None


def test_eos_token_ids() -> None:
    model = build(ARCHITECTURES["llama"])
    assert HuggingFaceModel(model).eos_token_ids == ()
    assert HuggingFaceModel(model, tokenizer=FakeTokenizer(None)).eos_token_ids == ()
    assert HuggingFaceModel(model, tokenizer=FakeTokenizer(4)).eos_token_ids == (4,)
    model.config.eos_token_id = 5
    assert HuggingFaceModel(model, tokenizer=FakeTokenizer(4)).eos_token_ids == (5,)
    model.generation_config.eos_token_id = [6, 7]
    assert HuggingFaceModel(model, tokenizer=FakeTokenizer(4)).eos_token_ids == (6, 7)


def test_a_multimodal_model_is_described_by_its_text_part() -> None:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=ARCHITECTURES["gemma3"].config | {"eos_token_id": 3},
        vision_config=vision | {"image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        eos_token_id=3,
    )
    assert why_unsupported(config) is None
    model = randomise(transformers.Gemma3ForConditionalGeneration(config).double()).eval()
    adapter = HuggingFaceModel(model)
    assert (adapter.vocab_size, adapter.max_positions, adapter.eos_token_ids) == (V, LIMIT, (3,))
    tokens = text(3 * WINDOW)
    logits = read(adapter, adapter.new_cache(), tokens, step=5, junk=3)
    torch.testing.assert_close(logits, reference(model, tokens), rtol=0, atol=1e-9)


# --- quantised and dispatched models ---------------------------------------------------------------------------------


def forbid_moving(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("a quantised or dispatched model cannot be moved or cast")

    for method in ("to", "float", "double", "half", "bfloat16", "cpu", "_apply"):
        monkeypatch.setattr(model, method, refuse)


class PackedLinear(nn.Module):
    """A layer as quantisation leaves it: the weights packed into bytes of another shape, the sizes beside them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        self.scale = float(weight.abs().max()) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8).view(-1, 1), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ (self.weight.view(self.out_features, self.in_features).to(rows.dtype) * self.scale).T


def fbgemm_linear(layer: nn.Linear) -> nn.Module:
    """torch's own packed layer, as dynamic quantisation puts it in: ``weight`` is a method of it."""
    packed = torch.ao.nn.quantized.dynamic.Linear(layer.in_features, layer.out_features, dtype=torch.float16)
    packed.set_weight_bias(layer.weight.detach(), layer.bias)
    return packed


def quantised(model: Any, replacement: Callable[[nn.Linear], nn.Module]) -> Any:
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, child_name, replacement(child))
    return model


@pytest.mark.parametrize(
    ("replacement", "dtype", "tolerance"),
    [(PackedLinear, torch.float64, 1e-9), (fbgemm_linear, torch.float32, 1e-4)],
)
def test_a_quantised_model(
    replacement: Callable[[nn.Linear], nn.Module],
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if replacement is fbgemm_linear and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no packed layers for this processor")
    model = quantised(build(ARCHITECTURES["llama"], dtype), replacement)
    forbid_moving(model, monkeypatch)
    adapter, tokens = HuggingFaceModel(model), text(20)
    assert (adapter.vocab_size, adapter.embedding_size) == (V, V)
    logits = read(adapter, adapter.new_cache(), tokens, step=3, junk=2)
    torch.testing.assert_close(logits, reference(model, tokens), rtol=0, atol=tolerance)


def dispatched(model: Any) -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


def offloaded(model: Any) -> Any:
    """No weight is anywhere between passes."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("spread", [dispatched, offloaded])
def test_a_model_spread_by_accelerate(spread: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = text(20)
    expected = reference(build(ARCHITECTURES["gemma3"]), tokens)
    model = spread(build(ARCHITECTURES["gemma3"]))
    forbid_moving(model, monkeypatch)
    adapter = HuggingFaceModel(model)
    assert (adapter.device, adapter.vocab_size, adapter.embedding_size) == (torch.device("cpu"), V, V)
    logits = read(adapter, adapter.new_cache(), tokens, step=3, junk=2)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


# --- refusals --------------------------------------------------------------------------------------------------------

RECURRENT = {
    "Mamba": "MambaForCausalLM",
    "Mamba2": "Mamba2ForCausalLM",
    "FalconMamba": "FalconMambaForCausalLM",
    "FalconH1": "FalconH1ForCausalLM",
    "Rwkv": "RwkvForCausalLM",
    "xLSTM": "xLSTMForCausalLM",
    "Jamba": "JambaForCausalLM",
    "RecurrentGemma": "RecurrentGemmaForCausalLM",
    "Bamba": "BambaForCausalLM",
    "Zamba": "ZambaForCausalLM",
    "Zamba2": "Zamba2ForCausalLM",
    "NemotronH": "NemotronHForCausalLM",
    "Qwen3Next": "Qwen3NextForCausalLM",
    "MiniMax": "MiniMaxForCausalLM",
    "GraniteMoeHybrid": "GraniteMoeHybridForCausalLM",
}


@pytest.mark.parametrize("prefix", RECURRENT)
def test_a_recurrent_model_is_refused_from_its_config(prefix: str) -> None:
    reason = cannot_roll_back(getattr(transformers, f"{prefix}Config")())
    assert reason is not None
    assert reason.startswith(f"{RECURRENT[prefix]} (model type ")
    assert "a rejected draft token cannot be taken back" in reason


def test_convolution_layers_are_refused() -> None:
    config = transformers.Lfm2Config(**LLAMA_LIKE, layer_types=["conv", "full_attention"])
    assert "Lfm2ForCausalLM" in (cannot_roll_back(config) or "")


def test_a_hybrid_family_without_recurrent_layers_is_welcome() -> None:
    """Granite 4 has members whose layers are all attention, in a class that is marked as recurrent."""
    settings = LLAMA_LIKE | {"layer_types": ["full_attention"] * 2, "mamba_n_heads": 8, "shared_intermediate_size": 32}
    config = transformers.GraniteMoeHybridConfig(**settings, num_local_experts=0)
    assert cannot_roll_back(config) is None
    model, tokens = randomise(transformers.GraniteMoeHybridForCausalLM(config).double()).eval(), text(20)
    adapter = HuggingFaceModel(model)
    logits = read(adapter, adapter.new_cache(), tokens, step=3, junk=2)
    torch.testing.assert_close(logits, reference(model, tokens), rtol=0, atol=1e-9)


class RemoteRwkvConfig(transformers.LlamaConfig):
    """A recurrent model whose code is not part of transformers, and says nothing of its state."""

    model_type = "rwkv9"


def test_a_recurrent_model_of_remote_code_is_refused() -> None:
    assert "RemoteRwkvConfig (model type rwkv9) is a recurrent model" in (cannot_roll_back(RemoteRwkvConfig()) or "")


def recurrent_models() -> Iterator[Any]:
    small = COMMON | {"hidden_size": 16, "num_hidden_layers": 2}
    yield transformers.MambaForCausalLM(transformers.MambaConfig(**small, state_size=4))
    yield transformers.RwkvForCausalLM(transformers.RwkvConfig(**small, attention_hidden_size=16))
    jamba = transformers.JambaConfig(
        **LLAMA_LIKE, num_experts=1, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=0
    )
    yield transformers.JambaForCausalLM(jamba)


@pytest.mark.parametrize("index", range(3), ids=["mamba", "rwkv", "jamba"])
def test_a_recurrent_model_is_refused_before_the_first_pass(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = list(recurrent_models())[index]
    monkeypatch.setattr(type(model), "__call__", lambda *_: pytest.fail("a forward pass was made"))
    with pytest.raises(InputError, match=type(model).__name__):
        HuggingFaceModel(model)


def not_causal() -> dict[str, Any]:
    llama = transformers.LlamaConfig(**LLAMA_LIKE)
    bert = {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}
    t5 = {"vocab_size": V, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return {
        "has no output layer": transformers.LlamaModel(llama),
        "LlamaForSequenceClassification": transformers.LlamaForSequenceClassification(llama),
        "is an encoder-decoder model": transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
        "BertForMaskedLM": transformers.BertForMaskedLM(transformers.BertConfig(**bert)),
        "reads its text in both directions": transformers.BertLMHeadModel(transformers.BertConfig(**bert)),
        "Linear is not a model of transformers": nn.Linear(2, 2),
    }


@pytest.mark.parametrize(
    "reason",
    [
        "has no output layer",
        "LlamaForSequenceClassification",
        "is an encoder-decoder model",
        "BertForMaskedLM",
        "reads its text in both directions",
        "Linear is not a model of transformers",
    ],
)
def test_what_is_not_a_causal_language_model_is_refused(reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        HuggingFaceModel(not_causal()[reason])


def test_a_config_is_enough_to_ask() -> None:
    assert why_unsupported(transformers.LlamaConfig()) is None
    assert "encoder-decoder" in (why_unsupported(transformers.T5Config()) or "")
    assert "both directions" in (why_unsupported(transformers.BertConfig()) or "")
    assert "no output layer" in (why_unsupported(transformers.ViTConfig()) or "")


class CachelessLlama(transformers.LlamaForCausalLM):
    """Takes a cache and does not use it, as code from elsewhere may."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **arguments: Any) -> Any:
        return super().forward(input_ids, use_cache=False)


def test_a_model_that_ignores_its_cache_is_found_out() -> None:
    model = CachelessLlama(transformers.LlamaConfig(**LLAMA_LIKE)).eval()
    adapter = HuggingFaceModel(model)
    with pytest.raises(InputError, match=r"CachelessLlama .* does not use the key/value cache"):
        adapter.forward([3, 4], adapter.new_cache(), 1)
