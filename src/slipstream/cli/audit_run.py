"""What ``audit`` does: check, load, collect, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.drafts import NONE, is_model, members
from slipstream.cli.screen import console, is_terminal
from slipstream.errors import InputError
from slipstream.measure.files import check_writable, write_whole

if TYPE_CHECKING:
    from slipstream.audit.law import Scorer
    from slipstream.audit.run import Audit, Progress, Report
    from slipstream.audit.suite import Settings
    from slipstream.audit.types import Engine, Finding
    from slipstream.models.base import Model

TOY = "toy"
#: A run that is killed loses what came in this time.
_SAVE_SECONDS = 10.0
#: A server may take so long for a request, and longer only if the whole run may.
_LEAST_SECONDS = 60.0
_MARKS = {"pass": "ok", "fault": "FAULT", "undecided": "?", "skipped": "-"}


@dataclass(frozen=True)
class AuditTask:
    """One call of ``audit``, as the user put it."""

    model: str | None
    engine: str
    url: str | None
    reference_url: str | None
    function: str | None
    draft: str
    k: int
    rule: str
    minutes: float
    variation: float
    alpha: float
    tolerance: float | None
    skip: str
    seed: int
    weights: str
    draft_weights: str
    device: str
    threads: int | None
    resume: str | None
    html: str | None
    as_json: bool
    no_color: bool


@dataclass(frozen=True)
class Loaded:
    """What is tested, and by which law."""

    engine: Engine
    scorer: Scorer | None
    reference: Engine | None


def run(task: AuditTask) -> int:
    """Do it; the exit code."""
    from slipstream.audit.run import verdict

    start = monotonic()
    settings = check(task)
    loaded = load(task)
    untested = _left_out(task, loaded.engine)
    with _shown(task) as progress:
        report = _audit(task, settings, loaded, progress, start)
    told = {f.name for f in report.findings}
    findings = (*report.findings, *(f for f in untested if f.result == "fault" or f.name not in told))
    report = replace(report, findings=findings, verdict=verdict(findings, report.controls))
    _deliver(task, report)
    return report.exit_code


def check(task: AuditTask) -> Settings:
    """Refuse what cannot work, before anything is loaded."""
    from slipstream.audit.suite import Settings

    if task.url and task.function:
        raise InputError("--url and --callable are two engines; give one")
    if task.model is None and not (task.url and task.reference_url):
        raise InputError("there is nothing to compare with; give TARGET, or --url with --reference-url")
    if task.model == TOY and task.engine == "transformers":
        raise InputError("the toy target is no transformers model; give a checkpoint, or leave --engine out")
    for name, value, most in (
        ("--minutes", task.minutes, 1e6),
        ("--tv", task.variation, 1),
        ("--alpha", task.alpha, 0.5),
    ):
        if not 0 < value <= most:
            raise InputError(f"{name} {value} is not usable; use a number above 0 and at most {most:g}")
    if task.tolerance is not None and not 0 <= task.tolerance < 1:
        raise InputError(f"--tolerance {task.tolerance} is not usable; use a number from 0 to 1, such as 0.001")
    if task.k < 0:
        raise InputError(f"-k {task.k} is not usable; use 0 or more")
    _skipped(task)
    for option, path in (("--html", task.html), ("--resume", task.resume)):
        if path is not None:
            check_writable(option, path)
    tolerance = 1e-3 if task.tolerance is None else task.tolerance
    return Settings(variation=task.variation, alpha=task.alpha, tolerance=tolerance, seed=task.seed)


def _skipped(task: AuditTask) -> list[str]:
    """The parameters in ``--skip``."""
    from dataclasses import fields

    from slipstream.types import SamplingParams

    names = [name.strip() for name in task.skip.split(",") if name.strip()]
    known = [f.name for f in fields(SamplingParams)]
    for name in names:
        if name not in known:
            raise InputError(f"--skip {name!r} is not a sampling parameter; use names of {', '.join(known)}")
    return names


def _left_out(task: AuditTask, engine: Engine) -> list[Finding]:
    """Findings on the parameters that are not tested; ``engine`` honours the others from now on."""
    from slipstream.audit.run import failure
    from slipstream.audit.suite import TESTED
    from slipstream.audit.types import EngineError, Finding, Refusing

    broken: list[Finding] = []
    why = dict.fromkeys(TESTED - engine.honours, "the engine has none, or means something else by it")
    why |= dict.fromkeys(_skipped(task), "left out by --skip")
    engine.honours -= set(_skipped(task))
    if isinstance(engine, Refusing):
        try:
            engine.probe()
        except EngineError as error:
            broken = [failure(error)]
        why |= {name: f"the engine refuses it ({said})" for name, said in engine.unsupported.items()}
    return [*broken, *(Finding(name, f"{name} is honoured", "skipped", why[name]) for name in sorted(why))]


# --- loading ----------------------------------------------------------------------------------------------------------


def load(task: AuditTask) -> Loaded:
    """The engine, and the target's law or a reference."""
    from slipstream.audit.endpoint import EndpointEngine
    from slipstream.audit.engines import CallableEngine, SlipstreamEngine
    from slipstream.audit.law import ModelScorer
    from slipstream.audit.toy import ToyModel

    if task.threads is not None:
        import torch

        torch.set_num_threads(task.threads)
    seconds = max(_LEAST_SECONDS, 60 * task.minutes)
    reference = EndpointEngine(task.reference_url, seconds=seconds) if task.reference_url else None
    if task.model is None:
        assert task.url is not None
        return Loaded(EndpointEngine(task.url, seconds=seconds), None, reference)
    if task.model == TOY:
        toy = ToyModel()
        target, scorer = _as_model(toy), toy
    elif task.engine == "transformers" and not task.url and not task.function:
        return _load_transformers(task)
    else:
        from slipstream.models.load import load_model

        target = load_model(task.model, weights=task.weights, device=task.device)
        scorer = ModelScorer(target)  # type: ignore[assignment]
    if task.url:
        endpoint = EndpointEngine(task.url, target.eos_token_ids, seconds)
        plain = SlipstreamEngine(_plain(target), "plain decoding of the target here")
        return Loaded(endpoint, scorer, reference or plain)
    if task.function:
        return Loaded(CallableEngine(task.function), scorer, None)
    return Loaded(SlipstreamEngine(_speculative(task, target), f"slipstream, {_called(task)}"), scorer, None)


