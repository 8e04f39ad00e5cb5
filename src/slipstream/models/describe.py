"""What is known of a checkpoint from its configuration and tokenizer files; weights need not be there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InputError
from slipstream.models import registry
from slipstream.models.load import (
    _HUB_FILES,
    _check_hub_reachable,
    _first_line,
    _Folder,
    _foreign_head,
    _safetensors_shapes,
    _weight_files,
    find,
)
from slipstream.models.shapes import Shape, size_of


@dataclass(frozen=True)
class Description:
    """A checkpoint that may be without weights."""

    name: str
    path: Path
    config: Mapping[str, Any]
    """As in config.json, defaults filled in."""
    settings: Any
    """transformers' configuration object; None of a GGUF file."""
    tokenizer: Any | None
    shapes: Mapping[str, Shape]
    """Of every tensor: read from the files, or what the configuration asks for."""
    has_weights: bool
    weights_bytes: int
    """Size of the weight files; 0 without weights."""
    eos_token_ids: tuple[int, ...]
    obstacle: str | None
    """Why it cannot be decoded speculatively; None if it can."""
    ours: bool = True
    """Whether the lean decoder runs it."""
    floats_in_place: bool = False
    """Whether its files hold float32 numbers, which are read without a copy."""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the language model."""
        if self.settings is None:
            return self.config
        found: Mapping[str, Any] = self.settings.get_text_config(decoder=True).to_dict()
        return found

    @property
    def vocab_size(self) -> int:
        """Number of ids, padding rows included."""
        return int(self.number("vocab_size"))

    @property
    def max_positions(self) -> int | None:
        """Number of positions it was made for; None if it has no limit or does not say."""
        if self.settings is None:
            return self.config.get("max_position_embeddings")
        from slipstream.models.huggingface import _max_positions

        return _max_positions(self.settings.get_text_config(decoder=True))

    @property
    def parameters(self) -> int:
        """How many numbers its tensors hold."""
        import math

        return sum(math.prod(shape) for shape in self.shapes.values())

    def number(self, name: str, default: float = 0) -> float:
        """An entry of the language model's configuration under transformers' common name for it."""
        if self.settings is None:
            value = self.config.get(name)
        else:
            value = size_of(self.settings.get_text_config(decoder=True), name)
        return value if isinstance(value, int | float) else default


def describe(name: str) -> Description:
    """Read what can be read without weights. Of a model on the hub, only configuration and tokenizer are downloaded.

    Raises:
        InputError: there is no such model, or its files cannot be understood at all.
    """
    path = _locate(name)
    return _of_gguf(path, name) if path.is_file() else _of_folder(path, name)


def _locate(name: str) -> Path:
    try:
        here = Path(name).expanduser().exists() or registry.resolve(name) is not None
    except (OSError, ValueError, RuntimeError):
        here = True  # let find say what is wrong
    looks_local = name in registry.SOURCES or name.startswith((".", "~", "/")) or name.count("/") != 1
    return find(name) if here or looks_local else _hub_configuration(name)


def _hub_configuration(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except HFValidationError as error:
        raise InputError(f"the model {name} is no local path, no cached model and no valid hub id: check it") from error
    except OSError:
        pass  # not in the hub's cache
    _check_hub_reachable(name)
    try:
        return Path(snapshot_download(name, allow_patterns=[*_HUB_FILES], ignore_patterns="*/*"))
    except (OSError, HfHubHTTPError) as error:
        raise InputError(
            f"the model {name} cannot be fetched from the model hub ({_first_line(error)}): check its id and access"
        ) from error


def _of_gguf(file: Path, name: str) -> Description:
    from slipstream.models.gguf import GGUFFile
    from slipstream.models.llama import unsupported

    source = GGUFFile(file)
    config = source.config()
    reason = unsupported(config)
    return Description(
        name=name,
        path=file,
        config=config,
        settings=None,
        tokenizer=source.tokenizer(),
        shapes=source.shapes(),
        has_weights=True,
        weights_bytes=file.stat().st_size,
        eos_token_ids=source.eos_token_ids(),
        obstacle=f"{name} cannot be run from GGUF ({reason}); use its Hugging Face checkpoint" if reason else None,
    )


def _of_folder(path: Path, name: str) -> Description:
    from slipstream.models.llama import unsupported

    folder = _Folder(path, name)
    stated, settings = folder.stated()
    _check_sizes(path, settings.get_text_config(decoder=True))
    config = settings.to_dict()
    ours = unsupported(config) is None
    files = [file for file in _weight_files(path) if file.is_file()]
    tokenizer = folder._tokenizer()
    return Description(
        name=name,
        path=path,
        config=config,
        settings=settings,
        tokenizer=tokenizer,
        shapes=_shapes(files, settings, ours),
        has_weights=bool(files) and len(files) == len(_weight_files(path)),
        weights_bytes=sum(file.stat().st_size for file in files),
        eos_token_ids=folder._eos_token_ids(settings, tokenizer),
        obstacle=_obstacle(stated, settings, ours),
        ours=ours,
        floats_in_place=_holds_floats(files, config),
    )


def _check_sizes(path: Path, settings: Any) -> None:
    """Refuse what no model has, before anything is added up from it."""
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        size = size_of(settings, name)
        if isinstance(size, int) and size < 1:
            raise InputError(
                f"{path / 'config.json'} has {name} {size}, which no model has: repair or download it again"
            )


def _holds_floats(files: list[Path], config: Mapping[str, Any]) -> bool:
    if not files or files[0].suffix != ".safetensors":
        return str(config.get("dtype", "")).endswith("float32") and not files
    from safetensors import safe_open

    with safe_open(files[0], framework="pt") as opened:
        return all(opened.get_slice(name).get_dtype() == "F32" for name in list(opened.keys())[:1])


def _obstacle(stated: Mapping[str, Any], settings: Any, ours: bool) -> str | None:
    if reason := _foreign_head(stated):
        return reason
    if ours:
        return None
    # imported only here because transformers' modelling code takes seconds to import
    from slipstream.models.huggingface import why_unsupported

    return why_unsupported(settings)


def _shapes(files: list[Path], settings: Any, ours: bool) -> dict[str, Shape]:
    if files and all(file.suffix == ".safetensors" for file in files):
        return {name: shape for file in files for name, shape in _safetensors_shapes(file).items()}
    return llama_shapes(settings.to_dict()) if ours else _shapes_of_modules(settings)


def llama_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """The tensors that a checkpoint of the Llama family with this config.json holds."""
    width, inner, rows = (int(config[k]) for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = int(config["num_attention_heads"])
    kv_heads, head = int(config.get("num_key_value_heads") or heads), int(config.get("head_dim") or width // heads)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (rows, width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (int(config.get("draft_vocab_size") or rows), width)
    products = {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (kv_heads * head, width),
        "self_attn.v_proj": (kv_heads * head, width),
        "self_attn.o_proj": (width, heads * head),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    biased = ("q_proj", "k_proj", "v_proj") if config["model_type"] == "qwen2" or config.get("attention_bias") else ()
    for i in range(int(config["num_hidden_layers"])):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{n}.weight": (width,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.{n}.weight": shape for n, shape in products.items()}
        shapes |= {f"{layer}.{n}.bias": shape[:1] for n, shape in products.items() if n.endswith(biased)}
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{n}.weight": (head,) for n in ("q_norm", "k_norm")}
    return shapes


def _shapes_of_modules(settings: Any) -> dict[str, Shape]:
    """From transformers' own modules, without memory for their numbers; empty if they cannot be made from a config."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except Exception:  # whatever a configuration of another task, or with quantised layers, leads to
        return {}
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
