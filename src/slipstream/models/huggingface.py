"""Any causal language model of transformers behind the ``Model`` protocol: its own modules, its own key/value cache.

What makes rollback right is the cache. transformers gives a sliding-window layer a cache that forgets what has left the
window, so that a rejected draft token may already have pushed out a key that is needed again. Here every layer keeps
all keys, and the window is left to the attention mask, which transformers derives from the config and not from the
cache. The price is memory: a windowed layer costs as much as a full one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
)

from slipstream.errors import InputError
from slipstream.models.shapes import cached_numbers

#: Cache layers of transformers that hold one entry a token (or, the last one, nothing at all), so that the newest
#: entries can be cut off. By name, because not every version of transformers has all of them.
_CROPPABLE_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer"})
#: How remote code, which need not set the marks that transformers' own models carry, names recurrent architectures.
_RECURRENT_WORDS = ("mamba", "rwkv", "xlstm", "retnet", "hyena", "recurrent", "ssm")
#: The names under which configs give the number of positions, best first.
_POSITION_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
_ADVICE = "choose a model whose layers all use attention with a key/value cache"


class HuggingFaceCache:
    """One sequence of a ``HuggingFaceModel``: its token ids, and transformers' keys and values of the first of them.

    Only the ids are authoritative. After a failed pass, or where rotary frequencies change with the length of the
    sequence, keys and values count as lost, and the next pass computes them again from the ids.
    """

    def __init__(self, past: Any) -> None:
        self.past = past
        self.tokens: list[int] = []
        self.held = 0
        """Of how many tokens ``past`` has valid keys and values; the next pass cuts off what it has beyond."""
        self.rope = 0
        """Which set of rotary frequencies these keys were made with."""

    @property
    def length(self) -> int:
        """Number of tokens of the sequence."""
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        """Forget everything from position ``length`` on.

        Raises:
            ValueError: ``length`` is negative or above the present one.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        # No tensor is touched here, and ``held`` comes first: an interrupt at any point leaves the cache consistent.
        self.held = min(self.held, length)
        del self.tokens[length:]


class HuggingFaceModel:
    """A causal language model of transformers as it is: never moved, cast, or left in another mode than before.

    Works for models that are quantised (bitsandbytes, GPTQ, AWQ, torchao) or spread over devices by ``device_map``.
    Dropout is off in every pass: a model in training mode is switched to evaluation for the pass and back after it.

    Args:
        model: A causal language model; its config, weights and hooks are used as they are.
        name: What to call it in messages; by default the path it was loaded from, else its class.
        tokenizer: Its tokenizer, if text is to go in or out.

    Raises:
        InputError: the model is not a causal language model, or what it keeps of a sequence cannot be rolled back.
    """

    def __init__(self, model: PreTrainedModel, *, name: str | None = None, tokenizer: Any | None = None) -> None:
        reason = why_unsupported(model)
        if reason is not None:
            raise InputError(reason)
        self.model: Any = model
        self.tokenizer = tokenizer
        self.name = name or getattr(model, "name_or_path", "") or type(model).__name__
        config = _text_config(self.model.config)
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self.embedding_size = _rows(embedding, config.vocab_size)
        self.vocab_size = _rows(head, config.vocab_size)
        self.max_positions = _max_positions(config)
        self.eos_token_ids = _eos_token_ids(self.model, tokenizer)
        self.device = _input_device(embedding)
        self._rope_switches = _rope_switches(config)
        self._cache_argument = cache_argument(type(model)) or "past_key_values"
        self._has_logits_to_keep = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    @property
    def position_bytes(self) -> int:
        """Bytes of cache that one token takes, as far as the config tells."""
        return int(cached_numbers(_text_config(self.model.config)) * self.model.dtype.itemsize)

    def new_cache(self) -> HuggingFaceCache:
        """An empty cache for one sequence."""
        return HuggingFaceCache(_unwindowed(_new_past(self.model.config)))

    def forward(self, tokens: Sequence[int], cache: HuggingFaceCache, num_logits: int) -> Tensor:
        """Append ``tokens`` to the sequence in ``cache``. If the pass fails, the cache is as it was before.

        Returns:
            Logits of the last ``num_logits`` of ``tokens``, shape (num_logits, V), in the model's floating type and on
            the device of its output layer.

        Raises:
            ValueError: there are no tokens, or fewer than ``num_logits``.
            InputError: the model (one whose code is not part of transformers) turned out not to use the cache.
        """
        if not tokens or not 0 <= num_logits <= len(tokens):
            raise ValueError(f"cannot give {num_logits} rows of logits for {len(tokens)} tokens")
        start = cache.length
        try:
            cache.tokens.extend(tokens)
            with torch.no_grad(), _evaluating(self.model):
                return self._read(cache, start, cache.length - num_logits)
        except BaseException:
            # Some layers may have appended and others not, so none is trusted. An interrupt is one of the ways to here.
            cache.held = 0
            cache.truncate(start)
            raise

    def _read(self, cache: HuggingFaceCache, start: int, first: int) -> Tensor:
        """Pass the tokens from ``start`` on; logits of those from position ``first`` on.

        Tokens before and after a rope switch go in separate passes, as they do when they come one at a time.
        """
        end = cache.length
        stops = sorted({switch for switch in self._rope_switches if start < switch < end} | {end})
        rows = []
        for begin, stop in zip([start, *stops], stops, strict=False):
            # Positions before the last switch whose logits nobody wants: the pass after it reads them anyway.
            if stop > first or stop == end:
                rows.append(self._pass(cache, stop, min(stop - begin, stop - first)))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _pass(self, cache: HuggingFaceCache, stop: int, num_logits: int) -> Tensor:
        """One pass over what the model has not yet seen of the first ``stop`` tokens; the last ``num_logits`` rows."""
        rope = sum(stop > switch for switch in self._rope_switches)
        if cache.rope != rope:
            cache.held = 0
        _cut(cache.past, cache.held)
        arguments: dict[str, Any] = {self._cache_argument: cache.past}
        if self._has_logits_to_keep:
            arguments["logits_to_keep"] = max(num_logits, 1)  # transformers takes 0 for "all"
        ids = torch.tensor([cache.tokens[cache.held : stop]], dtype=torch.long, device=self.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=True, return_dict=True, **arguments).logits
        if max((layer.get_seq_length() for layer in _filled_layers(cache.past)), default=0) != stop:
            raise InputError(f"{_title(self.model)} does not use the key/value cache of transformers; {_ADVICE}.")
        cache.held, cache.rope = stop, rope
        return logits[0, logits.shape[1] - num_logits :]


