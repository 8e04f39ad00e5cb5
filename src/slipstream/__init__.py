"""Slipstream: large language models answer sooner, with exactly the answers they would have given.

>>> from slipstream import SpeculativeDecoding, load_model
>>> spec = SpeculativeDecoding(target_model=load_model("smollm2-135m"), draft_model="suffix", k=8)  # doctest: +SKIP
>>> spec.complete("Once upon a time", max_new_tokens=20)[0].text  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.errors import InputError, ModelError, SlipstreamError
    from slipstream.models.load import load_model
    from slipstream.speculative import SpeculativeDecoding, Stream
    from slipstream.types import Draft, Output, Piece, Round, SamplingParams, Stats, TokenLogprob, Verdict

# Imported when first used, so that `slipstream --help` does not wait for torch.
_HOME = {
    "Draft": "types",
    "InputError": "errors",
    "ModelError": "errors",
    "Output": "types",
    "Piece": "types",
    "Round": "types",
    "SamplingParams": "types",
    "SlipstreamError": "errors",
    "SpeculativeDecoding": "speculative",
    "Stats": "types",
    "Stream": "speculative",
    "TokenLogprob": "types",
    "Verdict": "types",
    "load_model": "models.load",
}

__all__ = [
    "Draft",
    "InputError",
    "ModelError",
    "Output",
    "Piece",
    "Round",
    "SamplingParams",
    "SlipstreamError",
    "SpeculativeDecoding",
    "Stats",
    "Stream",
    "TokenLogprob",
    "Verdict",
    "load_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_HOME[name]}"), name)
