"""A picture of a run: loss and acceptance by step, acceptance by draft position before and after."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.distill.acceptance import TEMPERATURES

if TYPE_CHECKING:
    from slipstream.distill.run import Result

#: Okabe and Ito's blue and vermilion, by temperature.
_COLOURS = {0: "#0072b2", 1: "#d55e00"}


def save_picture(file: Path, result: Result, title: str) -> bool:
    """Draw it, if matplotlib is here; whether it is."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    loss, rates, positions = figure.subplots(1, 3)
    figure.suptitle(title)
    loss.plot([s.number for s in result.curve], [s.loss for s in result.curve], color="#999999", linewidth=0.8)
    loss.set(xlabel="step", ylabel="loss")
    for t in TEMPERATURES:
        _draw_rates(rates, result, t)
        _draw_positions(positions, result, t)
    rates.set(xlabel="step", ylabel="acceptance on held-out text", ylim=(0, 1))
    positions.set(xlabel="position in the draft", ylabel="acceptance, given the ones before", ylim=(0, 1))
    for axes in (rates, positions):
        axes.legend(frameon=False)
    figure.savefig(file, format="png", dpi=150)
    return True


def _draw_rates(axes: Any, result: Result, temperature: int) -> None:
    points = [(e.step, e.acceptance[temperature]) for e in result.evaluations]
    axes.plot(*zip(*points, strict=True), marker=".", color=_COLOURS[temperature], label=f"T = {temperature}")


def _draw_positions(axes: Any, result: Result, temperature: int) -> None:
    for figures, style, when in ((result.before, ":", "before"), (result.after, "-", "after")):
        found = figures.positions[temperature]
        numbers, values = range(1, len(found) + 1), [i.value for i in found]
        ends = [[i.value - i.low for i in found], [i.high - i.value for i in found]]
        look: Any = {"linestyle": style, "capsize": 2, "color": _COLOURS[temperature]}
        axes.errorbar(numbers, values, yerr=ends, label=f"T = {temperature}, {when}", **look)
