"""The picture of what savings depend on: one bar an input, the widest on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.economics import SWING, Swing
from slipstream.measure.plot import FORMATS

_LOWER, _HIGHER = "#d55e00", "#0072b2"


def save_tornado(path: Path, swings: Sequence[Swing]) -> None:
    """Draw it; the format is what the name (before ``.part``) ends with."""
    kind = next(suffix for suffix in path.suffixes[::-1] if suffix.lower() in FORMATS)
    figure(swings).savefig(path, format=kind.removeprefix("."), dpi=150)


def figure(swings: Sequence[Swing]) -> Any:
    """A matplotlib figure of net savings a month."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(8, 1.4 + 0.42 * len(swings)), layout="constrained")
    axes = drawn.subplots()
    names, base = [s.name for s in swings], swings[0].base
    for part, colour, sign, shift in (("low", _LOWER, "-", -0.2), ("high", _HIGHER, "+", 0.2)):
        lengths = [getattr(s, f"net_{part}") - base for s in swings]
        # Half a bar each: whole servers may move both to one side.
        places = [i + shift for i in range(len(swings))]
        axes.barh(places, lengths, height=0.4, left=base, color=colour, label=f"input {sign}{SWING:.0%}")
    axes.set_yticks(range(len(names)), names)
    axes.axvline(base, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("net savings a month, dollars")
    axes.legend(frameon=False)
    return drawn
