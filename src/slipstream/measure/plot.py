"""The picture of a measurement: speed-up against k, and where the time of a token goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import nan
from pathlib import Path
from typing import Any

from slipstream.errors import InputError
from slipstream.measure.bench import Contender, Own
from slipstream.measure.summary import Figures
from slipstream.types import Round

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
        found = [(c.k, overall[c.name].speed_up) for c in own if c.draft == draft and isinstance(c.k, int)]
        points = sorted((k, s.median, s.median - s.low, s.high - s.median) for k, s in found if k and s)
        colour = _COLOURS[number % len(_COLOURS)]
        if points:
            k, medians, below, above = zip(*points, strict=True)
            axes.errorbar(k, medians, yerr=[below, above], marker="o", capsize=3, color=colour, label=draft)
        policies = [c for c in own if c.draft == draft and isinstance(c.k, str)]
        for style, named in zip(("--", "-."), policies, strict=False):
            if speed_up := overall[named.name].speed_up:
                axes.axhline(speed_up.median, linestyle=style, color=colour, label=named.name)
    for number, peer in enumerate(peers, start=len(drafts)):
        if speed_up := overall[peer.name].speed_up:
            axes.axhline(speed_up.median, linestyle=":", color=_COLOURS[number % len(_COLOURS)], label=peer.name)
    axes.axhline(1, linewidth=1, color="black")
    axes.set_xlabel("k, draft tokens a round")
    axes.set_ylabel("speed-up over plain (median, quartiles)")
    axes.set_xticks(sorted({c.k for c in own if c.k and isinstance(c.k, int)}))
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def save_rounds(path: Path, rounds: Sequence[Round], title: str) -> None:
    """Draw what each round of one answer drafted and accepted, and the acceptance rate about it."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drafting = rounds[1:]
    starts = [sum(len(r.tokens) for r in rounds[: i + 1]) for i in range(len(drafting))]
    widths = [max(1, len(r.tokens)) for r in drafting]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    figure.suptitle(title)
    style: dict[str, Any] = {"align": "edge", "width": widths, "linewidth": 0}
    upper.bar(starts, [r.num_drafted for r in drafting], color="#e69f00", label="drafted (k)", **style)
    upper.bar(starts, [r.num_accepted for r in drafting], color="#0072b2", label="accepted", **style)
    upper.set_ylabel("tokens in a round")
    upper.yaxis.set_major_locator(MaxNLocator(integer=True))
    upper.legend(frameon=False, loc="upper right")
    rates = [_rate_about(drafting, i) for i in range(len(drafting))]
    lower.step(starts, [nan if r is None else r for r in rates], where="post", color="#0072b2")
    lower.set_ylim(0, 1.05)
    lower.set_ylabel("acceptance rate")
    lower.set_xlabel("tokens of the answer")
    kind = next(suffix for suffix in path.suffixes[::-1] if suffix.lower() in FORMATS)
    figure.savefig(path, format=kind.removeprefix("."), dpi=150)


def _rate_about(rounds: Sequence[Round], at: int, reach: int = 4) -> float | None:
    """accepted / drafted of a round and its neighbours; None if they drafted nothing."""
    some = rounds[max(0, at - reach) : at + reach + 1]
    drafted = sum(r.num_drafted for r in some)
    return sum(r.num_accepted for r in some) / drafted if drafted else None


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
