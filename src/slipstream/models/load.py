"""From a name or a path to a model that is ready to run."""

from __future__ import annotations

import json
import os
import socket
import struct
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor

from slipstream.errors import InputError
from slipstream.models import registry
from slipstream.models.base import Model
from slipstream.models.shapes import Shape, first_misfit

WEIGHTS = ("auto", "fp32", "bf16", "fp16", "int8", "fp64")
_AUTO_DRAFT = "auto draft"
"""Names that ``load_model`` takes; not every one is to be had for every model and device."""

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")
#: How the classes that predict the next token are called in config.json.
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


def load_model(
    path: str | os.PathLike[str],
    *,
    weights: str = "auto",
    device: str | torch.device = "cpu",
    tokenizer: Any | None = None,
) -> Model:
    """Load a causal language model.

    Models of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM2) run in Slipstream's own decoder, every other
    one, and every checkpoint that is already quantised, in transformers' modules. Code that a checkpoint brings along
    is never run.

    Args:
        path: a folder in Hugging Face layout, a ``.gguf`` file of the Llama family, the name of a model in the model
            cache such as ``"smollm2-135m"``, or a model hub id such as ``"Qwen/Qwen2.5-0.5B-Instruct"``; tried in this
            order. A hub model that the hub's own cache holds is used as it is, without asking the network.
        weights: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``, or ``"auto"``: fp16 on a CPU (fp32 for a model that
            runs in transformers' modules), bf16 elsewhere.
        device: such as ``"cpu"`` or ``"cuda:0"``.
        tokenizer: a transformers tokenizer to use in place of the checkpoint's own.

    Returns:
        The model. Its ``tokenizer`` is None if the checkpoint came without one.

    Raises:
        InputError: anything about the arguments or the checkpoint that stands against it, found before weights are
            read: nothing at ``path``, files missing or cut short, an architecture that cannot be decoded
            speculatively, weights or a device that are not to be had.
    """
    return open_checkpoint(path, weights=weights, device=device, tokenizer=tokenizer).load()


@dataclass(frozen=True)
class Checkpoint:
    """A model that could be loaded: everything about it but its weights."""

    name: str
    config: Mapping[str, Any]
    """As in config.json."""
    tokenizer: Any | None
    max_positions: int | None
    """Number of positions the model was made for; None if that shows only once it is loaded."""
    load: Callable[[], Model]
    """Reads the weights: seconds to minutes."""


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    weights: str = "auto",
    device: str | torch.device = "cpu",
    tokenizer: Any | None = None,
) -> Checkpoint:
    """What ``load_model`` does before it reads weights, with the same arguments and errors."""
    where = _device(device)
    return _open(os.fspath(path), _weights(weights, where), where, tokenizer)


def open_draft(
    path: str | os.PathLike[str], *, weights: str = "auto", device: str | torch.device = "cpu"
) -> Checkpoint:
    """``open_checkpoint`` for a draft model, where ``"auto"`` on a CPU means int8 if Slipstream's own decoder runs it.

    A draft step takes as long as reading the weights, and what rounding them changes costs acceptance only.
    """
    where = _device(device)
    kind = _weights(weights, where)
    return _open(os.fspath(path), _AUTO_DRAFT if kind == "auto" else kind, where, None)


@dataclass(frozen=True)
class Kinds:
    """How a target and its drafts are to be loaded."""

    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"


def open_models(target: str, drafts: Iterable[str], kinds: Kinds) -> tuple[Checkpoint, dict[str, Checkpoint]]:
    """A target and draft models by name, each checked to go with it."""
    from slipstream.models.vocabulary import check_pair

    opened, found = open_checkpoint(target, weights=kinds.weights, device=kinds.device), {}
    for name in drafts:
        found[name] = open_draft(name, weights=kinds.draft_weights, device=kinds.device)
        check_pair(opened, found[name])
    return opened, found


def auto_weights(*, on_cpu: bool, ours: bool, drafting: bool = False) -> str:
    """What ``"auto"`` means; ``ours``: the model runs in Slipstream's own decoder, not in transformers' modules."""
    return "bf16" if not on_cpu else "fp32" if not ours else "int8" if drafting else "fp16"


def _open(name: str, kind: str, device: torch.device, tokenizer: Any | None) -> Checkpoint:
    found = find(name)
    if found.is_file():
        return _open_gguf(found, name, kind, device, tokenizer)
    return _Folder(found, name).open(kind, device, tokenizer)


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device={device!r} is not a device: use for example 'cpu' or 'cuda'") from error
    if found.type == "cpu":
        return found
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != found.type:
        raise InputError(f"device={str(device)!r} is not available on this machine: use {str(here or 'cpu')!r}")
    if (found.index or 0) >= torch.accelerator.device_count():
        raise InputError(f"device={str(device)!r} does not exist, {torch.accelerator.device_count()} are there: use 0")
    return found


