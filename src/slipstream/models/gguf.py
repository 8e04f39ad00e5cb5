"""Reads ``.gguf`` files of the Llama family: configuration, weights, tokenizer; writes them as Hugging Face folders.

A GGUF file is a header (typed key-value metadata, then name, shape, type and offset of each tensor) followed by the
tensors' data. Opening one reads and checks the header alone; a tensor is dequantised when it is asked for.
The header is parsed here because the ``gguf`` package's reader makes a numpy array of each string of the vocabulary and
of the merges, which takes seconds to half a minute; dequantisation is that package's.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from slipstream.errors import InputError

#: GGUF architecture -> (model_type, architectures entry) of the Hugging Face configuration.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_GLOBAL_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_TENSORS_BACK = {ours: theirs for theirs, ours in _LAYER_TENSORS.items()}
_GLOBAL_TENSORS_BACK = {ours: theirs for theirs, ours in _GLOBAL_TENSORS.items()}

# Metadata value types of the format: number -> struct code; strings and arrays are numbers 8 and 9.
_SCALARS = dict(enumerate(("B", "b", "H", "h", "I", "i", "f", "?"))) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_TOKEN_UNKNOWN, _TOKEN_CONTROL, _TOKEN_USER, _TOKEN_UNUSED = 2, 3, 4, 5

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """How a byte-level vocabulary cuts text before its merges apply."""

    split: str | None = None
    """A regular expression; None is GPT-2's own."""
    digits: bool = False
    """Cut digits from each other first."""
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken without merging."""
    add_bos: bool = False
    """What holds if the file does not say."""


_GPT2 = _PreTokenizer()
_QWEN2 = _PreTokenizer(split=_QWEN2_SPLIT, nfc=True)
_LLAMA3 = _PreTokenizer(split=_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
#: Values of ``tokenizer.ggml.pre`` -> what they mean.
_PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _PreTokenizer(digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _PreTokenizer(split=_QWEN2_SPLIT),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _PreTokenizer(split=_TEKKEN_SPLIT, ignore_merges=True, add_bos=True),
}
_ELSE = "use the model's Hugging Face checkpoint instead"
#: Control tokens that end an answer or a text, whatever the file's single ``eos_token_id`` is.
_END_TOKENS = {"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>"}


@dataclass(frozen=True)
class _TensorInfo:
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""

    @property
    def bytes_shape(self) -> tuple[int, ...]:
        block, size = GGML_QUANT_SIZES[self.type]
        return (*self.shape[:-1], self.shape[-1] // block * size)


class _Header:
    """A cursor over the header's little-endian values. Reading past the end raises struct.error or ValueError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 4  # after the magic

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize(code)
        # shortest decimal of a float32, so that 1e-05 does not come back as 9.999999747378752e-06
        return float(str(np.float32(value))) if code == "f" else value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, at, length = self.data, self.at, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            end = at + 8 + length(data, at)[0]
            if end > len(data):
                raise ValueError("a string ends past the end of the file")
            found.append(data[at + 8 : end].decode())
            at = end
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        dtype = np.dtype("<" + _SCALARS[kind])
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values


