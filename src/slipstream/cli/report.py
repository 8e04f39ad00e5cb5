"""The figures of one answer or of two: as a table, as sentences, as a JSON document, as a picture."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.answer import Answer
from slipstream.cli.drafts import short_name
from slipstream.cli.screen import legend, styled
from slipstream.measure.files import write_whole

if TYPE_CHECKING:
    from rich.table import Table

    from slipstream.types import Origin

_NONE = "-"
_SVG_WIDTHS = (72, 100)
# Every machine has one of these fonts, so the picture fetches none.
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x} {terminal_y})" clip-path="url(#{unique_id}-clip)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">{matrix}</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Report:
    """What came out of one run: ``plain`` is there if it was compared."""

    model: str
    draft: str | None
    k: int | str
    greedy: bool
    fast: Answer
    plain: Answer | None = None

    @property
    def speed_up(self) -> float | None:
        """Plain time per token / speculative time per token; None unless both have one."""
        if self.plain is None:
            return None
        plain, fast = (a.output.stats.seconds_per_token for a in (self.plain, self.fast))
        return plain / fast if plain and fast else None

    @property
    def split_at(self) -> int | None:
        """Index of the first token at which the two answers differ; None if they do not, or there is one only."""
        if self.plain is None:
            return None
        a, b = self.plain.output.tokens, self.fast.output.tokens
        differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        return next(differing, None if len(a) == len(b) else min(len(a), len(b)))

    @property
    def interrupted(self) -> bool:
        """Whether an answer was ended by Ctrl-C."""
        return self.fast.interrupted or (self.plain is not None and self.plain.interrupted)

    @property
    def origins(self) -> dict[Origin, int]:
        """How many tokens of the speculative answer had each origin."""
        counts: Counter[Origin] = Counter(self.fast.output.origins)
        order: tuple[Origin, ...] = ("accepted", "corrected", "bonus")
        return {origin: counts[origin] for origin in order}


def table(report: Report) -> Table:
    """The figures that practitioners quote, one column an answer."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    shown.add_column("")
    answers = [report.fast]
    if report.plain is not None:
        answers.insert(0, report.plain)
        shown.add_column("plain", justify="right")
    shown.add_column(f"draft: {short_name(report.draft)}" if report.draft else "plain", justify="right")
    for label, cell in _rows(report):
        shown.add_row(label, *(cell(a) for a in answers))
    return shown


def _rows(report: Report) -> list[tuple[str, Callable[[Answer], str]]]:
    def fast_only(value: str) -> Callable[[Answer], str]:
        return lambda a: value if a is report.fast and report.draft else _NONE

    stats = report.fast.output.stats
    rows: list[tuple[str, Callable[[Answer], str]]] = [
        ("tokens", lambda a: str(a.output.stats.emitted)),
        ("time per token", lambda a: _scaled(a.output.stats.seconds_per_token, 1e3, "ms")),
        ("throughput", lambda a: _scaled(a.output.stats.tokens_per_second, 1, "tok/s")),
        ("first-token latency", lambda a: _scaled(a.output.stats.first_token_seconds, 1e3, "ms")),
        ("peak memory", lambda a: _scaled(a.peak_memory or 0, 1e-6, "MB", digits=0)),
    ]
    if report.draft:
        rows += [
            ("k", fast_only(_ks(report))),
            ("acceptance rate", fast_only(f"{stats.acceptance_rate:.2f}" if stats.drafted else _NONE)),
            ("mean accepted length", lambda a: f"{a.output.stats.mean_accepted_length:.2f}"),
        ]
    if report.plain is not None:
        speed_up = report.speed_up
        rows += [
            ("speed-up", lambda a: "1.00x" if a is report.plain else f"{speed_up:.2f}x" if speed_up else _NONE),
            ("same answer", fast_only(_NONE if report.interrupted else "no" if report.split_at is not None else "yes")),
        ]
    return rows


def _ks(report: Report) -> str:
    """The k that was asked for, and what a policy made of it, as in ``adaptive: 0..8, mean 4.2``."""
    drafted = report.fast.output.stats.rounds_by_k
    if not isinstance(report.k, str) or not drafted:
        return str(report.k)
    return f"{report.k}: {min(drafted)}..{max(drafted)}, mean {report.fast.output.stats.mean_k:.1f}"


def _scaled(value: float, scale: float, unit: str, digits: int = 1) -> str:
    return f"{value * scale:,.{digits}f} {unit}" if value else _NONE


def sentence(report: Report) -> str | None:
    """What is to be said of the two answers; None if there is one, or one was interrupted."""
    if report.plain is None or report.interrupted:
        return None
    at = report.split_at
    if at is None:
        return f"Both answers are identical: {len(report.fast.output.tokens)} tokens."
    if report.greedy:
        return (
            f"The answers split at token {at}: the passes over one token and over several round differently, "
            "and two tokens were nearly equally likely there (--weights fp32 rounds least)."
        )
    return f"The answers split at token {at}: sampled answers differ by chance, though they follow one distribution."


def document(report: Report, **settings: Any) -> dict[str, Any]:
    """Everything, for other programs."""
    return {
        "model": report.model,
        "draft": report.draft,
        "k": report.k,
        **settings,
        "answer": _answer_document(report.fast),
        "plain": _answer_document(report.plain) if report.plain is not None else None,
        "speed_up": report.speed_up,
        "identical": report.split_at is None if report.plain is not None and not report.interrupted else None,
        "split_at": report.split_at,
        "interrupted": report.interrupted,
    }


def _answer_document(answer: Answer) -> dict[str, Any]:
    output = answer.output
    stats = output.stats
    derived = ("acceptance_rate", "mean_accepted_length", "mean_k", "tokens_per_second", "seconds_per_token")
    return {
        "text": output.text,
        "tokens": list(output.tokens),
        "origins": list(output.origins),
        "finish_reason": output.finish_reason,
        "prompt_tokens": len(output.prompt_tokens),
        "peak_memory_bytes": answer.peak_memory,
        "stats": asdict(stats) | {name: getattr(stats, name) for name in derived},
        "rounds": [
            {
                "k": r.k,
                "drafted": r.num_drafted,
                "accepted": r.num_accepted,
                "ended": r.ended,
                "sources": list(r.sources),
                "draft_seconds": r.draft_seconds,
                "verify_seconds": r.verify_seconds,
            }
            for r in answer.rounds
        ],
    }


def save_rounds(report: Report, path: Path) -> None:
    """A picture of k and acceptance over the course of the answer."""
    from slipstream.measure.plot import save_rounds as draw

    title = f"{Path(report.model).name}, draft: {Path(report.draft).name if report.draft else 'none'}, k: {report.k}"
    write_whole(path, lambda partial: draw(partial, report.fast.rounds, title))


def save_svg(report: Report, path: Path) -> None:
    """A picture of the coloured answer, the legend, and the table."""
    from rich.console import Console

    answer = styled(report.fast.parts)
    narrowest, widest = _SVG_WIDTHS
    width = min(max(narrowest, *(line.cell_len for line in answer.split())), widest)
    recorder = Console(
        file=io.StringIO(), record=True, width=width, force_terminal=True, color_system="truecolor",
        highlight=False, legacy_windows=False,
    )  # fmt: skip
    recorder.print(answer)
    recorder.print()
    recorder.print(legend(report.origins))
    recorder.print()
    recorder.print(table(report))
    if said := sentence(report):
        recorder.print(f"\n{said}")
    drawing = recorder.export_svg(title=f"slipstream: {report.model}", code_format=_SVG)
    write_whole(path, lambda partial: partial.write_text(drawing, encoding="utf-8"))