def _weights(weights: str, device: torch.device) -> str:
    if weights not in WEIGHTS:
        raise InputError(f"weights={weights!r} is not known: use one of {', '.join(WEIGHTS[:-1])}")
    if device.type == "cpu":
        return weights
    return auto_weights(on_cpu=False, ours=True) if weights == "auto" else weights


def _packed(weights: str, device: torch.device) -> str:
    """What our decoder is to use for ``weights``: packed fp16 or int8 on a CPU if its kernels are there."""
    from slipstream.models.linear import PACKED, packed_kernels
    from slipstream.models.native.build import why_not

    auto = weights in ("auto", _AUTO_DRAFT)
    best = auto_weights(on_cpu=True, ours=True, drafting=weights == _AUTO_DRAFT) if auto else weights
    if device.type != "cpu" or best not in PACKED:
        return weights
    if packed_kernels():
        if reason := why_not():
            warnings.warn(f"{reason}, so decoding uses torch's own kernels, which are slower", stacklevel=2)
        return best
    warnings.warn(
        f"this torch has no packed {best} kernels for this processor; using fp32",
        stacklevel=2,
    )
    return "fp32"


def find(name: str) -> Path:
    """The file or folder that ``name`` means."""
    if not name.strip():  # an empty path would be the current folder
        raise InputError(f"the model {name!r} has no name: give a model folder, a .gguf file, or a cached model's name")
    try:
        local = Path(name).expanduser()
        if local.exists():
            return local
        if local.is_symlink():
            raise InputError(f"the model {name} is a link to nothing: mend the link or give another path")
        if cached := registry.resolve(name):
            return cached
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, no such user, not allowed
        raise InputError(f"the model {name} cannot be looked up ({_first_line(error)}): check the path") from error
    if name in registry.SOURCES:
        raise InputError(f"the model {name} is not in the model cache yet: run 'slipstream models fetch {name}' first")
    if local.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1 or local.suffix == ".gguf":
        raise InputError(f"the model {name} does not exist: give the path of a model folder or of a .gguf file")
    return _hub_folder(name)


def _hub_folder(name: str) -> Path:
    """The local folder of a hub model; what is missing is downloaded, the weights only if the configuration will do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if _weight_files(cached):
            return cached
    except HFValidationError as error:
        raise InputError(f"the model {name} is no local path, no cached model and no valid hub id: check it") from error
    except OSError:
        pass  # not in the hub's cache
    _check_hub_reachable(name)
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*_HUB_FILES], ignore_patterns="*/*"))
        _Folder(folder, name).config()
        for pattern in ("*.safetensors", "*.bin"):
            snapshot_download(name, allow_patterns=pattern, ignore_patterns="*/*")
            if _weight_files(folder):
                break
    except (OSError, HfHubHTTPError) as error:
        raise InputError(
            f"the model {name} cannot be fetched from the model hub ({_first_line(error)}): check its id and access"
        ) from error
    return folder


def _check_hub_reachable(name: str) -> None:
    """Refuse at once where the hub's own client would retry for half a minute."""
    from huggingface_hub import constants

    problem = InputError(
        f"the model {name} is no local path and not in the model cache, and the model hub cannot be reached: connect, "
        f"or use a model folder, a .gguf file or one of {', '.join(registry.SOURCES)}"
    )
    if constants.HF_HUB_OFFLINE:
        raise problem
    if getproxies():
        return
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError:
        raise problem from None


def _open_gguf(file: Path, name: str, weights: str, device: torch.device, tokenizer: Any | None) -> Checkpoint:
    from slipstream.models.gguf import GGUFFile
    from slipstream.models.llama import unsupported

    source = GGUFFile(file)
    config = source.config()
    if reason := unsupported(config):
        raise InputError(f"{file} cannot be run from GGUF ({reason}): use the model's Hugging Face checkpoint instead")
    _check_shapes(file, config, source.shapes())
    if tokenizer is None:
        tokenizer = source.tokenizer()
    load = partial(
        _our_decoder,
        file,
        config,
        lambda: source.tensor,
        name=name,
        weights=_packed(weights, device),
        device=device,
        eos_token_ids=source.eos_token_ids(),
        tokenizer=tokenizer,
    )
    return Checkpoint(name, config, tokenizer, config.get("max_position_embeddings"), load)


def _our_decoder(
    path: Path, config: Mapping[str, Any], tensors: Callable[[], Callable[[str], Tensor]], **settings: Any
) -> Model:
    from slipstream.models.llama import LlamaModel

    try:
        return LlamaModel(config, tensors(), **settings)
    except KeyError as error:
        raise InputError(f"{path} lacks the tensor {error.args[0]}: download the model again") from error


