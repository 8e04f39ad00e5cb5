"""What of a plan an engine can take over, and why it was chosen."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.export.types import Target, Wanted
from slipstream.plan import Candidate, Draft, Estimate, Plan

#: Told where an engine has no counterpart.
_NO_EARLY_EXIT = (
    "the plan's draft is the target's own first layers (early exit), which {engine} has no counterpart of; a draft "
    "model of "
    "its own (`slipstream distill`) or an EAGLE-3 head trained for the target comes nearest"
)
_NO_CASCADE = (
    "the plan's draft first copies and then asks a model ({name}); {engine} has one drafter at a time, so the "
    "export has "
    "{kept}, which alone is predicted at {alone}"
)


def choose(plan: Plan, engine: str, target: Target, *, cascades: bool = False) -> Wanted:
    """The plan's draft, or the nearest one that the engine can run.

    Args:
        plan: with a verdict.
        engine: its name, for what is said.
        target: how it is to run.
        cascades: whether it can try copies first and a model then.
    """
    most = target.max_requests or max([b.batch for b in plan.batches] + [plan.asked.batch])
    notes: list[str] = []
    draft, candidate = plan.draft, plan.candidate
    if draft is not None and any(m.kind == "early-exit" for m in draft.members):
        notes.append(_NO_EARLY_EXIT.format(engine=engine))
        draft, candidate = _next_best(plan, [d for d in plan.drafts if _exportable(d, cascades)])
        notes.append(_instead(draft, candidate))
    elif draft is not None and len(draft.members) > 1 and not cascades:
        singles = [d for d in plan.drafts if len(d.members) == 1 and d.members[0] in draft.members]
        kept, alone = _next_best(plan, singles)
        if kept is None:  # not looked at alone: its model is the safer half
            member = next((m for m in draft.members if m.kind == "model"), draft.members[0])
            kept = Draft(member.model or member.kind, (member,))
        speed = f"{alone.speed_up.value:.2f}x" if alone else "a speed-up that was not predicted"
        notes.append(_NO_CASCADE.format(name=draft.name, engine=engine, kept=kept.name, alone=speed))
        draft, candidate = kept, alone or candidate
    k = 0 if draft is None else candidate.k if candidate else plan.verdict.k
    return Wanted(
        plan=plan,
        kinds=() if draft is None or k == 0 else tuple(m.kind for m in draft.members),
        model=None if draft is None else next((m.model for m in draft.members if m.kind == "model"), None),
        k=k,
        why=_why(plan, draft, candidate),
        schedule=schedule(plan, draft, k, most),
        max_requests=most,
        notes=tuple(note for note in notes if note),
    )


def _exportable(draft: Draft, cascades: bool) -> bool:
    simple = all(m.kind in ("model", "suffix") for m in draft.members)
    return draft.failed is None and simple and (cascades or len(draft.members) == 1)


def _next_best(plan: Plan, drafts: Sequence[Draft]) -> tuple[Draft | None, Candidate | None]:
    """The fastest of ``drafts`` at the plan's batch; None if none gains."""
    named = {d.name: d for d in drafts}
    found = [c for c in plan.candidates if c.draft in named and c.batch == plan.asked.batch and c.speed_up.value > 1]
    best = max(found, key=lambda c: c.speed_up.value, default=None)
    return (named[best.draft], best) if best else (None, None)


def _instead(draft: Draft | None, candidate: Candidate | None) -> str:
    if draft is None or candidate is None:
        return "no other draft of the plan gains anything, so the export decodes plainly"
    return (
        f"the export has the next best draft of the plan, {draft.name} at k = {candidate.k}: {said(candidate.speed_up)}"
    )


def said(estimate: Estimate) -> str:
    """A figure with where it comes from.

    >>> said(Estimate(1.92, "predicted from costs", 1.8, 2.03))
    '1.92x [1.80-2.03], predicted from costs'
    """
    spread = (
        f" [{estimate.low:.2f}-{estimate.high:.2f}]" if estimate.low is not None and estimate.high is not None else ""
    )
    return f"{estimate.value:.2f}x{spread}, {estimate.how}"


def _why(plan: Plan, draft: Draft | None, candidate: Candidate | None) -> str:
    if draft is None:
        return f"no draft: {plan.verdict.sentence}"
    if candidate is None:
        return f"draft {draft.name}: {plan.verdict.sentence}"
    parts = [f"draft {draft.name}, k = {candidate.k}: speed-up {said(candidate.speed_up)}"]
    if candidate.acceptance is not None:
        parts.append(f"acceptance {candidate.acceptance.value:.2f} ({candidate.acceptance.how})")
    parts.append(f"{candidate.tokens_per_round.value:.2f} tokens a round")
    if plan.validation and plan.validation.draft == candidate.draft and plan.validation.k == candidate.k:
        parts.append(f"in a real run {plan.validation.overall.measured.value:.2f}x")
    return "; ".join(parts)


def schedule(plan: Plan, draft: Draft | None, k: int, most: int) -> tuple[tuple[int, int, int, str], ...]:
    """k by number of requests at a time: each point of the plan holds up to the next one."""
    if draft is None or k == 0:
        return ()
    points = [
        (b.batch, b.k, b.speed_up) for b in plan.batches if (b.draft == draft.name or b.k == 0) and b.batch <= most
    ]
    if not any(batch == plan.asked.batch for batch, _, _ in points):
        points.append((plan.asked.batch, k, plan.verdict.speed_up))
    points.sort(key=lambda point: point[0])
    if len({point[1] for point in points}) < 2:
        return ()
    starts = [1, *(point[0] for point in points[1:])]
    ends = [*(start - 1 for start in starts[1:]), max(most, starts[-1])]
    return tuple(
        (start, end, point[1], f"at {point[0]} requests: {said(point[2])}")
        for start, end, point in zip(starts, ends, points, strict=True)
    )


def without_effect(target: Target, engine: str, **why: str) -> list[str]:
    """Notes on options that were given and that an engine does not take, by their fields: what to do instead."""
    usual = Target()
    return [
        f"--{name.replace('_', '-')} has no effect with {engine}: {instead}"
        for name, instead in why.items()
        if getattr(target, name) != getattr(usual, name)
    ]


#: Only vLLM has two kinds of copies.
ONE_KIND_OF_COPIES = "it has n-gram look-up only"


def expected_acceptance(plan: Plan, draft: str | None, rules: Sequence[str]) -> str:
    """What acceptance to expect under the rule that the engine really uses, if the plan measured it."""
    for rule in rules:
        for entry in plan.acceptance:
            if entry.draft == draft and entry.rule == rule and entry.sampling == plan.asked.sampling:
                return f"expect about {entry.rate.value:.2f} of first draft tokens accepted ({entry.rate.how}, {rule})"
    return ""


def weights_note(plan: Plan, engine: str, remedy: str) -> str:
    """What becomes of int8 weights, which are packed when Slipstream loads a model and no engine makes itself."""
    if plan.target.weights != "int8":
        return ""
    return f"the plan's int8 weights are Slipstream's own; {engine} {remedy}"
