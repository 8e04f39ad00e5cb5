"""Memory that a model needs, predicted from the shapes of its tensors: weights, caches, a pass, the peak of loading.

The lean decoder's figures follow its code allocation by allocation; of transformers' modules the weights and caches are
counted and the rest is an estimate. The program itself (torch and its libraries) comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.models.base import PREFILL_CHUNK
from slipstream.models.describe import Description
from slipstream.models.shapes import Shape, cached_numbers

#: Bytes of one number.
_SIZES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
#: Bits of methods of quantisation that have one kind only.
_METHOD_BITS = {"fp8": 8, "mxfp4": 4, "nvfp4": 4, "fp4": 4}
#: What configurations call the experts that a token is sent to, and those that there are.
_USED = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PANEL, _GROUP = 16, 256
#: What can be packed, and the bytes of a number of the float32 source.
_PACKED = ("fp32", "fp16", "int8")
_SOURCE = 4
#: What sampling takes for each number of a logits row: float32 logits and float64 probabilities, twice.
_SAMPLING = 20
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Need:
    """Bytes that one model needs."""

    weights: int
    """Held while it is loaded."""
    loading: int
    """Most that is in use while it is being loaded, ``weights`` included as far as they are there by then."""
    cache: int
    """Of all sequences."""
    activations: int
    """Of one pass, with its logits and what is made of them."""

    @property
    def running(self) -> int:
        """After loading."""
        return self.weights + self.cache + self.activations


@dataclass(frozen=True)
class Load:
    """What is asked of a model."""

    context: int
    """Positions in a cache."""
    batch: int
    rows: int
    """Tokens whose logits one verification gives, or a draft step: k + 1 or 1."""
    on_cpu: bool = True


def need(model: Description, weights: str, load: Load) -> Need:
    """What ``model`` needs with these ``weights``, one of fp32, bf16, fp16, int8."""
    packed = model.ours and load.on_cpu and weights in _PACKED
    held = _packed_bytes(model, weights) if packed else _dense_bytes(model, weights)
    return Need(
        weights=held,
        loading=_packing_peak(model, weights, held) if packed else _dense_peak(model, weights, held),
        cache=cache_bytes(model, load.context, 4 if packed else _SIZES.get(weights, 2)) * load.batch,
        activations=_activations(model, load, 4 if packed else _SIZES.get(weights, 2)),
    )


def step_bytes(model: Description, weights: str, on_cpu: bool) -> int:
    """What one decode step reads: every weight but an embedding that is not the output layer too.

    Of a mixture's experts it reads those that one token is sent to.
    """
    held = need(model, weights, Load(1, 1, 1, on_cpu)).weights
    if not model.ours:
        return int(held * _read_share(model))
    return held if _is_tied(model) else held - _table_bytes(model, weights)


def experts(model: Description) -> tuple[int, int] | None:
    """How many experts a token is sent to, and how many a layer has; None of a model without a mixture."""
    used, there = (next((int(n) for name in names if (n := model.number(name))), 0) for names in (_USED, _EXPERTS))
    return (used, there) if 0 < used < there else None


def _read_share(model: Description) -> float:
    """Share of a mixture's numbers that one token is multiplied with; 1 of other models."""
    found = experts(model)
    if found is None or not model.parameters:
        return 1.0
    in_experts = sum(math.prod(shape) for name, shape in model.shapes.items() if ".experts." in name)
    return 1 - in_experts / model.parameters * (1 - found[0] / found[1])


def together(needs: Sequence[Need]) -> Need | None:
    """What several models need that are loaded one after the other, of which one runs at a time; None of none."""
    if not needs:
        return None
    before = [sum(n.weights for n in needs[:i]) for i in range(len(needs))]
    return Need(
        weights=sum(n.weights for n in needs),
        loading=max(held + n.loading for held, n in zip(before, needs, strict=True)),
        cache=sum(n.cache for n in needs),
        activations=max(n.activations for n in needs),
    )


