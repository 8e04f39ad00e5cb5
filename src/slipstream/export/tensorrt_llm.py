"""TensorRT-LLM (the PyTorch backend of ``trtllm-serve``)."""

from __future__ import annotations

from typing import Any

from slipstream.export.choices import ONE_KIND_OF_COPIES, choose, expected_acceptance, weights_note, without_effect
from slipstream.export.types import FILES, Argument, Export, Support, Target, Version, Wanted, version_text
from slipstream.plan import Plan
from slipstream.yaml_text import Noted, comment, dump

SUPPORT = Support(
    "tensorrt-llm",
    oldest="1.0.0",
    newest="1.3.0",
    checked="1.0, 1.2.1 and main of 2026-11 (taken for 1.3) by documentation and sources, 2026-11-30; nothing was run",
)
CONFIG = "trtllm.yaml"
#: ``--config`` and ``speculative_model`` in place of ``--extra_llm_api_options`` and ``speculative_model_dir``;
#: schedules.
NEW_NAMES: Version = (1, 2)
SCHEDULE: Version = (1, 2)
#: From here on a schedule's keys are the largest batch of each k, before they were the smallest.
UPPER: Version = (1, 3)


def export(plan: Plan, target: Target) -> Export:
    """Command and config file."""
    version, numbers, warnings = SUPPORT.find(target.version)
    wanted = choose(plan, "tensorrt-llm", target)
    revision = "speculative_config has no place for it; give a folder with that version as --draft"
    notes = [*wanted.notes]
    notes += without_effect(target, "tensorrt-llm", copies=ONE_KIND_OF_COPIES, draft_revision=revision)
    config = _config(wanted, target, numbers, notes)
    model, port = target.target or plan.target.model, target.port or 8000
    option = "--config" if numbers >= NEW_NAMES else "--extra_llm_api_options"
    arguments = [
        Argument((model,), f"the plan's target, {plan.target.weights} weights"),
        Argument(("--backend", "pytorch")),
        Argument(("--host", target.host, "--port", str(port))),
        Argument(("--tp_size", str(target.tensor_parallel)), "the plan was measured on one device"),
        Argument(("--max_batch_size", str(wanted.max_requests)), "the largest batch that the plan looked at"),
        Argument((option, f"{FILES}/{CONFIG}")),
    ]
    notes.append(weights_note(plan, "tensorrt-llm", "wants a checkpoint that was quantised before (ModelOpt)"))
    head = "\n".join(comment(f"tensorrt-llm {version}; checked against {SUPPORT.checked}")) + "\n"
    return Export(
        engine="tensorrt-llm",
        version=version,
        checked=SUPPORT.checked,
        program="trtllm-serve",
        arguments=tuple(arguments),
        port=port,
        files={CONFIG: head + dump(config)},
        notes=tuple(n for n in notes if n),
        warnings=warnings,
        image=f"nvcr.io/nvidia/tensorrt-llm/release:{version}",
        metrics="/prometheus/metrics" if numbers >= UPPER else "/metrics",
        running="trtllm_num_requests_running",
        target=model,
        draft=(target.draft or wanted.model) if "model" in wanted.kinds else None,
    )


def _config(wanted: Wanted, target: Target, version: Version, notes: list[str]) -> dict[str, Any]:
    share = 0.85 if target.memory_share is None else target.memory_share
    config: dict[str, Any] = {
        "kv_cache_config": {
            "free_gpu_memory_fraction": Noted(share, "of what weights of target and draft leave free"),
        },
        "return_perf_metrics": Noted(True, "acceptance by position, for `slipstream monitor`"),
        "enable_iter_perf_stats": Noted(True, "draft and accepted tokens of each iteration"),
    }
    if target.target_revision:
        config |= {"revision": target.target_revision, "tokenizer_revision": target.target_revision}
    if not wanted.kinds:
        return config
    config["disable_overlap_scheduler"] = Noted(True, "draft models and n-grams run beside the target and need it off")
    speculative: dict[str, Any] = {"max_draft_len": Noted(max([wanted.k, *wanted.ks]), wanted.why)}
    if wanted.kinds[0] == "model":
        name = "speculative_model" if version >= NEW_NAMES else "speculative_model_dir"
        speculative |= {"decoding_type": "DraftTarget", name: target.draft or wanted.model}
        if wanted.plan.asked.sampling.temperature > 0:
            notes.append(
                "a draft token is accepted if it is the one that the target samples. "
                + expected_acceptance(wanted.plan, wanted.model, ("exact match", "greedy draft"))
            )
    else:
        speculative |= {"decoding_type": "NGram", "max_matching_ngram_size": 4, "is_public_pool": True}
        notes.append("n-gram look-up has no confidence to stop at, as Slipstream's suffix drafts have")
    _schedule(wanted, speculative, version, notes)
    config["speculative_config"] = speculative
    return config


def _schedule(wanted: Wanted, speculative: dict[str, Any], version: Version, notes: list[str]) -> None:
    if not wanted.schedule:
        return
    reason = "; ".join(f"{a}-{b}: {k}, {why}" for a, b, k, why in wanted.schedule)
    if version < SCHEDULE:
        speculative["max_concurrency"] = Noted(
            next((a - 1 for a, _, k, _ in wanted.schedule if k == 0), wanted.max_requests),
            f"above this many requests drafting is off; k by batch size ({reason}) came with {version_text(SCHEDULE)}",
        )
        notes.append(
            f"k by batch size is known of tensorrt-llm from {version_text(SCHEDULE)} on; before, drafting is on or off"
        )
        return
    if version >= UPPER:
        table = {b: k for _, b, k, _ in wanted.schedule if k > 0}
        speculative["draft_len_schedule"] = Noted(table, f"keys are the largest batch of each k; {reason}")
        return
    most = max(wanted.ks)
    table = {a: k for a, _, k, _ in wanted.schedule} | {1: most}
    speculative["draft_len_schedule"] = Noted(table, f"keys are the smallest batch of each k, 1 has the most; {reason}")
