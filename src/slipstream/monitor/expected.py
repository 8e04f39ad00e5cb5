"""What a plan says should be seen in production."""

from __future__ import annotations

from slipstream.measure.expectation import Costs
from slipstream.monitor.stream import Expected
from slipstream.plan import Plan


def from_plan(plan: Plan) -> Expected:
    """Acceptance, k, costs and models of the recommended way."""
    verdict = plan.verdict
    accepted = plan.accepted(verdict.draft) if verdict.draft else None
    positions = accepted.positions[: verdict.k] if accepted else ()
    models = [member.model for member in plan.draft.members if member.model] if plan.draft else []
    return Expected(
        acceptance=verdict.acceptance.value if verdict.acceptance else None,
        at={j: estimate.value for j, estimate in enumerate(positions, start=1)},
        k=float(verdict.k),
        speculation=verdict.action == "speculate",
        costs=costs(plan),
        plain_seconds=plan.costs[0].plain_step.value if plan.costs else None,
        target=plan.target.model,
        draft=models[0] if models else None,
    )


def costs(plan: Plan) -> Costs | None:
    """Of the recommended draft, in plain steps; None for plain decoding, or if they are not in the plan."""
    found = next((c for c in plan.costs if c.draft == plan.verdict.draft), None)
    if found is None or plan.verdict.draft is None:
        return None
    plain = found.plain_step.value
    step = found.draft_step.value if found.draft_step else 0.0
    call = found.draft_call.value if found.draft_call else 0.0
    # A draft has a fixed cost too; spread over its tokens it is part of c.
    c = (step + call / max(1, plan.verdict.k)) / plain
    return Costs(c, {rows: v.value / plain for rows, v in found.verify.items()})
