"""What ``slipstream doctor`` does: describes both models, has them examined, prints what was found."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from slipstream.cli.drafts import EARLY_EXIT, NONE, is_model, members
from slipstream.cli.screen import next_step
from slipstream.errors import InputError
from slipstream.measure.doctor import Diagnosis, Finding, Setting, examine
from slipstream.measure.engines import Combination, read_combinations
from slipstream.measure.footprint import as_text
from slipstream.measure.peak import Peak, Trial, measure_peak
from slipstream.models.describe import Description, describe
from slipstream.models.load import auto_weights

FORMAT = 1
_GIGA = 1e9
#: Predicted and measured peak may differ by this share.
_TOLERANCE = 0.10


@dataclass(frozen=True)
class DoctorTask:
    """The options as given."""

    target: str
    draft: str | None = None
    k: int = 4
    context: int = 2048
    batch: int = 1
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    memory: float | None = None
    text_file: str | None = None
    engines: tuple[str, ...] = ()
    engines_table: str | None = None
    measure: bool = False
    as_json: bool = False


@dataclass(frozen=True)
class Examined:
    """A diagnosis and what it is about."""

    target: Description
    draft: Description | None
    setting: Setting
    diagnosis: Diagnosis
    peak: Peak | None

    @property
    def models(self) -> list[tuple[str, Description]]:
        """By role."""
        return [("target", self.target)] + ([("draft", self.draft)] if self.draft is not None else [])


def run(task: DoctorTask) -> int:
    """Print the findings; 1 if there is a blocker."""
    examined = _examine(task)
    click.echo(json.dumps(document(examined)) if task.as_json else shown(examined), nl=task.as_json)
    if not examined.diagnosis.blocked and task.draft is not None:
        next_step("plan", task.target, "--drafts", task.draft.replace(",", "+"), "--prompts", "prompts.jsonl")
    return 1 if examined.diagnosis.blocked else 0


def _examine(task: DoctorTask) -> Examined:
    for option, value in (("-k", task.k), ("--context", task.context), ("--batch", task.batch)):
        if value < 1:
            raise InputError(f"{option} {value} is too small; use 1 or more")
    table = _table(task)
    text = _text(task.text_file)
    target, name = describe(task.target), _draft_model(task.draft)
    draft = describe(name) if name is not None else None
    _check_early_exits(task.draft, target)
    setting = _setting(task, target, draft, text)
    diagnosis = examine(target, draft, setting, table)
    found, lines = (None, ()) if not task.measure else _measured(task, target, draft, setting, diagnosis)
    diagnosis = replace(diagnosis, findings=(*diagnosis.findings, *lines))
    return Examined(target, draft, setting, diagnosis, found)


def _draft_model(given: str | None) -> str | None:
    """The model among the members of ``--draft``; None if there is none to compare with."""
    names = members(given) if given is not None else ()
    models = [name for name in names if is_model(name)]
    if NONE in names or len(models) > 1:
        raise InputError(f"--draft {given!r} has not one model; examine one at a time, or leave --draft out")
    return models[0] if models else None


def _check_early_exits(given: str | None, target: Description) -> None:
    from slipstream.drafters.early_exit import check_early_exit

    for name in members(given) if given is not None else ():
        if name.startswith(EARLY_EXIT):
            check_early_exit(name, target.config, target.name)


def _table(task: DoctorTask) -> list[Combination]:
    table = read_combinations(task.engines_table)
    known = {row.engine.lower(): row.engine for row in table}
    unknown = next((e for e in task.engines if e.lower() not in known), None)
    if unknown is not None:
        raise InputError(f"--engine {unknown!r} is not in the table; use one of {', '.join(known.values())}")
    wanted = {known[e.lower()] for e in task.engines} or set(known.values())
    return [row for row in table if row.engine in wanted]


def _text(file: str | None) -> str:
    if file is None:
        from slipstream.measure.prompts import read_prompts

        contents = [p.content for p in read_prompts(None)]
        return "\n".join(c if isinstance(c, str) else "\n".join(m["content"] for m in c) for c in contents)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {file!r} cannot be read ({error}); give a text file in UTF-8") from error
    if not text.strip():
        raise InputError(f"--text {file!r} is empty; give a text like those that are to be written")
    return text


def _setting(task: DoctorTask, target: Description, draft: Description | None, text: str) -> Setting:
    on_cpu = task.device.split(":")[0] == "cpu"
    memory, how = _memory(task, on_cpu)
    return Setting(
        context=task.context,
        batch=task.batch,
        k=task.k,
        weights=_weights(task.weights, target, on_cpu),
        draft_weights=_weights(task.draft_weights, draft or target, on_cpu, drafting=True),
        on_cpu=on_cpu,
        memory=memory,
        memory_how=how,
        text=text,
    )


def _weights(given: str, model: Description, on_cpu: bool, *, drafting: bool = False) -> str:
    return given if given != "auto" else auto_weights(on_cpu=on_cpu, ours=model.ours, drafting=drafting)


def _memory(task: DoctorTask, on_cpu: bool) -> tuple[int | None, str]:
    if task.memory is not None:
        if not 0 < task.memory < float("inf"):
            raise InputError(f"--memory {task.memory:g} is no amount of memory; use gigabytes above 0")
        return int(task.memory * _GIGA), "memory assumed: --memory"
    from slipstream.measure.machine import memory_bytes

    found = memory_bytes("cpu" if on_cpu else task.device)
    return found, "memory measured here" if found is not None else f"{task.device} is not here"


def _measured(
    task: DoctorTask, target: Description, draft: Description | None, setting: Setting, diagnosis: Diagnosis
) -> tuple[Peak | None, tuple[Finding, ...]]:
    """The peak in a process of its own, and what it says of the prediction."""
    models = [(target, setting.weights)] + ([(draft, setting.draft_weights)] if draft is not None else [])
    missing = next((m.name for m, _ in models if not m.has_weights), None)
    if missing is not None:
        raise InputError(f"--measure needs weights, and {missing} has none; leave --measure out, or download them")
    if diagnosis.blocked:
        what = "the peak was not measured, since the pair cannot run"
        return None, (Finding("warning", "measured peak", what, "see the blockers first"),)
    trial = Trial(tuple((m.name, w) for m, w in models), setting.context, setting.k, task.device, setting.batch)
    found = measure_peak(trial)
    if isinstance(found, str):
        return None, (Finding("blocker", "measured peak", found, "see what it says", "measured here"),)
    ratio = diagnosis.predicted_peak / found.bytes
    what = f"{as_text(found.bytes)} beside the program's own {as_text(found.program)}; predicted / measured {ratio:.2f}"
    close = abs(ratio - 1) <= _TOLERANCE
    do = "" if close else "go by the measured one"
    return found, (Finding("ok" if close else "warning", "measured peak", what, do, "measured here"),)


# --- what is shown ----------------------------------------------------------------------------------------------------


def shown(examined: Examined) -> str:
    """Plain text, for a terminal."""
    parts = [_models(examined), _needed(examined), _engines(examined.diagnosis.engines)]
    counts = {level: sum(f.level == level for f in examined.diagnosis.findings) for level in ("blocker", "warning")}
    verdict = "It can be used." if not counts["blocker"] else "It cannot be used as asked."
    totals = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())
    parts.append([*_findings(examined.diagnosis.findings), "", f"{verdict} {totals}."])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _models(examined: Examined) -> list[str]:
    lines = []
    for role, model in examined.models:
        origin = "weights are here" if model.has_weights else "no weights: predicted from its configuration"
        kind = f"{model.config.get('model_type')}, {model.parameters / 1e6:,.0f} M parameters"
        lines.append(f"{role:<7} {model.name}  {kind}, {model.vocab_size:,} ids ({origin})")
    return lines


def _needed(examined: Examined) -> list[str]:
    setting = examined.setting
    head = f"Memory at a context of {setting.context:,}, batch {setting.batch}, predicted from shapes"
    rows: list[tuple[str, ...]] = [("weights", "target", "draft", "caches", "activations", "in use", "peak of loading")]
    for name, (ours, theirs) in examined.diagnosis.needs.items():
        both = [ours] + ([theirs] if theirs is not None else [])
        caches, activations = sum(n.cache for n in both), max(n.activations for n in both)
        in_use = sum(n.weights for n in both) + caches + activations
        loading = max(ours.loading, ours.weights + theirs.loading if theirs is not None else 0)
        drafts = as_text(theirs.weights) if theirs is not None else "-"
        sizes = (as_text(n) for n in (caches, activations, in_use, loading))
        rows.append((name, as_text(ours.weights), drafts, *sizes))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [head, *("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _engines(rows: tuple[Combination, ...]) -> list[str]:
    if not rows:
        return []
    lines = ["Other engines (assumed: from their sources on the date given)"]
    for row in rows:
        lines.append(f"  {row.engine:<12} {row.severity:<8} {row.what}; {row.do} ({row.date})")
    return lines


def _findings(findings: tuple[Finding, ...]) -> list[str]:
    width = max(len(f.topic) for f in findings)
    lines = []
    for found in findings:
        do = f": {found.do}" if found.do else ""
        lines.append(f"{found.level:<8} {found.topic:<{width}}  {found.what}{do} [{found.how}]")
    return lines


def document(examined: Examined) -> dict[str, Any]:
    """Everything, for other programs; sizes in bytes."""
    found = examined.diagnosis
    return {
        "format": FORMAT,
        "blocked": found.blocked,
        "models": {role: _model_document(model) for role, model in examined.models},
        "setting": {k: v for k, v in asdict(examined.setting).items() if k != "text"},
        "findings": [asdict(f) for f in found.findings],
        "vocabulary": asdict(found.vocabulary) if found.vocabulary is not None else None,
        "memory": {
            "how": "predicted from shapes",
            "by_weights": {
                name: {"target": asdict(ours), "draft": asdict(theirs) if theirs is not None else None}
                for name, (ours, theirs) in found.needs.items()
            },
            "predicted_peak": {"value": found.predicted_peak, "how": "predicted from shapes"},
            "measured_peak": {**asdict(examined.peak), "how": "measured here"} if examined.peak is not None else None,
        },
        "engines": [asdict(row) for row in found.engines],
    }


def _model_document(model: Description) -> dict[str, Any]:
    return {
        "name": model.name,
        "model_type": model.config.get("model_type"),
        "parameters": model.parameters,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_positions,
        "has_weights": model.has_weights,
        "obstacle": model.obstacle,
    }