class GGUFFile:
    """An open ``.gguf`` file.

    Opening checks everything that can be checked without reading the weights: that the file is whole, that its
    architecture and its tensors are those of the Llama family, and that their types can be dequantised.

    Raises:
        InputError: the file is missing, is no GGUF file, is cut short, or holds a model that is not supported.
    """

    path: Path
    metadata: dict[str, Any]
    """The file's key-value pairs as they are."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata = {}
        self._tensors: dict[str, _TensorInfo] = {}
        self._data = self._map()
        try:
            self._read_header()
            self._check_whole()
            self._check_supported()
            self._config = self._read_config()
        except InputError:
            raise
        except (struct.error, ValueError, TypeError, LookupError, ArithmeticError):
            self._refuse("is cut short or damaged in its header: download it again")

    def _refuse(self, problem: str) -> NoReturn:
        raise InputError(f"{self.path} {problem}") from None

    def _map(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    self._refuse("is not a GGUF file (it does not begin with GGUF): give a .gguf model file")
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            self._refuse(f"cannot be read ({error.strerror}): check the path")

    def _read_header(self) -> None:
        header = _Header(self._data)
        version = header.scalar("I")
        if version not in (2, 3):
            what = "is big-endian" if version & 0xFFFF == 0 else f"has GGUF version {version}"
            self._refuse(f"{what}, and only little-endian GGUF files of version 2 and 3 can be read: convert it anew")
        num_tensors, num_pairs = header.scalar("Q"), header.scalar("Q")
        for _ in range(num_pairs):
            key = header.string()
            self.metadata[key] = header.value(header.scalar("I"))
        found = []
        for _ in range(num_tensors):
            name = header.string()
            dims = [header.scalar("Q") for _ in range(header.scalar("I"))]
            if not dims:
                raise ValueError("a tensor without dimensions")
            found.append((name, tuple(reversed(dims)), header.scalar("I"), header.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-header.at // alignment) * alignment
        for name, shape, kind, offset in found:
            self._tensors[name] = _TensorInfo(shape, self._quantisation(name, kind), start + offset)

    def _quantisation(self, name: str, kind: int) -> GGMLQuantizationType:
        try:
            found = GGMLQuantizationType(kind)
            dequantize(np.zeros((1, GGML_QUANT_SIZES[found][1]), np.uint8), found)
        except (ValueError, KeyError, NotImplementedError):
            self._refuse(
                f"stores tensor {name} in quantisation type {kind}, which the installed gguf package cannot "
                "dequantise: upgrade gguf or take another quantisation of the model"
            )
        return found

    def _check_whole(self) -> None:
        size = len(self._data)
        end = max((info.offset + math.prod(info.bytes_shape) for info in self._tensors.values()), default=0)
        if end > size:
            self._refuse(f"is cut short ({size:,} bytes of at least {end:,}): download it again")

    def _check_supported(self) -> None:
        if self.metadata.get("split.count", 1) > 1:
            self._refuse("is one of several parts: join them first, for example with llama-gguf-split --merge")
        architecture = self.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            self._refuse(
                f"holds a model of architecture {architecture!r}, and GGUF files are read for "
                f"{', '.join(_ARCHITECTURES)} only: {_ELSE}"
            )
        strangers = [name for name in self._tensors if name != "rope_freqs.weight" and _hf_name(name) is None]
        if strangers:
            self._refuse(f"holds a tensor {strangers[0]} that a dense {architecture} model does not have: {_ELSE}")

    def _get(self, key: str, default: Any = None) -> Any:
        """Metadata of this architecture; a missing key without a default is an error of the file."""
        full = f"{self.metadata['general.architecture']}.{key}"
        value = self.metadata.get(full, default)
        if value is None:
            self._refuse(f"lacks the metadata {full}: convert the model to GGUF anew")
        return value

    def config(self) -> dict[str, Any]:
        """The model's configuration with the keys of a Hugging Face ``config.json``."""
        return dict(self._config)

    def _read_config(self) -> dict[str, Any]:
        model_type, class_name = _ARCHITECTURES[self.metadata["general.architecture"]]
        heads, hidden = self._get("attention.head_count"), self._get("embedding_length")
        kv_heads = self._get("attention.head_count_kv", heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            self._refuse(f"has a different number of heads in each layer: {_ELSE}")
        head_dim = self._get("attention.key_length", hidden // heads)
        if {head_dim} != {self._get("attention.value_length", head_dim), self._get("rope.dimension_count", head_dim)}:
            self._refuse(f"has keys, values and rotary embeddings of different sizes: {_ELSE}")
        config: dict[str, Any] = {
            "model_type": model_type,
            "architectures": [class_name],
            "hidden_act": "silu",
            "hidden_size": hidden,
            "num_hidden_layers": self._get("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": self._get("feed_forward_length"),
            "rms_norm_eps": self._get("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),
            "max_position_embeddings": self._get("context_length"),
            "vocab_size": self._embedding_rows(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
        }
        window = self._get("attention.sliding_window", 0)
        if window and model_type == "llama":  # llama.cpp keeps Mistral under the name llama
            config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        if scaling := self._rope_scaling(config):
            config["rope_scaling"] = scaling
        for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
            if (token := self.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
                config[f"{role}_token_id"] = token
        return config

    def _embedding_rows(self) -> int:
        if "token_embd.weight" not in self._tensors:
            self._refuse("holds no token_embd.weight: pass the file of a whole language model")
        return self._tensors["token_embd.weight"].shape[0]

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:
            return self._llama3_scaling(config["rope_theta"], config["head_dim"])
        kind = self._get("rope.scaling.type", "linear" if self._has("rope.scale_linear") else "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            self._refuse(f"uses RoPE scaling {kind!r}, which is not read from GGUF files: {_ELSE}")
        scaling = {"rope_type": kind, "factor": self._get("rope.scaling.factor", self._get("rope.scale_linear", 1.0))}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._get("rope.scaling.original_context_length")
        return scaling

    def _has(self, key: str) -> bool:
        return f"{self.metadata['general.architecture']}.{key}" in self.metadata

    def _llama3_scaling(self, theta: float, head_dim: int) -> dict[str, Any]:
        """Llama 3 files hold the divisor of each rotary frequency; find the four numbers that they were made from.

        All Llama 3 models scale between 1 and 4 wavelengths in 8192 positions, and differ in the factor alone.
        """
        divisors = self._read("rope_freqs.weight").double()
        factor, low, high, length = float(divisors.max()), 1.0, 4.0, 8192
        frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        waves = length * frequencies / (2 * math.pi)
        smooth = ((waves - low) / (high - low)).clamp(0, 1)
        if not torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
            self._refuse(f"scales its rotary frequencies in an unknown way: {_ELSE}")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }

    def tensor_names(self) -> list[str]:
        """Hugging Face names of the tensors in the file."""
        return [name for stored in self._tensors if (name := _hf_name(stored)) is not None]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by its Hugging Face name."""
        return {name: self._tensors[_gguf_name(name)].shape for name in self.tensor_names()}

    def tensor(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name, dequantised to float32 and with rows in Hugging Face order.

        Raises:
            KeyError: the file has no such tensor; tied models have no ``lm_head.weight``.
        """
        found: Tensor = self._read(_gguf_name(name))
        if self.metadata["general.architecture"] != "llama" or not re.search(r"\.[qk]_proj\.", name):
            return found
        # llama.cpp stores the two halves of each Llama head interleaved; Qwen's are left as they are
        heads = self._config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        interleaved = found.view(heads, -1, 2, *found.shape[1:])
        return interleaved.transpose(1, 2).reshape(found.shape)

    def _read(self, stored_name: str) -> Tensor:
        info = self._tensors[stored_name]
        *rows, row_bytes = info.bytes_shape
        # gguf works on 16 rows at a time, few values in a narrow matrix; joining rows makes it 2 to 4 times faster
        joined, num_rows = 1, math.prod(rows)
        while num_rows % (2 * joined) == 0 and 2 * joined * info.shape[-1] <= 8192:
            joined *= 2
        raw = np.frombuffer(self._data, np.uint8, num_rows * row_bytes, info.offset)
        values = dequantize(raw.reshape(-1, joined * row_bytes), info.type).reshape(info.shape)
        if not values.flags.writeable:  # float32 comes as a view of the file
            values = values.copy()
        return torch.from_numpy(values)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: those the file names, and the control tokens that are known to."""
        named = [self.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        kinds = self.metadata.get("tokenizer.ggml.token_type", [])
        known = [i for i, kind in enumerate(kinds) if kind == _TOKEN_CONTROL and tokens[i] in _END_TOKENS]
        return tuple(dict.fromkeys([i for i in named if i is not None] + known))

    def tokenizer(self) -> Any | None:
        """The file's tokenizer, chat template included, as a ``PreTrainedTokenizerFast``; None if it has none.

        Decoding is exact: nothing is cleaned up, and padding rows of the vocabulary are not tokens.

        Raises:
            InputError: the vocabulary is of a kind that is not known here.
        """
        kind = self.metadata.get("tokenizer.ggml.model", "none")
        if kind in ("none", "no_vocab"):
            return None
        builders = {"gpt2": self._byte_level, "llama": self._sentencepiece}
        if kind not in builders:
            self._refuse(f"has a tokenizer of kind {kind!r}, and only gpt2 and llama are read: pass tokenizer= instead")
        try:
            backend = builders[kind]()
        except KeyError as error:
            self._refuse(f"lacks the tokenizer's {error.args[0]}: pass tokenizer= or convert the model to GGUF anew")
        except InputError:
            raise
        except Exception as error:  # tokenizers has no class of its own
            self._refuse(f"has a tokenizer that makes no sense ({error}): pass tokenizer= or download the file again")
        from transformers import PreTrainedTokenizerFast

        special = {
            f"{role}_token": token
            for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (token := self._token(key)) is not None
        }
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=_Unshared(backend),
            model_max_length=self._get("context_length"),
            clean_up_tokenization_spaces=False,
            **special,
        )
        tokenizer.chat_template = self.metadata.get("tokenizer.chat_template")
        return tokenizer

    def _token(self, role: str) -> str | None:
        index = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        tokens = self.metadata["tokenizer.ggml.tokens"]
        return tokens[index] if index is not None and index < len(tokens) else None

    def _vocabulary(self) -> tuple[dict[str, int], list[int]]:
        """Tokens with their ids, and the type of each; rows at the end that no text produces are left out."""
        tokens: list[str] = self.metadata["tokenizer.ggml.tokens"]
        kinds: list[int] = self.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
        size = len(tokens)
        while size and kinds[size - 1] == _TOKEN_UNUSED:
            size -= 1
        return dict(zip(tokens[:size], range(size), strict=True)), kinds[:size]

    def _byte_level(self) -> Any:
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        name = self.metadata.get("tokenizer.ggml.pre", "default")
        rules = _PRE_TOKENIZERS.get(name)
        if rules is None:
            self._refuse(f"has a tokenizer with unknown pre-tokenizer {name!r}: pass tokenizer= instead")
        vocab, kinds = self._vocabulary()
        pairs = [merge.partition(" ") for merge in self.metadata["tokenizer.ggml.merges"]]
        merges = [(left, right) for left, _, right in pairs]
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=rules.ignore_merges))
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rules.digits else []
        if rules.split:
            steps.append(pre_tokenizers.Split(Regex(rules.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.split is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if rules.nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        self._finish(tokenizer, vocab, kinds, rules.add_bos)
        return tokenizer

    def _sentencepiece(self) -> Any:
        from tokenizers import Tokenizer, decoders, models, normalizers

        vocab, kinds = self._vocabulary()
        merges = _merges_from_scores(vocab, self.metadata["tokenizer.ggml.scores"])
        unknown = self._token("unknown") or "<unk>"
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        # as in llama.cpp and Llama 2, the prefix also comes after each special token inside a text
        prefix = self.metadata.get("tokenizer.ggml.add_space_prefix", True)
        before: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        after: list[Any] = [decoders.Strip(" ", left=1, right=0)] if prefix else []
        tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
        )
        self._finish(tokenizer, vocab, kinds, add_bos=True)
        return tokenizer

    def _finish(self, tokenizer: Any, vocab: Mapping[str, int], kinds: list[int], add_bos: bool) -> None:
        """Mark special and user-defined tokens, and add the tokens that frame a text."""
        from tokenizers import AddedToken, processors

        special = {_TOKEN_UNKNOWN: True, _TOKEN_CONTROL: True, _TOKEN_USER: False}
        tokenizer.add_tokens(
            [
                AddedToken(token, normalized=False, special=special[kinds[i]])
                for token, i in vocab.items()
                if kinds[i] in special
            ]
        )
        first = self._token("bos") if self.metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
        last = self._token("eos") if self.metadata.get("tokenizer.ggml.add_eos_token", False) else None
        # set even if it adds nothing: without one, transformers makes up its own
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in (first, "$A", last) if part is not None],
            pair=[f"{part}:{i}" for i in (0, 1) for part in (first, f"${'AB'[i]}", last) if part is not None],
            special_tokens=[(token, vocab[token]) for token in (first, last) if token is not None],
        )


class _Unshared:
    """A tokenizer backend that nobody else holds: transformers need not copy it, a second for 150k ids."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: object) -> Any:
        return self._backend


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours that give the best-scored token; as merges: best first, all its halves."""
    best_first = sorted(vocab.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [
        (token[:cut], token[cut:])
        for token, _ in best_first
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _gguf_name(name: str) -> str:
    """``model.layers.0.mlp.up_proj.weight`` -> ``blk.0.ffn_up.weight``; KeyError for a name not of the family."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
        return f"blk.{match[1]}.{_LAYER_TENSORS[match[2]]}.{kind}"
    return f"{_GLOBAL_TENSORS[stem]}.{kind}"


def _hf_name(name: str) -> str | None:
    """The inverse of ``_gguf_name``; None for a name that is not of the family."""
    stem, _, kind = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", stem):
        layer_part = _LAYER_TENSORS_BACK.get(match[2])
        return layer_part and f"model.layers.{match[1]}.{layer_part}.{kind}"
    part = _GLOBAL_TENSORS_BACK.get(stem)
    return part and f"{part}.{kind}"


def export_folder(gguf: str | os.PathLike[str] | GGUFFile, folder: str | os.PathLike[str]) -> Path:
    """Write a GGUF model as a Hugging Face folder with bfloat16 weights, which transformers loads too.

    The folder appears under its name only when it is complete.

    Returns:
        ``folder`` as a path.

    Raises:
        InputError: the file cannot be read, or ``folder`` exists.
    """
    from safetensors.torch import save_file

    source = gguf if isinstance(gguf, GGUFFile) else GGUFFile(gguf)
    target = Path(folder)
    if target.exists():
        raise InputError(f"{target} exists already: name a new folder or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        unfinished.chmod(0o755)  # mkdtemp makes it private
        if (tokenizer := source.tokenizer()) is not None:
            tokenizer.save_pretrained(unfinished)
        config = source.config() | {"dtype": "bfloat16"}
        _write_json(unfinished / "config.json", config)
        generation = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
        _write_json(unfinished / "generation_config.json", generation | {"eos_token_id": list(source.eos_token_ids())})
        weights = {name: source.tensor(name).to(torch.bfloat16) for name in source.tensor_names()}
        save_file(weights, unfinished / "model.safetensors", metadata={"format": "pt"})
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
