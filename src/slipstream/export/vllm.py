"""vLLM."""

from __future__ import annotations

import json
from typing import Any

from slipstream.export.choices import choose, expected_acceptance, weights_note
from slipstream.export.types import Argument, Export, Support, Target, Version, Wanted, version_text
from slipstream.plan import Plan

SUPPORT = Support(
    "vllm",
    oldest="0.11.0",
    newest="0.33.0",
    checked="0.14, 0.25 and 0.33 by documentation, 0.32 by sources and by running its CPU build, 2026-11-30",
)
#: The first version in which each was found; versions between were not looked at.
DRAFT_MODEL: Version = (0, 20)
SCHEDULE: Version = (0, 25)
RULES: Version = (0, 32)
SUFFIX: Version = (0, 12)
#: How it calls the plan's weights.
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "int8": "auto", "auto": "auto"}


def export(plan: Plan, target: Target) -> Export:
    """Command and ``--speculative-config``."""
    version, numbers, warnings = SUPPORT.find(target.version)
    wanted = choose(plan, "vllm", target)
    notes = list(wanted.notes)
    config, why = speculative_config(wanted, target, numbers, notes)
    model = target.target or plan.target.model
    share = 0.9 if target.memory_share is None else target.memory_share
    arguments = [
        Argument(("serve", model), f"the plan's target, {plan.target.weights} weights"),
        *([Argument(("--revision", target.target_revision))] if target.target_revision else []),
        Argument(("--host", target.host, "--port", str(target.port or 8000))),
        Argument(("--dtype", DTYPES.get(plan.target.weights, "auto")), "the weights that the plan was measured with"),
        *([Argument(("--max-model-len", str(plan.target.max_positions)))] if plan.target.max_positions else []),
        Argument(("--tensor-parallel-size", str(target.tensor_parallel)), "the plan was measured on one device"),
        Argument(("--gpu-memory-utilization", f"{share:g}"), "weights of target and draft, and the cache, share this"),
        Argument(("--max-num-seqs", str(wanted.max_requests)), "the largest batch that the plan looked at"),
    ]
    if config is not None:
        arguments.append(Argument(("--speculative-config", json.dumps(config)), why))
    notes.append(weights_note(plan, "vllm", "wants a checkpoint that was quantised before (compressed-tensors W8A8)"))
    return Export(
        engine="vllm",
        version=version,
        checked=SUPPORT.checked,
        program="vllm",
        arguments=tuple(arguments),
        port=target.port or 8000,
        notes=tuple(n for n in notes if n),
        warnings=warnings,
        image=f"vllm/vllm-openai:v{version}",
        running="vllm:num_requests_running",
        target=model,
        draft=None if config is None else config.get("model"),
    )


def speculative_config(
    wanted: Wanted, target: Target, version: Version, notes: list[str]
) -> tuple[dict[str, Any] | None, str]:
    """``--speculative-config`` and the reason for it; None for plain decoding. What cannot be is added to ``notes``."""
    if not wanted.kinds:
        return None, wanted.why
    if wanted.kinds[0] == "model":
        if version < DRAFT_MODEL:
            notes.append(
                f"vllm before {version_text(DRAFT_MODEL)} was not found to run draft models, so the export copies "
                "(n-gram) instead"
            )
            config = _ngram(wanted.k)
        else:
            config = {
                "method": "draft_model",
                "model": target.draft or wanted.model,
                "num_speculative_tokens": wanted.k,
            }
            if target.draft_revision:
                config["revision"] = target.draft_revision
    else:
        config = _copies(wanted, target, version, notes)
    reasons = [wanted.why]
    if wanted.schedule and version >= SCHEDULE:
        config["num_speculative_tokens"] = max(wanted.ks)
        config["num_speculative_tokens_per_batch_size"] = [[a, b, k] for a, b, k, _ in wanted.schedule]
        reasons.append("k by batch size: " + "; ".join(f"{a}-{b}: {k}, {why}" for a, b, k, why in wanted.schedule))
    elif wanted.schedule:
        notes.append(
            f"k by batch size is known of vllm from {version_text(SCHEDULE)} on; here k stays {wanted.k}, which the "
            f"plan says does not pay from {_stops(wanted)} requests at a time on"
        )
    reasons.append(_rule(wanted, config, version, notes))
    return config, ". ".join(reason for reason in reasons if reason)


def _rule(wanted: Wanted, config: dict[str, Any], version: Version, notes: list[str]) -> str:
    asked, model = wanted.plan.asked, config["method"] == "draft_model"
    if asked.sampling.temperature == 0 or not model:
        return "greedy, or copied drafts: every rule accepts the same"
    if version < RULES:
        notes.append(
            f"accept rules and drawn drafts can be chosen in vllm from {version_text(RULES)} on; here the draft's "
            f"likeliest token is "
            f"verified, which accepts less. {expected_acceptance(wanted.plan, wanted.model, ('greedy draft',))}"
        )
        return ""
    config["draft_sample_method"] = "probabilistic"
    config["rejection_sample_method"] = "block" if asked.rule == "block" else "standard"
    if asked.rule == "block":
        notes.append(
            "vllm has the block rule in its model runner V2 only, which needs Triton and so a GPU; the other one says "
            "nothing and verifies the draft's likeliest token by the standard rule, which accepts less: give it "
            '"rejection_sample_method": "standard"'
        )
    how = f"with drawn drafts and the {asked.rule} rule"
    return f"the plan was measured at temperature {asked.sampling.temperature:g} {how}"


def _copies(wanted: Wanted, target: Target, version: Version, notes: list[str]) -> dict[str, Any]:
    if target.copies == "suffix" and version >= SUFFIX:
        notes.append("suffix decoding in vllm needs the package arctic-inference beside it")
        return {"method": "suffix", "num_speculative_tokens": wanted.k}
    notes.append(
        "n-gram look-up copies from the request itself; Slipstream's suffix drafts also copy from earlier answers "
        "and stop "
        "where they are not sure. `--copies suffix` is nearer, and needs the package arctic-inference"
    )
    return _ngram(wanted.k)


def _ngram(k: int) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": max(1, k), "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def _stops(wanted: Wanted) -> str:
    return str(next((a for a, _, k, _ in wanted.schedule if k < wanted.k), "more"))
