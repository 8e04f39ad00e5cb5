"""The costs as a table, as a page, as a JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.util import find_spec
from typing import Any

from slipstream.economics import HOURS_A_MONTH, SWING, Bill, Figure, Service, Swing, Verdict, payback_days

FORMAT = 1
_NEVER = "never"
_BY_INPUTS = "predicted from the inputs"
_BILLS = f"What it costs ({_BY_INPUTS})"


@dataclass(frozen=True)
class Report:
    """Everything that is to be said."""

    inputs: Mapping[str, Figure]
    notes: tuple[str, ...]
    service: Service
    verdict: Verdict
    swings: Sequence[Swing]
    has_trained: bool
    """Whether the draft is compared before and after training."""
    target_training: float | None
    break_even_acceptance: float | None
    acceptance_to_save: float | None
    knows_costs: bool

    @property
    def bills(self) -> dict[str, tuple[float, Bill]]:
        """Speed-up and bill by column."""
        columns = {"plain": (1.0, self.verdict.plain)}
        if self.has_trained:
            columns["draft as it is"] = (self.service.untrained_speed_up, self.verdict.untrained)
        columns["trained draft" if self.has_trained else "speculative"] = (
            self.service.speed_up,
            self.verdict.speculative,
        )
        return columns


def sentence(report: Report) -> str:
    """The answer in one sentence."""
    found = report.verdict
    if found.net_a_month <= 0:
        return f"Speculation saves nothing here: {_why_not(found)}."
    share = found.saved_an_hour / found.plain.an_hour
    return (
        f"Speculation saves {_dollars(found.net_a_month)} a month: {found.plain.servers} servers become "
        f"{found.speculative.servers}, {share:.0%} of the server costs."
    )


def _why_not(found: Verdict) -> str:
    plain, fast = found.plain.servers, found.speculative.servers
    if fast > plain:
        more = _dollars(-found.net_a_month)
        return f"{plain} server{'' if plain == 1 else 's'} would become {fast}, for {more} a month more"
    return "no server less is needed" if fast == plain else "retraining costs more than is saved"


def _number(value: float) -> str:
    """Six digits, in full up to where nobody counts them any more."""
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:,.6g}"


def table(report: Report) -> str:
    """Plain text, for a terminal."""
    columns = report.bills
    inputs = [(f"  {name}", _number(figure.value), figure.how) for name, figure in report.inputs.items()]
    swings = [(f"  {s.name}", _dollars(s.net_low), _dollars(s.net_high)) for s in report.swings]
    parts = [
        [sentence(report)],
        [_BILLS, *_aligned([("", *columns), *_bill_rows(columns)])],
        _aligned(list(derived(report)), left=(0, 2)),
        ["Inputs", *_aligned(inputs, left=(0, 2))],
        [f"Net savings a month if an input is {SWING:.0%} lower, or higher ({_BY_INPUTS})", *_aligned(swings)],
        list(report.notes),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part) + "\n"


def _bill_rows(columns: Mapping[str, tuple[float, Bill]]) -> Iterator[tuple[str, ...]]:
    bills = [b for _, b in columns.values()]
    yield ("speed-up", *(f"{s:.2f}x" for s, _ in columns.values()))
    yield ("servers", *(str(b.servers) for b in bills))
    yield ("  needed", *(f"{b.needed:.2f}" for b in bills))
    yield ("cost an hour", *(_dollars(b.an_hour, 2) for b in bills))
    yield ("cost a month", *(_dollars(b.a_month) for b in bills))
    yield ("cost a million tokens", *(_dollars(b.a_million_tokens, 2) for b in bills))


def derived(report: Report) -> Iterator[tuple[str, str, str]]:
    """Name, value and origin of what follows from the bills."""
    found, service = report.verdict, report.service
    bills = "predicted from the servers and their price"
    yield ("saved an hour", _dollars(found.saved_an_hour, 2), bills)
    yield ("saved a month", _dollars(found.saved_a_month), f"{bills}, {HOURS_A_MONTH:.0f} hours")
    if found.training_a_month:
        yield ("retraining a month", _dollars(found.training_a_month), "predicted from --training, --retrain-months")
        yield ("net a month", _dollars(found.net_a_month), "predicted from both")
    saved = found.untrained.an_hour - found.speculative.an_hour
    if service.training:
        yield ("training pays back in", _days(found.payback_days), "predicted from --training and what it saves")
    if report.target_training is not None:
        days = _days(payback_days(report.target_training, saved))
        if service.training:
            days += f", {report.target_training / service.training:.0f} x the draft's price"
        yield ("training the target instead", days, "predicted from --target-training and the same savings")
    if found.break_even_speed_up is not None:
        yield ("money is saved from", f"{found.break_even_speed_up:.2f}x", "predicted from whole servers")
    if report.knows_costs:
        yield ("time is saved above", _share(report.break_even_acceptance), "acceptance, predicted from the costs c, b")
        yield ("money is saved above", _share(report.acceptance_to_save), "acceptance, predicted from the same")


def document(report: Report) -> dict[str, Any]:
    """Everything, for other programs. Each input and result is an object of ``value`` and ``how``."""
    found, bills = report.verdict, _BY_INPUTS
    results = {
        "saved_an_hour": found.saved_an_hour,
        "saved_a_month": found.saved_a_month,
        "training_a_month": found.training_a_month,
        "net_a_month": found.net_a_month,
        "payback_days": found.payback_days,
        "break_even_speed_up": found.break_even_speed_up,
        "break_even_acceptance": report.break_even_acceptance,
        "acceptance_to_save": report.acceptance_to_save,
    }
    return {
        "format": FORMAT,
        "verdict": sentence(report),
        "inputs": {name: asdict(figure) for name, figure in report.inputs.items()},
        "bills": {n: {"speed_up": s, **asdict(b), "how": bills} for n, (s, b) in report.bills.items()},
        "results": {name: {"value": value, "how": bills} for name, value in results.items()},
        "tornado": [asdict(s) | {"how": bills} for s in report.swings],
        "notes": list(report.notes),
    }


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>What speculation saves</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56em; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff }}
h1 {{ font-size: 1.5em }} h2 {{ font-size: 1.15em; margin-top: 2em }}
.verdict {{ font-size: 1.15em; border-left: 4px solid {colour}; padding: .4em 1em; background: #f7f7f7 }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: 1em 0 }} td, th {{ padding: .2em .9em .2em 0; text-align: right }}
td:first-child, th:first-child, td.how {{ text-align: left }} td.how {{ color: #666; font-size: 14px }}
td.how {{ overflow-wrap: anywhere; min-width: 9em }}
tr {{ border-bottom: 1px solid #ddd }} svg {{ max-width: 100%; min-width: 35em; height: auto }}
</style></head><body>
<h1>What speculation saves</h1>
<p class="verdict"><strong>{verdict}</strong></p>
{body}
<p>{notes}</p>
</body></html>
"""