def _as_model(toy: Any) -> Model:
    found: Model = toy
    return found


def _plain(target: Model) -> Any:
    from slipstream.speculative import SpeculativeDecoding

    return SpeculativeDecoding(target, None, k=0)


def _speculative(task: AuditTask, target: Model) -> Any:
    from slipstream.audit.toy import ToyModel
    from slipstream.models.load import open_draft
    from slipstream.speculative import SpeculativeDecoding

    drafts: list[Any] = []
    for member in members(task.draft):
        if member == TOY:
            drafts.append(ToyModel(seed=1, likeness=0.4))
        elif member != NONE:
            weights = task.draft_weights
            drafts.append(
                open_draft(member, weights=weights, device=task.device).load() if is_model(member) else member
            )
    draft = None if not drafts else drafts[0] if len(drafts) == 1 else drafts
    return SpeculativeDecoding(target, draft, k=task.k, rule=task.rule)


def _load_transformers(task: AuditTask) -> Loaded:
    from slipstream.audit.engines import TransformersEngine
    from slipstream.audit.law import ModelScorer
    from slipstream.measure.peers import load_hf
    from slipstream.models.huggingface import HuggingFaceModel
    from slipstream.models.load import open_checkpoint

    assert task.model is not None
    precision = "fp32" if task.weights == "auto" else task.weights
    model = load_hf(task.model, precision, task.device)
    parts = members(task.draft)
    assistant = load_hf(parts[0], precision, task.device) if is_model(parts[0]) else None
    lookup = task.k if parts[0] == "suffix" else 0
    if len(parts) > 1 or parts[0].startswith("early-exit"):
        raise InputError(f"--draft {task.draft!r} is not to be had from transformers; give a model, suffix or none")
    scorer = ModelScorer(HuggingFaceModel(model, tokenizer=open_checkpoint(task.model).tokenizer))
    engine = TransformersEngine(model, assistant, lookup, task.k, scorer.eos_token_ids, scorer.tokenizer)
    return Loaded(engine, scorer, None)


def _called(task: AuditTask) -> str:
    return f"draft {task.draft}, k={task.k}, rule {task.rule}"


# --- collecting -------------------------------------------------------------------------------------------------------


def _audit(task: AuditTask, settings: Settings, loaded: Loaded, progress: Progress, start: float) -> Report:
    from slipstream.audit.run import FAILED, Report, run_controls, verdict

    controls = run_controls(settings, progress)
    progress("one answer at a time", 0.0)
    singles, audit = _prepared(loaded, settings)
    key = {"engine": loaded.engine.name, "model": task.model, "settings": asdict(settings), "options": _kind(task)}
    state = _restore(task, audit, key)
    began = start - state.get("seconds", 0.0)

    def save() -> None:
        if task.resume is not None:
            document = {"key": key, "seconds": monotonic() - began, **audit.state()}
            write_whole(Path(task.resume), lambda path: path.write_text(json.dumps(document), encoding="utf-8"))

    if not any(f.result == "fault" and f.name == FAILED for f in singles):
        singles += _collect(task, audit, progress, save)
    save()
    seconds = monotonic() - began
    findings = (*singles, *audit.findings())
    return Report(
        engine=loaded.engine.name,
        target=task.model or "the reference server",
        verdict=verdict(findings, controls),
        findings=findings,
        controls=tuple(controls),
        settings=settings,
        seconds=seconds,
        answers=audit.samples,
    )


def _kind(task: AuditTask) -> list[str]:
    """Options that make other answers, or another law of them, without a part in the engine's name."""
    return [task.weights, task.draft_weights, task.device, task.url or "", task.reference_url or "", task.skip]


