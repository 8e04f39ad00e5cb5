"""``slipstream distill`` on tiny models: starts, training, resuming, results, refusals."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from conftest import byte_tokenizer, save_checkpoint
from slipstream import InputError, SpeculativeDecoding, load_model
from slipstream.distill import run as distilling
from slipstream.distill.acceptance import Exact, Kept, Overlaps, by_position, figures, gain, predicted, rate
from slipstream.distill.card import _rows
from slipstream.distill.job import Job
from slipstream.distill.lens import fit_output_layer
from slipstream.distill.on_policy import continue_rows
from slipstream.distill.prepare import Target, make_rows, read_base, read_data
from slipstream.distill.run import Evaluation, Interrupted, Refused, Result, distill
from slipstream.distill.run import along as along_draft
from slipstream.distill.student import Student, read_start, save_student
from slipstream.distill.teacher import Asking
from slipstream.distill.tokens import Encoded
from slipstream.distill.train import Recipe, Step, Trainer
from slipstream.measure.expectation import Choice, Costs
from slipstream.models.describe import describe
from slipstream.models.exit_head import read_exit_head
from slipstream.serve.capture import Folder

COSTS = Costs.linear(0.2, 0.05)


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals that are good enough here."""
    monkeypatch.setattr("slipstream.measure.bootstrap._DRAWS", 200)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, of which all but the first change little."""
    folder = save_checkpoint(
        tmp_path_factory.mktemp("target"), byte_tokenizer(), num_hidden_layers=4, initializer_range=0.3
    )
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")) and ".layers.0." not in name:
            tensors[name] *= 0.6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    random, words = (
        Random(0),
        ["the", "and", "in", "a", "here", "then", "he", "hand", "other", "an", "thin", "ring", "rain"],
    )
    for i in range(16):
        lines = [" ".join(random.choice(words) for _ in range(9)) for _ in range(16)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


class Quiet:
    """Remembers what it is told."""

    def __init__(self, at_step: Callable[[Step], None] = lambda _: None) -> None:
        self.steps: list[Step] = []
        self.evaluations: list[Evaluation] = []
        self.phases: list[str] = []
        self._at_step = at_step

    def phase(self, what: str) -> None:
        self.phases.append(what)

    def begin(self, steps: int, done: int) -> None: ...

    def step(self, step: Step) -> None:
        self.steps.append(step)
        self._at_step(step)

    def evaluation(self, evaluation: Evaluation, best: bool) -> None:
        self.evaluations.append(evaluation)


@pytest.fixture
def job(target: Path, texts: Path, tmp_path: Path) -> Job:
    return Job(
        target=str(target),
        out=tmp_path / "draft",
        init="prune:2",
        data=(str(texts),),
        validation=0.25,
        length=64,
        validation_tokens=1000,
        batch=8,
        steps=12,
        evaluate_every=4,
        learning_rate=1e-2,
        costs=COSTS,
        weights="fp32",
    )


def run(job: Job, at_step: Callable[[Step], None] = lambda _: None) -> tuple[Result, Quiet]:
    quiet = Quiet(at_step)
    return distill(job, quiet), quiet


# --- starts -----------------------------------------------------------------------------------------------------------


def test_pruning_keeps_the_first_layers(target: Path) -> None:
    about = describe(str(target))
    pruned, named = read_start("prune:2", about), read_start("layers:0,1", about)
    assert pruned.config["num_hidden_layers"] == 2
    assert pruned.tensors.keys() == named.tensors.keys()
    assert all(torch.equal(pruned.tensors[name], named.tensors[name]) for name in named.tensors)


def test_a_start_is_its_layers_of_the_target(target: Path, tmp_path: Path) -> None:
    """All layers: the target itself; some: as transformers' own model with the others taken out."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(target)
    ids, scored = torch.tensor([[5, 6, 7, 8]]), torch.ones(1, 4, dtype=torch.bool)
    for layers in ([0, 1, 2, 3], [0, 2]):
        student = Student(read_start(f"layers:{','.join(map(str, layers))}", describe(str(target))))
        reference.model.layers = torch.nn.ModuleList([reference.model.layers[i] for i in layers])
        expected = reference(ids, use_cache=False).logits[0].log_softmax(-1)
        with torch.no_grad():
            assert torch.allclose(student.log_probs(ids, scored), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("prune:0", "does not fit the target's 4 layers; use prune:1 to 3"),
        ("prune:4", "does not fit the target's 4 layers"),
        ("prune:two", "is not understood"),
        ("layers:0,4", "name layers 0 to 3"),
        ("layers:1,0", "in ascending order"),
        ("layers:", "is not understood"),
        ("nowhere", "nowhere"),
        ("", "--init is missing"),
    ],
)
def test_starts_that_do_not_fit(job: Job, init: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(replace(job, init=init))
    assert not job.work.exists()


def test_another_tokenizer_is_refused(job: Job, other_tokenizer_checkpoint: Path) -> None:
    with pytest.raises(InputError, match=r"has another tokenizer than the target .* \(id 4 is"):
        run(replace(job, init=str(other_tokenizer_checkpoint)))


# --- what comes of it -------------------------------------------------------------------------------------------------


def test_a_draft_that_slipstream_and_transformers_load(job: Job) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result, quiet = run(job)
    assert result.gain[0].value > 0.02, "training did not help"
    assert result.gain[1].value > 0.02
    assert [e.step for e in quiet.evaluations] == [0, 4, 8, 12]
    model = load_model(job.out, weights="fp32")
    theirs = AutoModelForCausalLM.from_pretrained(job.out)
    assert theirs.config.num_hidden_layers == 2
    ids = [5, 6, 7, 8]
    expected = theirs(torch.tensor([ids])).logits[0]
    assert torch.allclose(model.forward(ids, model.new_cache(), 4), expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(job.out)("a the")["input_ids"] == byte_tokenizer()("a the")["input_ids"]
    plain = SpeculativeDecoding(job.target)
    fast = SpeculativeDecoding(job.target, job.out, k=3)
    one, other = (s.complete(ids, max_new_tokens=20)[0] for s in (plain, fast))
    assert one.tokens == other.tokens
    assert not job.work.exists()
    assert sorted(p.name for p in job.out.parent.iterdir()) == ["draft"], "something was left beside it"


def test_a_reduced_vocabulary_and_a_portable_one(job: Job) -> None:
    from transformers import AutoModelForCausalLM

    small, whole = (
        replace(job, draft_vocab=16),
        replace(job, draft_vocab=16, full_vocab=True, out=job.out.parent / "whole"),
    )
    found = [run(one)[0] for one in (small, whole)]
    model: Any = load_model(small.out, weights="fp32")
    assert model.vocab_size == 16
    assert {0, 1, 2, 3} <= set(model.output_ids.tolist()), "special tokens have rows"
    theirs = AutoModelForCausalLM.from_pretrained(whole.out)
    logits = theirs(torch.tensor([[5, 6, 7, 8]])).logits[0]
    assert logits.shape == (4, 300)
    few = model.forward([5, 6, 7, 8], model.new_cache(), 4)
    assert torch.allclose(logits[:, model.output_ids], few, atol=1e-3), "the rows that were trained are as they were"
    assert found[1].after.rate[1].value > found[0].after.rate[1].value - 0.03, "the other rows take little from them"
    with pytest.raises(InputError, match="has a reduced vocabulary already"):
        run(replace(job, init=str(small.out), draft_vocab=10, out=job.out.parent / "x"))


def test_costs_are_those_of_the_draft_that_is_written(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --full-vocab they were those of the reduced output layer, a fraction of it."""
    sizes, measure = [], distilling.measure_costs

    def measured(target: Any, draft: Any, tokens: Any) -> Costs:
        sizes.append(draft.vocab_size)
        return measure(target, draft, tokens)

    monkeypatch.setattr(distilling, "measure_costs", measured)
    for whole in (False, True):
        run(replace(job, draft_vocab=16, full_vocab=whole, costs=None, steps=1, out=job.out.parent / f"{whole}"))
    assert sizes == [16, 300]


def test_an_output_layer_that_is_fitted(target: Path, texts: Path, job: Job) -> None:
    """Least squares against numpy's own; of all layers the fitted one is the target's; of some it is a better start."""
    whole = Target(str(target), "fp32")
    job.work.mkdir()
    data = read_data(job, whole)
    start, rows = read_base(replace(job, init="layers:0,1"), whole), make_rows(job, data, whole)
    student, asking = Student(start), Asking(whole.model, None, 300)
    states, logits = [], []
    for row in range(6):
        positions = rows.scored[row].nonzero().squeeze(1)
        with torch.no_grad():
            states.append(student.states(rows.ids[row : row + 1])[0, positions].double().numpy())
        found = asking.targets(row, rows.ids[row].tolist(), positions).log_probs.double()
        logits.append((found - found.mean(1, keepdim=True)).numpy())
    x, y = np.concatenate(states), np.concatenate(logits)
    ridge = np.sqrt(1e-2 * np.diag(x.T @ x).mean()) * np.eye(x.shape[1])
    x, y = np.concatenate((x, ridge)), np.concatenate((y, np.zeros((len(ridge), 300))))
    expected = np.linalg.lstsq(x, y, rcond=None)[0]
    fit_output_layer(student, asking, rows, 6)
    assert np.allclose(student.head.detach().numpy(), expected.T, atol=1e-3)
    exact = Exact(whole.model, data.validation)
    plain, fitted = exact.compare([along_draft(Student(start)), along_draft(student)], [None] * 2)
    assert rate(fitted, 1) > rate(plain, 1) + 0.03
    shutil.rmtree(job.work)
    fresh, _ = run(replace(job, steps=1, learning_rate=1e-9))
    bare, _ = run(replace(job, steps=1, learning_rate=1e-9, fit=0, out=job.out.parent / "bare"))
    assert fresh.gain[1].value > 0.03 > abs(bare.gain[1].value)


def test_a_reduced_draft_can_be_trained_on(job: Job) -> None:
    first = replace(job, draft_vocab=16)
    before, _ = run(first)
    after, quiet = run(replace(job, init=str(first.out), out=job.out.parent / "second", seed=0))
    assert after.before.rate[1].value == pytest.approx(before.after.rate[1].value, abs=1e-3)
    losses = [step.loss for step in quiet.steps]
    assert sum(losses[-4:]) < sum(losses[:4])


def test_lora_is_merged(job: Job, tiny_draft_checkpoint: Path) -> None:
    result, _ = run(replace(job, init=str(tiny_draft_checkpoint), lora=4, steps=20, learning_rate=3e-2, temperature=1))
    assert result.gain[1].value > 0
    model = load_model(job.out, weights="fp32")
    assert model.forward([5, 6], model.new_cache(), 1).shape == (1, 300)
    from safetensors import safe_open

    with safe_open(job.out / "model.safetensors", "pt") as opened:
        assert not [name for name in opened.keys() if "lora" in name or "base" in name]  # noqa: SIM118


@pytest.mark.parametrize(
    "change", [{"loss": "ce"}, {"on_policy": 1.0}, {"bf16": True}, {"accumulate": 4}, {"loss": "tv"}]
)
def test_other_recipes(job: Job, change: dict[str, Any]) -> None:
    result, quiet = run(replace(job, steps=4, **change))
    assert all(s.loss > 0 for s in quiet.steps)
    assert len(result.curve) == 4


def visited(job: Job, student: Student, target: Any) -> float:
    """Acceptance (T = 1) where the draft has written the tokens before itself, in the middle of held-out text."""
    rows = [one.ids[:33] for one in read_data(job, Target(job.target)).validation if len(one.ids) >= 33]
    ids, scored = torch.tensor(rows), torch.ones(len(rows), 33, dtype=torch.bool)
    written, reached = continue_rows(student, ids, scored, torch.Generator().manual_seed(5))
    found = []
    for row, mask in zip(written, reached, strict=True):
        p = target.forward(row.tolist(), target.new_cache(), len(row))[mask].log_softmax(-1)
        with torch.no_grad():
            q = student.log_probs(row.unsqueeze(0), mask.unsqueeze(0))
        found.append(float(torch.minimum(p, q).exp().sum(1).mean()))
    return sum(found) / len(found)


def test_steps_on_the_drafts_own_text_help_where_it_has_written_itself(job: Job) -> None:
    job = replace(job, steps=200, evaluate_every=200, fit=0)
    target, reached = load_model(job.target, weights="fp32"), {}
    for share in (0.0, 1.0):
        one = replace(job, on_policy=share, out=job.out.parent / f"{share}")
        run(one)
        again = replace(job, out=job.out.parent / "again")
        reached[share] = visited(again, Student(read_start(str(one.out), describe(job.target))), target)
    assert reached[1.0] > reached[0.0] + 0.03, reached


@pytest.mark.parametrize("change", [{}, {"lora": 2}])
def test_the_draft_writes_without_complaints(job: Job, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' newer versions have another name for the cache, and say so once."""
    from transformers.utils import generic

    said: list[str] = []
    monkeypatch.setattr(generic.logger, "warning_once", said.append, raising=False)
    run(replace(job, on_policy=1.0, steps=2, **change))
    assert not said


def test_a_position_that_the_draft_wrote_weighs_as_much_as_any(job: Job) -> None:
    """The mean was taken over all positions of a row where only its end was learned from."""
    job.work.mkdir()
    whole = Target(job.target, "fp32")
    data = read_data(job, whole)
    student = Student(read_start("prune:2", whole.description))
    rows, asking = make_rows(job, data, whole), Asking(whole.model, None, 300)
    trainer = Trainer(student, rows, asking, Recipe(steps=4, on_policy=1.0, batch=4, accumulate=2))
    step = trainer.step()
    assert step.positions == 4 * 33
    trainer = Trainer(student, rows, asking, Recipe(steps=4, batch=4))
    assert step.loss == pytest.approx(trainer.step().loss, rel=0.5)


def test_accumulating_changes_nothing_but_memory(job: Job) -> None:
    whole, parts = (run(replace(job, steps=3, out=job.out.parent / str(n), accumulate=n))[0].curve for n in (1, 4))
    assert [s.loss for s in whole] == pytest.approx([s.loss for s in parts], rel=1e-4)


def test_an_exit_head(job: Job) -> None:
    """On held-out text more of what it drafts is accepted than of the bare layers, and answers are the target's."""
    result, _ = run(replace(job, init="", early_exit=2, rank=16, steps=60, evaluate_every=20))
    assert result.gain[1].low > 0
    held_out = read_data(replace(job, out=job.out.parent / "again"), Target(job.target)).validation[:8]
    settings: dict[str, Any] = {"max_new_tokens": 30, "ignore_eos": True}
    target = load_model(job.target, weights="fp32")
    plain = SpeculativeDecoding(target).complete([w.ids[:20] for w in held_out], **settings)
    spec = SpeculativeDecoding(target, f"early-exit:{job.out}", k=2)
    assert [o.tokens for o in spec.complete([w.ids[:20] for w in held_out], **settings)] == [o.tokens for o in plain]
    sampled = SpeculativeDecoding(target, f"early-exit:{job.out}", k=2, temperature=1.0, seed=0)
    assert sampled.complete([5, 6, 7], **settings)[0].stats.drafted > 0


def test_an_exit_head_drafts_as_it_was_trained(job: Job) -> None:
    """What the drafter makes of it is what training saw, and what was measured."""
    quiet, students = Quiet(), []
    prepared = distilling._finish

    def finish(one: Any) -> Any:
        found = prepared(one)
        students.append(one.student)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilling, "_finish", finish)
        distill(replace(job, init="", early_exit=2, rank=4), quiet)
    target: Any = load_model(job.target, weights="fp32")
    head = read_exit_head(job.out)
    assert head.layers == 2
    ids = [5, 6, 7, 8]
    cache = target.new_cache()
    found = [target.exit_early([i], cache, 2, head=target.fit(head))[0] for i in ids]
    with torch.no_grad():
        expected = students[0].log_probs(torch.tensor([ids]), torch.ones(1, 4, dtype=torch.bool))
    assert torch.allclose(torch.stack(found).log_softmax(-1), expected, atol=1e-4)


def test_the_record_and_the_card(job: Job) -> None:
    result, _ = run(replace(job, command="slipstream distill this"))
    record = json.loads((job.out / "distill.json").read_text())
    assert record["command"] == "slipstream distill this"
    assert len(record["target"]["sha256"]) == len(record["data"]["sha256"]) == 64
    assert record["versions"]["torch"] == torch.__version__
    assert record["after"]["rate"]["0"]["value"] == pytest.approx(result.after.rate[0].value, abs=1e-5)
    assert len(record["loss"]) == 12
    card = (job.out / "README.md").read_text()
    assert f"{result.after.rate[0].value:.3f}" in card
    assert "| 8 |" in card
    assert (job.out / "acceptance.png").read_bytes().startswith(b"\x89PNG")


def test_a_category_of_few_documents_has_no_interval() -> None:
    """Drawn from one document again and again, a figure does not move: the card called that certainty."""
    seen = [Overlaps(f"a{i}", "many", (float(i % 2), 1.0), (0.5, 1.0)) for i in range(6)]
    found = figures([*seen, Overlaps("b", "one", (1.0, 0.0), (0.5, 0.2))], Costs.linear(0.2, 0.1))
    rows = {line.split(" | ")[0]: line for line in _rows(found, found)}
    assert rows["| one"] == "| one | 1 | 0.500 | 0.500 | 0.350 | 0.350 |"
    assert rows["| many"].startswith("| many | 6 | 0.750 [")
    assert rows["| all"].startswith("| all | 7 | ")


def test_figures_for_tensorboard(job: Job, tmp_path: Path) -> None:
    """Every step's, once: also of a run that was interrupted, and of the last moments before it ended."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    job = replace(job, logs=str(tmp_path / "logs"))
    with pytest.raises(Interrupted):
        run(job, lambda step: step.number == 6 and signal.raise_signal(signal.SIGINT))
    result, _ = run(replace(job, resume=True))
    found = reading.EventAccumulator(job.logs)
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [
        (s.number, pytest.approx(s.loss, rel=1e-6)) for s in result.curve
    ]
    assert [e.step for e in found.Scalars("acceptance/T=0")] == [e.step for e in result.evaluations]
    assert found.Scalars("predicted speed-up")[-1].value == pytest.approx(
        result.evaluations[-1].speed_up.speed_up, rel=1e-6
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--logs '.*file/x' cannot be made: Not a directory; give another folder"):
        run(replace(job, logs=str(tmp_path / "file" / "x"), out=tmp_path / "other"))


def test_prompts_are_answered_once(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i} times {i * i}"}) for i in range(30)))
    job = replace(job, data=(str(prompts),), answer_tokens=24, answer_temperature=1.0, length=64)
    asked: list[int] = []
    from slipstream.engine import Engine

    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda self, r: (asked.append(1), add(self, r))[1])
    with pytest.raises(Interrupted):
        run(job, lambda step: os.kill(os.getpid(), signal.SIGINT) if step.number == 2 else None)
    kept = (job.work / "answers.jsonl").read_text().strip().split("\n")
    assert len(asked) == len(kept) == 30
    run(replace(job, resume=True))
    assert len(asked) == 30


# --- going on ---------------------------------------------------------------------------------------------------------


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return load_file(file)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"keep": 16},
        {"on_policy": 0.5, "draft_vocab": 30},
        {"lora": 2},
        {"init": "", "early_exit": 1, "rank": 4, "on_policy": 0.3},
    ],
)
def test_an_interrupted_run_goes_on_bit_for_bit(job: Job, change: dict[str, Any]) -> None:
    job = replace(job, steps=8, evaluate_every=3, **change)
    whole, _ = run(replace(job, out=job.out.parent / "whole"))
    for stop in (2, 5):
        with pytest.raises(Interrupted, match=rf"after step {stop}; go on with the same command"):
            run(
                replace(job, resume=stop > 2),
                lambda step, stop=stop: step.number == stop and signal.raise_signal(signal.SIGTERM),
            )  # type: ignore[misc]
        assert not job.out.exists()
    rest, _ = run(replace(job, resume=True))
    assert [s.loss for s in rest.curve] == [s.loss for s in whole.curve]
    assert rest.evaluations == whole.evaluations
    one, other = weights(job.out), weights(job.out.parent / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def ruined_from(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learning rate that spoils the draft from some step on."""
    rate = Recipe.rate
    monkeypatch.setattr(Recipe, "rate", lambda self, at: rate(self, at) if at < step else 0.5)


def test_the_best_weights_are_written_not_the_last(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a run that was interrupted after its best step."""
    job = replace(job, fit=0)
    ruined_from(8, monkeypatch)
    whole, _ = run(job)
    found = {e.step: e.acceptance[0] for e in whole.evaluations}
    assert max(found, key=lambda step: found[step]) == 8, found
    assert found[12] < found[8] - 0.05
    assert whole.after.rate[0].value == pytest.approx(found[8], abs=1e-6)
    again = replace(job, out=job.out.parent / "again")
    with pytest.raises(Interrupted):
        run(again, lambda step: step.number == 10 and signal.raise_signal(signal.SIGTERM))
    rest, _ = run(replace(again, resume=True))
    assert rest.after.rate == whole.after.rate
    one, other = weights(job.out), weights(again.out)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_draft_that_training_spoils_stays_what_it_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training made a draft worse than its start, and the best of what it had made was written all the same."""
    first, _ = run(job)
    ruined_from(0, monkeypatch)
    result, _ = run(replace(job, init=str(job.out), out=job.out.parent / "worse", steps=4, evaluate_every=2, keep=0))
    assert result.after.rate == result.before.rate
    assert result.before.rate[0].value == pytest.approx(first.after.rate[0].value)


def test_training_ends_by_the_predicted_speed_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    ruined_from(4, monkeypatch)
    result, _ = run(replace(job, steps=40, evaluate_every=2, patience=2, costs=Costs.linear(0.05, 0.0)))
    gains = {e.step: e.speed_up.speed_up for e in result.evaluations}
    best = max(gains, key=lambda step: gains[step])
    assert gains[best] > 1.2
    assert result.stopped_early
    assert result.steps == best + 4


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(job: Job) -> None:
    """Killed (-9) in the middle of writing its fourth checkpoint."""
    whole, _ = run(replace(job, out=job.out.parent / "whole"))
    file = job.out.parent / "job.pickle"
    file.write_bytes(pickle.dumps(replace(job, checkpoint_minutes=0)))
    ended = subprocess.run([sys.executable, "-c", _KILLED, file], cwd=Path(__file__).parent, check=False, timeout=600)
    assert ended.returncode == -signal.SIGKILL
    parts = list(job.work.glob(".state.pt.*"))
    assert len(parts) == 1
    assert 0 < parts[0].stat().st_size < (job.work / "state.pt").stat().st_size
    rest, quiet = run(replace(job, resume=True))
    assert quiet.steps[0].number == 4
    assert [s.loss for s in rest.curve] == [s.loss for s in whole.curve]
    file.unlink()
    assert sorted(p.name for p in job.out.parent.iterdir()) == ["draft", "whole"], "something was left"


_KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from slipstream.distill.run import distill
import test_distill

write, written = Path.write_bytes, []

def killed(self, data):
    if self.name.startswith(".state.pt"):
        written.append(self)
        if len(written) == 4:
            write(self, bytes(data[: len(data) // 2]))
            os.kill(os.getpid(), signal.SIGKILL)
    return write(self, data)

Path.write_bytes = killed
distill(pickle.loads(Path(sys.argv[1]).read_bytes()), test_distill.Quiet())
"""


def test_a_checkpoint_that_is_damaged(job: Job) -> None:
    with pytest.raises(Interrupted):
        run(job, lambda step: signal.raise_signal(signal.SIGINT))
    state = job.work / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"state\.pt' is damaged; remove it to start training anew"):
        run(replace(job, resume=True))
    state.unlink()
    result, _ = run(replace(job, resume=True))
    assert result.steps == 12


def test_resuming_asks_for_the_same_run(job: Job) -> None:
    with pytest.raises(InputError, match="there is no unfinished run"):
        run(replace(job, resume=True))
    with pytest.raises(Interrupted):
        run(job, lambda step: signal.raise_signal(signal.SIGINT))
    with pytest.raises(InputError, match="holds an unfinished run"):
        run(job)
    with pytest.raises(InputError, match=r"had learning_rate 0\.01, and this one has 0\.5"):
        run(replace(job, resume=True, learning_rate=0.5))
    assert (job.work / "state.pt").exists()


def test_a_run_that_was_killed_before_it_had_anything_begins_anew(job: Job) -> None:
    """Without --resume it was called unfinished, and with it there was no unfinished run."""
    job.work.mkdir()
    (job.work / ".settings.json.7.part").write_text("{")
    with pytest.raises(InputError, match=r"there is no unfinished run.*leave --resume out"):
        run(replace(job, resume=True))
    run(job)
    assert not job.work.exists()


def test_a_folder_that_is_somebodys_is_left_alone(job: Job) -> None:
    job.work.mkdir()
    (job.work / "letters").mkdir()
    with pytest.raises(InputError, match="is something else than an unfinished run"):
        run(job)
    assert (job.work / "letters").exists()


def test_a_capture_that_goes_on_can_be_resumed(job: Job, tmp_path: Path) -> None:
    """A server captured further answers, and began another file: a resumed run refused its own data."""
    folder, random = tmp_path / "traffic", Random(1)
    captured = Folder(folder, 20_000, 1_000_000)

    def serve(count: int) -> None:
        for _ in range(count):
            said = " ".join(random.choices(["the", "thin", "ring", "in", "here"], k=30))
            record = {"messages": [{"role": "user", "content": f"say {random.random()}"}], "answer": said}
            captured.write(json.dumps(record | {"finish_reason": "stop"}).encode() + b"\n")

    serve(120)
    before = Folder.files(captured)
    copy = tmp_path / "copy" / "traffic"
    shutil.copytree(folder, copy)
    job = replace(job, data=(str(folder),), latest=100)
    whole, _ = run(replace(job, out=tmp_path / "whole", data=(str(copy),)))
    with pytest.raises(Interrupted):
        run(job, lambda step: step.number == 5 and signal.raise_signal(signal.SIGINT))
    serve(150)
    before[0].unlink()  # the oldest go
    rest, quiet = run(replace(job, resume=True))
    assert quiet.steps[0].number == 6
    assert [s.loss for s in rest.curve] == [s.loss for s in whole.curve]
    captured.close()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The system refuses longer ones, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("change", [{}, {"init": "", "early_exit": 2, "rank": 64}])
def test_a_full_disk_loses_nothing(job: Job, change: dict[str, Any]) -> None:
    """At a checkpoint, and when the draft is written."""
    job = replace(job, keep=0, steps=6, evaluate_every=3, **change)
    whole, _ = run(replace(job, out=job.out.parent / "whole"))
    largest = max(f.stat().st_size for f in (job.out.parent / "whole").glob("*.safetensors"))
    with ExitStack() as limits:

        def fill(step: Step) -> None:
            if step.number == 4:
                limits.enter_context(files_of_at_most(1000))

        with pytest.raises(InputError, match=r"cannot write .*state\.pt.*: File too large; make room and go on with"):
            run(replace(job, checkpoint_minutes=0), fill)
    assert sorted(p.name for p in job.work.iterdir()) == ["data.json", "settings.json", "state.pt"]
    with pytest.raises(Interrupted):
        run(replace(job, resume=True), lambda step: step.number == 6 and signal.raise_signal(signal.SIGINT))
    with files_of_at_most(largest - 1), pytest.raises(InputError, match=r"cannot write .*(draft|state\.pt).*make room"):
        run(replace(job, resume=True))
    assert not job.out.exists()
    rest, quiet = run(replace(job, resume=True))
    assert not quiet.steps, "all steps had been made"
    assert [s.loss for s in rest.curve] == [s.loss for s in whole.curve]
    one, other = weights(job.out), weights(job.out.parent / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_no_room_for_what_the_target_says(job: Job) -> None:
    """It showed as a dead process (SIGBUS) while the first rows were kept."""
    with files_of_at_most(300_000), pytest.raises(InputError, match=r"outcomes', which takes [\d,]+ bytes: File too"):
        run(replace(job, keep=64))
    assert not job.work.exists()


def test_no_room_for_answers(job: Job, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i} times {i * i}"}) for i in range(30)))
    job = replace(job, data=(str(prompts),), answer_tokens=24, answer_temperature=1.0, steps=2)
    with files_of_at_most(1000), pytest.raises(InputError, match=r"answers\.jsonl'.*the answers so far are kept"):
        run(job)
    kept = {json.loads(row)["key"] for row in (job.work / "answers.jsonl").read_text().split("\n")[1:-1]}
    assert kept
    run(replace(job, resume=True))


def test_training_ends_where_nothing_gets_better(job: Job) -> None:
    result, _ = run(replace(job, steps=100, evaluate_every=1, patience=3, learning_rate=1e-9))
    assert result.stopped_early
    assert result.steps < 100


def test_a_draft_that_is_no_better_is_refused(job: Job) -> None:
    with pytest.raises(Refused, match=r"is not better on held-out text: its acceptance at T = 0 changed by [+-]0\.\d+"):
        run(replace(job, must_gain=True, learning_rate=1e-9, steps=2, fit=0))
    assert not job.out.exists()
    result, _ = run(replace(job, must_gain=True))
    assert result.gain[0].low > 0


def test_minutes_instead_of_steps(job: Job) -> None:
    """What is going to be done is said before."""
    # However many steps fit into the time here, none is left out because acceptance has not risen for a while.
    result, quiet = run(replace(job, steps=None, minutes=0.02, patience=10_000))
    assert result.steps >= 1
    (said,) = [p for p in quiet.phases if p.startswith("plan: ")]
    assert f"plan: {result.steps:,} steps of 8 rows, about " in said
    assert "of 64 tokens" in said


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [Recipe(steps=100, learning_rate=1.0, warmup=0.1).rate(i) for i in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == rates[9] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[-1] < 0.001


# --- measuring --------------------------------------------------------------------------------------------------------


def along(sampled: list[float], greedy: list[float] | None = None, document: str = "d") -> Overlaps:
    return Overlaps(document, "c", tuple(greedy or sampled), tuple(sampled))


def test_acceptance_by_position_follows_neighbours() -> None:
    """Acceptances that come in runs: the second token is accepted more often than the first."""
    found = by_position([along([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])], 1, 3)
    assert found == pytest.approx((8 / 12, 6 / 7, 4 / 5))
    assert by_position([along([0.5] * 20)], 1, 4) == pytest.approx((0.5,) * 4)
    assert len(by_position([along([1.0, 1.0])], 1, 8)) == 2
    assert by_position([along([0.0, 0.0])], 0, 8) == (0.0,)


def test_overlaps_are_those_of_both_models(target: Path) -> None:
    """V3. Exactly, and with the target's likeliest tokens; of all ids, and of a draft that has rows for some."""
    model = load_model(target, weights="fp32")
    window = Encoded("d", "c", tuple(range(5, 25)), (False,) * 10 + (True,) * 10)
    p = model.forward(window.ids[:-1], model.new_cache(), 19)[9:].double().softmax(-1)
    q = (2 * torch.randn(10, 300, generator=torch.Generator().manual_seed(0))).log_softmax(-1)
    some = torch.arange(0, 300, 3)
    reduced = q[:, some].log_softmax(-1)
    (whole,), (part,) = Exact(model, [window]).compare([lambda _: q, lambda _: reduced], [None, some])
    assert whole.sampled == pytest.approx(torch.minimum(p, q.double().exp()).sum(1).tolist(), abs=1e-5)
    assert part.sampled == pytest.approx(torch.minimum(p[:, some], reduced.double().exp()).sum(1).tolist(), abs=1e-5)
    assert part.greedy == tuple((some[reduced.argmax(1)] == p.argmax(1)).float().tolist())
    kept = Kept(model, [window])
    for draft, ids, exact in ((q, None, whole), (reduced, some, part)):
        (found,) = kept.overlaps(lambda _, draft=draft: draft, ids)  # type: ignore[misc]
        assert found.greedy == exact.greedy
        assert all(a <= b + 1e-5 for a, b in zip(found.sampled, exact.sampled, strict=True))
        assert found.sampled == pytest.approx(exact.sampled, abs=0.15)
    (same,) = kept.overlaps(lambda _: p.log().float(), None)
    assert set(same.greedy) == {1.0}


def test_the_acceptance_is_what_a_live_run_counts(job: Job) -> None:
    """Greedy, along the target's own answer, a token at a time."""
    run(replace(job, steps=8))
    target, draft = load_model(job.target, weights="fp32"), load_model(job.out, weights="fp32")
    spec = SpeculativeDecoding(target, draft, k=1)
    output = spec.complete([5, 6, 7], max_new_tokens=60, ignore_eos=True)[0]
    ids = (5, 6, 7, *output.tokens)
    window = Encoded("d", "c", ids, (False,) * 3 + (True,) * 60)
    student = Student(read_start(str(job.out), describe(job.target)))
    ((found,),) = Exact(target, [window]).compare([along_draft(student)], [None])
    at, counted = 3, []
    for accepted in _rounds(spec, [5, 6, 7]):
        if accepted is not None:
            counted.append((at, accepted))
            at += accepted
        at += 1
    assert counted
    assert [found.greedy[i - 3] for i, _ in counted] == [float(a) for _, a in counted]


def _rounds(spec: SpeculativeDecoding, prompt: list[int]) -> Iterator[int | None]:
    stream = spec.stream(prompt, max_new_tokens=60, ignore_eos=True)
    stream.finish()
    for one in stream.rounds:
        if len(one.tokens) == one.num_accepted + 1:
            yield one.num_accepted if one.num_drafted else None


def test_figures_and_gains() -> None:
    before = [along([0.2, 0.4], document=f"{i}") for i in range(5)]
    after = [along([0.7, 0.9], document=f"{i}") for i in range(5)]
    found = figures(after, COSTS)
    assert (found.tokens, found.documents) == (10, 5)
    assert found.rate[1].value == pytest.approx(0.8)
    assert found.speed_up[1] == predicted(after, 1, COSTS)
    change = gain(before, after, 1)
    assert (change.value, change.low, change.high) == pytest.approx((0.5, 0.5, 0.5))
    assert rate(before, 1) == pytest.approx(0.3)
    assert predicted([along([0.0, 0.0])], 1, COSTS) == Choice(0, 1.0)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "--steps 0 is not usable; use 1 or more"),
        ({"minutes": 1.0}, "--steps and --minutes are both given"),
        ({"loss": "mse"}, "--loss 'mse' is not known; use one of kl, "),
        ({"accumulate": 9}, "--accumulate 9 is not usable; use 1 to 8"),
        ({"temperature": 2}, "--temperature 2 is not usable"),
        ({"length": 1000}, "--length 1000 is beyond the target's 256 positions"),
        ({"draft_vocab": 2}, r"--draft-vocab 2 is not usable; use 4 \(all special tokens\) to 300"),
        ({"full_vocab": True}, "--full-vocab is for --draft-vocab"),
        ({"early_exit": 2}, "--init has no meaning with it"),
        ({"early_exit": 4, "init": ""}, "--early-exit 4 does not fit the target's 4 layers"),
        ({"target": "nowhere"}, "nowhere"),
        ({"loss": "ce", "on_policy": 0.5}, "--on-policy has no meaning with --loss ce"),
        ({"lora": 4, "embeddings": True}, "--embeddings has no meaning where only adapters are trained"),
        ({"threads": 0}, "--threads 0 is not usable"),
        ({"data": ("nowhere",)}, "neither a file nor a folder"),
    ],
)
def test_what_cannot_work(job: Job, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(replace(job, **change))
    assert not job.out.exists()
    assert not job.work.exists()


def test_little_data(job: Job, tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(f"so few words {i}")
    with pytest.raises(InputError, match=r"the data has \d+ tokens to learn from and \d+ to measure on"):
        run(replace(job, data=tuple(str(tmp_path / f"{i}.txt") for i in range(4))))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match="holds no text"):
        run(replace(job, data=(str(tmp_path / "empty.txt"),)))
    assert not job.work.exists()


def test_a_target_that_does_not_fit(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.distill.prepare.memory_here", lambda: 10_000)
    with pytest.raises(InputError, match=r"of memory are needed for the target .* and this machine has 0\.0 MB; lower"):
        run(job)


def test_a_disk_that_is_too_small(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(InputError, match=r"free, and about .* are needed; make room, or choose another --out"):
        run(job)


def test_an_existing_folder_is_left_alone(job: Job) -> None:
    job.out.mkdir()
    with pytest.raises(InputError, match="exists already"):
        run(job)
    with pytest.raises(InputError, match="in a folder that does not exist"):
        run(replace(job, out=job.out / "no" / "where"))


def test_a_loss_that_is_no_number_ends_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.distill.train.LOSSES", {"kl": lambda p, q: q.sum(1) * float("nan")})
    with pytest.raises(InputError, match="the loss of step 1 is nan; lower --learning-rate"):
        run(job)


def test_a_saved_student_is_the_student(target: Path, tmp_path: Path) -> None:
    student = Student(read_start("prune:2", describe(str(target))))
    save_student(student, tmp_path, torch.float32)
    model = load_model(tmp_path, weights="fp32")
    ids, scored = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool)
    logits = model.forward([5, 6, 7], model.new_cache(), 3).log_softmax(-1)
    with torch.no_grad():
        assert torch.allclose(student.log_probs(ids, scored), logits, atol=1e-5)
