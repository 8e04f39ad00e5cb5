"""Alert rules for Prometheus and a dashboard for Grafana, made from the same definitions as the monitor.

They are for a Prometheus that scrapes engines directly; where it scrapes the monitor's exporter, the monitor's own
alarms are there too. Recording rules give every engine's counters one name each (``slipstream:...``), so alerts and
panels are written once. A rule over fixed spans of time is no sequential test: it is slower, and its rate of false
alarms is not known.
"""

from __future__ import annotations

from typing import Any

from slipstream.monitor.alarms import KINDS, PINNED_SHARE, SWITCH_OFF
from slipstream.monitor.engines import CHECKED, ENGINES, LLAMA_CPP, SGLANG, Metrics
from slipstream.monitor.exporter import ALARM, AT, COUNTERS, EVIDENCE, RATES, SPEED_UP, USUAL, Series
from slipstream.yaml_text import dump

_SPANS = {"5m": "5m", "30m": "30m", "1d": "1d"}
#: What acceptance must fall by, in 30 minutes against the day before, and how many draft tokens must say so.
FALL, TOKENS = 0.1, 2000
_ROLES = ("drafted", "accepted", "rounds", "drafting_rounds", "emitted")
_GROUP = "by (engine, job, instance, model_name)"


def expressions(metrics: Metrics, span: str) -> dict[str, str]:
    """PromQL for increases over ``span`` of what an engine counts or implies, by role; the same derivations as
    ``derive``.
    """

    def increase(name: str) -> str:
        return f"sum by (job, instance, model_name) (increase({name}[{span}]))" if name else ""

    drafted, accepted = increase(metrics.drafted), increase(metrics.accepted)
    if metrics.drafted_at and metrics.engine != "slipstream":  # TensorRT-LLM's are counted with the positions
        drafted, accepted = increase(metrics.drafted_at), increase(metrics.accepted_at)
    rounds, drafting, emitted = increase(metrics.rounds), increase(metrics.drafting_rounds), ""
    if metrics.generated:
        emitted = increase(metrics.generated)
        if metrics.firsts:
            emitted = f"clamp_min({emitted} - {increase(metrics.firsts)}, 0)"
    if metrics is SGLANG:
        k = f"avg by (job, instance, model_name) (avg_over_time({metrics.k}[{span}]))"
        accepted, drafted, drafting = f"clamp_min({emitted} - {rounds}, 0)", f"{rounds} * {k}", rounds
    if not rounds:
        rounds = f"clamp_min({emitted} - {accepted}, 0)"
    if not drafting and metrics.drafted_at:
        first = f'{metrics.drafted_at}{{{metrics.position}="{metrics.first_position}"}}'
        drafting = f"sum by (job, instance, model_name) (increase({first}[{span}]))"
    if not emitted:
        emitted = f"{rounds} + {accepted}"
    found = dict(zip(_ROLES, (drafted, accepted, rounds, drafting, emitted), strict=True))
    return {role: text for role, text in found.items() if text}


def recording() -> list[dict[str, Any]]:
    """One name for every engine's increases: ``slipstream:drafted:5m`` and so on."""
    found = []
    for span in _SPANS:
        for role in _ROLES:
            parts = []
            for metrics in ENGINES:
                if text := expressions(metrics, span).get(role):
                    parts.append(f'label_replace({text}, "engine", "{metrics.engine}", "", "")')
            found.append({"record": f"slipstream:{role}:{span}", "expr": "\nor ".join(parts)})
        found += [{"record": f"slipstream:{name}:{span}", "expr": text} for name, text in _derived(span)]
    return found


def _derived(span: str) -> list[tuple[str, str]]:
    accepted, drafted, rounds = (f"slipstream:{role}:{span}" for role in ("accepted", "drafted", "rounds"))
    return [
        ("acceptance", f"{accepted} / ({drafted} > 0)"),
        ("length", f"({accepted} + {rounds}) / ({rounds} > 0)"),
        ("drafting", f"slipstream:drafting_rounds:{span} / ({rounds} > 0)"),
    ]


