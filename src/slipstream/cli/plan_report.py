"""A plan as a table for a terminal and as a page to forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from itertools import takewhile
from math import isfinite
from pathlib import Path

from slipstream.measure.expectation import LoadCurve
from slipstream.plan import Acceptance, Candidate, Checked, Estimate, Plan

_NONE = "-"


def short(plan: Plan, draft: str) -> str:
    """What to call a draft: the last part of each path, if that is clear."""
    names = {d.name: ",".join(Path(part).name for part in d.name.split(",")) for d in plan.drafts}
    clear = len(set(names.values())) == len(names)
    return names.get(draft, draft) if clear else draft


def sentence(plan: Plan) -> str:
    """The verdict, with short names."""
    said = plan.verdict.sentence
    for d in sorted(plan.drafts, key=lambda d: -len(d.name)):
        said = said.replace(d.name, short(plan, d.name))
    return said


def best(plan: Plan) -> list[Candidate]:
    """The best k of each draft at the batch that was asked for."""
    found: dict[str, Candidate] = {}
    for c in plan.candidates:
        if c.batch == plan.asked.batch and (c.draft not in found or _gain(plan, c) > _gain(plan, found[c.draft])):
            found[c.draft] = c
    return list(found.values())


def _gain(plan: Plan, c: Candidate) -> float:
    return (c.speed_up if plan.asked.objective == "throughput" else c.whole_answer).value


def table(plan: Plan) -> str:
    """Plain text."""
    against, notes = split_notes(plan)
    parts = [[sentence(plan), *against, *(f"  {a.what}" for a in plan.verdict.advice)]]
    for title, rows, how in sections(plan):
        if len(rows) > 1:
            parts.append([f"{title} ({how})", *_aligned(rows)])
    parts.append(notes)
    return "\n\n".join("\n".join(line.rstrip() for line in part) for part in parts if part) + "\n"


def split_notes(plan: Plan) -> tuple[list[str], list[str]]:
    """What the short real run says against the verdict, which belongs beside it, and the other notes."""
    count = 0 if plan.validation is None or plan.validation.within else 1
    return list(plan.notes[:count]), list(plan.notes[count:])


def sections(plan: Plan) -> Iterator[tuple[str, list[tuple[str, ...]], str]]:
    """Title, rows with a head, and how the figures were obtained."""
    choices = best(plan)
    if choices:
        yield "Drafts at their best k", list(_choice_rows(plan, choices)), choices[0].speed_up.how
        yield "Speed-up by category", list(_category_rows(plan, choices)), choices[0].speed_up.how
    if plan.acceptance:
        yield "Acceptance of a first draft token", list(_acceptance_rows(plan)), plan.acceptance[0].rate.how
    if plan.costs:
        yield "Costs in milliseconds", list(_cost_rows(plan)), plan.costs[0].plain_step.how
    if plan.batches:
        rows: list[tuple[str, ...]] = [("requests at a time", "k", "speed-up")]
        rows += [(str(b.batch), str(b.k), f"{b.speed_up.value:.2f}x") for b in plan.batches]
        yield f"By batch, {short(plan, plan.batches[0].draft)}: {crossover(plan)}", rows, plan.batches[-1].speed_up.how
    if plan.load is not None:
        full = f", {plan.load.batch} requests answered at a time" if plan.load.batch else ""
        yield f"Under load{full}", list(_load_rows(plan)), plan.load.plain.idle_seconds.how
    if plan.validation is not None:
        rows = [("", "predicted", "measured", "difference")]
        rows += [_check_row(c) for c in (plan.validation.overall, *plan.validation.categories)]
        yield "The prediction, checked", rows, plan.validation.overall.measured.how


def crossover(plan: Plan) -> str:
    """From which batch on plain decoding is best."""
    paying = list(takewhile(lambda b: b.k > 0, plan.batches))
    if not paying:
        return "plain decoding is best"
    if len(paying) == len(plan.batches):
        return f"it pays at every batch up to {paying[-1].batch}"
    return f"it pays up to batch {paying[-1].batch}, plain decoding is best from {plan.batches[len(paying)].batch} on"


def _choice_rows(plan: Plan, choices: Sequence[Candidate]) -> Iterator[tuple[str, ...]]:
    yield ("draft", "k", "speed-up", "whole answers", "accepted", "tokens a round", "ms a token")
    for c in sorted(choices, key=lambda c: -_gain(plan, c)):
        yield (
            short(plan, c.draft),
            str(c.k),
            with_interval(c.speed_up, "x"),
            f"{c.whole_answer.value:.2f}x",
            _share(c.acceptance),
            f"{c.tokens_per_round.value:.2f}",
            f"{1e3 * c.seconds_per_token.value:.1f}",
        )


def _category_rows(plan: Plan, choices: Sequence[Candidate]) -> Iterator[tuple[str, ...]]:
    categories = list(plan.asked.categories)
    yield ("draft", *categories)
    for c in choices:
        yield (
            f"{short(plan, c.draft)}, k = {c.k}",
            *(f"{c.categories[x].value:.2f}x" if x in c.categories else _NONE for x in categories),
        )


def _acceptance_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield ("draft", "rule", "temperature", "top p", "accepted", "position 2", "3", "4")
    for a in shown_rates(plan):
        later = [f"{q.value:.2f}" for q in a.positions[1:4]]
        yield (
            short(plan, a.draft),
            a.rule,
            f"{a.sampling.temperature:g}",
            f"{a.sampling.top_p:g}",
            with_interval(a.rate),
            *(later + [_NONE] * 3)[:3],
        )


def shown_rates(plan: Plan) -> list[Acceptance]:
    """All rules under the sampling that was asked for, and the asked rule under the others."""
    a = plan.asked
    return [r for r in plan.acceptance if r.sampling == a.sampling or r.rule == a.rule]


def _cost_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield ("draft", "plain step", "draft step", "c", "5 rows", "v(5)", "prompt token, draft")
    for c in plan.costs:
        plain = c.plain_step.value
        five = c.verify[5].value if 5 in c.verify else None
        step = c.draft_step.value if c.draft_step is not None else 0.0
        read = c.draft_prompt_token.value if c.draft_prompt_token is not None else 0.0
        yield (
            short(plan, c.draft or _NONE),
            f"{1e3 * plain:.2f}",
            f"{1e3 * step:.2f}",
            f"{step / plain:.2f}",
            _NONE if five is None else f"{1e3 * five:.2f}",
            _NONE if five is None else f"{five / plain:.2f}",
            f"{1e3 * read:.2f}",
        )


def _load_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    assert plan.load is not None
    rate = plan.asked.requests_per_second
    asked = () if rate is None else (f"seconds an answer at {rate.value:g} requests a second",)
    yield ("", "alone, seconds an answer (C1)", "most requests a second (1 / C2)", *asked)
    for name, found in (("plain", plan.load.plain), ("speculative", plan.load.speculative)):
        curve = LoadCurve(found.idle_seconds.value, found.capacity_seconds.value)
        there = () if rate is None else (_seconds(curve.latency(rate.value)),)
        yield (name, f"{curve.idle_seconds:.3g}", f"{curve.most:.3g}", *there)
    crossing = plan.load.crossing_rate
    yield (
        "plain is faster above",
        "",
        "no rate" if crossing is None else f"{crossing.value:.3g}",
        *("" for _ in asked),
    )


def _seconds(value: float) -> str:
    return f"{value:.3g}" if isfinite(value) else "no end"


def _check_row(c: Checked) -> tuple[str, ...]:
    return (c.category, f"{c.predicted.value:.2f}x", with_interval(c.measured, "x"), f"{c.error:+.1%}")


def with_interval(e: Estimate, unit: str = "", digits: int = 2) -> str:
    """A figure, and its interval if it has one."""
    shown = f"{e.value:.{digits}f}{unit}"
    return shown if e.low is None or e.high is None else f"{shown} ({e.low:.{digits}f} to {e.high:.{digits}f})"


def _share(e: Estimate | None) -> str:
    return _NONE if e is None else f"{e.value:.0%}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) if i < len(row) else 0 for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False)))
        for row in rows
    ]


# --- the page ---------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Should {target} speculate?</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222;
  background: #fff }}
h1 {{ font-size: 1.5em }} h2 {{ font-size: 1.15em; margin-top: 2em }}
.verdict {{ font-size: 1.15em; border-left: 4px solid {colour}; padding: .4em 1em; background: #f7f7f7 }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(12em, 1fr)); gap: 1em 1.5em;
  margin: 1.2em 0 }}
.figures b {{ display: block; font-size: 1.5em }}
.how {{ color: #666; font-size: 14px }}
.wide {{ overflow-x: auto }} table {{ border-collapse: collapse; margin: .6em 0; font-size: 15px }}
td, th {{ padding: .2em 1em .2em 0; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }}
td:first-child, th:first-child {{ text-align: left }} tr {{ border-bottom: 1px solid #ddd }}
svg {{ max-width: 100%; height: auto }} figure {{ margin: 1em 0; break-inside: avoid;
  overflow-x: auto }}
figure svg {{ min-width: 35em }}
@media print {{ body {{ margin: 0; max-width: none }} h2 {{ break-after: avoid }} table {{ break-inside: avoid }} }}
</style></head><body>
<h1>Should {target} speculate?</h1>
<p class="verdict"><strong>{verdict}</strong>{against}</p>
<div class="figures">{figures}</div>
{advice}
<p>{setting}</p>
{plots}
{tables}
<h2>Notes</h2>
<ul>{notes}</ul>
</body></html>
"""


