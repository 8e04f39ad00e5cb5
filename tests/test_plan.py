"""Plans: the file and its one loader, the command from end to end on tiny models, and who acts on a plan."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from slipstream import InputError, SamplingParams, load_model
from slipstream.cli.from_plan import recommended
from slipstream.cli.main import cli
from slipstream.cli.pairs import Wanted, parse_drafts
from slipstream.cli.pairs import load as load_pairs
from slipstream.cli.plan_report import crossover, html, table
from slipstream.cli.progress import follow
from slipstream.drafters import SuffixDrafter
from slipstream.fields import schema, to_json
from slipstream.measure.batch_run import BatchRun, run_batch
from slipstream.measure.plan_build import as_long, contradiction
from slipstream.measure.planning import Point, Subject
from slipstream.measure.prediction import RoundCosts, constant_case, predict
from slipstream.measure.prompts import BenchPrompt
from slipstream.measure.rounds import TURNS
from slipstream.plan import Estimate, Plan, load, save

EXAMPLE = files("slipstream.data").joinpath("plan.example.json")


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, args)), prog_name="slipstream")


def example(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    return found | changes


# --- the file ---------------------------------------------------------------------------------------------------------


def test_drafts_are_loaded_as_other_commands_load_them(tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    """They were fp16 where `generate` and `bench` have int8, so a plan was of another draft than the one that runs."""
    from slipstream.models.load import Kinds, open_models

    draft = str(tiny_draft_checkpoint)
    pairs = load_pairs(Wanted(str(tiny_checkpoint), ((draft,),)), [])
    _, opened = open_models(str(tiny_checkpoint), [draft], Kinds())
    assert pairs.weights[draft] == opened[draft].load().weights  # type: ignore[attr-defined]
    assert pairs.weights[draft] != pairs.target_weights


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = load(str(EXAMPLE))
    save(plan, str(tmp_path / "again.json"))
    assert load(str(tmp_path / "again.json")) == plan
    assert (tmp_path / "again.json").read_text() == EXAMPLE.read_text(encoding="utf-8")


def test_the_schema_in_the_package_is_that_of_the_dataclasses() -> None:
    kept = json.loads(files("slipstream.data").joinpath("plan.schema.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(schema(Plan)))
    jsonschema.Draft202012Validator.check_schema(kept)
    jsonschema.validate(example(), kept)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(example(verdict={"action": "perhaps"}), kept)


def test_fields_that_nobody_knows_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(example(colour="green")))
    assert load(str(file)) == load(str(EXAMPLE))


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"kind": "something"}, "is no plan"),
        ({"asked": {**example()["asked"], "rule": "typical"}}, r"asked\.rule is 'typical'; use 'block' or 'token'"),
        ({"format": 2}, "of format 2, and this version reads format 1"),
        ({"drafts": [{"name": "suffix"}]}, r"drafts\[0\] has no 'members'"),
        ({"verdict": {**example()["verdict"], "k": "four"}}, r"verdict\.k is 'four', which is not a whole number"),
        ({"verdict": {**example()["verdict"], "k": True}}, "not a whole number"),
        ({"verdict": {**example()["verdict"], "action": "wait"}}, "'speculate' or 'plain'"),
        ({"verdict": {**example()["verdict"], "draft": "other"}}, "a draft that it does not describe"),
        ({"target": []}, "which is not an object"),
        ({"verdict": {**example()["verdict"], "k": 10**9}}, r"verdict\.k is 1000000000"),
        ({"asked": {**example()["asked"], "batch": 0}}, r"asked\.batch is 0"),
        ({"costs": [{**example()["costs"][0], "plain_step": {"value": 0, "how": "assumed"}}]}, "takes 0 s"),
        ({"costs": [{**example()["costs"][0], "verify": {"1": {"value": -1, "how": "assumed"}}}]}, "takes -1 s"),
        ({"memory_bytes": {"value": float("nan"), "how": "assumed"}}, "nan, which is not a number"),
        ({"candidates": {}}, "which is not a list"),
        ({"costs": [{**example()["costs"][0], "verify": {"x": {"value": 1, "how": "assumed"}}}]}, "the key 'x'"),
    ],
)
def test_plans_that_cannot_be_read(tmp_path: Path, change: dict[str, Any], fragment: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(example(**change)))
    with pytest.raises(InputError, match=fragment):
        load(str(file))


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load(str(tmp_path / "none.json"))
    for text in ("{", "", EXAMPLE.read_text(encoding="utf-8")[:-40], "[" * 10**6):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(InputError, match="is not JSON"):
            load(str(tmp_path / "plan.json"))


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one's own."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    prompts = [("a", "one", "the the the and"), ("b", "two", "in the end"), ("c", "two", "an error in")]
    lines = [json.dumps({"id": i, "category": c, "prompt": text}) for i, c, text in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return tmp_path


def plan_of(here: Path, target: Path, drafts: str, *more: object) -> tuple[Plan, Result]:
    args = ["plan", target, "--drafts", drafts, "--prompts", here / "prompts.jsonl", "-n", 20, "--weights", "fp32"]
    result = invoke(*args, "--draft-weights", "fp32", "--out", here / "plan.json", *more)
    assert result.exit_code == 0, result.output
    return load(str(here / "plan.json")), result


def origins(value: Any) -> list[dict[str, Any]]:
    """Every object that holds a value."""
    if isinstance(value, list):
        return [found for entry in value for found in origins(entry)]
    if not isinstance(value, dict):
        return []
    own = [value] if "value" in value else []
    return own + [found for entry in value.values() for found in origins(entry)]


def test_a_plan_from_end_to_end(here: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    drafts = f"{tiny_draft_checkpoint},suffix,suffix+{tiny_draft_checkpoint},early-exit:1"
    plan, result = plan_of(
        here, tiny_checkpoint, drafts, "--batch", 2, "--requests-per-second", 0.1, "--html", here / "p.html"
    )
    names = [str(tiny_draft_checkpoint), "suffix", f"suffix,{tiny_draft_checkpoint}", "early-exit:1"]
    assert [d.name for d in plan.drafts] == names
    assert [m.kind for d in plan.drafts for m in d.members] == ["model", "suffix", "suffix", "model", "early-exit"]
    assert {c.draft for c in plan.candidates} == set(names)
    assert {c.batch for c in plan.candidates} == {1, 2, 4, 8, 16, 32}
    assert set(plan.asked.categories.items()) == {("one", 1), ("two", 2)}
    assert plan.verdict.sentence in result.stdout or plan.verdict.action == "speculate"
    assert plan.validation is not None
    assert plan.load is not None
    assert [b.batch for b in plan.batches] == [1, 2, 4, 8, 16, 32]
    assert {a.rule for a in plan.acceptance} >= {"block", "token", "greedy draft", "exact match"}
    document = to_json(plan)
    jsonschema.validate(document, json.loads(files("slipstream.data").joinpath("plan.schema.json").read_text()))
    assert all(re.match("measured here|predicted from|assumed", one["how"]) for one in origins(document))
    page = (here / "p.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 5
    assert not re.search(r'src=|href="(?!#)|url\((?!#)|@import|<script', page)


def test_a_batch_is_checked_by_a_real_run_of_that_batch(
    here: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path
) -> None:
    """What was predicted for three requests at a time was compared with answers to one at a time."""
    plan, _ = plan_of(here, tiny_checkpoint, str(tiny_draft_checkpoint), "--batch", 3, "--objective", "throughput")
    assert plan.validation is not None
    whole, draft, k = plan.validation.overall, plan.validation.draft, plan.validation.k
    assert "turns of 3 requests at a time" in whole.measured.how
    (predicted,) = (c for c in plan.candidates if (c.draft, c.k, c.batch) == (draft, k, 3))
    assert whole.predicted == predicted.speed_up
    assert "passes of the whole batch" in plan.verdict.margin.how
    assert whole.error == pytest.approx(whole.predicted.value / whole.measured.value - 1, abs=1e-4)


def test_only_steps_of_a_full_batch_are_counted(tiny_checkpoint: Path) -> None:
    """Of three prompts, two at a time: the tokens counted are of steps in which both were past their first."""
    target = load_model(str(tiny_checkpoint), weights="fp32")
    prompts = [BenchPrompt(str(n), "one", "", ids=tuple(range(1, 4 + n))) for n in range(3)]
    params = SamplingParams(max_new_tokens=9, temperature=0.0, ignore_eos=True)
    subject = Subject(target, {"suffix": SuffixDrafter()}, prompts, params)
    points: list[Point] = []
    run = BatchRun("suffix", 2, 2, prompts, turns=1)
    assert len(list(run_batch(subject, run, points))) == run.steps
    (point,) = points
    assert 0 < point.tokens <= 2 * (9 - 1) + 2 * 2
    assert point.plain > 0
    assert point.fast > 0
    assert 0 <= point.accepted <= point.drafted


def test_both_sides_are_measured_anew_where_they_disagree(
    here: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the real run was repeated, in other minutes than those in which rounds had been timed."""
    monkeypatch.setattr("slipstream.measure.plan_build.WITHIN", 0.0)
    plan, _ = plan_of(here, tiny_checkpoint, str(tiny_draft_checkpoint))
    assert plan.validation is not None
    assert not plan.validation.within
    assert "go by the measurement" in plan.notes[0]
    assert all(f", {2 * TURNS} turns" in one.plain_step.how for one in plan.costs)


