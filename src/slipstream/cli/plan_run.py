"""What ``slipstream plan`` does: load, gather, decide, check by a short real run, write."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.options import sampling_params
from slipstream.cli.pairs import Pairs, Wanted, check_room, load, parse_drafts
from slipstream.cli.progress import follow
from slipstream.cli.run import INTERRUPTED
from slipstream.cli.screen import next_step
from slipstream.errors import InputError, SlipstreamError
from slipstream.measure.files import check_writable

if TYPE_CHECKING:
    from slipstream.measure.ledger import Ledger
    from slipstream.measure.plan_build import Made, Wish
    from slipstream.measure.planning import Gathered, Point, Subject
    from slipstream.plan import Plan, Validation
    from slipstream.types import SamplingParams

#: Batch sizes that are looked at beside the one that is asked for.
BATCHES = (1, 2, 4, 8, 16, 32)
#: Prompts that the real run answers at most.
_CHECKED = 8
#: How often it answers them once more if it is far from what was predicted.
_REPEATS = 2


@dataclass(frozen=True)
class PlanTask:
    """The options as given."""

    model: str
    drafts: str = "suffix"
    prompts: str | None = None
    limit: int | None = None
    objective: str = "latency"
    requests_per_second: float | None = None
    batch: int = 1
    latency_budget: float | None = None
    memory: float | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    rule: str = "block"
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    out: str = "plan.json"
    html: str | None = None
    no_check: bool = False
    fresh: bool = False
    as_json: bool = False
    no_color: bool = False

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes that are looked at."""
        return tuple(sorted({*BATCHES, self.batch}))


def run(task: PlanTask) -> int:
    """Do it; the exit code."""
    params = check(task)
    from slipstream.measure.prompts import read_prompts
    from slipstream.plan import save

    wanted = Wanted(
        task.model,
        parse_drafts(task.drafts),
        task.weights,
        task.draft_weights,
        task.device,
        task.threads,
        task.no_color,
    )
    prompts = read_prompts(task.prompts, task.limit)
    pairs = load(wanted, prompts)
    check_room(pairs.prompts, pairs.target)
    from slipstream.measure.planning import Subject

    subject = Subject(pairs.target, pairs.drafters, pairs.prompts, params, other_samplings(params), task.rule)
    ledger = open_ledger(subject, pairs, task.fresh)
    try:
        plan = make(task, subject, pairs, ledger)
    except KeyboardInterrupt:
        click.echo("slipstream: interrupted; the same command goes on from here", err=True)
        return INTERRUPTED
    save(plan, task.out)
    deliver(task, plan)
    ledger.done()
    return 0


