"""Whether a checkpoint holds what the lean decoder needs, told from names and shapes, before any weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]


def layers_of(config: Any) -> list[Any]:
    """transformers' configuration of each layer: the same for all of them but in models whose layers differ in size."""
    count = int(getattr(config, "num_hidden_layers", 0) or 0)
    return [config.per_layer_config[i] for i in range(count)] if _differ(config) else [config] * count


def size_of(config: Any, name: str) -> Any:
    """An entry of a configuration; the largest of those of its layers, where they differ; None if there is none."""
    if not _differ(config) or name not in (config.per_layer_attributes or ()):
        return getattr(config, name, None)
    return max((one for layer in layers_of(config) if (one := getattr(layer, name, None)) is not None), default=None)


def _differ(config: Any) -> bool:
    return bool(getattr(config, "is_heterogeneous", False))


def cached_numbers(config: Any) -> int:
    """Numbers of keys and values that transformers keeps of one token, in all layers, told from its configuration."""
    layers = layers_of(config)
    # The last layers of some models use the keys and values of earlier ones.
    held = layers[: len(layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)]
    return sum(map(_cached_in_layer, held))


def _cached_in_layer(layer: Any) -> int:
    def number(name: str) -> int:
        value = getattr(layer, name, None)
        return int(value) if isinstance(value, int | float) else 0

    if latent := number("kv_lora_rank"):  # one latent row for all heads, and the rotary part beside it
        return latent + number("qk_rope_head_dim")
    heads = number("num_attention_heads") or 1
    kv_heads = number("num_key_value_heads") or heads
    if number("multi_query") and not number("new_decoder_architecture"):  # as Falcon and GPT-BigCode say it
        kv_heads = 1
    head = number("head_dim") or number("hidden_size") // heads
    return kv_heads * (head + (number("v_head_dim") or head))


def first_misfit(config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> str | None:
    """What is wrong with the tensors of a checkpoint of the Llama family; None if nothing is.

    Args:
        config: as in config.json.
        shapes: of each tensor, by its name in the Hugging Face layout.

    The number of rows of the embeddings and the width of the feed-forward layers are taken as they are.
    """
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        return f"has {heads} attention heads that cannot share {kv_heads} key/value heads"
    for name, wanted, optional in _wanted(config, heads, kv_heads, shapes):
        found = shapes.get(name)
        if found is None and not optional:
            return f"lacks the tensor {name}"
        if found is not None and found != wanted:
            return f"holds a tensor {name} of shape {found}, where its configuration asks for {wanted}"
    return None


def _wanted(
    config: Mapping[str, Any], heads: int, kv_heads: int, shapes: Mapping[str, Shape]
) -> Iterator[tuple[str, Shape, bool]]:
    """Name and shape of every tensor, and whether a model may do without it."""
    width = int(config["hidden_size"])
    head = int(config.get("head_dim") or width // heads)
    for i in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.{i}"
        inner = shapes.get(f"{layer}.mlp.gate_proj.weight", (0,))[0]
        yield f"{layer}.input_layernorm.weight", (width,), False
        yield f"{layer}.post_attention_layernorm.weight", (width,), False
        for norm in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{norm}.weight", (head,), True
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head, width),
            ("self_attn.k_proj", kv_heads * head, width),
            ("self_attn.v_proj", kv_heads * head, width),
            ("self_attn.o_proj", width, heads * head),
            ("mlp.gate_proj", inner, width),
            ("mlp.up_proj", inner, width),
            ("mlp.down_proj", width, inner),
        ):
            yield f"{layer}.{name}.weight", (rows, columns), False
            yield f"{layer}.{name}.bias", (rows,), True
    yield "model.norm.weight", (width,), False
    for name, optional in (("model.embed_tokens", False), ("lm_head", bool(config.get("tie_word_embeddings")))):
        yield f"{name}.weight", (shapes.get(f"{name}.weight", (0,))[0], width), optional