def alerts() -> list[dict[str, Any]]:
    """Alert rules: of Prometheus' own over fixed spans, and the monitor's alarms."""
    off = "; ".join(f"{engine}: {way}" for engine, way in SWITCH_OFF.items())
    own = [
        _alert(
            "acceptance-drift",
            f"slipstream:acceptance:30m < slipstream:acceptance:1d offset 30m - {FALL}\n"
            f"and slipstream:drafted:30m > {TOKENS}\nand slipstream:drafted:1d offset 30m > {5 * TOKENS}",
            "10m",
            "acceptance of {{ $labels.model_name }} on {{ $labels.instance }} is {{ $value | humanizePercentage }}, "
            f"more than {FALL:.0%} below the day before",
            "See whether target, template or requests changed; train the draft (`slipstream distill`), or lower k "
            "(`slipstream plan` says which is best).",
        ),
        _alert(
            "speculation-off",
            "slipstream:emitted:30m > 1000\nand (slipstream:drafted:30m == 0 or slipstream:emitted:30m unless "
            "slipstream:drafted:30m)\nand slipstream:drafted:1d offset 30m > 0",
            "5m",
            "{{ $labels.instance }} generated {{ $value | humanize }} tokens in 30 minutes and drafted none",
            "Look at the engine's start-up log and at its command line (`slipstream export` writes it).",
        ),
        _alert(
            "k-pinned",
            f"slipstream:drafting:30m < {PINNED_SHARE}\nand slipstream:drafted:30m > 0\n"
            "and slipstream:rounds:30m > 1000",
            "15m",
            "only {{ $value | humanizePercentage }} of the rounds of {{ $labels.instance }} have a draft",
            f"Drafting does not pay at this load: `slipstream plan` at this batch size; to switch it off: {off}.",
        ),
    ]
    mine = [
        _alert(
            kind,
            f'{ALARM.full}{{kind="{kind}"}} == 1',
            None,
            f"the monitor of {{{{ $labels.service }}}} says: {what}",
            "`slipstream monitor --url ... --once` tells figures, advice and what it costs.",
            prefix="SlipstreamMonitor",
        )
        for kind, (what, _) in KINDS.items()
    ]
    return own + mine


def _alert(
    kind: str, expr: str, wait: str | None, summary: str, advice: str, prefix: str = "Slipstream"
) -> dict[str, Any]:
    name = prefix + "".join(word.capitalize() for word in kind.split("-"))
    return {
        "alert": name,
        "expr": expr,
        **({"for": wait} if wait else {}),
        "labels": {"severity": KINDS[kind][1], "kind": kind},
        "annotations": {"summary": summary, "description": advice},
    }


def groups() -> list[dict[str, Any]]:
    """All rules, in Prometheus' groups."""
    return [
        {"name": "slipstream-recording", "interval": "1m", "rules": recording()},
        {"name": "slipstream-alerts", "rules": alerts()},
    ]


def rules() -> str:
    """A rules file for Prometheus."""
    head = f"# Written by `slipstream monitor --rules`. Engines' metric names as of {CHECKED}.\n"
    return head + dump({"groups": groups()})


# --- Grafana ----------------------------------------------------------------------------------------------------------

_SELECT = 'job=~"$job", instance=~"$instance"'


def dashboard() -> dict[str, Any]:
    """A dashboard (schema 39): engines by the recording rules, and the monitor's own figures."""
    panels = [
        _panel("Acceptance", "percentunit", [_target(f"slipstream:acceptance:5m{{{_SELECT}}}")]),
        _panel("Mean accepted length, tokens a round", "short", [_target(f"slipstream:length:5m{{{_SELECT}}}")]),
        _panel("Rounds with a draft", "percentunit", [_target(f"slipstream:drafting:5m{{{_SELECT}}}")]),
        _panel("Draft tokens in 5 minutes", "short", [_target(f"slipstream:drafted:5m{{{_SELECT}}}")]),
        _of_monitor("Acceptance and what is usual", RATES["acceptance"], USUAL),
        _of_monitor("Acceptance at a position", AT),
        _of_monitor("Evidence of a fall (1: alarm)", EVIDENCE),
        _of_monitor("Speed-up, estimated", SPEED_UP),
        _of_monitor("Draft tokens a round", RATES["k"]),
        _of_monitor("Alarms", ALARM),
        _panel(
            "Tokens a second",
            "short",
            [_target(f"sum by (service, engine) (rate({COUNTERS['emitted'].full}[5m]))", "{{service}}")],
        ),
    ]
    for number, panel in enumerate(panels):
        panel |= {"id": number + 1, "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)}}
    return {
        "title": "Speculative decoding",
        "uid": "slipstream-speculation",
        "tags": ["llm", "speculative decoding"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_datasource(), *(_variable(name) for name in ("job", "instance"))]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(title: str, unit: str, targets: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "title": title,
        "type": "timeseries",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [target | {"refId": chr(ord("A") + i)} for i, target in enumerate(targets)],
    }


def _of_monitor(title: str, *series: Series) -> dict[str, Any]:
    legend = {AT.name: "{{model}} {{position}}", EVIDENCE.name: "{{model}} {{position}}", ALARM.name: "{{kind}}"}
    targets = [_target(s.full, legend.get(s.name, "{{service}} {{model}} {{drafter}} " + s.name)) for s in series]
    return _panel(title, series[0].unit, targets)


def _target(expr: str, legend: str = "{{engine}} {{model_name}} {{instance}}") -> dict[str, Any]:
    return {"expr": expr, "legendFormat": legend, "datasource": {"type": "prometheus", "uid": "${datasource}"}}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "query": {"query": f"label_values(slipstream:drafted:5m, {name})", "refId": name},
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "includeAll": True,
        "multi": True,
        "refresh": 2,
        "allValue": ".*",
    }


#: What the rules leave out: builds without counters of drafts cannot be told in PromQL.
UNCOVERED = (f"{LLAMA_CPP.engine} before its counters of drafts", f"{SGLANG.engine} before its counter of calls")
