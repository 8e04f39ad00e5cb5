"""Writes small GGUF files as llama.cpp's converter would, from models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, TokenType

_ARCHS = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}


def tiny_model(kind: str = "llama", *, seed: int = 0, **config: Any) -> Any:
    """A random transformers model of the Llama family: 2 layers, width 64, 4 heads that share 2 key/value heads."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | config))).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # they start at 0 and 1, where mistakes do not show
                torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


def tokenizer_metadata(tokenizer: Any, pre: str | None = "gpt-2") -> dict[str, Any]:
    """The metadata that describes a byte-level transformers tokenizer."""
    import json

    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = set(tokenizer.all_special_tokens)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(TokenType.CONTROL if t in special else TokenType.NORMAL) for t in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tokenizer.chat_template,
    }
    return metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre})


def write_gguf(
    path: Path,
    model: Any | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE,
) -> Path:
    """Write ``model`` with its matrices in quantisation ``kind``.

    ``metadata`` adds to and replaces what the model's config gives (None removes a key), ``tensors`` the tensors, by
    their name in the file and in the bytes of their type.
    """
    model = tiny_model() if model is None else model
    architecture = "llama" if model.config.model_type == "mistral" else model.config.model_type
    writer = gguf.GGUFWriter(None, architecture, endianess=endianess)
    for key, value in (_config_metadata(model.config, architecture) | dict(metadata or {})).items():
        _add(writer, key, value)
    stored = _stored_tensors(model, architecture, kind) | dict(tensors or {})
    for name, (values, its_kind) in stored.items():
        writer.add_tensor(name, values, raw_dtype=its_kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, Sequence):
        writer.add_array(key, value)


def _config_metadata(config: Any, architecture: str) -> dict[str, Any]:
    named = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else None,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    return {f"{architecture}.{key}": value for key, value in named.items()}


def _stored_tensors(
    model: Any, architecture: str, kind: GGMLQuantizationType
) -> dict[str, tuple[np.ndarray, GGMLQuantizationType]]:
    config = model.config
    names = gguf.get_tensor_name_map(_ARCHS[architecture], config.num_hidden_layers)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ".q_proj." in name:
            values = _interleaved(values, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = _interleaved(values, config.num_key_value_heads)
        own = kind if values.ndim == 2 else GGMLQuantizationType.F32
        stored[names.get_name(name, (".weight", ".bias"))] = (gguf.quantize(values, own), own)
    return stored


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in llama.cpp's order: the first of one half, the first of the other, the second of one..."""
    half = values.shape[0] // heads // 2
    order = [head * 2 * half + side * half + i for head in range(heads) for i in range(half) for side in range(2)]
    return values[order]
