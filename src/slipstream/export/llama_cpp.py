"""llama.cpp's server."""

from __future__ import annotations

from shlex import quote

from slipstream.export.choices import ONE_KIND_OF_COPIES, choose, expected_acceptance, without_effect
from slipstream.export.types import Argument, Export, Support, Target, Version, Wanted
from slipstream.plan import Plan

SUPPORT = Support(
    "llama.cpp",
    oldest="9993",
    newest="11434",
    checked="b9993 by its --help and by running it, newer builds by descriptions of changes, 2026-11-30",
)
#: What a file of the plan's weights is called by the conversion script.
TYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32", "int8": "q8_0", "auto": "f16"}
#: Up to this build a draft model's server aborts where a pass verifies more rows than it has slots.
ABORTS: Version = (10027,)


def export(plan: Plan, target: Target) -> Export:
    """Command."""
    version, numbers, warnings = SUPPORT.find(target.version)
    wanted = choose(plan, "llama.cpp", target, cascades=True)
    model, port = _gguf(target.target or plan.target.model, plan.target.weights), target.port or 8080
    draft = _gguf(target.draft or wanted.model, "int8") if "model" in wanted.kinds and wanted.model else None
    cpu = plan.target.device == "cpu"
    context = (plan.target.max_positions or 4096) * wanted.max_requests
    slots, why = wanted.max_requests, "the largest batch that the plan looked at"
    if draft is not None and numbers <= ABORTS:
        slots *= wanted.k + 1
        why = f"{wanted.max_requests} requests at a time with k + 1 rows each; see the warning"
        warnings = (
            *warnings,
            f"up to b{ABORTS[0]} llama.cpp's server aborts where a pass verifies more rows than there are slots: let "
            f"no more than {wanted.max_requests} requests in at a time, or take a newer build",
        )
    arguments = [
        Argument(("-m", model), f"the plan's target; {plan.target.weights} weights are {_type(plan)} there"),
        Argument(("--host", target.host, "--port", str(port))),
        Argument(("--parallel", str(slots)), why),
        Argument(("-c", str(context), "--kv-unified"), "shared: each request's context times their number"),
        *([] if cpu else [Argument(("-ngl", "all"))]),
        *_spread(target, cpu),
        *([Argument(("-t", str(plan.target.threads)), "as the plan was measured")] if plan.target.threads else []),
        Argument(("--metrics",), "for `slipstream monitor`"),
        *_drafting(wanted, draft),
    ]
    notes = [*wanted.notes, *_limits(wanted), *_files(plan, target, wanted), *_unused(target, cpu)]
    return Export(
        engine="llama.cpp",
        version=version,
        checked=SUPPORT.checked,
        program="llama-server",
        arguments=tuple(arguments),
        port=port,
        notes=tuple(n for n in notes if n),
        warnings=warnings,
        image=f"ghcr.io/ggml-org/llama.cpp:server{'' if cpu else '-cuda'}-b{version}",
        image_program="/app/llama-server",
        cpu_only=cpu,
        running="llamacpp:requests_processing",
        target=model,
        draft=draft,
    )


def _spread(target: Target, cpu: bool) -> list[Argument]:
    """Over several accelerators."""
    if cpu or target.tensor_parallel == 1:
        return []
    why = f"{target.tensor_parallel} accelerators compute parts of each layer; it takes all that it sees"
    return [Argument(("--split-mode", "row"), why)]


def _unused(target: Target, cpu: bool) -> list[str]:
    revision = "a GGUF file has its own version; keep one file for each"
    spread = {"tensor_parallel": "the plan is of a CPU"} if cpu else {}
    return without_effect(
        target,
        "llama.cpp",
        **spread,
        memory_share="it takes what weights and cache need; a smaller -c takes less",
        copies=ONE_KIND_OF_COPIES,
        target_revision=revision,
        draft_revision=revision,
    )


def _drafting(wanted: Wanted, draft: str | None) -> list[Argument]:
    if not wanted.kinds:
        return [Argument(("--spec-type", "none"), wanted.why)]
    types = ["ngram-simple" if kind == "suffix" else "draft-simple" for kind in wanted.kinds]
    found = [Argument(("--spec-type", ",".join(types)), wanted.why)]
    if "suffix" in wanted.kinds:
        found.append(Argument(("--spec-ngram-simple-size-m", str(wanted.k)), f"copies of k = {wanted.k} tokens"))
    if draft is not None:
        found += [
            Argument(("--spec-draft-model", draft)),
            Argument(("--spec-draft-n-max", str(wanted.k)), f"k = {wanted.k}"),
            Argument(("--spec-draft-n-min", "0")),
        ]
    return found


def _limits(wanted: Wanted) -> list[str]:
    if not wanted.kinds:
        return []
    notes = []
    if wanted.schedule:
        notes.append(
            f"k does not depend on the batch in llama.cpp; it stays {wanted.k}, and drafts of busy slots cost more"
        )
    if wanted.plan.asked.sampling.temperature > 0:
        notes.append(
            "a draft token is accepted if it is the one that the target samples. "
            + expected_acceptance(wanted.plan, wanted.model, ("exact match", "greedy draft"))
        )
    if "suffix" in wanted.kinds:
        notes.append(
            "ngram-simple looks for 12 equal tokens before it copies (--spec-ngram-simple-size-n); Slipstream, for any"
        )
    return notes


def _gguf(name: str, weights: str) -> str:
    if name.endswith(".gguf"):
        return name
    return f"{name.rstrip('/').rsplit('/', 1)[-1]}-{TYPES.get(weights, 'f16')}.gguf"


def _type(plan: Plan) -> str:
    return TYPES.get(plan.target.weights, "f16").upper()


def _files(plan: Plan, target: Target, wanted: Wanted) -> list[str]:
    """How to make GGUF files of checkpoints."""
    models = [(target.target or plan.target.model, plan.target.weights)]
    if "model" in wanted.kinds and wanted.model:
        models.append((target.draft or wanted.model, "int8"))
    return [
        f"make the file with: python convert_hf_to_gguf.py {quote(name)} --outtype {TYPES.get(weights, 'f16')} "
        f"--outfile {quote(_gguf(name, weights))}"
        for name, weights in models
        if not name.endswith(".gguf")
    ]