def peak(target: Need, draft: Need | None) -> int:
    """Most bytes at once if the target is loaded, then the draft, and both run."""
    if draft is None:
        return max(target.loading, target.running)
    # The draft waits while the target verifies, so one pass at a time needs room.
    running = target.weights + draft.weights + target.cache + draft.cache + max(target.activations, draft.activations)
    return max(target.loading, target.weights + draft.loading, running)


def cache_bytes(model: Description, context: int, size: int) -> int:
    """Keys and values of one sequence of ``context`` tokens, ``size`` bytes a number."""
    if model.settings is not None:
        return cached_numbers(model.settings.get_text_config(decoder=True)) * context * size
    heads = model.number("num_attention_heads", 1)
    kv_heads = model.number("num_key_value_heads") or heads
    head = model.number("head_dim") or model.number("hidden_size") // heads
    return int(2 * model.number("num_hidden_layers") * kv_heads * head * context * size)


# --- the lean decoder -------------------------------------------------------------------------------------------------


def _packed_bytes(model: Description, weights: str) -> int:
    return _layer_bytes(model, weights) + _linear_bytes(_head(model), weights) + _table_bytes(model, weights)


def _layer_bytes(model: Description, weights: str) -> int:
    """Every product and vector of the layers, and the final norm."""
    total = sum(math.prod(shape) * 4 for name, shape in model.shapes.items() if name.endswith("norm.weight"))
    for _, names in _products(model):
        shapes = [model.shapes[f"{n}.weight"] for n in names]
        total += _linear_bytes((sum(s[0] for s in shapes), shapes[0][1]), weights)
        if f"{names[0]}.bias" in model.shapes:
            total += 4 * sum(s[0] for s in shapes)
    return total


def _products(model: Description) -> list[tuple[str, list[str]]]:
    """Fused products: kind, and the names of their parts."""
    layers = range(int(model.number("num_hidden_layers")))
    return [(kind, [f"model.layers.{i}.{p}" for p in parts]) for i in layers for kind, parts in _FUSED.items()]