def test_a_single_prompt_has_no_interval(here: Path, tiny_checkpoint: Path) -> None:
    """One prompt alone was given an interval without width, as if it were certain."""
    plan, result = plan_of(here, tiny_checkpoint, "suffix", "--limit", 1)
    assert all(c.speed_up.low is None for c in plan.candidates)
    assert plan.verdict.speed_up.low is None
    assert re.search("measured here: .* to 1 prompt, one at a time", result.stdout)


def test_an_interrupted_plan_goes_on_where_it_was(
    here: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.measure import planning

    true_curves = planning.gather_curves

    def interrupted(*args: Any) -> Any:
        yield "about to be interrupted"
        raise KeyboardInterrupt

    monkeypatch.setattr(planning, "gather_curves", interrupted)
    args = ["plan", tiny_checkpoint, "--prompts", here / "prompts.jsonl", "-n", 12, "--out", here / "plan.json"]
    args += ["--no-check"]
    first = invoke(*args)
    assert (first.exit_code, (here / "plan.json").exists()) == (130, False)
    assert "the same command goes on" in first.stderr

    def not_again(*args: Any) -> Any:
        raise AssertionError("answered again")

    monkeypatch.setattr(planning, "gather_curves", true_curves)
    monkeypatch.setattr(planning, "answered", not_again)
    monkeypatch.setattr(planning, "time_rounds", not_again)
    second = invoke(*args)
    assert second.exit_code == 0, second.output
    assert "going on from an interrupted run" in second.stderr
    assert not list((here / "cache" / ".work").glob("*"))


def test_being_asked_to_end_is_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM ended the process without a word, and left a terminal without its cursor."""
    before = signal.getsignal(signal.SIGTERM)

    def steps() -> Iterator[str]:
        yield "one"
        os.kill(os.getpid(), signal.SIGTERM)
        yield "two"

    with pytest.raises(KeyboardInterrupt):
        follow(steps(), 2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_drafts_that_do_not_fit_are_left_out(here: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    """All drafts were measured by the largest one, so a copier did not fit either."""
    drafts, rest = f"{tiny_draft_checkpoint},suffix", ("--no-check", "--limit", 1)
    plan, _ = plan_of(here, tiny_checkpoint, drafts, *rest)
    assert plan.memory_bytes is not None
    alone, _ = plan_of(here, tiny_checkpoint, "suffix", *rest)
    both, _ = plan_of(here, tiny_checkpoint, str(tiny_draft_checkpoint), *rest)
    assert alone.memory_bytes is not None
    assert both.memory_bytes is not None
    assert alone.memory_bytes.value < both.memory_bytes.value
    between = (alone.memory_bytes.value + both.memory_bytes.value) / 2e9
    plan, result = plan_of(here, tiny_checkpoint, drafts, *rest, "--memory", between)
    assert f"{tiny_draft_checkpoint} does not fit" in plan.notes[0]
    assert plan.verdict.reason != "memory"
    assert plan.memory_bytes == alone.memory_bytes
    none, result = plan_of(here, tiny_checkpoint, drafts, *rest, "--memory", 1e-6, "--html", here / "p.html")
    assert (none.verdict.action, none.verdict.reason) == ("plain", "memory")
    assert "no draft fits beside the target" in result.stdout
    assert none.validation is None


def test_a_plan_says_what_to_run_next(here: Path, tiny_checkpoint: Path) -> None:
    _, result = plan_of(here, tiny_checkpoint, "suffix", "--no-check", "--limit", 1, "--json")
    assert json.loads(result.stdout)["kind"] == "slipstream plan"
    assert f"Next: slipstream generate {tiny_checkpoint} --plan {here / 'plan.json'} --prompt" in result.stderr


def test_a_real_run_that_contradicts_the_prediction_is_said_first() -> None:
    plan = load(str(EXAMPLE))
    assert plan.validation is not None
    assert contradiction(plan) == []
    slower = replace(plan.validation.overall, measured=Estimate(0.9, "measured here"), error=1.1)
    plan = replace(plan, validation=replace(plan.validation, within=False, overall=slower))
    (said,) = contradiction(plan)
    assert "measured 0.90x where" in said
    assert said.endswith("speculation does not pay.")
    plan = replace(plan, notes=(said, "Another note."))
    lines = table(plan).splitlines()
    assert lines[1] == said
    assert lines[-1] == "Another note."
    page = html(plan)
    assert page.count("speculation does not pay.") == 1
    assert page.index("speculation does not pay.") < page.index('class="figures"')
    assert "#009e73" not in page.split("</style>")[0]


def test_a_real_run_is_compared_with_answers_of_its_length() -> None:
    """A given answer of many tokens outweighed the others in what was predicted, and its real one was of a few."""
    costs = RoundCosts({1: 1.0, 2: 1.2, 3: 1.4}, step=0.1)
    long, short = (replace(constant_case(rate, 10, 101), id=name) for rate, name in ((0.1, "a"), (0.9, "b")))
    points = [Point("a", "all", 4.0, 5.0, 6, 0, 0), Point("b", "all", 100.0, 60.0, 101, 0, 0)]
    alone = [predict([case], 2, lambda _: costs).speed_up.value for case in (long, short)]
    assert predict([long, short], 2, lambda _: costs).speed_up.value < 0.95 * alone[1]
    assert as_long([long, short], 2, lambda _: costs, points).value == pytest.approx(alone[1], rel=0.1)
    same = [replace(point, tokens=101) for point in points]
    assert as_long([long, short], 2, lambda _: costs, same) == predict([long, short], 2, lambda _: costs).speed_up


def test_a_report_names_the_batch_from_which_plain_decoding_is_best() -> None:
    plan = load(str(EXAMPLE))
    ks = {b.batch: b.k for b in plan.batches}
    assert "up to batch" in crossover(plan) or "every batch" in crossover(plan)
    falling = tuple(replace(b, k=3 if b.batch < 8 else 0) for b in plan.batches)
    most = max(b for b in ks if b < 8)
    assert crossover(replace(plan, batches=falling)).startswith(f"it pays up to batch {most}, plain decoding is best")
    assert crossover(replace(plan, batches=tuple(replace(b, k=0) for b in plan.batches))) == "plain decoding is best"


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_draft_with_another_tokenizer(
    here: Path, tiny_checkpoint: Path, other_tokenizer_checkpoint: Path, temperature: int
) -> None:
    plan, _ = plan_of(here, tiny_checkpoint, str(other_tokenizer_checkpoint), "-t", temperature, "--limit", 2)
    assert plan.drafts[0].failed is None
    assert plan.validation is not None
    assert {c.draft for c in plan.candidates} == {str(other_tokenizer_checkpoint)}


def test_given_answers_are_used_as_they_are(here: Path, tiny_checkpoint: Path) -> None:
    rows = [{"id": "a", "prompt": "in the", "answer": "the and the and the and"}]
    (here / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    plan, _ = plan_of(here, tiny_checkpoint, "suffix", "--no-check")
    assert plan.validation is None
    assert plan.asked.answer_tokens is not None
    assert plan.asked.answer_tokens.how.startswith("assumed")
    assert "given answers" in plan.acceptance[0].rate.how


def test_acceptance_on_the_command_line(here: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    args = ["acceptance", tiny_checkpoint, "--draft", tiny_draft_checkpoint, "--draft", tiny_checkpoint, "-n", 12]
    result = invoke(
        *args, "--prompts", here / "prompts.jsonl", "--json", "--weights", "fp32", "--draft-weights", "fp32"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["acceptance"]
    itself = [a for a in found if a["draft"] == str(tiny_checkpoint) and a["rule"] in ("block", "token")]
    assert all(a["rate"]["value"] == pytest.approx(1, abs=1e-4) for a in itself)
    assert all(q["value"] == pytest.approx(1, abs=1e-4) for a in itself for q in a["positions"])
    assert {a["sampling"]["temperature"] for a in found} == {0.0, 0.7, 1.0}
    rates = {
        a["rule"]: a["rate"]["value"]
        for a in found
        if a["draft"] != str(tiny_checkpoint) and a["sampling"] == found[0]["sampling"]
    }
    assert rates["exact match"] <= rates["token"] == rates["block"]
    assert all(one["how"].startswith("measured here") for one in origins(found))


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (("--batch", 0), "--batch 0"),
        (("--drafts", "suffix,suffix"), "names the same draft twice"),
        (("--drafts", "suffix,,"), "is no draft"),
        (("--drafts", "none"), "is no draft"),
        (("--requests-per-second", 0), "--requests-per-second 0"),
        (("--max-new-tokens", 1), "--max-new-tokens 1"),
        (("--memory", -1), "--memory -1"),
        (("--out", "/no/such/folder/plan.json"), "--out"),
        (("--prompts", "/no/such/file"), "/no/such/file"),
    ],
)
def test_plans_that_cannot_be_made(tiny_checkpoint: Path, args: tuple[object, ...], fragment: str) -> None:
    result = invoke("plan", tiny_checkpoint, *args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert fragment in line


def test_cascades_have_plus_signs() -> None:
    assert parse_drafts("a, suffix+a,early-exit:8") == (("a",), ("suffix", "a"), ("early-exit:8",))


# --- who acts on it ---------------------------------------------------------------------------------------------------


def test_generate_takes_what_the_plan_recommends(tiny_checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    given = example()
    given["verdict"] |= {"draft": "early-exit:8", "k": 3}
    given["drafts"] = [{"name": "early-exit:1", "members": [{"kind": "early-exit", "layers": 1}]}]
    given["verdict"]["draft"] = "early-exit:1"
    given["target"]["weights"] = "fp32"
    file.write_text(json.dumps(given))
    args = ["generate", tiny_checkpoint, "--plan", file, "--prompt", "the", "-n", 8, "--json"]
    found = json.loads(invoke(*args).stdout)
    assert (found["draft"], found["k"], found["weights"]) == ("early-exit:1", 3, "fp32")
    found = json.loads(invoke(*args, "-k", 2, "--draft", "suffix").stdout)
    assert (found["draft"], found["k"]) == ("suffix", 2)
    given["verdict"] |= {"action": "plain", "draft": None, "k": 0}
    file.write_text(json.dumps(given))
    assert json.loads(invoke(*args).stdout)["draft"] is None
    assert "cannot be read" in invoke(*args[:3], tmp_path / "none", *args[4:]).stderr


def test_serve_takes_what_the_plan_recommends_but_for_k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents said so, and there was no such option. k follows the load, which a plan cannot know."""
    from slipstream.cli import serve_run

    taken: list[dict[str, Any]] = []
    monkeypatch.setattr(serve_run, "run", lambda options: taken.append(options) or 0)
    (tmp_path / "serve.toml").write_text('draft = "suffix"\n')
    for more in ((), ("--draft", "none", "-k", 2), ("--config", tmp_path / "serve.toml")):
        assert invoke("serve", "models/target", "--plan", EXAMPLE, *more).exit_code == 0
    assert [(o["draft"], o["k"]) for o in taken] == [
        (example()["verdict"]["draft"], "adaptive"),
        ("none", 2),
        ("suffix", "adaptive"),
    ]
    assert all(o["weights"] == example()["target"]["weights"] and "plan" not in o for o in taken)


def test_what_is_recommended() -> None:
    found = recommended(load(str(EXAMPLE)))
    assert found == {
        "draft": "models/draft-0.5b",
        "k": 4,
        "rule": "block",
        "weights": "fp16",
        "draft_weights": "int8",
    }


def test_cost_takes_what_the_plan_found() -> None:
    args = ["cost", "--plan", str(EXAMPLE), "--requests-per-day", 10_000, "--price", 2]
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    plan = load(str(EXAMPLE))
    assert found["inputs"]["speed-up"]["value"] == plan.verdict.speed_up.value
    assert found["inputs"]["tokens a request"]["value"] == 96
    plain_token = 0.0255 * 1.92
    assert found["inputs"]["tokens a second, plain"]["value"] == pytest.approx(96 / (plain_token * 96 + 120 * 0.009))
    assert all(f["how"].startswith(("predicted", "assumed", "measured")) for f in found["inputs"].values())
    assert "leave one out" in invoke(*args, "--from", "x").stderr
