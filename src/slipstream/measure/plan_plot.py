"""The pictures of a plan: speed-up against k, acceptance by position, where time goes, load, batches."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

from slipstream.measure.expectation import LoadCurve
from slipstream.plan import Candidate, Plan

#: Okabe and Ito's colours, which stay apart for every kind of colour blindness.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SIZE = (7.2, 3.6)
Name = Callable[[str], str]


def figures(plan: Plan, name: Name) -> Iterator[tuple[str, Any]]:
    """Title and matplotlib figure of each; ``name`` says what to call a draft."""
    if plan.candidates:
        yield "Speed-up against k", _speed_up(plan, name)
        yield "Where the time of a token goes", _time(plan, name)
    if any(a.positions for a in plan.acceptance):
        yield "Acceptance by position", _positions(plan, name)
    if plan.load is not None:
        yield "Latency under load", _load(plan)
    if len(plan.batches) > 1:
        yield "Speed-up by batch", _batches(plan, name)


def svg(figure: Any) -> str:
    """The picture as an element of a page."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "slipstream", "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawing = buffer.getvalue()
    return drawing[drawing.index("<svg") :]


def _axes(title: str, x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _of(plan: Plan) -> dict[str, list[Candidate]]:
    """Candidates at the batch that was asked for, by draft."""
    found: dict[str, list[Candidate]] = {}
    for c in plan.candidates:
        if c.batch == plan.asked.batch:
            found.setdefault(c.draft, []).append(c)
    return {draft: sorted(some, key=lambda c: c.k) for draft, some in found.items()}


def _at(plan: Plan) -> str:
    return f", batch {plan.asked.batch}" if plan.asked.batch > 1 else ""


def _speed_up(plan: Plan, name: Name) -> Any:
    figure, axes = _axes(
        f"Speed-up against k (predicted{_at(plan)}; bands: 95 % over prompts)", "draft tokens in a round, k", "speed-up"
    )
    for number, (draft, some) in enumerate(_of(plan).items()):
        colour, ks = _COLOURS[number % len(_COLOURS)], [c.k for c in some]
        axes.plot(ks, [c.speed_up.value for c in some], marker="o", markersize=4, color=colour, label=name(draft))
        low, high = ([getattr(c.speed_up, side) or c.speed_up.value for c in some] for side in ("low", "high"))
        axes.fill_between(ks, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(1, color="black", linewidth=1)
    checked = plan.validation
    if checked is not None:
        axes.plot(
            checked.k, checked.overall.measured.value, marker="*", markersize=13, color="black", linestyle="none",
            label="measured",
        )  # fmt: skip
    axes.legend(frameon=False)
    return figure


def _time(plan: Plan, name: Name) -> Any:
    figure, axes = _axes(f"Where the time of a token goes (predicted, best k{_at(plan)})", "milliseconds a token", "")
    rows = [max(some, key=lambda c: c.speed_up.value) for some in _of(plan).values()]
    labels = [f"{name(c.draft)}, k = {c.k}" for c in rows]
    # A candidate's time and speed-up together give plain's time at its batch.
    plain = next((c.seconds_per_token.value * c.speed_up.value for c in rows), 0.0)
    values = [("verify", "#0072b2", [c.verify_seconds for c in rows] + [plain])]
    values.append(("draft", "#e69f00", [c.draft_seconds for c in rows] + [0.0]))
    values.append(("draft reads the prompt", "#999999", [c.prompt_seconds for c in rows] + [0.0]))
    left = [0.0] * (len(rows) + 1)
    for label, colour, seconds in values:
        axes.barh(
            [*labels, "plain"], [1e3 * s for s in seconds], left=[1e3 * s for s in left], color=colour, label=label
        )
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(values), frameon=False)  # beside the bars, never on them
    return figure


def _positions(plan: Plan, name: Name) -> Any:
    title = "Acceptance by position (measured here, teacher-forced)"
    figure, axes = _axes(title, "position in the draft", "given that the ones before were accepted")
    some = [a for a in plan.acceptance if (a.rule, a.sampling) == (plan.asked.rule, plan.asked.sampling)]
    for number, a in enumerate(one for one in some if one.positions):
        places = range(1, len(a.positions) + 1)
        values = [q.value for q in a.positions]
        below = [max(q.value - (q.low if q.low is not None else q.value), 0.0) for q in a.positions]
        above = [max((q.high if q.high is not None else q.value) - q.value, 0.0) for q in a.positions]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.errorbar(places, values, yerr=[below, above], marker="o", capsize=3, color=colour, label=name(a.draft))
    axes.set_xticks(range(1, max((len(a.positions) for a in some), default=1) + 1))
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)
    return figure


def _load(plan: Plan) -> Any:
    assert plan.load is not None
    figure, axes = _axes(
        "Latency under load, L = C1 / (1 - rate C2) (predicted)", "requests a second", "seconds an answer"
    )
    curves = {
        label: LoadCurve(c.idle_seconds.value, c.capacity_seconds.value)
        for label, c in (("plain", plan.load.plain), ("speculative", plan.load.speculative))
    }
    most = max(c.most for c in curves.values())
    for (label, curve), colour in zip(curves.items(), _COLOURS, strict=False):
        rates = [curve.most * i / 200 for i in range(190)]
        axes.plot(rates, [curve.latency(r) for r in rates], color=colour, label=label)
    asked = plan.asked.requests_per_second
    axes.set_xlim(0, most if asked is None else max(most, 1.05 * asked.value))
    axes.set_ylim(0, 6 * max(c.idle_seconds for c in curves.values()))
    if (crossing := plan.load.crossing_rate) is not None and crossing.value > 0:
        axes.axvline(crossing.value, color="black", linestyle="--", linewidth=1, label=f"equal at {crossing.value:.3g}")
    if asked is not None:
        axes.axvline(asked.value, color="#999999", linewidth=1, label=f"asked for: {asked.value:g}")
    axes.legend(frameon=False)
    return figure


def _batches(plan: Plan, name: Name) -> Any:
    draft = plan.batches[0].draft
    title = f"Speed-up by batch, {name(draft)} (predicted; the number is the best k)"
    figure, axes = _axes(title, "requests answered at the same time", "speed-up")
    sizes, values = [b.batch for b in plan.batches], [b.speed_up.value for b in plan.batches]
    axes.plot(sizes, values, marker="o", color=_COLOURS[0])
    for b in plan.batches:
        axes.annotate(str(b.k), (b.batch, b.speed_up.value), textcoords="offset points", xytext=(4, 6))
    axes.axhline(1, color="black", linewidth=1)
    axes.margins(y=0.15)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(s) for s in sizes])
    return figure
