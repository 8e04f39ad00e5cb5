"""``slipstream distill`` as a command, and plans that it takes up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import byte_tokenizer, save_checkpoint
from slipstream import InputError
from slipstream.cli.distill_run import job_of
from slipstream.cli.main import cli
from slipstream.distill.plan import Planned, read_plan


def call(*words: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(args=list(words), prog_name="slipstream")
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    rows = [{"text": f"{i} the {i * i} and a ring {i * 7} in here, he said {i}" * 3} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def words(tiny_checkpoint: Path, text: Path, tmp_path: Path) -> list[str]:
    found = ["distill", str(tiny_checkpoint), "--init", "prune:1", "--data", str(text), "--out", str(tmp_path / "out")]
    return [*found, "--steps", "2", "--length", "64", "--batch", "4", "--validation-tokens", "200"]


def test_a_draft_from_the_command_line(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    shown = capfd.readouterr()
    assert "T = 0: accepted" in shown.out
    assert "predicted speed-up" in shown.out
    assert "training, 2 steps" in shown.err
    assert "step 2/2" in shown.err
    record = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert record["command"].startswith("slipstream distill ")
    assert record["settings"]["init"] == "prune:1"
    assert record["costs"]["draft_step"] > 0


def test_one_json_document(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*words, "--json") == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--loss", "mse"], "--loss 'mse' is not known"),
        (["--early-exit", "1"], "--init has no meaning"),
        (["--minutes", "1"], "--steps and --minutes are both given"),
        (["--resume"], "there is no unfinished run"),
        (["--from-plan", "plan.json"], "leave TARGET and --init out"),
        (["--logs", "here"], "pip install tensorboard"),
    ],
)
def test_refusals(
    words: list[str], more: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.distill.job.find_spec", lambda name: None)
    assert call(*words, *more) == 2
    shown = capfd.readouterr()
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_missing_words(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("distill", "--data", "x", "--out", "y") == 2
    assert "TARGET is missing" in capfd.readouterr().err
    assert call("distill", "t", "--init", "prune:1", "--out", "y") == 2
    assert "nothing to learn from" in capfd.readouterr().err


def test_help_is_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """No training code is imported for it."""
    for name in [name for name in sys.modules if name.startswith("slipstream.distill")]:
        monkeypatch.delitem(sys.modules, name)
    assert call("distill", "--help") == 0
    assert not [name for name in sys.modules if name.startswith("slipstream.distill")]


# --- plans ------------------------------------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "target": {"model": "big"},
    "verdict": {"draft": "suffix,small"},
    "drafts": [
        {"name": "other", "members": [{"kind": "model", "model": "other"}]},
        {"name": "suffix,small", "members": [{"kind": "suffix"}, {"kind": "model", "model": "small"}]},
    ],
}


def plan(tmp_path: Path, **changes: Any) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**PLAN, **changes}))
    return file


def test_the_draft_of_a_plan(tmp_path: Path) -> None:
    assert read_plan(plan(tmp_path)) == Planned("big", "small")
    assert read_plan(plan(tmp_path, verdict={"draft": None})) == Planned("big", "other")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"drafts": []}, "has no draft model to train"),
        ({"drafts": [{"name": "suffix", "members": [{"kind": "suffix"}]}]}, "has no draft model to train"),
        ({"target": {}}, "is no plan"),
        ({"drafts": 3}, "is no plan"),
        ({"format": 2}, "its format is 2, and this version reads format 1"),
    ],
)
def test_plans_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_plan(plan(tmp_path, **changes))
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "nowhere")


def test_a_plan_makes_a_job_that_must_gain(tmp_path: Path) -> None:
    options = {"target": None, "init": "", "data": (), "latest": 100}
    job = job_of(out="x", capture="traffic", from_plan=str(plan(tmp_path)), **options)
    assert (job.target, job.init, job.data, job.must_gain, job.latest) == ("big", "small", ("traffic",), True, 100)


def test_a_draft_that_is_no_better_ends_with_1(tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = save_checkpoint(tmp_path / "target", byte_tokenizer())
    draft = save_checkpoint(tmp_path / "draft", byte_tokenizer(), seed=1, num_hidden_layers=1)
    file = plan(
        tmp_path,
        target={"model": str(target)},
        verdict={"draft": "d"},
        drafts=[{"name": "d", "members": [{"kind": "model", "model": str(draft)}]}],
    )
    words = [
        "distill",
        "--from-plan",
        str(file),
        "--capture",
        str(text),
        "--out",
        str(tmp_path / "out"),
        "--steps",
        "1",
    ]
    assert call(*words, "--learning-rate", "1e-9", "--length", "64", "--batch", "2") == 1
    assert "is not better on held-out text" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.unfinished").exists()