def html(plan: Plan) -> str:
    """One page that needs nothing else; the pictures are in it if matplotlib is there to draw them."""
    against, notes = split_notes(plan)
    seen = plan.validation.overall.measured.value if plan.validation is not None else 1.0
    good = plan.verdict.action == "speculate" and seen >= 1
    advice = "".join(f"<li>{escape(a.what)}</li>" for a in plan.verdict.advice)
    tables = [
        f'<h2>{escape(title)}</h2><p class="how">{escape(how[:1].upper() + how[1:])}.</p>{_html_table(rows)}'
        for title, rows, how in sections(plan)
        if len(rows) > 1
    ]
    return _PAGE.format(
        target=escape(Path(plan.target.model).name),
        colour="#009e73" if good else "#d55e00",
        verdict=escape(sentence(plan)),
        against="".join(f"<br>{escape(said)}" for said in against),
        figures="".join(_figure(*one) for one in _figures(plan)),
        advice=f"<h2>What would help</h2><ul>{advice}</ul>" if advice else "",
        setting=escape(_setting(plan)),
        plots=_plots(plan),
        tables="\n".join(tables),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes),
    )


def _figures(plan: Plan) -> Iterator[tuple[str, str, str]]:
    verdict = plan.verdict
    of = "of whole answers" if plan.asked.objective == "latency" else "after the first token"
    yield with_interval(verdict.speed_up, "x"), f"speed-up {of}", verdict.speed_up.how
    if plan.validation is not None:
        whole = plan.validation.overall
        said = f"after the first token, in a real run; {whole.predicted.value:.2f}x was predicted for it"
        yield f"{whole.measured.value:.2f}x", said, whole.measured.how
    if verdict.acceptance is not None:
        yield f"{verdict.acceptance.value:.0%}", "of draft tokens accepted", verdict.acceptance.how
    if verdict.break_even is not None:
        yield f"{verdict.break_even.value:.0%}", "acceptance needed", verdict.break_even.how
    if plan.memory_bytes is not None:
        yield f"{plan.memory_bytes.value / 1e9:.2f} GB", "memory, at most", plan.memory_bytes.how