def why_unsupported(config_or_model: Any) -> str | None:
    """Why a ``HuggingFaceModel`` cannot be made of this model, or of a model with this config; None if it can.

    A config is enough to ask before any weights are loaded; the model class is then the one that
    ``AutoModelForCausalLM`` would choose. The answer is a sentence that names the architecture and the way out.
    """
    return _not_causal(config_or_model) or cannot_roll_back(config_or_model)


def cannot_roll_back(config_or_model: Any) -> str | None:
    """Why the state that this model keeps of a sequence cannot be cut back to an earlier length; None if it can.

    True of recurrent models (Mamba, RWKV, ...), of hybrids that mix recurrent or convolution layers with attention,
    and of models that do not take transformers' cache. The answer is a sentence that names the architecture.
    """
    model_class, config = _class_and_config(config_or_model)
    obstacle = _class_obstacle(model_class) or _layer_obstacle(model_class, config)
    if obstacle is None:
        return None
    return f"{_title(config_or_model)} {obstacle}, so a rejected draft token cannot be taken back; {_ADVICE}."


def _class_obstacle(model_class: Any) -> str | None:
    """What in the signature or the marks of a model class stands against rollback."""
    if model_class is None:
        return None
    # transformers' own list of architectures that bring a cache of their own; the method is not in every version.
    takes_cache = getattr(model_class, "_supports_default_dynamic_cache", lambda: True)()
    if not takes_cache or cache_argument(model_class) is None:
        return "keeps its state outside the key/value cache of transformers"
    return None


def _layer_obstacle(model_class: Any, config: Any) -> str | None:
    """What in the cache that transformers would make for this config stands against rollback."""
    try:
        kinds = {type(layer).__name__ for layer in _new_past(config).layers}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        return f"has no key/value cache that transformers could make from its config ({error})"
    if not kinds <= _CROPPABLE_LAYERS:
        return f"has layers that keep a running state ({', '.join(sorted(kinds - _CROPPABLE_LAYERS))})"
    # Hybrid families have members with attention layers only, which carry the family's mark all the same. It counts
    # where the config does not list its layers, so that the cache above is only transformers' guess.
    foreign = not type(config).__module__.startswith("transformers.")
    marked = getattr(model_class, "_is_stateful", False)
    if foreign and any(word in f"{config.model_type} {type(config).__name__}".lower() for word in _RECURRENT_WORDS):
        marked = True
    if marked and not getattr(_text_config(config), "layer_types", None):
        return "is a recurrent model"
    return None


def _not_causal(config_or_model: Any) -> str | None:
    """Why this is not a causal language model, as a sentence; None if it is one."""
    if not isinstance(config_or_model, PreTrainedModel | PreTrainedConfig):
        kind = type(config_or_model).__name__
        return f"{kind} is not a model of transformers; pass a PreTrainedModel (PEFT: what merge_and_unload() returns)."
    model_class, config = _class_and_config(config_or_model)
    if config.is_encoder_decoder:
        obstacle = "is an encoder-decoder model"
    elif not _has_language_head(config_or_model, model_class, config):
        obstacle = "has no output layer for the next token"
    elif _reads_both_ways(_text_config(config)):
        obstacle = "reads its text in both directions"
    else:
        return None
    title = _title(config_or_model)
    return f"{title} {obstacle}; choose a decoder-only model and load it with AutoModelForCausalLM."


