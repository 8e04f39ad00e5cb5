"""The picture of a measurement: speed-up against k, and where the time of a token goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.errors import InputError
from slipstream.measure.bench import Contender, Own
from slipstream.measure.summary import Figures

FORMATS = (".png", ".svg")
#: Okabe and Ito's colours, which stay apart for every kind of colour blindness.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_PARTS = (("draft", "#e69f00"), ("verify", "#0072b2"), ("rest", "#999999"))


def check_plot(name: str) -> None:
    """Refuse what cannot be drawn.

    Raises:
        InputError: an unknown kind of file, or matplotlib is missing.
    """
    if Path(name).suffix.lower() not in FORMATS:
        raise InputError(f"--plot {name!r} is neither a .png nor a .svg file; give it one of these endings")
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs the package matplotlib; install it with: pip install matplotlib")


def save_plot(path: Path, overall: Mapping[str, Figures], contenders: Sequence[Contender], title: str) -> None:
    """Draw both pictures side by side; the format is what the name (before ``.part``) ends with."""
    from matplotlib.figure import Figure

    own = [c for c in contenders if c.kind == Own.kind and c.name in overall]
    peers = [c for c in contenders if c.kind != Own.kind and c.name in overall]
    figure = Figure(figsize=(11, max(4.2, 1.6 + 0.28 * len(own))), layout="constrained")
    left, right = figure.subplots(1, 2)
    figure.suptitle(title)
    _draw_speed_up(left, overall, own, peers)
    _draw_time(right, overall, own)
    kind = next(suffix for suffix in path.suffixes[::-1] if suffix.lower() in FORMATS)
    figure.savefig(path, format=kind.removeprefix("."), dpi=150)


def _draw_speed_up(
    axes: Any, overall: Mapping[str, Figures], own: Sequence[Contender], peers: Sequence[Contender]
) -> None:
    drafts = list(dict.fromkeys(c.draft for c in own if c.draft is not None))
    for number, draft in enumerate(drafts):
        found = [(c.k, overall[c.name].speed_up) for c in own if c.draft == draft]
        points = sorted((k, s.median, s.median - s.low, s.high - s.median) for k, s in found if k and s)
        if not points:
            continue
        k, medians, below, above = zip(*points, strict=True)
        colour = _COLOURS[number % len(_COLOURS)]
        axes.errorbar(k, medians, yerr=[below, above], marker="o", capsize=3, color=colour, label=draft)
    for number, peer in enumerate(peers, start=len(drafts)):
        if speed_up := overall[peer.name].speed_up:
            axes.axhline(speed_up.median, linestyle=":", color=_COLOURS[number % len(_COLOURS)], label=peer.name)
    axes.axhline(1, linewidth=1, color="black")
    axes.set_xlabel("k, draft tokens a round")
    axes.set_ylabel("speed-up over plain (median, quartiles)")
    axes.set_xticks(sorted({c.k for c in own if c.k}))
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _draw_time(axes: Any, overall: Mapping[str, Figures], own: Sequence[Contender]) -> None:
    rows = [(c.name, split) for c in own if (split := overall[c.name].time_split) is not None]
    begin = [0.0] * len(rows)
    for part, colour in _PARTS:
        # Plain decoding has no draft: its time is all the target's.
        lengths = [1000 * getattr(split, part) for _, split in rows]
        axes.barh([name for name, _ in rows], lengths, left=begin, color=colour, label=part)
        begin = [a + b for a, b in zip(begin, lengths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a token, after the first")
    if rows:
        axes.legend(frameon=False)