def _figure(value: str, what: str, how: str) -> str:
    return f'<div><b>{escape(value)}</b>{escape(what)}<br><span class="how">{escape(how)}</span></div>'


def _setting(plan: Plan) -> str:
    a, t = plan.asked, plan.target
    cpu = plan.machine.get("accelerator") or plan.machine.get("cpu") or "this machine"
    threads = f", {t.threads} thread{'' if t.threads == 1 else 's'}" if t.threads else ""
    choice = "greedy" if a.sampling.temperature == 0 else f"temperature {a.sampling.temperature:g}"
    return (
        f"{a.prompts} prompts ({a.prompts_from}), answers of at most {a.max_new_tokens} tokens, {choice}, for "
        f"{a.objective} at a batch of {a.batch}; {t.weights} weights on {cpu}{threads}; {plan.created[:10]}, "
        f"Slipstream {plan.slipstream}."
    )


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(c)}</th>" for c in rows[0])
    body = "\n".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows[1:])
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _plots(plan: Plan) -> str:
    if find_spec("matplotlib") is None:
        return '<p class="how">Pictures need the package matplotlib.</p>'
    from slipstream.measure.plan_plot import figures, svg

    drawn = [(title, svg(figure)) for title, figure in figures(plan, lambda name: short(plan, name))]
    return "\n".join(f'<figure role="img" aria-label="{escape(title)}">{drawing}</figure>' for title, drawing in drawn)
