"""Cost curves: arithmetic, files that belong to one model on one machine, and the controller that begins with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fakes import TableModel, random_law
from slipstream import InputError, SpeculativeDecoding, load_model
from slipstream.cli.main import cli
from slipstream.controller import Adaptive
from slipstream.drafters import EarlyExitDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.estimates import MOST, Costs
from slipstream.measure import curves
from slipstream.measure.curves import Cell, Curve, Key, find, grid, interpolated, keep, key_of, path_of, read
from slipstream.measure.ledger import Ledger
from slipstream.measure.rounds import Place, Timed, Timing, time_rounds
from slipstream.types import SamplingParams

KEY = Key("model", "fp32", "cpu", 1, "machine", "0")


def curve(**changes: Any) -> Curve:
    cells = [Cell(n, 1, 10.0 + n, 3) for n in (1, 2, 5, 9)] + [Cell(1, 8, 20.0, 3), Cell(5, 8, 60.0, 3)]
    given = Curve(KEY, "toy", 64, tuple(cells), {32: 16.0, 128: 32.0}, "measured here", "2026-01-01")
    return replace(given, **changes)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_measured_passes_are_what_they_are_and_others_lie_between() -> None:
    found = curve()
    assert [found.seconds(n) for n in (1, 2, 3, 5, 9)] == pytest.approx([11, 12, 13, 15, 19])
    assert found.seconds(3, 8) == pytest.approx(40)  # between its own batch's cells
    assert found.seconds(2, 2) == pytest.approx(14)  # four rows in all
    assert found.v(5, 8) == pytest.approx(3)
    assert found.shape == pytest.approx({1: 1, 2: 12 / 11, 5: 15 / 11, 9: 19 / 11})
    assert found.prompt_token == pytest.approx(0.25)
    assert interpolated({3: 1.0}, 99) == 1.0
    with pytest.raises(InputError, match="no pass was measured"):
        interpolated({}, 1)


def test_the_grid_covers_rows_and_batches_up_to_32() -> None:
    cells = grid()
    assert {n for n, b in cells if b == 1} >= {*range(1, 10), 16, 32}
    assert {b for n, b in cells if n == 1} == {1, 2, 4, 8, 16, 32}
    assert max(n * b for n, b in cells if b > 1 and n > 1) <= curves.MOST_ROWS


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_curve_is_found_by_its_model_only(cache: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    target, other = (load_model(path, weights="fp32") for path in (tiny_checkpoint, tiny_draft_checkpoint))
    assert find(target) is None
    path = keep(curve(key=key_of(target)))
    assert find(target) == curve(key=key_of(target))
    assert find(other) is None
    assert find(load_model(tiny_checkpoint, weights="fp16")) is None
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing unfinished
    for change in ({"threads": 99}, {"machine": "other"}, {"version": "99"}, {"device": "cuda"}):
        assert path_of(replace(key_of(target), **change)) != path  # type: ignore[arg-type]


def test_a_file_that_cannot_be_read_is_none(cache: Path, tiny_checkpoint: Path) -> None:
    target = load_model(tiny_checkpoint, weights="fp32")
    path = keep(curve(key=key_of(target)))
    for text in ("{", "[]", json.dumps({"kind": "slipstream costs", "format": 99})):
        path.write_text(text)
        assert find(target) is None
        with pytest.raises(InputError):
            read(path)


def test_a_ledger_survives_being_cut_off(cache: Path) -> None:
    ledger = Ledger({"job": 1})
    ledger.put("a", [1, 2])
    ledger.put("b", {"x": None})
    with ledger.path.open("a") as file:
        file.write('["c", 1')
    again = Ledger({"job": 1})
    assert (again["a"], again["b"], "c" in again, again.resumed) == ([1, 2], {"x": None}, False, 2)
    again.put("d", 4)
    assert Ledger({"job": 1})["d"] == 4
    assert "a" not in Ledger({"job": 2})
    assert Ledger({"job": 1}, fresh=True).resumed == 0


# --- measuring --------------------------------------------------------------------------------------------------------


def test_the_command_measures_keeps_and_shows(cache: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    args = ["costs", str(tiny_checkpoint), "--draft", str(tiny_draft_checkpoint), "--batches", "1,4", "--turns", "2"]
    args += ["--context", "20", "--weights", "fp32", "--draft-weights", "fp32"]
    result = CliRunner().invoke(cli, [*args, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    cells = found["models"][str(tiny_checkpoint)]["cells"]
    assert {(c["rows"], c["batch"]) for c in cells} == {(n, b) for n in range(1, 33) for b in curves.BATCHES}
    assert {c["how"].split(":")[0].split(" ")[0] for c in cells} == {"measured", "predicted"}
    assert all(c["seconds"] > 0 for c in cells)
    kept = find(load_model(tiny_checkpoint, weights="fp32"))
    assert kept is not None
    assert {(c.rows, c.batch) for c in kept.cells} == set(grid(batches=(1, 4)))
    table = CliRunner().invoke(cli, args).stdout
    assert "batch 4" in table
    assert "a draft step is c =" in table


def test_passes_leave_caches_as_they_were() -> None:
    model = TableModel(random_law(9, 0), 9, limit=40)
    steps = curves.measure_curve(model, (1, 2, 3), 10, [(1, 1), (3, 1), (1, 2), (2, 2)], turns=2)
    timing = finished(steps)
    assert {cell: len(some) for cell, some in timing.cells.items()} == dict.fromkeys(timing.cells, 2)
    assert max(call.start + call.count for call in model.calls) <= 40


def test_an_interrupted_curve_loses_one_turn_at_most(cache: Path) -> None:
    """Only whole curves were kept, so that `slipstream costs` of one model began anew."""
    cells, names = [(1, 1), (3, 1), (1, 2)], []
    first = TableModel(random_law(9, 0), 9)
    steps = curves.measure_curve(first, (1, 2, 3), 10, cells, 3, curves.Kept(Ledger("job"), "curve"))
    for name in steps:
        names.append(name)
        if "turn 3" in name:  # turns 1 and 2 are over
            break
    again = TableModel(random_law(9, 0), 9)
    kept = curves.Kept(Ledger("job"), "curve")
    assert [turn in kept for turn in range(3)] == [True, True, False]
    known = kept.turn(1)
    timing = finished(curves.measure_curve(again, (1, 2, 3), 10, cells, 3, kept))
    assert timing.cells[3, 1][1] == known.cells[3, 1][0]
    assert {len(some) for some in timing.cells.values()} == {3}
    assert len(again.calls) < len(first.calls)
    nothing = TableModel(random_law(9, 0), 9)
    whole = finished(curves.measure_curve(nothing, (1, 2, 3), 10, cells, 3, curves.Kept(Ledger("job"), "curve")))
    assert whole.cells == timing.cells
    assert not nothing.calls


def finished(steps: Any) -> curves.Timing:
    """What a generator returns in the end."""
    try:
        while True:
            next(steps)
    except StopIteration as done:
        found: curves.Timing = done.value
        return found


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_a_round_is_taken_back() -> None:
    target = TableModel(random_law(9, 0), 9)
    draft = TableModel(random_law(9, 1), 9)
    place = Place.make(target, ModelDrafter(draft, 9), (1, 2, 3, 4), SamplingParams(), "block")
    for k in (0, 3, 1, 5):
        done = place.round(k)
        assert done.num_drafted == k
        assert place.progress.tokens == [1, 2, 3, 4]
        assert place.progress.cache.tokens == [1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_timed_by_rows_and_drafts(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = TableModel(random_law(9, 0), 9), TableModel(random_law(9, 1), 9)
    for module in (
        "slipstream.measure.rounds",
        "slipstream.decode",
    ):  # rows are its time
        monkeypatch.setattr(f"{module}.perf_counter", lambda: float(target.rows_fed + draft.rows_fed))
    text = tuple(i % 9 for i in range(60))
    params = SamplingParams(temperature=temperature, seed=0)
    for drafter, has_step, reads in (
        (ModelDrafter(draft, 9), True, True),
        (SuffixDrafter(), False, False),
        (NoDrafter(), False, False),
    ):
        into = Timed()
        steps = list(time_rounds(Timing(target, drafter, text, 40, params, "block", turns=2), into))
        costs, plain = into.costs(), isinstance(drafter, NoDrafter)
        assert len(steps) == 3
        assert set(costs.verify) == ({1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 17} if plain else {1})
        assert all(len(some) == 2 for some in into.verify.values())
        assert (len(into.draft) > 1) == has_step
        assert (costs.read > 0) == reads
        assert (costs.prompt > 0) == plain


def test_early_exit_is_timed_with_its_own_verifications(tiny_checkpoint: Path) -> None:
    target: Any = load_model(tiny_checkpoint, weights="fp32")
    into = Timed()
    text = tuple(5 + i % 9 for i in range(60))
    drafter = EarlyExitDrafter(target, 1)
    list(time_rounds(Timing(target, drafter, text, 40, SamplingParams(), "block", turns=2), into))
    assert set(into.costs().verify) == {1, 2, 3, 4, 5, 7, 9, 17}
    assert into.costs().read == 0


# --- the controller ---------------------------------------------------------------------------------------------------


def test_costs_begin_with_what_was_measured_earlier() -> None:
    shape = {1: 1.0, 2: 1.1, 5: 1.2, 9: 3.0}
    costs = Costs(0.1, shape=shape)
    assert [costs.verify()[n] for n in shape] == pytest.approx(list(shape.values()))
    assert costs.most() == 8
    costs.verified(1, 0.2)  # the machine is what it is today; the shape stays
    assert [costs.verify()[n] for n in shape] == pytest.approx([0.2 * v for v in shape.values()])
    for _ in range(9):
        costs.verified(5, 0.5)  # and what is measured today wins
    assert costs.verify()[5] == pytest.approx(0.5, rel=0.05)
    assert Costs(0.1, shape=dict.fromkeys(range(1, 33), 1.0)).most() == 31 <= MOST


def test_a_kept_curve_changes_k_and_nothing_else(
    cache: Path, tiny_checkpoint: Path, tiny_draft_checkpoint: Path
) -> None:
    target, draft = (load_model(path, weights="fp32") for path in (tiny_checkpoint, tiny_draft_checkpoint))
    plain = SpeculativeDecoding(target, draft)
    assert plain.policy.shape == {}  # type: ignore[attr-defined]
    cells = tuple(Cell(n, 1, 0.01 * (1 if n == 1 else 50), 3) for n in (1, 2, 5, 9, 17, 32))
    keep(curve(key=key_of(target), cells=cells))
    dear = SpeculativeDecoding(target, draft)
    assert dear.policy.shape[2] == pytest.approx(50)  # type: ignore[attr-defined]
    assert dear.policy.step is None  # type: ignore[attr-defined]
    keep(curve(key=key_of(draft), cells=(Cell(1, 1, 0.002, 3),)))
    again = SpeculativeDecoding(target, draft)
    assert again.policy.step == pytest.approx(0.2)  # type: ignore[attr-defined]
    answers = [spec.complete("the and in", max_new_tokens=30)[0].tokens for spec in (plain, dear, again)]
    assert answers[0] == answers[1] == answers[2]
    seeded = [spec.complete("the", max_new_tokens=30, temperature=1.0, seed=3)[0] for spec in (plain, dear, again)]
    assert len({one.tokens for one in seeded}) == 1
    assert len({tuple(sorted(one.stats.rounds_by_k.items())) for one in seeded}) == 1


def test_a_policy_of_ones_own_is_left_alone(cache: Path, tiny_checkpoint: Path) -> None:
    target = load_model(tiny_checkpoint, weights="fp32")
    keep(curve(key=key_of(target)))
    own = Adaptive()
    SpeculativeDecoding(target, "suffix", own)
    assert own.shape == {}
    assert SpeculativeDecoding(target, "suffix").policy.shape == curve().shape  # type: ignore[attr-defined]
    assert torch.get_num_threads() == key_of(target).threads
