"""A lean decoder for the Llama family: Llama 2 and 3, Mistral, Qwen2, Qwen2.5, Qwen3, SmolLM2.

One sequence at a time, no autograd, no modules. With D = hidden size, H query heads, G key/value heads, d = head size:

    tokens (n) -> x (n, D)
    each layer:  x += out( attention( rope(norm(q)), rope(norm(k)), v ) )     q (H, n, d); k, v (G, n, d)
                 x += down( silu(gate(x')) * up(x') )                          x' = rms_norm(x)
    logits = head( rms_norm(x) )                                               only for the rows that are asked for
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from slipstream.errors import InputError
from slipstream.models.base import ROWS, Item
from slipstream.models.cache import Ahead, KeyValueCache
from slipstream.models.exit_head import ExitHead
from slipstream.models.heap import return_freed
from slipstream.models.linear import Linear, activation_dtype, embedding_dtype, make_linear, stored_bytes
from slipstream.models.native.panels import TILE, PanelLinear
from slipstream.models.native.stack import Rows, Stack
from slipstream.models.reduced import read_output_ids

#: (name in the Hugging Face layout) -> tensor; raises KeyError if there is none.
Tensors = Callable[[str], Tensor]

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Why this decoder cannot run a checkpoint with this config.json, or None if it can."""
    if config.get("model_type") not in _FAMILY:
        return f"model type {config.get('model_type')!r} is not of the Llama family"
    if config.get("hidden_act", "silu") != "silu":
        return f"activation {config['hidden_act']!r} is not silu"
    if _rope_settings(config)["rope_type"] not in _ROPE_TYPES:
        return f"rope type {_rope_settings(config)['rope_type']!r} is not one of {', '.join(_ROPE_TYPES)}"
    if "mscale" in _rope_settings(config):
        return "its yarn settings scale attention in a way of their own (mscale)"
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        return "rotary embeddings cover only a part of each head"
    if config.get("quantization_config"):
        return "the weights are already quantised"
    return None


@dataclass(frozen=True)
class _Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    window: int | None


@dataclass(frozen=True)
class _Attended:
    """What one layer's attention reaches: its part of the cache, by position and within the window."""

    cache: KeyValueCache
    layer: int
    start: int
    rotation: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class _Span:
    """Layers ``first`` to ``last`` (excluded) over positions from ``start`` on."""

    cache: KeyValueCache
    start: int
    first: int
    last: int


