"""The figures of ``bench`` as tables that a person reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from slipstream.measure.bench import TARGET, Bench, Contender, Measured, Own
from slipstream.measure.document import Limit, limits
from slipstream.measure.runs import PLAIN
from slipstream.measure.spread import Spread
from slipstream.measure.summary import Figures, Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from slipstream.measure.machine import Machine

_NONE = "-"
_MOST_PROMPTS = 24
_MOST_SPLITS = 8
_NAME_WIDTH = 22
_CELL_WIDTH = 11


@dataclass(frozen=True)
class Report:
    """A measurement, whole or as far as it came."""

    bench: Bench
    measured: Measured
    summary: Summary
    machine: Machine
    interrupted: bool

    @property
    def contenders(self) -> list[Contender]:
        """Those of which something was measured."""
        return [c for c in self.bench.contenders if c.name in self.summary.overall]

    @property
    def own(self) -> list[Contender]:
        """Slipstream's own among them."""
        return [c for c in self.contenders if c.kind == Own.kind]


def show(report: Report, console: Console) -> None:
    """Print all tables that there is something for."""
    for line in _head(report):
        console.print(line)
    if report.interrupted:
        console.print("Interrupted; the figures are of what came so far.")
    tables = [
        _speed(report),
        _drafts(report),
        _positions(report),
        *_matrix("By category: speed-up", report.summary.categories, report, console.width),
        *_matrix("By prompt: speed-up", _few(report.summary.prompts), report, console.width),
        _peers(report),
        _passes(report),
        _limits(report),
        _splits(report),
    ]
    for table in tables:
        if table is not None and table.row_count:
            title, table.title = table.title, None  # rich would wrap it to the table's width
            console.print()
            console.print(title, style="bold")
            console.print(table)
    console.print()
    for line in conclusions(report):
        console.print(line)


def _head(report: Report) -> list[str]:
    bench, machine = report.bench, report.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    prompts, repeats = _count(len(bench.prompts), "prompt"), _count(bench.repeats, "repeat")
    counts = (prompts, repeats, f"up to {bench.params.max_new_tokens} new tokens")
    chosen = "greedy" if bench.params.temperature == 0 else f"temperature {bench.params.temperature:g}"
    where = machine.accelerator or f"{machine.cpu}, {machine.cores} cores, {machine.threads} threads"
    return [f"{bench.target.name}: {', '.join(counts)}, {chosen}", f"{where}; {versions}; {machine.date}"]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def conclusions(report: Report) -> list[str]:
    """What it comes to, in sentences."""
    best = report.summary.best
    if best is None:
        return ["Nothing was measured."]
    found = report.summary.overall[best]
    if best == PLAIN or found.speed_up is None:
        return ["No draft pays here: plain decoding is the fastest."]
    lines = [f"Best: {best}, {_times(found.speed_up)} as fast as plain decoding after the first token."]
    peer = report.summary.best_peer
    if peer is not None and (ratio := report.summary.peers[peer][best].whole_answer) is not None:
        lines.append(f"Against the best peer, {peer}, whole answers come {_times(ratio)} as fast.")
    return lines


# --- tables -----------------------------------------------------------------------------------------------------------


