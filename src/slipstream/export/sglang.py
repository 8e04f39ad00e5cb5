"""SGLang."""

from __future__ import annotations

from slipstream.export.choices import ONE_KIND_OF_COPIES, choose, expected_acceptance, weights_note, without_effect
from slipstream.export.types import Argument, Export, Support, Target, Wanted
from slipstream.plan import Plan

SUPPORT = Support(
    "sglang",
    oldest="0.5.6",
    newest="0.5.23",
    checked="0.5.9 by documentation, 0.5.23 by its sources, 2026-11-30",
)
DTYPES = {"fp16": "half", "bf16": "bfloat16", "fp32": "float", "int8": "auto", "auto": "auto"}


def export(plan: Plan, target: Target) -> Export:
    """Command."""
    version, _, warnings = SUPPORT.find(target.version)
    wanted = choose(plan, "sglang", target)
    notes = [*wanted.notes, *_limits(wanted), *without_effect(target, "sglang", copies=ONE_KIND_OF_COPIES)]
    model, port = target.target or plan.target.model, target.port or 30000
    share = 0.85 if target.memory_share is None else target.memory_share
    arguments = [
        Argument(("-m", "sglang.launch_server")),
        Argument(("--model-path", model), f"the plan's target, {plan.target.weights} weights"),
        *([Argument(("--revision", target.target_revision))] if target.target_revision else []),
        Argument(("--host", target.host, "--port", str(port))),
        Argument(("--dtype", DTYPES.get(plan.target.weights, "auto")), "the weights that the plan was measured with"),
        *([Argument(("--context-length", str(plan.target.max_positions)))] if plan.target.max_positions else []),
        Argument(("--tp-size", str(target.tensor_parallel)), "the plan was measured on one device"),
        Argument(
            ("--mem-fraction-static", f"{share:g}"),
            "weights and cache; drafting needs more room beside them than usual",
        ),
        Argument(("--max-running-requests", str(wanted.max_requests)), "the largest batch that the plan looked at"),
        Argument(("--enable-metrics",), "for `slipstream monitor`"),
        *_drafting(wanted, target),
    ]
    notes.append(
        weights_note(plan, "sglang", "wants a checkpoint that was quantised before (--quantization w8a8_int8)")
    )
    return Export(
        engine="sglang",
        version=version,
        checked=SUPPORT.checked,
        program="python3",
        arguments=tuple(arguments),
        port=port,
        notes=tuple(n for n in notes if n),
        warnings=warnings,
        image=f"lmsysorg/sglang:v{version}",
        running="sglang:num_running_reqs",
        target=model,
        draft=(target.draft or wanted.model) if "model" in wanted.kinds else None,
    )


def _drafting(wanted: Wanted, target: Target) -> list[Argument]:
    if not wanted.kinds:
        return []
    if wanted.kinds[0] == "suffix":
        return [
            Argument(("--speculative-algorithm", "NGRAM"), wanted.why),
            Argument(
                ("--speculative-num-draft-tokens", str(wanted.k + 1)), f"k = {wanted.k}, and the token before them"
            ),
            Argument(("--speculative-ngram-max-bfs-breadth", "1"), "a chain, as the plan's copies are, not a tree"),
        ]
    revision = (
        [Argument(("--speculative-draft-model-revision", target.draft_revision))] if target.draft_revision else []
    )
    return [
        Argument(("--speculative-algorithm", "STANDALONE"), wanted.why),
        Argument(("--speculative-draft-model-path", target.draft or wanted.model or "")),
        *revision,
        Argument(("--speculative-num-steps", str(wanted.k)), f"k = {wanted.k}"),
        Argument(("--speculative-eagle-topk", "1"), "a chain, as it was measured, not a tree"),
        Argument(("--speculative-num-draft-tokens", str(wanted.k + 1)), "k, and the token before them"),
    ]


def _limits(wanted: Wanted) -> list[str]:
    if not wanted.kinds:
        return []
    notes = []
    if wanted.schedule:
        stops = next((a for a, _, k, _ in wanted.schedule if k < wanted.k), None)
        notes.append(
            "k by batch size (--speculative-adaptive) is for EAGLE and EAGLE3 heads only; with a draft model or "
            "copies k is "
            f"fixed at {wanted.k}. The plan has a smaller k from {stops} requests at a time on: hold "
            f"--max-running-requests "
            "below that, or start a second server for peaks"
        )
    if wanted.kinds[0] == "suffix":
        notes.append("n-gram drafts run on CUDA only, and switch the overlap scheduler off")
    if wanted.plan.asked.sampling.temperature > 0 and wanted.kinds[0] == "model":
        notes.append(
            "draft models are verified by the target's probabilities alone (the draft's likeliest token); rejection "
            "sampling "
            "and the block rule are for EAGLE heads. "
            + expected_acceptance(wanted.plan, wanted.model, ("greedy draft", "exact match"))
        )
    return notes
