"""Plans with early exit against what the decoder and the engine really do, counted in rows that go through a layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoding
from slipstream.drafters import CascadeDrafter, Drafter, EarlyExitDrafter, SuffixDrafter
from slipstream.measure import planning
from slipstream.measure.curves import Cell, Curve, Key
from slipstream.measure.planning import PLAIN, Gathered, Subject, batched
from slipstream.measure.prediction import RoundCosts, Times, times
from slipstream.measure.prompts import BenchPrompt
from slipstream.models.llama import LlamaModel
from slipstream.types import Round
from test_early_exit import target as make_target

LAYERS, FIRST = 5, 2
PROMPTS = ((5, 6, 7, 9, 11, 5, 6, 7), (3, 1, 4, 1, 5, 9, 2, 6), (20, 21, 22))
PARAMS = SamplingParams(max_new_tokens=50, ignore_eos=True, temperature=0, seed=0)


class Rows:
    """A clock that counts rows times layers; on a busy machine, ``pace`` times as many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pace = 1.0
        run = LlamaModel._run

        def counted(model: LlamaModel, x: Any, span: Any, num_logits: int) -> Any:
            self.now += len(x) * (span.last - span.first) * self.pace
            return run(model, x, span, num_logits)

        monkeypatch.setattr(LlamaModel, "_run", counted)
        for module in ("slipstream.measure.rounds", "slipstream.decode"):
            monkeypatch.setattr(f"{module}.perf_counter", lambda: self.now)


def drafters(model: Any, least: float) -> dict[str, Drafter]:
    early, suffix = EarlyExitDrafter(model, FIRST), SuffixDrafter()
    return {
        "early": early,
        "suffix": suffix,
        "suffix first": CascadeDrafter([suffix, early], min_confidence=least),
        "early first": CascadeDrafter([early, suffix], min_confidence=least),
    }


class Memory(dict[str, Any]):
    """A ledger that is not on a disk."""

    put = dict.__setitem__


def gathered(subject: Subject) -> Gathered:
    ledger: Any = Memory()
    found = Gathered()
    for step in (planning.gather_texts, planning.gather_trails):
        list(step(subject, ledger, found))
    list(planning.gather_rounds(subject, ledger, found, turns=1))
    return found


def lived(subject: Subject, drafter: Drafter, k: int, prompt: Sequence[int]) -> list[Round]:
    stream = SpeculativeDecoding(subject.target, drafter, k).stream(list(prompt), subject.params)
    stream.finish()
    return list(stream.rounds[1:])


def subject_of(model: Any, drafters: dict[str, Drafter]) -> Subject:
    prompts = [BenchPrompt(str(i), "all", "", ids) for i, ids in enumerate(PROMPTS)]
    return Subject(model, drafters, prompts, PARAMS)