def _table(title: str, first: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _speed(report: Report) -> Table:
    """How fast every contender is; medians, with quartiles of the ratios."""
    title = "Speed: medians, and the quartiles of ratios to plain"
    table = _table(title, "", "speed-up", "whole answers", "throughput", "time/token", "first token")
    for contender in report.contenders:
        f = report.summary.overall[contender.name]
        compared = contender.name != PLAIN
        table.add_row(
            contender.name,
            _times(f.speed_up, quartiles=compared),
            _times(f.whole_answer_speed_up, quartiles=compared),
            f"{f.total_tokens_per_second:,.1f} tok/s" if f.total_tokens_per_second else _NONE,
            _milliseconds(f.seconds_per_token),
            _milliseconds(f.first_token_seconds),
        )
    return table


def _drafts(report: Report) -> Table:
    table = _table(
        "Drafts and rounds", "", "accepted", "length", "c", "draft", "verify", "rest", "outside passes", "same answers",
        "peak memory",
    )  # fmt: skip
    greedy = report.bench.params.temperature == 0  # sampled answers differ by chance
    for contender in report.contenders:
        f = report.summary.overall[contender.name]
        got = f.acceptance
        table.add_row(
            contender.name,
            f"{got.rate:.2f}" if got else _NONE,
            f"{got.mean_accepted_length:.2f}" if got and got.mean_accepted_length else _NONE,
            f"{f.cost_ratio.median:.3f}" if f.cost_ratio else _NONE,
            *_shares(f),
            f"{f.outside_share.median:.1%}" if f.outside_share else _NONE,
            f"{f.identical_share:.0%}"
            if f.identical_share is not None and greedy and contender.name != PLAIN
            else _NONE,
            f"{f.peak_memory_bytes / 1e9:,.2f} GB" if f.peak_memory_bytes else _NONE,
        )
    return table


def _shares(some: Figures) -> list[str]:
    """Draft, verify and rest, of the time of a token."""
    split = some.time_split
    if split is None:
        return [_NONE] * 3
    whole = split.draft + split.verify + split.rest
    return [f"{part / whole:.1%}" if whole else _NONE for part in (split.draft, split.verify, split.rest)]


def _positions(report: Report) -> Table | None:
    """Acceptance at each position of a draft, given that all before it were accepted."""
    found = {c.name: f for c in report.own if (f := report.summary.overall[c.name].acceptance) and f.conditional}
    longest = max((len(f.conditional) for f in found.values()), default=0)
    if not longest:
        return None
    shown = range(1, longest + 1) if longest <= 8 else [*range(1, 9), *sorted({12, 16, longest} - {*range(9)})]
    shown = [j for j in shown if j <= longest]
    table = _table("Acceptance at a position, given the ones before", "", *(str(j) for j in shown))
    for name, f in found.items():
        table.add_row(name, *(_share_at(f.conditional, j) for j in shown))
    return table


def _share_at(conditional: Sequence[float | None], position: int) -> str:
    value = conditional[position - 1] if position <= len(conditional) else None
    return _NONE if value is None else f"{value:.2f}"


def _few(prompts: Mapping[str, dict[str, Figures]]) -> Mapping[str, dict[str, Figures]]:
    """All prompts, or none where the table would be too long to read."""
    return prompts if len(prompts) <= _MOST_PROMPTS else {}


def _matrix(title: str, rows: Mapping[str, dict[str, Figures]], report: Report, width: int) -> list[Table]:
    """Speed-ups, a row a category or prompt, a column a contender; in several tables if one would be too wide."""
    names = [c.name for c in report.contenders if c.name != PLAIN]
    fitting = max(1, (width - _NAME_WIDTH) // _CELL_WIDTH - 1)
    if len(rows) < 2:
        return []
    tables = []
    for begin in range(0, len(names), fitting):
        some = names[begin : begin + fitting]
        table = _table(title, "", "plain", *some)
        for row, figures in rows.items():
            plain = figures.get(PLAIN)
            speed = _milliseconds(plain.seconds_per_token) if plain else _NONE
            cells = [_times(figures[n].speed_up) if n in figures else _NONE for n in some]
            table.add_row(row, speed, *cells)
        tables.append(table)
    return tables


def _peers(report: Report) -> Table | None:
    """How many times as long peers take for whole answers and for the first token."""
    best = report.summary.best
    shown = [PLAIN, best] if best not in (None, PLAIN) else [PLAIN]
    columns = [f"{what}, {name}" for name in shown for what in ("whole answer", "first token")]
    table = _table("Peers: their time / Slipstream's", "", *columns)
    for peer, settings in report.summary.peers.items():
        found = [settings[name] for name in shown if name in settings]
        cells = [cell for f in found for cell in (_times(f.whole_answer, quartiles=True), _times(f.first_token))]
        table.add_row(peer, *cells)
    return table


def _passes(report: Report) -> Table | None:
    """v(n): a pass of the target over n tokens / over one."""
    passes = report.measured.passes.get(TARGET, ())
    if not passes:
        return None
    context = passes[0].context
    table = _table(f"A pass over n tokens behind {context}", "n", *(str(p.rows) for p in passes))
    table.add_row("ms", *(f"{1000 * p.seconds.median:,.1f}" for p in passes))
    table.add_row("v(n)", *(f"{p.v.median:.2f}" for p in passes))
    return table


def _limits(report: Report) -> Table:
    """Steps against what memory allows."""
    bandwidth = report.measured.bandwidth
    title = f"Share of the memory-bandwidth limit; memory reads {median(bandwidth) / 1e9:.1f} GB/s" if bandwidth else ""
    table = _table(title, "", "weights", "limit", "step", "its share", "share of a bare pass")
    for name, limit in limits(report.bench, report.measured).items():
        table.add_row(name, *_limit_cells(limit))
    return table


def _limit_cells(limit: Limit) -> list[str]:
    return [
        f"{limit.weight_bytes / 1e6:,.0f} MB",
        f"{1000 * limit.seconds:,.1f} ms",
        _milliseconds(limit.step),
        f"{limit.share.median:.0%}" if limit.share else _NONE,
        f"{limit.pass_share.median:.0%}" if limit.pass_share else _NONE,
    ]


def _splits(report: Report) -> Table:
    splits = report.measured.splits
    title = f"Answers that split from plain's: {len(splits)}" + (
        f", of which {_MOST_SPLITS}" if len(splits) > _MOST_SPLITS else ""
    )
    table = _table(title, "", "prompt", "repeat", "token", "top-2 logit gap")
    for split in splits[:_MOST_SPLITS]:
        gap = f"{split.top2_gap:.4f}" if split.top2_gap is not None else _NONE
        table.add_row(split.contender, split.prompt, str(split.repeat + 1), str(split.position), gap)
    return table


# --- cells ------------------------------------------------------------------------------------------------------------


def _cell(write: Callable[[float], str], value: Spread | None) -> str:
    return _NONE if value is None else write(value.median)


def _times(value: Spread | None, *, quartiles: bool = False) -> str:
    text = _cell(lambda x: f"{x:.2f}x", value)
    return f"{text} {_quartiles(value)}" if quartiles and value is not None else text


def _quartiles(value: Spread | None) -> str:
    return "" if value is None else f"[{value.low:.2f}-{value.high:.2f}]"


def _milliseconds(value: Spread | None) -> str:
    return _cell(lambda x: f"{1000 * x:,.1f} ms", value)
