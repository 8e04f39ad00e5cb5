"""The limit that memory sets: a step reads all weights once, so it takes at least their bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from slipstream.measure.costs import synchronize
from slipstream.models.base import Model
from slipstream.models.linear import make_linear, packed_kernels

TURNS = 7
_SMALLEST = 256 * 2**20
_CACHES = 8  # as large as this many last-level caches, so that little of it is found there
_ROW = 4096
_CACHE_SIZE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")

#: Attributes of a decoder that a step does not read in full: of an embedding or a table of positions, one row.
_LOOKED_UP = frozenset({"tokenizer", "_tokenizer", "_embedding", "_rope"})


class Bandwidth:
    """A buffer far larger than caches, to be read with PyTorch's present threads.

    Args:
        device: whose memory.
        size: bytes of the buffer; by default ``buffer_bytes``.
    """

    def __init__(self, device: torch.device, size: int | None = None) -> None:
        self._device = device
        self._size = size or buffer_bytes(device)
        self._readers = list(_readers(device, self._size))
        self.once()  # what happens only the first time is not counted

    def once(self) -> float:
        """Bytes per second of the fastest way of reading: the limit is the memory's, not that of one kernel."""
        return self._size / min(self._seconds(read) for read in self._readers)

    def _seconds(self, read: Callable[[], object]) -> float:
        start = perf_counter()
        read()
        synchronize(self._device)
        return perf_counter() - start


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that reading memory reaches: the median of several turns."""
    bandwidth = Bandwidth(device)
    return median(bandwidth.once() for _ in range(TURNS))


def buffer_bytes(device: torch.device) -> int:
    """The size of a buffer that caches do not help with."""
    cache = _last_level_cache() if device.type == "cpu" else 0
    size = max(_SMALLEST, _CACHES * cache)
    return size // (_ROW * 8) * _ROW * 8


def _last_level_cache() -> int:
    try:
        text = _CACHE_SIZE.read_text().strip()
        return int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1)
    except (OSError, ValueError):
        return 0


def _readers(device: torch.device, size: int) -> Iterator[Callable[[], object]]:
    """Ways of reading ``size`` bytes: a sum, a product with one row, and that product with packed weights."""
    wide = torch.ones(size // (_ROW * 4), _ROW, device=device)
    row = torch.ones(1, _ROW, device=device)
    yield wide.sum
    yield lambda: F.linear(row, wide)
    if device.type == "cpu" and packed_kernels():
        packed = make_linear(torch.ones(size // (_ROW * 2), _ROW), None, "fp16")
        yield lambda: packed(row)


def weight_bytes(model: Model) -> int:
    """Bytes of weights that one decode step of ``model`` streams from memory.

    A model that knows says so by an attribute ``weight_bytes``. Otherwise everything that it holds is added up, but
    for what a step only looks a row up in: embedding and position tables. An output layer that is tied to the
    embedding counts. Of a mixture of experts all experts count, though a step reads some of them only.
    """
    stated = getattr(model, "weight_bytes", None)
    if isinstance(stated, int):
        return stated
    module = getattr(model, "model", None)
    if isinstance(module, nn.Module):
        return _module_bytes(module)
    return sum(_sizes(vars(_bare(model)), {}).values())


def _bare(model: Any) -> Any:
    """The model inside a wrapper that only times it."""
    return model.__dict__.get("_model", model)


def _module_bytes(module: Any) -> int:
    sizes = {weight.data_ptr(): weight.nbytes for weight in module.parameters()}
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    weights = [getattr(layer, "weight", None) for layer in (embedding, head)]
    looked_up, multiplied = (w.data_ptr() if isinstance(w, Tensor) else None for w in weights)
    if looked_up is not None and looked_up != multiplied:
        sizes.pop(looked_up, None)
    return sum(sizes.values())


def _sizes(value: Any, found: dict[int, int]) -> dict[int, int]:
    """Bytes of each distinct weight inside ``value``, by address."""
    if id(value) in found:
        return found
    if isinstance(value, Tensor):
        found[value.data_ptr()] = value.nbytes
    elif isinstance(value, torch.ScriptObject):
        found[id(value)] = _packed_bytes(value)
    elif isinstance(stated := getattr(value, "weight_bytes", None), int):
        found[id(value)] = stated
    elif type(value).__module__.startswith("slipstream."):
        found[id(value)] = 0
        _sizes(vars(value), found)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in _LOOKED_UP:
                _sizes(part, found)
    elif isinstance(value, list | tuple):
        for part in value:
            _sizes(part, found)
    return found


def _packed_bytes(packed: Any) -> int:
    """Size of weights in FBGEMM's layout, which does not tell it: they have to be unpacked once."""
    weight, _ = torch.ops.quantized.linear_unpack(packed)
    # 16-bit weights come back as floats.
    return int(weight.numel() * (2 if weight.is_floating_point() else weight.element_size()))
