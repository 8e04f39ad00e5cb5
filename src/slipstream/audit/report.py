"""An audit as a page of HTML: one file, nothing to load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from slipstream.audit.reference import FAULTS
from slipstream.audit.run import Report
from slipstream.audit.types import Finding

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
:root { color-scheme: light dark }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: .5rem 0 1.5rem }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td { overflow-wrap: anywhere; min-width: 3rem }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.pass { color: #17692f }
.fault { color: #b00020; font-weight: 600 } .undecided { color: #8a5a00 } .skipped { color: #777 }
.bar { background: #eee; height: .55rem; width: 12rem } .bar div { height: 100%; background: #2f8fd0 }
.bar + .bar div { background: #d86a00 }
h1 span { padding: .1rem .6rem; border: 2px solid }
@media (prefers-color-scheme: dark) { body { background: #151515; color: #ddd } td, th { border-color: #333 }
  .pass { color: #6fce8a } .fault { color: #ff6b7d } .undecided { color: #e0b050 } .bar { background: #333 } }
"""
_CLASS = {"exact within power": "pass", "fault found": "fault", "not decided": "undecided"}
_WORST = 8


def to_html(report: Report) -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Audit of {escape(report.engine)}</title>",
        f"<style>{_STYLE}</style>",
        f"<h1>Audit: <span class='{_CLASS[report.verdict]}'>{escape(report.verdict)}</span></h1>",
        _rows(
            [
                ("Engine", report.engine),
                ("Target", report.target),
                ("Answers", f"{report.answers:,}"),
                ("Time", f"{report.seconds:.0f} s"),
                ("False alarms", f"at most {report.settings.alpha:g} over all tests and looks together"),
                ("Arithmetic", f"logits may be off by {report.settings.tolerance:g}"),
            ]
        ),
        "<h2>Tests</h2>",
        _findings(report.findings),
        "<h2>Observed against expected, where they differ most</h2>",
        *_tables(report.findings),
        "<h2>Controls</h2><p>The same tests of a built-in decoder, with one fault at a time and with none.</p>",
        _controls(report),
        "</html>",
    ]
    return "\n".join(parts)


def _rows(pairs: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}<td>{escape(b)}</tr>" for a, b in pairs) + "</table>"


def _findings(findings: Iterable[Finding]) -> str:
    rows = [
        f"<tr><td class='{f.result}'>{f.result}<td>{escape(f.name)}<td>{escape(f.hypothesis)}"
        f"<td class='n'>{f.samples:,}<td class='n'>{'' if f.p_value is None else f'{f.p_value:.2g}'}"
        f"<td>{escape(f.detects or '')}<td>{escape(f.detail)}</tr>"
        for f in findings
    ]
    head = "<tr><th>result<th>test<th>hypothesis<th>answers<th>p<th>would find (95 %)<th>why</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _tables(findings: Iterable[Finding]) -> list[str]:
    with_tables = [f for f in findings if f.table]
    worst = sorted(with_tables, key=lambda f: (f.result != "fault", f.p_value if f.p_value is not None else 1.0))
    return [f"<h3>{escape(f.name)}</h3>{_table(f.table)}" for f in worst[:_WORST]]


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = [
        f"<tr><td>{escape(str(r.get('behind', '')))}<td>{escape(str(r['token']))}<td class='n'>{r['observed']:.4f}"
        f"<td class='n'>{r['expected']:.4f}<td>{_bar(r['observed'])}{_bar(r['expected'])}"
        f"<td class='n'>{r.get('n', '')}<td class='n'>{r.get('deviations', '')}</tr>"
        for r in rows
    ]
    head = "<tr><th>behind<th>token<th>observed<th>expected<th><th>answers<th>standard deviations</tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _bar(share: float) -> str:
    return f"<div class='bar'><div style='width:{100 * min(1.0, max(0.0, share)):.1f}%'></div></div>"


def _controls(report: Report) -> str:
    rows = [
        f"<tr><td class='{'pass' if c.as_it_must else 'fault'}'>"
        f"{('caught' if c.as_it_must else 'missed') if c.fault else ('passed' if c.as_it_must else 'did not pass')}"
        f"<td>{escape(c.fault or 'correct')}<td>{escape(FAULTS.get(c.fault or '', 'no fault'))}"
        f"<td class='n'>{c.samples:,}<td>{escape(c.found_by)}</tr>"
        for c in report.controls
    ]
    head = "<tr><th>result<th>decoder<th>what it does<th>answers<th>found by</tr>"
    return f"<table>{head}{''.join(rows)}</table>"