class _Folder:
    """A checkpoint in Hugging Face layout, checked step by step from cheap to expensive."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name

    def open(self, weights: str, device: torch.device, tokenizer: Any | None) -> Checkpoint:
        from slipstream.models.llama import unsupported

        config = self.config()
        files = _weight_files(self.path)
        shapes = self._shapes(files)
        settings = config.to_dict()
        ours = unsupported(settings) is None
        if ours and shapes is not None:
            _check_shapes(self.path, settings, shapes)
            _check_output_ids(self.path, settings, shapes, files)
        if tokenizer is None:
            tokenizer = self._tokenizer()
        if not ours:
            weights = auto_weights(on_cpu=True, ours=False) if weights in ("auto", _AUTO_DRAFT) else weights
            self._check_adaptable(config, weights)
            load: Callable[[], Model] = partial(self._adapted, config, weights, device, tokenizer)
            return Checkpoint(self.name, settings, tokenizer, None, load)
        load = partial(
            _our_decoder,
            self.path,
            settings,
            partial(_tensors, files),
            name=self.name,
            weights=_packed(weights, device),
            device=device,
            eos_token_ids=self._eos_token_ids(config, tokenizer),
            tokenizer=tokenizer,
        )
        return Checkpoint(self.name, settings, tokenizer, settings.get("max_position_embeddings"), load)

    def _check_adaptable(self, config: Any, weights: str) -> None:
        if getattr(config, "quantization_config", None) is None and weights not in _DTYPES:
            raise InputError(
                f"weights={weights!r} is not available for {self.path} (model type {config.model_type}): "
                "use 'fp32', 'bf16' or 'fp16'"
            )

    def config(self) -> Any:
        """The checkpoint's transformers configuration, of an architecture that can be decoded speculatively."""
        stated, config = self.stated()
        if reason := _foreign_head(stated) or _why_unusable(config):
            raise InputError(f"{self.path} cannot be used: {reason}")
        return config

    def stated(self) -> tuple[dict[str, Any], Any]:
        """config.json as it is written, and transformers' configuration, of any architecture that transformers has."""
        from transformers import CONFIG_MAPPING, AutoConfig

        if not self.path.is_dir():
            raise InputError(f"{self.path} is neither a folder nor a file: give a model folder or a .gguf file")
        stated = self._json("config.json")
        if stated is None:
            raise InputError(f"the folder {self.path} has no config.json: give a model folder in Hugging Face layout")
        kind = stated.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            why = "needs code of its own, which is not run" if "auto_map" in stated else "transformers does not know"
            raise InputError(f"{self.path} holds a model of type {kind!r}, which {why}: choose another model")
        try:
            return stated, AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                f"{self.path / 'config.json'} cannot be used ({_first_line(error)}): repair or download it again"
            ) from error

    def _json(self, file: str) -> dict[str, Any] | None:
        """What a JSON file of the folder holds; None if there is no such file."""
        try:
            value = json.loads((self.path / file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path / file} cannot be read ({error}): repair or download it again") from error
        if not isinstance(value, dict):
            raise InputError(f"{self.path / file} does not hold a JSON object: repair or download it again")
        return value

    def _shapes(self, files: list[Path]) -> dict[str, Shape] | None:
        """The shapes of all tensors, if the files are whole; None if their kind tells only when it is read."""
        if not files:
            raise InputError(
                f"the folder {self.path} has a config.json and no weights (*.safetensors or pytorch_model*.bin): "
                "download the model again"
            )
        for file in files:
            if not file.is_file():
                raise InputError(f"{file} is missing, though the model's index lists it: copy or download it again")
        if files[0].suffix != ".safetensors":
            return None
        return {name: shape for file in files for name, shape in _safetensors_shapes(file).items()}

    def _tokenizer(self) -> Any | None:
        from transformers import AutoTokenizer

        if not any((self.path / file).is_file() for file in _TOKENIZER_FILES):
            return None
        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:
            raise InputError(
                f"the tokenizer of {self.path} cannot be read ({_first_line(error)}): repair it or pass tokenizer="
            ) from error

    def _eos_token_ids(self, config: Any, tokenizer: Any | None) -> tuple[int, ...]:
        """Ids of generation_config.json, else of config.json, and the tokenizer's own; if none is stated, the default.

        The tokenizer's is added because many a chat model kept the generation config of the base model that it was
        made from, and ends its turns with a token that only its tokenizer knows of.
        """
        own = getattr(tokenizer, "eos_token_id", None)
        for file in ("generation_config.json", "config.json"):
            stated = self._json(file) or {}
            ids = stated.get("eos_token_id", stated.get("text_config", {}).get("eos_token_id"))
            if ids is not None:
                if not all(type(i) is int for i in (ids if isinstance(ids, list) else [ids])):
                    raise InputError(
                        f"{self.path / file} has eos_token_id {ids!r}, which is no id or list of ids: repair it"
                    )
                return _unique(ids, own)
        return _unique(own if own is not None else config.get_text_config(decoder=True).eos_token_id)

    def _adapted(self, config: Any, weights: str, device: torch.device, tokenizer: Any | None) -> Model:
        """The model in transformers' own modules."""
        from transformers import AutoModelForCausalLM

        from slipstream.models.huggingface import HuggingFaceModel

        quantised = getattr(config, "quantization_config", None) is not None
        placing: dict[str, Any] = {"device_map": device} if quantised else {"dtype": _DTYPES[weights]}
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(self.path, trust_remote_code=False, **placing)
        except ImportError as error:
            raise InputError(f"{self.path} needs another package ({_first_line(error)}): install it") from error
        except Exception as error:  # whatever a config.json without sense leads to
            raise InputError(
                f"{self.path} cannot be loaded by transformers ({_first_line(error)}): repair or download it again"
            ) from error
        loaded.eval()
        model = HuggingFaceModel(loaded if quantised else loaded.to(device), name=self.name, tokenizer=tokenizer)
        model.eos_token_ids = self._eos_token_ids(config, tokenizer)
        return model


def _unique(*ids: int | Iterable[int] | None) -> tuple[int, ...]:
    """All ids that are given, alone or in lists, once each."""
    lists = [[entry] if isinstance(entry, int) else entry or [] for entry in ids]
    return tuple(dict.fromkeys(i for entry in lists for i in entry))


def _first_line(error: Exception) -> str:
    said = str(error).strip()
    if not said or isinstance(error, KeyError):  # of a KeyError only the key
        said = f"{type(error).__name__} {said}"
    return said.splitlines()[0][:200].rstrip(".: ")


def _foreign_head(stated: Mapping[str, Any]) -> str | None:
    """Why the weights of a checkpoint with this config.json are not a causal language model's; None if they are."""
    classes = stated.get("architectures") or []
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        return f"its config.json has architectures {classes!r}, which is no list of names; repair or download it again"
    if not classes or any(name.endswith(_HEADS) for name in classes):
        return None
    return f"it holds the weights of a {classes[0]}, which is not a causal language model; choose one that is"


def _why_unusable(config: Any) -> str | None:
    """Why neither our decoder nor the adapter can run a model with this transformers configuration."""
    from slipstream.models.llama import unsupported

    if unsupported(config.to_dict()) is None:
        return None
    # imported only here because transformers' modelling code takes seconds to import
    from slipstream.models.huggingface import why_unsupported

    return why_unsupported(config)


def _weight_files(folder: Path) -> list[Path]:
    """The files with the folder's weights, as the index lists them if there is one; they may be missing."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if (folder / f"{stem}.{suffix}").is_file():
            return [folder / f"{stem}.{suffix}"]
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                return [folder / name for name in sorted(names)]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{index} cannot be read: copy or download it again") from error
    return []


def _safetensors_shapes(file: Path) -> dict[str, Shape]:
    """The shapes of a file's tensors; its header alone tells whether it is cut short."""
    try:
        size = file.stat().st_size
        with file.open("rb") as start:
            (length,) = struct.unpack("<Q", start.read(8))
            header = json.loads(start.read(min(length, size)))
        header.pop("__metadata__", None)
        whole = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f"{file} is damaged or cut short in its header: copy or download it again") from None
    if size < whole:
        raise InputError(f"{file} is cut short ({size:,} bytes of {whole:,}): copy or download it again")
    return shapes


