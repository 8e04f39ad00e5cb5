"""How many rows, steps and evaluations a run is given, and how much of the data is read for it."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from slipstream import InputError
from slipstream.distill.answers import answers_to, with_answers
from slipstream.distill.documents import Document, order
from slipstream.distill.job import Job
from slipstream.distill.schedule import Pace, Plan, plan, seconds_of, tokens_of_use, tokens_to_measure_at
from slipstream.models.load import load_model
from slipstream.types import SamplingParams


def job(**settings: Any) -> Job:
    return Job(target="t", out=Path("out"), init="prune:2", data=("d",), batch=8, **settings)


@pytest.mark.parametrize(
    ("settings", "rows", "pace", "found"),
    [
        # as many passes over a row as make asking about it no dearer than learning from it, four at most
        ({}, 10_000, Pace(step=1, target=3), Plan(342, 684, 68, 64)),
        ({}, 10_000, Pace(step=1, target=0.2), Plan(500, 4000, 100, 0)),
        # fewer rows than could be asked about: they are seen more often
        ({}, 80, Pace(step=1, target=3), Plan(570, 80, 114, 64)),
        ({"keep": 0}, 10_000, Pace(step=1, target=3), Plan(150, 1200, 30, 0)),
        ({"loss": "ce"}, 10_000, Pace(step=1, target=3), Plan(600, 4800, 120, 0)),
        ({"keep": 0}, 10_000, Pace(step=1, target=3, evaluation=10), Plan(137, 1096, 27, 0)),
        ({"keep": 0, "evaluate_every": 15}, 10_000, Pace(step=1, target=3, evaluation=10), Plan(128, 1024, 15, 0)),
        ({"on_policy": 0.5}, 10_000, Pace(step=1, target=3, drawn=8), Plan(100, 800, 20, 0)),
        ({}, 10_000, Pace(step=1000, target=3000), Plan(1, 8, 1, 0)),
        ({}, 3, Pace(step=1, target=3), Plan(597, 3, 119, 64)),
    ],
)
def test_minutes_become_rows_and_steps(settings: dict[str, Any], rows: int, pace: Pace, found: Plan) -> None:
    assert plan(job(minutes=10, **settings), rows, pace) == found


@pytest.mark.parametrize("step", [0.01, 0.3, 4.0])
@pytest.mark.parametrize("target", [0.0, 0.1, 1.0, 12.0])
@pytest.mark.parametrize("rows", [10, 1000, 100_000])
@pytest.mark.parametrize("settings", [{}, {"keep": 0}, {"keep": 16}, {"on_policy": 0.3}, {"loss": "ce"}])
def test_the_minutes_are_used_and_kept_to(step: float, target: float, rows: int, settings: dict[str, Any]) -> None:
    """Asking the target, learning and measuring together."""
    asked = job(minutes=20, **settings)
    pace = Pace(step, target, drawn=2 * step + target, evaluation=3.0)
    chosen = plan(asked, rows, pace)
    assert chosen.rows <= rows
    assert 0.85 * 1200 <= seconds_of(chosen, asked, pace) <= 1.05 * 1200


def test_given_steps_take_the_rows_that_they_see() -> None:
    assert plan(job(steps=12), 1000, None) == Plan(12, 96, 2, 0)
    assert plan(job(steps=12), 20, None) == Plan(12, 20, 2, 64)
    assert plan(job(), 100_000, None) == Plan(2000, 16_000, 200, 0)
    assert plan(job(steps=12, keep=8, evaluate_every=5), 1000, None) == Plan(12, 96, 5, 8)
    assert plan(job(steps=2), 1000, None).every == 1


def test_no_more_text_is_read_than_is_of_use() -> None:
    assert tokens_of_use(job(steps=1000, length=512)) == 8 * 512 * 1000 + 1
    assert tokens_of_use(job(minutes=40)) == 8_000_000
    assert tokens_of_use(job(minutes=0.1)) == 1_000_000, "a reduced vocabulary is counted in it"


def test_short_runs_are_measured_at_less() -> None:
    wanted = [tokens_to_measure_at(job(**s)) for s in ({}, {"minutes": 40}, {"minutes": 4}, {"minutes": 0.5})]
    assert wanted == [8192, 8192, 4096, 2048]
    assert tokens_to_measure_at(job(minutes=0.5, validation_tokens=9000)) == 9000


def test_an_order_depends_on_the_seed_only() -> None:
    assert order(9, 1) == order(9, 1) != order(9, 2)
    assert sorted(order(9, 1)) == list(range(9))


# --- answers ----------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_new_tokens=3, temperature=0.0)


def prompts(number: int) -> list[Document]:
    return [Document(f"p{i}", "c", str(i), messages=({"role": "user", "content": f"say {i}"},)) for i in range(number)]


def never() -> Any:
    raise AssertionError("the target is asked")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by each time that somebody looks."""
    ticks = count()
    monkeypatch.setattr("slipstream.distill.answers.perf_counter", lambda: float(next(ticks)))


def test_answering_ends_when_its_time_is_over(tiny_checkpoint: Path, tmp_path: Path, clock: None) -> None:
    """The first prompts get an answer, in full; the others are left out, also when the run is resumed."""
    file, asked = tmp_path / "answers.jsonl", prompts(90)
    model = load_model(tiny_checkpoint, weights="fp32")
    found = answers_to(asked, lambda: model, PARAMS, file, seconds=41)
    assert sorted(d.id for d in with_answers(asked, found)) == sorted(d.id for d in asked[:40])
    assert answers_to(asked, never, PARAMS, file) == found
    assert len(with_answers(asked, found)) == 40


def test_prompts_that_cannot_be_asked_are_left_out(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """One that was too long used to end the run, and each resumed one, in the middle of answering."""
    file, asked = tmp_path / "answers.jsonl", prompts(4)
    long = Document("long", "c", "long", messages=({"role": "user", "content": "say it " * 400},))
    model = load_model(tiny_checkpoint, weights="fp32")
    found = answers_to([asked[0], long, *asked[1:]], lambda: model, PARAMS, file)
    assert {d.id for d in with_answers([long, *asked], found)} == {d.id for d in asked}
    assert answers_to([long, *asked], never, PARAMS, file) == found
    for _ in range(2):  # resumed, it says so again
        with pytest.raises(InputError, match=r"long: the prompt has \d+ tokens"):
            answers_to([long], lambda: model, PARAMS, tmp_path / "others.jsonl")


def test_answers_that_are_cut_off_are_asked_for_again(tiny_checkpoint: Path, tmp_path: Path) -> None:
    file, asked = tmp_path / "answers.jsonl", prompts(4)
    model = load_model(tiny_checkpoint, weights="fp32")
    found = answers_to(asked, lambda: model, PARAMS, file)
    lines = file.read_text().strip().split("\n")
    assert {json.loads(line)["id"] for line in lines} == {"p0", "p1", "p2", "p3"}
    file.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    assert answers_to(asked, lambda: model, PARAMS, file) == found
    assert answers_to(asked, never, PARAMS, file) == found
