"""What drafting and verifying cost on this machine, for the speed-up that acceptance leads to."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from slipstream.measure.costs import make_probes, pass_costs, run_probes
from slipstream.measure.expectation import Costs
from slipstream.models.base import Model

_CONTEXT = 256
_ROWS = tuple(range(1, 10))
_TURNS = 5


def measure_costs(target: Model, draft: Model, tokens: Sequence[int]) -> Costs:
    """c and v(n) by passes of both models behind some of ``tokens``, in turns."""
    limits = [m.max_positions for m in (target, draft) if m.max_positions is not None]
    context = min([_CONTEXT, *(limit - max(_ROWS) for limit in limits)])
    probes = make_probes(target, tokens, max(1, context), _ROWS)
    steps = make_probes(draft, tokens, max(1, context), (1,))
    turns = list(run_probes([*probes, *steps], _TURNS))
    verify = {c.rows: c.v.median for c in pass_costs(probes, [turn[:-1] for turn in turns])}
    return Costs(median(turn[-1] / turn[0] for turn in turns), verify)
