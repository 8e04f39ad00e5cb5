"""OpenVINO GenAI for ``slipstream audit --callable``: a draft model, prompt lookup, or neither.

    OV_TARGET=target/ OV_DRAFT=draft/ OV_MODE=draft PYTHONPATH=benchmarks \
        slipstream audit target-f16.gguf --weights fp32 --callable audit_openvino:complete --tolerance 0.005

OV_TARGET is a GGUF file or a folder of OpenVINO's own files; OV_DRAFT must be a folder, which
``LLMPipeline("draft.gguf", "CPU", enable_save_ov_model=True)`` fills. OV_MODE is ``draft``, ``lookup`` or ``plain``,
and OV_K the number of draft tokens (default: 3). OV_RETRY=1 builds the pipeline anew where it fails and asks with
another seed, so that the law of what does come back can be seen; how often that was is said at the end. The pipeline
computes in float32 and is asked for prompts of token ids.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

_K = int(os.environ.get("OV_K", "3"))
_MODE = os.environ.get("OV_MODE", "draft")
_COUNTS = {"asked": 0, "failed": 0}
atexit.register(lambda: print(f"OpenVINO GenAI: {_COUNTS}", file=sys.stderr))


@functools.cache
def _pipeline() -> Any:
    how: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 1}
    if _MODE == "draft":
        how["draft_model"] = genai.draft_model(os.environ["OV_DRAFT"], "CPU", **how)
    if _MODE == "lookup":
        how["prompt_lookup"] = True
    return genai.LLMPipeline(os.environ["OV_TARGET"], "CPU", **how)


def complete(prompt: Sequence[int], params: Mapping[str, Any], seed: int) -> list[int]:
    """Ids behind ``prompt``."""
    for attempt in range(100):
        _COUNTS["asked"] += 1
        try:
            return _once(prompt, params, seed + 1_000_000_000 * attempt)
        except RuntimeError:
            _COUNTS["failed"] += 1
            if not os.environ.get("OV_RETRY"):
                raise
            _pipeline.cache_clear()
    raise RuntimeError("a hundred failures, one after the other")


def _once(prompt: Sequence[int], params: Mapping[str, Any], seed: int) -> list[int]:
    config = _pipeline().get_generation_config()
    config.max_new_tokens = params["max_new_tokens"]
    config.min_new_tokens = params.get("min_new_tokens", 0)
    config.repetition_penalty = params.get("repetition_penalty", 1.0)
    config.frequency_penalty = params.get("frequency_penalty", 0.0)
    config.presence_penalty = params.get("presence_penalty", 0.0)
    config.do_sample = params["temperature"] > 0
    config.rng_seed = seed % 2**63
    if config.do_sample:
        config.temperature = params["temperature"]
        config.top_k = params.get("top_k", 0) or 2**31
        config.top_p = params.get("top_p", 1.0)
    if _MODE != "plain":
        config.num_assistant_tokens = _K
    if _MODE == "lookup":
        config.max_ngram_size = 2
    ids = openvino.Tensor(np.asarray([prompt], dtype=np.int64))
    mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
    return [int(i) for i in _pipeline().generate(genai.TokenizedInputs(ids, mask), config).tokens[0]]


complete.honours = ("temperature", "top_k", "top_p", "repetition_penalty", "min_new_tokens", "seed")  # type: ignore[attr-defined]
