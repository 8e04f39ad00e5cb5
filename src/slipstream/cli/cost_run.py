"""What ``slipstream cost`` does: gathers inputs with where they come from, and has them added up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from slipstream.cli.cost_report import Report, document, html, table
from slipstream.cli.screen import next_step
from slipstream.economics import (
    Figure,
    Service,
    check_dollars,
    find_price,
    read_prices,
    throughput_for,
    tornado,
    verdict,
)
from slipstream.errors import InputError
from slipstream.measure.expectation import Choice, Costs, acceptance_for, best, break_even, constant, speed_up
from slipstream.measure.files import check_writable, write_whole
from slipstream.plan import Estimate, Plan
from slipstream.plan import load as load_plan

_TOKENS = 250.0
_MOST_K = 1024


@dataclass(frozen=True)
class CostTask:
    """The options as given."""

    measured: str | None = None
    plan: str | None = None
    contender: str | None = None
    requests_per_day: float | None = None
    tokens_per_request: float | None = None
    servers: int | None = None
    tokens_per_second: float | None = None
    speed_up: float | None = None
    acceptance: float | None = None
    trained_acceptance: float | None = None
    draft_cost: float | None = None
    row_cost: float | None = None
    k: int | None = None
    price: float | None = None
    server: str | None = None
    prices: str | None = None
    utilisation: float | None = None
    spare: int = 0
    training: float | None = None
    target_training: float | None = None
    retrain_months: float | None = None
    list_prices: bool = False
    html: str | None = None
    plot: str | None = None
    as_json: bool = False


@dataclass(frozen=True)
class Measured:
    """What a document of ``slipstream bench`` says of one contender."""

    how: str
    speed_up: float
    plain_tokens_a_second: float
    acceptance: float | None
    k: int | None
    costs: Costs | None
    tokens_a_request: float | None = None
    notes: tuple[str, ...] = (
        "Throughput was measured with one request at a time. A server that batches has more of it, and less speed-up.",
    )


@dataclass
class Inputs:
    """Figures by name, each with where it is from, and what is to be said about them."""

    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str, value: float, how: str) -> float:
        """Remember one."""
        self.figures[name] = Figure(value, how)
        return value


def run(task: CostTask) -> int:
    """Print and save what was asked for."""
    if task.list_prices:
        _list_prices(task)
        return 0
    _check_outputs(task)
    report = make_report(task)
    if task.as_json:
        click.echo(json.dumps(document(report)))
    else:
        click.echo(table(report), nl=False)
    if task.html:
        page = html(report)
        write_whole(Path(task.html), lambda partial: partial.write_text(page, encoding="utf-8"))
    if task.plot:
        from slipstream.measure.tornado import save_tornado

        write_whole(Path(task.plot), lambda partial: save_tornado(partial, report.swings))
    if task.plan is not None:
        next_step("export", task.plan, "--engine", "vllm", "--out", "deploy")
    return 0


def make_report(task: CostTask) -> Report:
    """All figures.

    Raises:
        InputError: something is missing, or has no meaning.
    """
    inputs = Inputs()
    if task.target_training is not None:
        check_dollars("the training of the target", task.target_training)
    measured = _read(task)
    if task.requests_per_day is None:
        raise InputError("the load is missing; say how many requests come with --requests-per-day")
    requests = inputs.put("requests a day", task.requests_per_day, "assumed: --requests-per-day")
    tokens = _tokens(task, inputs, measured)
    utilisation = _given(inputs, "utilisation", task.utilisation, "--utilisation", 1.0)
    price = _price(task, inputs)
    costs, k = _costs(task, inputs, measured)
    before, after = _speed_ups(task, inputs, measured, costs, k)
    # The load is checked before it is divided by anything.
    checked = Service(requests, tokens, price, 1.0, after, before, utilisation, task.spare)
    service = Service(
        requests_a_day=requests,
        tokens_a_request=tokens,
        price=price,
        plain_tokens_a_second=_throughput(task, inputs, measured, checked),
        speed_up=after,
        untrained_speed_up=before if task.trained_acceptance is not None else 1.0,
        utilisation=utilisation,
        spare=task.spare,
        training=_given(inputs, "training the draft", task.training, "--training", 0.0),
        retraining_months=task.retrain_months,
    )
    found = verdict(service)
    return Report(
        inputs=inputs.figures,
        notes=tuple(inputs.notes),
        service=service,
        verdict=found,
        swings=tornado(service),
        has_trained=task.trained_acceptance is not None,
        target_training=task.target_training,
        break_even_acceptance=break_even(costs, k) if costs else None,
        acceptance_to_save=_acceptance_to_save(found.break_even_speed_up, costs, k),
        knows_costs=costs is not None,
    )


def _check_outputs(task: CostTask) -> None:
    for option, name in (("--html", task.html), ("--plot", task.plot)):
        if name:
            check_writable(option, name)
    if task.plot:
        from slipstream.measure.plot import check_plot

        check_plot(task.plot)


def _list_prices(task: CostTask) -> None:
    prices = read_prices(task.prices).values()
    if task.as_json:
        click.echo(json.dumps([vars(p) for p in prices]))
        return
    for price in prices:
        click.echo(f"{price.name:<22} {price.dollars:>8.2f}  {price.what}  ({price.date}, {price.source})")


def _given(inputs: Inputs, name: str, value: float | None, option: str, default: float) -> float:
    how = f"assumed: {option}" if value is not None else f"assumed (default; {option} says otherwise)"
    return inputs.put(name, default if value is None else value, how)


def _tokens(task: CostTask, inputs: Inputs, measured: Measured | None) -> float:
    """Of an answer; a plan knows how long answers are."""
    if task.tokens_per_request is None and measured is not None and measured.tokens_a_request is not None:
        return inputs.put("tokens a request", measured.tokens_a_request, measured.how)
    return _given(inputs, "tokens a request", task.tokens_per_request, "--tokens-per-request", _TOKENS)


def _price(task: CostTask, inputs: Inputs) -> float:
    if task.price is not None and task.server is not None:
        raise InputError("--price and --server both name a price; leave one out")
    if task.price is not None:
        return inputs.put("price of a server-hour", task.price, "assumed: --price")
    if task.server is None:
        raise InputError("the price is missing; give --price DOLLARS, or --server NAME (see --list-prices)")
    row = find_price(read_prices(task.prices), task.server)
    how = f"assumed: price table, {row.what}, {row.date}, {row.source}"
    return inputs.put("price of a server-hour", float(row.dollars), how)


def _costs(task: CostTask, inputs: Inputs, measured: Measured | None) -> tuple[Costs | None, int | None]:
    """What drafting and verifying cost, if it is known, and k, if it is fixed."""
    if task.k is not None and task.k < 1:
        raise InputError(f"-k {task.k} drafts nothing; use 1 or more")
    if task.k is not None and task.k > _MOST_K:
        raise InputError(f"-k {task.k} is longer than any draft; use {_MOST_K} at most")
    if task.draft_cost is not None or task.row_cost is not None:
        if task.draft_cost is None or task.row_cost is None:
            raise InputError("--draft-cost and --row-cost belong together; give both")
        inputs.put("c, a draft step", task.draft_cost, "assumed: --draft-cost")
        inputs.put("b, a further row", task.row_cost, "assumed: --row-cost")
        return Costs.linear(task.draft_cost, task.row_cost), task.k
    if measured is not None and measured.costs is not None:
        inputs.put("c, a draft step", measured.costs.draft_step, measured.how)
        return measured.costs, task.k if task.k is not None else measured.k and min(measured.k, _MOST_K)
    return None, task.k


def _speed_ups(
    task: CostTask, inputs: Inputs, measured: Measured | None, costs: Costs | None, k: int | None
) -> tuple[float, float]:
    """Of the draft as it is, and after training; the same if it is not trained."""
    now = _speed_up_now(task, inputs, measured, costs, k)
    if task.trained_acceptance is None:
        return now, now
    acceptance = inputs.figures.get("acceptance")
    if costs is None or acceptance is None:
        raise InputError(
            "--trained-acceptance needs the acceptance of now and the costs of drafting; give --acceptance, "
            "--draft-cost and --row-cost, or --from FILE"
        )
    trained = inputs.put("acceptance, trained", task.trained_acceptance, "assumed: --trained-acceptance")
    # Relative to what is predicted for now, so that a measured speed-up stays the anchor.
    best_then = _predicted(trained, costs, k)
    after = now * best_then.speed_up / _predicted(acceptance.value, costs, k).speed_up
    how = f"predicted from acceptance, trained, and the costs c and b, at k = {best_then.k}"
    return now, inputs.put("speed-up, trained", after, how)


def _speed_up_now(
    task: CostTask, inputs: Inputs, measured: Measured | None, costs: Costs | None, k: int | None
) -> float:
    if task.acceptance is not None:
        inputs.put("acceptance", task.acceptance, "assumed: --acceptance")
    elif measured is not None and measured.acceptance is not None:
        inputs.put("acceptance", measured.acceptance, measured.how)
    if task.speed_up is not None:
        return inputs.put("speed-up", task.speed_up, "assumed: --speed-up")
    if task.acceptance is not None:
        if costs is None:
            raise InputError("--acceptance alone gives no speed-up; add --draft-cost and --row-cost, or --from FILE")
        found = _predicted(task.acceptance, costs, k)
        how = f"predicted from acceptance and the costs c and b, at k = {found.k}"
        return inputs.put("speed-up", found.speed_up, how)
    if measured is None:
        raise InputError("the speed-up is missing; give --speed-up, --acceptance with the costs, or --from FILE")
    return inputs.put("speed-up", measured.speed_up, measured.how)


def _predicted(acceptance: float, costs: Costs, k: int | None) -> Choice:
    """At ``k``, or else at the best one."""
    if k is None:
        return best(constant(acceptance), costs)
    return Choice(k, speed_up(constant(acceptance, k), costs))


def _throughput(task: CostTask, inputs: Inputs, measured: Measured | None, service: Service) -> float:
    name = "tokens a second, plain"
    if task.servers is not None and task.tokens_per_second is not None:
        raise InputError("--servers and --tokens-per-second both say what a server can do; leave one out")
    if task.servers is not None:
        load = (service.requests_a_day, service.tokens_a_request, service.utilisation)
        how = f"predicted from the load on {task.servers} servers (--servers)"
        return inputs.put(name, throughput_for(task.servers, *load), how)
    if task.tokens_per_second is not None:
        return inputs.put(name, task.tokens_per_second, "assumed: --tokens-per-second")
    if measured is None:
        raise InputError(
            "what a server can do is missing; give --tokens-per-second, or --servers if that many are just used up now"
        )
    inputs.notes.extend(measured.notes)
    return inputs.put(name, measured.plain_tokens_a_second, measured.how)


def _acceptance_to_save(wanted: float | None, costs: Costs | None, k: int | None) -> float | None:
    return acceptance_for(wanted, costs, k) if wanted is not None and costs is not None else None


# --- measurements -----------------------------------------------------------------------------------------------------


def _read(task: CostTask) -> Measured | None:
    if task.plan and task.measured:
        raise InputError("--plan and --from both say what was measured; leave one out")
    if task.plan:
        return of_plan(load_plan(task.plan), Path(task.plan).name)
    return read_measured(task.measured, task.contender) if task.measured else None


def of_plan(plan: Plan, file: str) -> Measured:
    """What a plan says of the way that it recommends."""
    costs = next((c for c in plan.costs if c.draft == plan.verdict.draft), plan.costs[0] if plan.costs else None)
    if costs is None:
        raise InputError(f"the plan {file!r} has no costs, since every draft dropped out; make it anew")
    batch, chosen = plan.asked.batch, plan.candidate
    alone = costs.plain_step.value
    # A candidate's time and speed-up together give plain's time at its batch.
    plain_token = alone if chosen is None else chosen.seconds_per_token.value * chosen.speed_up.value
    tokens, prompt = _value(plan.asked.answer_tokens), _value(plan.asked.prompt_tokens)
    reading = (prompt or 0.0) * _value_or(costs.prompt_token) * (batch if chosen is not None else 1)
    seconds = plain_token * (tokens or _TOKENS) + reading
    at = batch if chosen is not None else 1
    step = _value_or(costs.draft_step)
    notes = [f"Speed-up and throughput are at a batch of {at}, as the plan has them; both are predicted."]
    if plan.verdict.action == "plain":
        notes.append(plan.verdict.sentence)
    return Measured(
        how=f"predicted from the plan {file} ({plan.created[:10]})",
        speed_up=plan.verdict.speed_up.value,
        plain_tokens_a_second=at * (tokens or _TOKENS) / seconds,
        acceptance=plan.accepted(chosen.draft).rate.value if chosen and plan.accepted(chosen.draft) else None,  # type: ignore[union-attr]
        k=plan.verdict.k or None,
        costs=Costs(step / alone, {n: e.value / alone for n, e in costs.verify.items()}) if plan.verdict.k else None,
        tokens_a_request=tokens,
        notes=tuple(notes),
    )


def _value(estimate: Estimate | None) -> float | None:
    return None if estimate is None else estimate.value


def _value_or(estimate: Estimate | None) -> float:
    return 0.0 if estimate is None else estimate.value


def read_measured(path: str, contender: str | None) -> Measured:
    """The figures of one contender in a document of ``slipstream bench``.

    Raises:
        InputError: no such file, another kind of file, no such contender.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--from {path!r} cannot be read ({error.strerror}); give another path") from error
    except ValueError as error:
        raise InputError(f"--from {path!r} is not JSON ({error}); give what `slipstream bench --out` wrote") from error
    if not isinstance(found, dict) or found.get("format") != 1 or not isinstance(found.get("overall"), dict):
        raise InputError(f"--from {path!r} is no bench document of format 1; give what `slipstream bench --out` wrote")
    name = contender or found.get("best")
    rows = {n: row for n, row in found["overall"].items() if isinstance(row, dict)}
    drafting = [n for n, row in rows.items() if n != "plain" and row.get("whole_answer_speed_up")]
    if name not in drafting or not rows.get("plain"):
        raise InputError(f"{path!r} has no contender {name!r} beside plain; use --contender with {', '.join(drafting)}")
    try:
        return _measured(found, str(name), Path(path).name)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"--from {path!r} was changed by hand, or is not whole ({type(error).__name__}: {error}); give what "
            "`slipstream bench --out` wrote"
        ) from error


def _measured(found: Mapping[str, Any], name: str, file: str) -> Measured:
    row, plain, machine = found["overall"][name], found["overall"]["plain"], found.get("machine") or {}
    ratio, curve = row.get("cost_ratio"), (found.get("passes") or {}).get("target") or []
    verify = {int(p["rows"]): float(p["v"]["median"]) for p in curve}
    k = next((c["k"] for c in found.get("contenders", ()) if c["name"] == name), None)
    where = ", ".join(str(machine[key]) for key in ("cpu", "date") if machine.get(key))
    return Measured(
        how=f"measured: {name} in {file}" + (f" ({where})" if where else ""),
        speed_up=float(row["whole_answer_speed_up"]["median"]),
        plain_tokens_a_second=float(plain["total_tokens_per_second"]),
        acceptance=float(row["acceptance"]["rate"]) if row.get("acceptance") else None,
        k=k if isinstance(k, int) and k > 0 else None,
        costs=Costs(float(ratio["median"]), verify) if ratio and len(verify) > 1 else None,
    )