def check(task: PlanTask) -> SamplingParams:
    """Refuse what cannot work, before anything is loaded."""
    for option, value, least in (
        ("--batch", task.batch, 1), ("--limit", task.limit, 1), ("--max-new-tokens", task.max_new_tokens, 2),
    ):  # fmt: skip
        if value is not None and value < least:
            raise InputError(f"{option} {value} is too few; use {least} or more")
    for name, number in (
        ("--requests-per-second", task.requests_per_second),
        ("--latency-budget", task.latency_budget),
        ("--memory", task.memory),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise InputError(f"{name} {number:g} is no positive number; correct it")
    parse_drafts(task.drafts)
    for option, file in (("--out", task.out), ("--html", task.html)):
        if file is not None:
            check_writable(option, file)
    names = ("max_new_tokens", "temperature", "top_p", "top_k")
    return replace(sampling_params({name: getattr(task, name) for name in names}), seed=0)


def other_samplings(params: SamplingParams) -> list[SamplingParams]:
    """Samplings whose acceptance is told too: it comes from the same logits."""
    common = ({"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9})
    plain: dict[str, Any] = {"top_p": 1.0, "top_k": 0}
    found = [replace(params, **(plain | one)) for one in common]
    return [one for one in found if one != params]


def open_ledger(subject: Subject, pairs: Pairs, fresh: bool) -> Ledger:
    """What an earlier, interrupted call for the same has found."""
    from slipstream.measure.curves import key_of
    from slipstream.measure.ledger import Ledger, stamp
    from slipstream.measure.planning import job_of
    from slipstream.models import registry

    models = {}
    for path in (subject.target.name, *pairs.weights):
        with suppress(OSError):
            models[path] = stamp(str(registry.resolve(path) or path))
    about = {"key": asdict(key_of(subject.target)), "weights": [pairs.target_weights, pairs.weights]}
    ledger = Ledger(job_of(subject, models, about), fresh=fresh)
    if ledger.resumed:
        click.echo(f"slipstream: going on from an interrupted run, {ledger.resumed} steps are known", err=True)
    return ledger


def gather(subject: Subject, ledger: Ledger, into: Gathered, batches: tuple[int, ...]) -> Iterator[str]:
    """Everything that a plan is made of."""
    from slipstream.measure import planning

    yield from planning.gather_texts(subject, ledger, into)
    yield from planning.gather_trails(subject, ledger, into)
    yield from planning.gather_rounds(subject, ledger, into)
    yield from planning.gather_curves(subject, ledger, into, batches)


def make(task: PlanTask, subject: Subject, pairs: Pairs, ledger: Ledger) -> Plan:
    """The plan with a short real run of the best way; if that is far from what was predicted, both are repeated."""
    from slipstream.measure import planning
    from slipstream.measure.plan_build import make_plan, validation
    from slipstream.measure.rounds import TURNS

    found = planning.Gathered()
    about = planning.round_steps(subject)
    total = planning.text_steps(subject) + len(subject.prompts) + about + planning.curve_steps(subject)
    follow(gather(subject, ledger, found, task.batches), total, task.no_color)

    def make_it(turns: int) -> Made:
        return make_plan(subject, found, _wish(task, pairs, found), _about(subject), turns)

    made = make_it(TURNS)
    if task.no_check or made.decision.option is None:
        return made.plan
    points = _real_run(subject, made, ledger, task)
    checked = validation(made, subject, found, points)
    if checked is not None and not checked.within:
        # The machine may have changed its pace since rounds were timed: both sides once more.
        follow(planning.gather_rounds(subject, ledger, found, again=1), about, task.no_color)
        once, made = _winner(made), make_it(2 * TURNS)
        if made.decision.option is None:
            return made.plan
        again = _real_run(subject, made, ledger, task, _REPEATS)
        checked = validation(made, subject, found, [*points, *again] if _winner(made) == once else again)
    return _with_check(task, made.plan, checked)


def _winner(made: Made) -> tuple[str, int] | None:
    option, best = made.decision.option, made.decision.prediction
    return None if option is None or best is None else (option.draft, best.k)


def _with_check(task: PlanTask, plan: Plan, checked: Validation | None) -> Plan:
    """The plan beside what its short real run has shown."""
    from slipstream.measure.plan_build import contradiction

    plan = replace(plan, validation=checked)
    if checked is None:
        said = f"The prediction was not checked: answers this short never kept {task.batch} places busy at once."
        plan = replace(plan, notes=(said, *plan.notes))
    return replace(plan, notes=(*contradiction(plan), *plan.notes))


def _real_run(subject: Subject, made: Made, ledger: Ledger, task: PlanTask, repeats: int = 1) -> list[Point]:
    from slipstream.fields import from_json, to_json
    from slipstream.measure.batch_run import BatchRun, run_batch
    from slipstream.measure.planning import Point, RealRun, run_for_real

    option, best = made.decision.option, made.decision.prediction
    assert option is not None
    assert best is not None
    name = f"real run {option.draft} {best.k} {repeats} {task.batch}"
    if name not in ledger:
        known = {case.id for case in option.cases}
        usable = [one for one in subject.prompts if one.id in known]
        into: dict[int, list[Point]] = {best.k: []}
        if task.batch > 1:
            crowd = BatchRun(option.draft, best.k, task.batch, usable)
            follow(run_batch(subject, crowd, into[best.k]), crowd.steps, task.no_color)
        else:
            count = min(_CHECKED, len(usable))
            some = [usable[i * len(usable) // count] for i in range(count)]
            real = RealRun(option.draft, (best.k,), some, repeats)
            follow(run_for_real(subject, real, into), real.steps, task.no_color)
        ledger.put(name, to_json(into[best.k]))
    return [from_json(Point, entry, name) for entry in ledger[name]]


def _wish(task: PlanTask, pairs: Pairs, found: Gathered) -> Wish:
    import torch

    from slipstream.measure.machine import memory_bytes
    from slipstream.measure.plan_build import Wish
    from slipstream.measure.prediction import Limits

    budget = None if task.latency_budget is None else task.latency_budget / 1000
    limits = Limits(task.batch, task.objective == "throughput", task.requests_per_second, budget)
    threads = torch.get_num_threads() if pairs.target.device.type == "cpu" else None
    return Wish(
        limits=limits,
        batches=task.batches,
        prompts_from=task.prompts or "the package's own",
        members=pairs.members,
        target_weights=pairs.target_weights,
        weights=pairs.weights,
        target=task.model,
        threads=threads,
        notes=_notes(pairs, found),
        needs=_needs(task, pairs),
        memory=memory_bytes(task.device) if task.memory is None else int(task.memory * 1e9),
    )


def _needs(task: PlanTask, pairs: Pairs) -> dict[str, int]:
    """Most bytes that the target needs together with each draft; none if that cannot be told."""
    from slipstream.measure.footprint import Load, need, peak, together
    from slipstream.models.describe import describe

    cpu = pairs.target.device.type == "cpu"
    context = max(len(one.ids) for one in pairs.prompts) + task.max_new_tokens
    try:
        target = need(describe(task.model), pairs.target_weights, Load(context, task.batch, 9, cpu))
        models = {n: need(describe(n), kind, Load(context, task.batch, 1, cpu)) for n, kind in pairs.weights.items()}
    except (SlipstreamError, KeyError, OSError):
        return {}
    return {
        draft: peak(target, together([models[m] for m in parts if m in models]))
        for draft, parts in pairs.members.items()
    }


def _notes(pairs: Pairs, found: Gathered) -> tuple[str, ...]:
    """What is to be known besides."""
    dropped = [f"{name} dropped out: {why}" for name, why in found.failed.items()]
    if short := len(pairs.prompts) - len(found.texts):
        said = f"{short} of {len(pairs.prompts)} prompts have answers of fewer than two tokens"
        dropped.append(f"{said}, which say nothing of drafts: they are left out.")
    return (*dropped, "A busy machine makes times long, and ratios of times less so.")


def _about(subject: Subject) -> dict[str, Any]:
    from slipstream.measure.machine import describe_machine, package_version
    from slipstream.measure.planning import now

    return {
        "created": now(),
        "slipstream": package_version(),
        "machine": asdict(describe_machine(subject.target.device)),
    }


def deliver(task: PlanTask, plan: Plan) -> None:
    """Print the plan and save the report."""
    from slipstream.cli.plan_report import html, table
    from slipstream.fields import to_json
    from slipstream.measure.ledger import write_text

    if task.html is not None:
        write_text(task.html, html(plan))
    if task.as_json:
        click.echo(json.dumps(to_json(plan)))
    else:
        click.echo(table(plan), nl=False)
    click.echo(f"Saved {task.out}" + (f" and {task.html}." if task.html else "."), err=True)
    next_step("generate", task.model, "--plan", task.out, "--prompt", "...")
    next_step("cost", "--plan", task.out, "--requests-per-day", "100000", "--price", "2.50")
    if any(a.kind == "fine-tune the draft" for a in plan.verdict.advice):
        next_step("distill", "--from-plan", task.out, "--capture", "traffic", "--out", "better-draft")
