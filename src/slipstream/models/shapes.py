"""Whether a checkpoint holds what the lean decoder needs, told from names and shapes, before any weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]


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