def _linear_bytes(shape: Shape, weights: str) -> int:
    outputs, inputs = -(-shape[0] // _PANEL) * _PANEL, shape[1]
    if weights == "int8":
        return outputs * (inputs + inputs % 2) + 4 * outputs * -(-inputs // _GROUP)
    return outputs * inputs * _SIZES[weights]


def _head(model: Description) -> Shape:
    shapes = model.shapes
    return shapes.get("lm_head.weight") or shapes["model.embed_tokens.weight"]


def _is_tied(model: Description) -> bool:
    return bool(model.config.get("tie_word_embeddings")) or "lm_head.weight" not in model.shapes


def _table_bytes(model: Description, weights: str) -> int:
    """The embedding: none where the output layer has the same rows in a type that they can be read from."""
    if _is_tied(model) and weights != "int8":
        return 0
    return math.prod(model.shapes["model.embed_tokens.weight"]) * (4 if weights == "fp32" else 2)


def _packing_peak(model: Description, weights: str, held: int) -> int:
    """The output layer is packed last, beside the float32 embedding and all layers."""
    layers = _layer_bytes(model, weights)
    embedding = math.prod(model.shapes["model.embed_tokens.weight"])
    source = 0 if model.floats_in_place else _SOURCE
    beside = 0 if _is_tied(model) else source * embedding
    at_head = layers + beside + source * math.prod(_head(model)) + _packing(_head(model), weights)
    products = [(sum(s[0] for s in shapes), shapes[0][1]) for shapes in _parts(model)]
    at_layer = layers + max(_SOURCE * math.prod(s) + _packing(s, weights) - _linear_bytes(s, weights) for s in products)
    return max(at_head, at_layer, held + source * embedding)


def _parts(model: Description) -> list[list[Shape]]:
    return [[model.shapes[f"{n}.weight"] for n in names] for _, names in _products(model)]


def _packing(shape: Shape, weights: str) -> int:
    """Most bytes in use beside the float32 source while a matrix is packed: see models/native/panels.py."""
    outputs, inputs = shape
    if weights == "int8":  # a copy; then, in whole groups, another, the quotients, and these rounded
        return outputs * (4 * inputs + 9 * -(-inputs // _GROUP) * _GROUP)
    return outputs * inputs * 8


# --- any model --------------------------------------------------------------------------------------------------------


def _dense_bytes(model: Description, weights: str) -> int:
    stated = model.config.get("quantization_config")
    if not stated:
        return int(model.parameters * _SIZES.get(weights, 1))
    return model.weights_bytes or _quantised_bytes(model, stated)


def _quantised_bytes(model: Description, stated: Mapping[str, Any]) -> int:
    """A quantised checkpoint without its files: matrices of layers at so many bits, the rest in two bytes.

    Groups have a scale of two bytes and an offset; methods that say nothing of their bits count as eight.
    """
    bits, group = quantised_bits(stated) or 8, int(_stated(stated, "group_size", "q_group_size") or 0)
    each = bits / 8 + ((2 + bits / 8) / group if group > 0 else 0)
    in_layers = sum(math.prod(s) for n, s in model.shapes.items() if len(s) > 1 and ".layers." in n)
    return int(in_layers * each + (model.parameters - in_layers) * 2)


def quantised_bits(stated: Mapping[str, Any]) -> int | None:
    """Bits of a number of a quantised layer, as a ``quantization_config`` states them in its method's way; None if not.

    >>> quantised_bits({"quant_method": "awq", "bits": 4}), quantised_bits({"quant_method": "fp8"})
    (4, 8)
    """
    if bits := _stated(stated, "bits", "w_bit", "nbits", "num_bits"):
        return int(bits)
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):
        return 4 if stated.get("load_in_4bit") else 8
    return next((bits for name, bits in _METHOD_BITS.items() if name in str(stated.get("quant_method", ""))), None)


def _stated(stated: Mapping[str, Any], *names: str) -> float | None:
    """The first number that can be under one of these names, in parts of the configuration too."""
    for name, value in stated.items():
        if isinstance(value, Mapping):
            value = _stated(value, *names)
        elif name not in names:
            continue
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return value
    return None


def _dense_peak(model: Description, weights: str, held: int) -> int:
    """Weights, and the largest tensor once more while it is converted."""
    largest = max((math.prod(shape) for shape in model.shapes.values()), default=0)
    return held + largest * _SIZES.get(weights, 1)


def _activations(model: Description, load: Load, size: int) -> int:
    """The larger of a chunk of the prompt and a verification of the whole batch."""
    chunk = min(load.context, PREFILL_CHUNK)
    vocabulary = -(-model.vocab_size // _PANEL) * _PANEL
    logits = load.rows * load.batch * vocabulary * (size + _SAMPLING)
    return max(_workspace(model, chunk, load, size), _workspace(model, load.rows * load.batch, load, size) + logits)


def _workspace(model: Description, n: int, load: Load, size: int) -> int:
    """A pass over ``n`` rows: ``slipstream_work`` of models/native/kernels.cpp and the hidden states before it."""

    def padded(value: float) -> int:
        return int(-(-value // _PANEL) * _PANEL)

    heads = model.number("num_attention_heads", 1)
    kv_heads = model.number("num_key_value_heads") or heads
    width = padded(model.number("hidden_size"))
    head = model.number("head_dim") or model.number("hidden_size") // heads
    inner = padded(model.number("intermediate_size") or 4 * width)
    mixed, wide = max(padded(heads * head), inner), max(padded((heads + 2 * kv_heads) * head), 2 * inner)
    scores = 0 if model.ours and load.on_cpu else int(heads) * n * load.context * size
    return n * (3 * width + wide + mixed + max(width, mixed) // 2 + 1) * size + scores


def as_text(count: float) -> str:
    """Bytes for people.

    >>> as_text(1.5e9), as_text(2.5e6)
    ('1.50 GB', '2.5 MB')
    """
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