class LlamaModel:
    """Weights and the forward pass. All state of a sequence is in its cache.

    ``weight_bytes`` counts what one decode step has to read: every weight but the embedding table.

    Args:
        config: a config.json that ``unsupported`` has nothing against.
        tensor: where the weights come from.
        weights: a name that ``linear.activation_dtype`` accepts.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensor: Tensors,
        *,
        name: str,
        weights: str = "fp32",
        device: torch.device | str = "cpu",
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Any | None = None,
    ) -> None:
        self.name = name
        self.device = torch.device(device)
        self.weights = weights
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.max_positions: int | None = config.get("max_position_embeddings")
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // self.heads)
        self._by_row = False
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._dtype = activation_dtype(weights, self.device)
        self._load(config, tensor)
        self._rope = _Rope(config, self.head_dim, self._dtype, self.device)

    def quick(self) -> LlamaModel:
        """The same weights with the cheapest arithmetic there is for them: for drafting."""
        if self._stack is not None:
            return self
        return self._view(lambda linear: linear.quick())

    def bit_exact(self) -> LlamaModel:
        """The same weights; a token's logits have the same bits whatever the number of tokens in the pass.

        Raises:
            InputError: the model is not on a CPU.
        """
        if self.device.type != "cpu":
            raise InputError(f"bit_exact works on a CPU only, and {self.name} is on {self.device}; leave it out")
        if self._stack is not None:
            return self  # it always is
        view = self._view(lambda linear: linear.bit_exact())
        view._by_row = True
        return view

    def with_outputs(self, ids: Tensor) -> LlamaModel | None:
        """The same weights with an output layer for ``ids`` (R,) only; None where the layer's rows cannot be told."""
        if not isinstance(self._head, PanelLinear) or self.weights == "int8":
            return None
        view = copy.copy(self)
        if view._table is None:
            view._table = self._head.rows(torch.arange(self.embedding_size))
        view._head = make_linear(self._head.rows(ids).to(self._dtype), None, self.weights)
        view.vocab_size = len(ids)
        view.output_ids = ids
        view._stack = view._native_stack()
        return view

    def _view(self, of: Callable[[Linear], Linear]) -> LlamaModel:
        view = copy.copy(self)
        view._layers = [
            replace(e, qkv=of(e.qkv), out=of(e.out), gate_up=of(e.gate_up), down=of(e.down)) for e in self._layers
        ]
        view._head = of(self._head)
        return view

    def fit(self, head: ExitHead) -> ExitHead:
        """``head`` in this model's numbers.

        Raises:
            InputError: it was made for another width.
        """
        if head.norm.shape != self._norm.shape:
            raise InputError(
                f"the exit head was made for a width of {len(head.norm)}, and {self.name} has {len(self._norm)}; make "
                "one for this target"
            )
        return head.to(self._norm)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self._layers)

    def new_cache(self) -> KeyValueCache:
        """An empty cache for one sequence."""
        return KeyValueCache(len(self._layers), self.kv_heads, self.head_dim, self._dtype, self.device)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], cache: KeyValueCache, num_logits: int) -> Tensor:
        """Append ``tokens`` to the sequence in ``cache``; logits (num_logits, V) of the last of them.

        What ``exit_early`` has computed for the first of them is not computed again.
        """
        end = cache.length + len(tokens)
        cache.reserve(end)
        ahead = cache.ahead
        known = 0 if ahead is None else _shared(tokens, ahead.tokens)
        if ahead is None or not known:
            x = self._embed(tokens)
            logits = self._run(x, _Span(cache, cache.length, 0, len(self._layers)), num_logits)
        else:
            rest = self._embed(tokens[known:])
            if len(rest):
                self._run(rest, _Span(cache, cache.length + known, 0, ahead.layers), 0)
            x = torch.cat((ahead.states[:known], rest))
            logits = self._run(x, _Span(cache, cache.length, ahead.layers, len(self._layers)), num_logits)
        cache.ahead = None
        cache.length = end
        return logits

    @property
    def position_bytes(self) -> int:
        """Bytes of cache that one token takes."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * self._dtype.itemsize

    @property
    def prompt_rows(self) -> tuple[int, int]:
        """Tokens of prompts in one pass: for each prompt where others wait for that pass; at most.

        The kernels take six rows at once. Four times as many are read in 0.7 of the time each, more in little less.
        """
        return (2 * TILE, 4 * TILE) if self._stack is not None else (ROWS, ROWS)

    @torch.inference_mode()
    def forward_batch(self, items: Sequence[Item]) -> list[Tensor]:
        """``forward`` for several sequences. Native kernels see all tokens in one pass, others one after the other.

        Returns:
            Logits (num_logits, V) of each item.
        """
        if self._stack is None or len(items) < 2 or len(_exits(items)) > 1:
            return [self.forward(item.tokens, item.cache, item.num_logits) for item in items]
        return list(self._forward_rows(items))

    def _forward_rows(self, items: Sequence[Item]) -> tuple[Tensor, ...]:
        """One native pass. Rows whose logits are wanted come last, as the output layer needs them.

        If some have been through the first layers already, the others go through these first.
        """
        silent: list[_Row] = []
        heard: list[_Row] = []
        for item in items:
            cache, quiet = item.cache, len(item.tokens) - item.num_logits
            cache.reserve(cache.length + len(item.tokens))
            states = () if cache.ahead is None else cache.ahead.states[: _shared(item.tokens, cache.ahead.tokens)]
            for at, token in enumerate(item.tokens):
                row = _Row(cache, cache.length + at, token, states[at] if at < len(states) else None)
                (silent if at < quiet else heard).append(row)
        rows = [*silent, *heard]
        first = max(_exits(items), default=0)
        fresh = [row for row in rows if row.state is None]
        x = self._embed([row.token for row in fresh])
        if len(fresh) < len(rows):
            if fresh:
                self._through(x, fresh, 0, (0, first))
            new = iter(x)
            x = torch.stack([next(new) if row.state is None else row.state for row in rows])
        else:
            first = 0
        logits = self._through(x, rows, len(heard), (first, len(self._layers)))
        for item in items:
            item.cache.ahead = None
            item.cache.length += len(item.tokens)
        return torch.split(logits, [item.num_logits for item in items])

    def _through(self, x: Tensor, rows: Sequence[_Row], num_logits: int, layers: tuple[int, int]) -> Tensor:
        """Take ``x`` (n, D), ``rows`` of any sequences, through some layers in place, natively; logits of the last."""
        positions = [row.position for row in rows]
        turns = self._rope.by_position(max(positions) + 1)
        places = Rows([row.cache for row in rows], positions)
        return cast(Stack, self._stack).forward(x, places, turns, num_logits, layers)

    @torch.inference_mode()
    def exit_early(
        self,
        tokens: Sequence[int],
        cache: KeyValueCache,
        layers: int,
        num_logits: int = 1,
        head: ExitHead | None = None,
    ) -> Tensor:
        """Run ``tokens`` through the first ``layers`` only; logits (num_logits, V) of the last ones, from there.

        ``head`` takes the place of the last layer's norm.

        They come behind the cache's length and what earlier calls put there; ``cache.length`` stays as it is, and
        ``forward`` goes on from where they are.
        """
        start = _reserved(cache, len(tokens))
        x = self._embed(tokens)
        self._run(x, _Span(cache, start, 0, layers), 0)
        _put_ahead(cache, layers, tokens, x)
        return self._exit_head(x[len(x) - num_logits :], head)

    @torch.inference_mode()
    def exit_early_batch(self, items: Sequence[Item], layers: int, head: ExitHead | None = None) -> list[Tensor]:
        """``exit_early`` for several sequences. Native kernels see all tokens in one pass, others one after the other.

        Returns:
            Logits (num_logits, V) of each item.
        """
        if self._stack is None or len(items) < 2:
            return [self.exit_early(i.tokens, i.cache, layers, i.num_logits, head) for i in items]
        rows: list[_Row] = []
        for item in items:
            start = _reserved(item.cache, len(item.tokens))
            rows += [_Row(item.cache, start + at, token) for at, token in enumerate(item.tokens)]
        x = self._embed([row.token for row in rows])
        self._through(x, rows, 0, (0, layers))
        parts = torch.split(x, [len(item.tokens) for item in items])
        for item, part in zip(items, parts, strict=True):
            _put_ahead(item.cache, layers, item.tokens, part)
        last = [part[len(part) - item.num_logits :] for item, part in zip(items, parts, strict=True)]
        return list(torch.split(self._exit_head(torch.cat(last), head), [item.num_logits for item in items]))

    def _exit_head(self, x: Tensor, head: ExitHead | None) -> Tensor:
        last = x[:, : len(self._norm)]
        if head is None:
            return self._head(self._normed(last, self._norm))
        return self._head(torch.cat([head(row, self._eps) for row in last.split(1)]))  # each as if it were alone

    def _run(self, x: Tensor, span: _Span, num_logits: int) -> Tensor:
        """Take ``x`` (n, D) through some layers, in place, and its last rows through the output layer."""
        cache, end = span.cache, span.start + len(x)
        if self._stack is not None:
            rows = Rows([cache] * len(x), range(span.start, end))
            turns = self._rope.by_position(end)
            return self._stack.forward(x, rows, turns, num_logits, (span.first, span.last))
        rotation = self._rope.rows(span.start, end)
        masks = {window: self._mask(span.start, end, window) for window in self._windows}
        for index in range(span.first, span.last):
            layer = self._layers[index]
            to = _Attended(cache, index, span.start, rotation, masks[layer.window])
            x += self._attention(layer, self._normed(x, layer.attention_norm), to)
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, dim=-1)
            x += layer.down(F.silu(gate) * up)
        return self._head(self._normed(x[len(x) - num_logits :], self._norm)) if num_logits else x[:0]

    def _embed(self, tokens: Sequence[int]) -> Tensor:
        """(n, D), in the activations' type; for the native kernels with columns of zeros up to whole panels."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.device)
        # Without a table the output layer has the rows too.
        rows = cast(PanelLinear, self._head).rows(ids) if self._table is None else self._table[ids]
        x = rows.to(self._dtype, copy=True)
        return x if self._stack is None else F.pad(x, (0, self._stack.width - x.shape[1])).contiguous()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _attention(self, layer: _Layer, x: Tensor, to: _Attended) -> Tensor:
        """Self-attention of the rows of ``x`` (n, D) over everything in the cache and themselves."""
        n = len(x)
        heads = layer.qkv(x).view(n, self.heads + 2 * self.kv_heads, self.head_dim).transpose(0, 1)
        turning, v = heads[: self.heads + self.kv_heads], heads[self.heads + self.kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = turning[: self.heads], turning[self.heads :]
            turning = torch.cat((self._normed(q, layer.query_norm), self._normed(k, layer.key_norm)))
        turned = _rotated(turning, to.rotation)
        keys, values = to.cache.write(to.layer, to.start, turned[self.heads :], v)
        q = turned[: self.heads]
        mix = self._mixed_by_row if self._by_row else self._mixed
        return layer.out(mix(q, keys, values, to.mask).transpose(0, 1).reshape(n, -1))

    def _mixed(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(d) + mask) v: q (H, n, d), keys, values (G, total, d), mask (n, total) -> (H, n, d)."""
        # The queries that share a key/value head are further rows of one product with it.
        rows, keys, scale = q.reshape(self.kv_heads, -1, self.head_dim), keys.transpose(1, 2), self.head_dim**-0.5
        if mask is None:
            scores = torch.bmm(rows * scale, keys)
        else:
            mask = mask.expand(self.heads // self.kv_heads, *mask.shape).reshape(-1, mask.shape[-1])
            scores = torch.baddbmm(mask, rows, keys, alpha=scale)
        return torch.bmm(torch.softmax(scores, dim=-1), values).view(q.shape)

    def _mixed_by_row(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """The same, every row by itself over just the keys up to it: its position alone decides the shapes."""
        first = keys.shape[1] - q.shape[1] + 1
        rows = []
        for i, row in enumerate(q.split(1, dim=1)):
            seen = first + i
            row_mask = None if mask is None else mask[i : i + 1, :seen]
            rows.append(self._mixed(row, keys[:, :seen], values[:, :seen], row_mask))
        return torch.cat(rows, dim=1)

    def _mask(self, start: int, end: int, window: int | None) -> Tensor | None:
        """What to add to scores of rows start..end over keys 0..end, (end - start, end); None if nothing is hidden."""
        alone = self._by_row or end - start == 1
        if alone and (window is None or end <= window):
            return None
        rows = torch.arange(start, end, device=self.device).unsqueeze(1)
        keys = torch.arange(end, device=self.device)
        hidden = keys > rows
        if window is not None:
            hidden |= keys <= rows - window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self.device).masked_fill_(hidden, -math.inf)

    def _load(self, config: Mapping[str, Any], tensor: Tensors) -> None:
        def dense(name: str) -> Tensor:
            # A copy, since the file may be replaced while the model is in use, and what is mapped would go with it.
            loaded = tensor(name).to(self.device, self._dtype, copy=True)
            self.weight_bytes += loaded.numel() * stored_bytes(self.weights, loaded.ndim)
            return loaded

        def optional(name: str) -> Tensor | None:
            try:
                return dense(name)
            except KeyError:
                return None

        def fused(prefix: str, *names: str) -> Linear:
            weight = torch.cat([dense(f"{prefix}.{n}.weight") for n in names])
            biases = [optional(f"{prefix}.{n}.bias") for n in names]
            bias = None if biases[0] is None else torch.cat([b for b in biases if b is not None])
            return make_linear(weight, bias, self.weights)

        self.weight_bytes = 0
        windows = _windows(config)
        self._windows = set(windows)
        self._layers = [
            _Layer(
                qkv=fused(f"model.layers.{i}.self_attn", "q_proj", "k_proj", "v_proj"),
                out=fused(f"model.layers.{i}.self_attn", "o_proj"),
                gate_up=fused(f"model.layers.{i}.mlp", "gate_proj", "up_proj"),
                down=fused(f"model.layers.{i}.mlp", "down_proj"),
                attention_norm=dense(f"model.layers.{i}.input_layernorm.weight"),
                mlp_norm=dense(f"model.layers.{i}.post_attention_layernorm.weight"),
                query_norm=optional(f"model.layers.{i}.self_attn.q_norm.weight"),
                key_norm=optional(f"model.layers.{i}.self_attn.k_norm.weight"),
                window=window,
            )
            for i, window in enumerate(windows)
        ]
        self._norm = dense("model.norm.weight")
        return_freed()  # the output layer is the largest by far
        tied, before = bool(config.get("tie_word_embeddings")), self.weight_bytes
        embedding = dense("model.embed_tokens.weight")
        if not tied:
            self.weight_bytes = before  # a step reads a few rows of it
        head = embedding if tied else dense("lm_head.weight")
        self._head = make_linear(head, None, self.weights)
        self._stack = self._native_stack()
        self._table = None
        if not (tied and self._stack is not None and self.weights != "int8"):
            self._table = embedding.to(embedding_dtype(self.weights))
        self.embedding_size = len(embedding)
        self.vocab_size = len(head)
        self.output_ids = read_output_ids(self.name, config, tensor, (self.vocab_size, self.embedding_size))
        """The id of each row of the output layer, (V,); None if row and id are one."""

    def _native_stack(self) -> Stack | None:
        """All of the decoder for one native call, if its products are native."""
        if not isinstance(self._head, PanelLinear):
            return None
        shape = (self.heads, self.kv_heads, self.head_dim)
        return Stack(self._layers, self._head, self._norm, shape, self._eps)


@dataclass
class _Row:
    """A token of a pass over several sequences."""

    cache: KeyValueCache
    position: int
    token: int
    state: Tensor | None = None
    """What goes into the layer that it got to earlier."""


def _exits(items: Sequence[Item]) -> set[int]:
    """The layers that some of the items' tokens have got to."""
    return {item.cache.ahead.layers for item in items if item.cache.ahead is not None}


def _reserved(cache: KeyValueCache, count: int) -> int:
    """Where ``count`` more tokens come behind those that are ahead."""
    start = cache.length + (len(cache.ahead.tokens) if cache.ahead else 0)
    cache.reserve(start + count)
    return start


def _put_ahead(cache: KeyValueCache, layers: int, tokens: Sequence[int], x: Tensor) -> None:
    """Keep what came of more tokens in the first layers."""
    before = cache.ahead
    states = torch.cat((before.states, x)) if before else x
    cache.ahead = Ahead(layers, (*(before.tokens if before else ()), *tokens), states)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences have in common from their start on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _windows(config: Mapping[str, Any]) -> list[int | None]:
    """Each layer's sliding window, None where a layer sees everything."""
    layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if config["model_type"] == "llama" or window is None:
        return [None] * layers
    if config["model_type"] == "mistral":
        return [window] * layers
    if not config.get("use_sliding_window"):
        return [None] * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", layers))
        return [None if i < first else window for i in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _rotated(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotary embedding of ``heads`` (any, n, d) by ``rotation`` (2, n, d), cosines and signed sines."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * rotation[0], swapped, rotation[1])


class _Rope:
    """The table of cosines and sines by position, grown as positions are asked for."""

    def __init__(self, config: Mapping[str, Any], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies, self._scale = _frequencies(config, head_dim)
        self._dtype = dtype
        self._device = device
        self._table = self._make(256)

    def rows(self, start: int, end: int) -> Tensor:
        """(2, end - start, d): cosines, and sines with the sign that swapping halves needs."""
        return self.by_position(end)[start:end].transpose(0, 1)

    def by_position(self, end: int) -> Tensor:
        """The same by position, (at least ``end``, 2, d)."""
        if end > len(self._table):
            self._table = self._make(max(end, 2 * len(self._table)))
        return self._table

    def _make(self, length: int) -> Tensor:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        table = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
        return table.to(self._device, self._dtype)


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """One view of what newer configs call rope_parameters and older ones rope_theta with rope_scaling."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    given.setdefault("rope_type", given.pop("type", "default"))
    if given.get("rope_theta") is None:
        given["rope_theta"] = config.get("rope_theta") or 10000.0
    return given


def _frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Radians per position of each pair of channels, (d/2,), and the factor on cosines and sines.

    In float32, and operation by operation as transformers computes them: far into a text, the last bit shows.
    """
    settings = _rope_settings(config)
    lengths = float(settings["rope_theta"]) ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    base = 1.0 / lengths
    kind, factor = settings["rope_type"], float(settings.get("factor") or 1.0)
    if kind == "linear":
        return base / factor, 1.0
    if kind == "llama3":
        return _llama3_frequencies(base, settings), 1.0
    if kind == "yarn":
        return _yarn_frequencies(lengths, settings, config, head_dim)
    return base, 1.0


def _llama3_frequencies(base: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
    turns = float(settings["original_max_position_embeddings"]) / (2 * math.pi / base)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * base / float(settings["factor"]) + keep * base


def _yarn_frequencies(
    lengths: Tensor, settings: Mapping[str, Any], config: Mapping[str, Any], head_dim: int
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): channels that turn often are kept, slow ones stretched, a ramp between."""
    original = settings.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor, theta = float(settings["factor"]), float(settings["rope_theta"])

    def channel(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(float(settings.get("beta_fast") or 32)), channel(float(settings.get("beta_slow") or 1))
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    scale = settings.get("attention_factor")
    frequencies = 1.0 / (factor * lengths) * (1 - keep) + 1.0 / lengths * keep
    return frequencies, float(scale or (0.1 * math.log(max(factor, 1.0)) + 1.0))