def _has_language_head(config_or_model: Any, model_class: Any, config: Any) -> bool:
    if model_class is None:  # remote code: its config names the class for each task
        return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_model = isinstance(config_or_model, PreTrainedModel)
    return model_class.can_generate() and not (is_model and config_or_model.get_output_embeddings() is None)


def _reads_both_ways(text_config: Any) -> bool:
    """Whether a token sees later ones: encoders that were not made decoders, and decoders that were made encoders."""
    # "is_decoder" is false of GPT-NeoX too, and absent from most; encoders are masked models or may be given another.
    decodes = getattr(text_config, "is_decoder", None)
    encodes = decodes is False and hasattr(text_config, "add_cross_attention")
    if not decodes and (encodes or type(text_config) in MODEL_FOR_MASKED_LM_MAPPING):
        return True
    two_way = getattr(text_config, "use_bidirectional_attention", None) in (True, "all")
    return two_way or getattr(text_config, "is_causal", True) is False


def _class_and_config(config_or_model: Any) -> tuple[Any, Any]:
    """The model class (None if it is not one of transformers' own) and the config."""
    if isinstance(config_or_model, PreTrainedModel):
        return type(config_or_model), config_or_model.config
    config = config_or_model
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)], config
    return None, config


def _title(config_or_model: Any) -> str:
    """The architecture as messages name it, such as ``MambaForCausalLM (model type mamba)``."""
    model_class, config = _class_and_config(config_or_model)
    return f"{(model_class or type(config)).__name__} (model type {config.model_type})"


def _text_config(config: Any) -> Any:
    """The part of a multimodal config that describes the language model; of any other config, all of it."""
    return config.get_text_config(decoder=True)


def cache_argument(model_class: Any) -> str | None:
    """The name under which ``forward`` takes the cache: transformers renamed it in the course of version 5."""
    parameters = inspect.signature(model_class.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), None)


def _new_past(config: Any) -> Any:
    """The cache that transformers itself would use."""
    return DynamicCache(config=config)


def _unwindowed(past: Any) -> Any:
    """The same cache with layers that keep everything in place of those that keep a window."""
    past.layers = [DynamicLayer() if getattr(layer, "is_sliding", False) else layer for layer in past.layers]
    return past


def _filled_layers(past: Any) -> list[Any]:
    """The layers that hold keys and values; layers that use another layer's keys hold none."""
    return [layer for layer in past.layers if isinstance(layer, DynamicLayer) and layer.get_seq_length()]


def _cut(past: Any, length: int) -> None:
    """Leave the keys and values of the first ``length`` tokens."""
    for layer in _filled_layers(past):
        excess = layer.get_seq_length() - length
        if excess > 0:
            layer.crop(-excess)


def _rows(layer: Any, default: int) -> int:
    """Number of ids that an input embedding takes or an output layer gives."""
    weight = getattr(layer, "weight", None)
    # Quantised weights may be packed, or a method: then the layer says for what it stands.
    if isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2:
        return int(weight.shape[0])
    return int(getattr(layer, "num_embeddings", getattr(layer, "out_features", default)))


def _input_device(embedding: nn.Module) -> torch.device:
    """Where token ids must be. Offloaded weights are nowhere; accelerate's hook then says where they will be."""
    weights = itertools.chain(embedding.parameters(), embedding.buffers())
    device = next((weight.device for weight in weights), torch.device("cpu"))
    if device.type != "meta":
        return device
    return torch.device(getattr(getattr(embedding, "_hf_hook", None), "execution_device", None) or "cpu")


def _max_positions(config: Any) -> int | None:
    """Number of positions the model was made for; None if it has no limit.

    RoPE of type "dynamic" could go on beyond it, but changes the frequencies of every later pass and of other
    requests when it does, so that no two ways of cutting a text into passes agree.
    """
    # ALiBi has no limit, whatever length the model was trained at. (MPT's code builds its biases for a fixed one.)
    if config.model_type == "bloom" or getattr(config, "alibi", False):
        return None
    sizes = (getattr(config, name, None) for name in _POSITION_NAMES)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _rope_switches(config: Any) -> tuple[int, ...]:
    """Lengths above which all rotary frequencies are others: "longrope" of Phi-3 and the like has one such length."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    switches = set()
    # Models with several kinds of layers may have one dictionary for each kind.
    for one in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if one.get("rope_type", one.get("type")) == "longrope":
            switches.add(one.get("original_max_position_embeddings") or config.original_max_position_embeddings)
    return tuple(sorted(switches))


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """End-of-sequence ids: those of the generation config, else of the config, else of the tokenizer."""
    for source in (getattr(model, "generation_config", None), _text_config(model.config), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch a model that is in training mode to evaluation, and each of its modules back afterwards."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