@pytest.mark.parametrize("least", [0.05, 0.3, 0.7])
def test_rounds_and_their_costs_are_those_of_the_decoder(
    least: float, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Plans took early exit in a cascade for a model that goes on from others' tokens, that is always sure, and whose
    drafts are verified from the first layer on. ``A+suffix`` was promised rounds of all that A could draft."""
    clock, model = Rows(monkeypatch), make_target()
    subject = subject_of(model, drafters(model, least))
    found = gathered(subject)
    for name, drafter in subject.drafters.items():
        at = planning.costs_at(found, drafter)
        for k in (1, 2, 4, 7):
            for case, prompt in zip(planning.cases(subject, found, name), PROMPTS, strict=True):
                before = clock.now
                rounds = lived(subject, drafter, k, prompt)
                rows = clock.now - before - len(prompt) * LAYERS
                predicted = times(case, k, at)
                assert predicted.rounds.count == pytest.approx(len(rounds))
                assert predicted.rounds.accepted == pytest.approx(sum(r.num_accepted for r in rounds))
                assert_same_cost(predicted, rounds, rows, exact=name != "early first")


def assert_same_cost(predicted: Times, rounds: Sequence[Round], rows: float, *, exact: bool) -> None:
    """How long a draft gets behind a wrong token is known of those only that do not look at how sure they are."""
    assert predicted.rounds.drafted == pytest.approx(sum(r.num_drafted for r in rounds), rel=1e-9 if exact else 0.15)
    assert predicted.fast == pytest.approx(rows, rel=1e-9 if exact else 0.1)


def test_a_machine_that_is_busy_in_some_turns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose turns fell into busy moments was compared with plain steps of quiet ones."""
    clock, model = Rows(monkeypatch), make_target()
    subject = subject_of(model, drafters(model, 0.7))
    quiet = gathered(subject)
    timing = planning.time_rounds

    def busy(timed: Any, into: Any) -> Iterator[str]:
        turns = timing(timed, into)
        while True:
            clock.pace = 1.0 if timed.verifies else 3.0
            said = next(turns, None)
            clock.pace = 1.0
            if said is None:
                return
            yield said

    monkeypatch.setattr(planning, "time_rounds", busy)
    found = gathered(subject)
    for drafter in subject.drafters.values():
        expected, costs = (planning.costs_at(one, drafter)(30) for one in (quiet, found))
        assert costs.step == pytest.approx(expected.step)
        assert dict(costs.verify) == pytest.approx(dict(expected.verify))


def test_requests_that_exit_early_share_passes_in_a_batch(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """With the native kernels; plans for batches price them so."""
    model, begun = make_target(), []
    run = LlamaModel._run

    def recorded(self: LlamaModel, x: Any, span: Any, num_logits: int) -> Any:
        begun.append(span.first)
        return run(self, x, span, num_logits)

    monkeypatch.setattr(LlamaModel, "_run", recorded)
    outputs = SpeculativeDecoding(model, "early-exit:2", 2).complete([list(ids) for ids in PROMPTS], PARAMS)
    drafted_for = sum(n for o in outputs for k, n in o.stats.rounds_by_k.items() if k)
    assert begun.count(FIRST) <= drafted_for
    assert (begun.count(FIRST) < drafted_for / 2) == (kernels == "native")

    cells = tuple(Cell(n, b, 1.0, 1) for n in (1, 2, 3, 9) for b in (1, 4))
    shared = Curve(Key("m", "fp32", "cpu", 1, "m", "v"), "m", 64, cells, {}, "measured here", "now")
    alone = RoundCosts({1: 1.0, 3: 0.8}, step=0.4, copied={1: 1.0, 3: 1.0})
    for drafter in (EarlyExitDrafter(model, FIRST), drafters(model, 0.7)["suffix first"]):
        costs = batched(Gathered(curves={PLAIN: shared}), drafter, lambda _: alone, 4)(64)
        assert (costs.plain, costs.rows(3), costs.rows(3, 0)) == pytest.approx((1.0, 0.8, 1.0))
        assert costs.step == pytest.approx(0.4)


def test_rounds_that_are_timed_again_count_as_much_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down between timing and answering is in both."""
    clock, model = Rows(monkeypatch), make_target()
    subject = subject_of(model, drafters(model, 0.7))
    found = gathered(subject)
    before = {name: list(some) for name, some in found.rounds.items()}
    ledger: Any = Memory()
    clock.pace = 3.0
    list(planning.gather_rounds(subject, ledger, found, turns=1, again=1))
    clock.pace = 5.0
    list(planning.gather_rounds(subject, ledger, found, turns=1, again=2))
    assert {name: len(some) for name, some in found.rounds.items()} == {
        name: len(some) for name, some in before.items()
    }
    for name, some in found.rounds.items():
        for (context, costs), (same, first) in zip(some, before[name], strict=True):
            assert context == same
            assert costs.verify == pytest.approx({n: 3 * seconds for n, seconds in first.verify.items()})
            assert costs.step == pytest.approx(3 * first.step)