def html(report: Report) -> str:
    """One page that needs nothing else; the picture is in it if matplotlib is there to draw it."""
    columns = report.bills
    body = [f"<p>{_BILLS}</p>", _rows([("", *columns), *_bill_rows(columns)]), _rows(list(derived(report)), how=True)]
    inputs = [(n, _number(f.value), f.how) for n, f in report.inputs.items()]
    body += ["<h2>Inputs</h2>", _rows(inputs, how=True)]
    body += [
        f"<h2>If an input is {SWING:.0%} lower, or higher</h2><p>Net savings a month, predicted from the inputs.</p>"
    ]
    body += [_rows([(s.name, _dollars(s.net_low), _dollars(s.net_high)) for s in report.swings]), _picture(report)]
    notes = " ".join(escape(n) for n in report.notes)
    colour = "#009e73" if report.verdict.net_a_month > 0 else "#d55e00"
    return _PAGE.format(verdict=escape(sentence(report)), colour=colour, body="\n".join(body), notes=notes)


def _picture(report: Report) -> str:
    if find_spec("matplotlib") is None:
        return ""
    import io

    from slipstream.measure.tornado import figure

    buffer = io.StringIO()
    figure(report.swings).savefig(buffer, format="svg")
    drawing = buffer.getvalue()
    return f'<div class="wide">{drawing[drawing.index("<svg") :]}</div>'


def _rows(rows: Sequence[Sequence[str]], how: bool = False) -> str:
    def cells(row: Sequence[str]) -> str:
        last = len(row) - 1
        return "".join(
            f'<td class="how">{escape(cell)}</td>' if how and i == last else f"<td>{escape(cell)}</td>"
            for i, cell in enumerate(row)
        )

    lines = "\n".join(f"<tr>{cells(row)}</tr>" for row in rows)
    return f'<div class="wide"><table>{lines}</table></div>'


def _aligned(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Columns of equal width; those in ``left`` begin flush, the others end so."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]


def _dollars(value: float, digits: int = 0) -> str:
    return f"{'-' if value < 0 else ''}${abs(value):,.{digits}f}"


def _days(days: float | None) -> str:
    return _NEVER if days is None else f"{days:,.1f} days"


def _share(value: float | None) -> str:
    return _NEVER if value is None else f"{value:.0%}"