def _check_shapes(path: Path, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
    if misfit := first_misfit(config, shapes):
        raise InputError(f"{path} {misfit}: download the model again")


def _check_output_ids(path: Path, config: Mapping[str, Any], shapes: Mapping[str, Shape], files: list[Path]) -> None:
    from slipstream.models.reduced import read_output_ids

    size = shapes["model.embed_tokens.weight"][0]
    rows = size if config.get("tie_word_embeddings") else shapes["lm_head.weight"][0]
    read_output_ids(str(path), config, _tensors(files), (rows, size))


def _tensors(files: list[Path]) -> Callable[[str], Tensor]:
    """A function from a tensor's name to the tensor; KeyError if none of the files holds it."""
    if files[0].suffix == ".bin":
        merged: dict[str, Tensor] = {}
        for file in files:
            try:
                merged |= torch.load(file, map_location="cpu", weights_only=True)
            except Exception as error:
                raise InputError(f"{file} cannot be read ({_first_line(error)}): copy or download it again") from error
        return merged.__getitem__
    from safetensors import safe_open

    opened = [safe_open(file, framework="pt") for file in files]
    holders = {name: handle for handle in opened for name in handle.keys()}  # noqa: SIM118 (not iterable)
    return lambda name: holders[name].get_tensor(name)