def _prepared(loaded: Loaded, settings: Settings) -> tuple[list[Finding], Audit]:
    from slipstream.audit.run import Audit, failure, prepare, prepare_pairs, single_findings
    from slipstream.audit.types import EngineError

    engine, scorer = loaded.engine, loaded.scorer
    try:
        if scorer is not None and _tells_tokens(engine, scorer, settings):
            return single_findings(engine, scorer, settings), prepare(engine, scorer, settings)
    except EngineError as error:
        return [failure(error)], Audit(loaded.engine, [], None, settings)
    assert loaded.reference is not None
    return [], prepare_pairs(loaded.engine, loaded.reference, loaded.scorer, settings)


def _tells_tokens(engine: Engine, scorer: Scorer, settings: Settings) -> bool:
    from slipstream.audit.suite import candidates
    from slipstream.types import SamplingParams

    prompt = candidates(scorer, 1, settings.seed)[0]
    return engine.complete([prompt], SamplingParams(max_new_tokens=4), [0])[0].tokens is not None


def _restore(task: AuditTask, audit: Audit, key: dict[str, Any]) -> dict[str, Any]:
    from slipstream.audit.run import load_state

    state = None if task.resume is None else load_state(Path(task.resume), key)
    if state is not None:
        try:
            audit.restore(state)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(
                f"--resume {task.resume!r} is damaged ({error}); remove it, or give another file"
            ) from error
    return state or {}


def _collect(task: AuditTask, audit: Audit, progress: Progress, save: Callable[[], None]) -> list[Finding]:
    """Ask until all is clear or time is up; a finding if the engine failed. Saved every few seconds, for who is killed.

    The time is the engine's own: on a busy machine the controls alone would use it up.
    """
    from slipstream.audit.run import failure
    from slipstream.audit.types import EngineError

    start = saved = monotonic()
    try:
        while monotonic() - start < 60 * task.minutes:
            progress(f"{audit.samples:,} answers", audit.share)
            if not audit.step():
                break
            if monotonic() - saved >= _SAVE_SECONDS:
                save()
                saved = monotonic()
    except KeyboardInterrupt:
        click.echo("slipstream: interrupted; reporting what there is", err=True)
    except EngineError as error:
        return [failure(error)]
    return []


# --- reporting --------------------------------------------------------------------------------------------------------


@contextmanager
def _shown(task: AuditTask) -> Iterator[Progress]:
    """Progress on a terminal; nothing elsewhere."""
    if not is_terminal(sys.stderr):
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console(sys.stderr, task.no_color), transient=True) as bar:
        line = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(line, description=what, completed=share)


def _deliver(task: AuditTask, report: Report) -> None:
    from slipstream.audit.report import to_html

    if task.html is not None:
        write_whole(Path(task.html), lambda path: path.write_text(to_html(report), encoding="utf-8"))
    out = sys.stderr if task.as_json else sys.stdout
    screen = console(out, task.no_color, width=120, soft_wrap=True)
    for finding in _worth_a_line(report.findings):
        screen.print(f"{_MARKS[finding.result]:>5}  {_line(finding)}")
    caught = sum(c.as_it_must for c in report.controls if c.fault)
    broken = sum(c.fault is not None for c in report.controls)
    correct = "passed" if all(c.as_it_must for c in report.controls if not c.fault) else "did not pass"
    screen.print(f"\nControls: {caught} of {broken} faulty decoders caught; the correct one {correct}.")
    for control in report.controls:
        if not control.as_it_must:
            screen.print(f"  {control.fault or 'correct'}: not as it must be after {control.samples:,} answers")
    if hint := _hint(report.findings):
        screen.print(hint)
    screen.print(f"{report.engine}: {report.verdict} ({report.answers:,} answers, {report.seconds:.0f} s)")
    if task.as_json:
        click.echo(json.dumps(report.document()))


def _hint(findings: Sequence[Finding]) -> str:
    """Where to look first, if something else than verification may be at fault."""
    if any(f.result == "fault" and f.name.endswith(": first token") for f in findings):
        return (
            "The first token has another law already, which most engines draw without a draft: look first at weights "
            "and their type (--tolerance), at the prompt's ids, and at defaults of the server; then at verification."
        )
    return ""


def _worth_a_line(findings: Sequence[Finding]) -> Iterator[Finding]:
    """All but what was not begun, and of one prompt's joint laws that all passed the least likely."""
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.name.split(":")[0], []).append(finding)
    for group in groups.values():
        if all(f.result == "pass" and f.p_value is not None for f in group):
            yield min(group, key=lambda f: f.p_value or 0.0)
        else:
            yield from (f for f in group if f.samples or f.result != "undecided")


def _line(finding: Finding) -> str:
    p = "" if finding.p_value is None else f", p = {finding.p_value:.2g}"
    found = f", would find {finding.detects}" if finding.detects and finding.result != "fault" else ""
    return f"{finding.name} ({finding.samples:,}{p}{found}): {finding.detail}"
