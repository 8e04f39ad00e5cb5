"""How k is chosen: what pays, what it may depend on, and that it repeats where it must. No test looks at a clock."""

from __future__ import annotations

import importlib.util
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from fakes import (
    ForcedDrafter,
    RecurrentModel,
    TableModel,
    all_outcomes,
    always_wrong,
    decode,
    greedy,
    greedy_of,
    joint_law,
    loaded_dice,
    oracle,
    random_law,
    softmax,
)
from slipstream import InputError, SpeculativeDecoding
from slipstream.controller import Adaptive, Fixed, Halving, Played, make_policy
from slipstream.drafters import CascadeDrafter, ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.estimates import MOST, OF_REQUEST, Acceptance, Costs, Prior
from slipstream.measure.simulation import Simulated, World, simulate
from slipstream.sampling import Sampler
from slipstream.types import Draft

V = 12
LAW = random_law(V, seed=1)
PROMPT = [3, 1, 4]


@pytest.fixture(scope="module")
def study() -> Any:
    """benchmarks/control.py."""
    spec = importlib.util.spec_from_file_location("control", Path(__file__).parents[1] / "benchmarks" / "control.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- fixed and halving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, True, 2.5, "fast", None, Adaptive, [4]])
def test_what_k_may_be(wrong: Any) -> None:
    assert make_policy(3) == Fixed(3)
    assert make_policy("halving").name == "halving"
    assert make_policy("adaptive").name == "adaptive"
    own = Halving(4)
    assert make_policy(own) is own
    with pytest.raises(InputError, match="'adaptive', 'halving', 0"):
        make_policy(wrong)


def test_halving_halves_once_after_the_first_rejection() -> None:
    """It kept on halving, so that one hard sentence left k at 1."""
    expected = greedy(LAW, PROMPT, 90)
    sequence = [*PROMPT, *expected]
    turn = iter([None, 3, None, 0, 2, *[None] * 99])

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        wrong = next(turn)
        right = sequence[len(tokens) : len(tokens) + k]
        return [(t + 1) % V if i == wrong else t for i, t in enumerate(right)]

    answer, rounds = decode(TableModel(LAW, V), ForcedDrafter(propose), PROMPT, k="halving", max_new_tokens=40)
    assert answer == expected[:40]
    assert [r.k for r in rounds][:8] == [0, 8, 8, 4, 4, 4, 4, 4]
    assert [r.num_accepted for r in rounds][1:5] == [8, 3, 4, 0]


# --- exactness: whatever a controller decides -------------------------------------------------------------------------

THREE = random_law(3, seed=21, order=1, spread=1.5)
OTHER = random_law(3, seed=22, order=1, spread=1.5)


class Adversary:
    """Decides by everything that it may look at, as unfavourably as it can: it likes to go on where 0 was drawn."""

    gated = True

    def __init__(self) -> None:
        self.past: list[int] = []
        self.accepted = 0
        self.asked: list[tuple[int, float]] = []

    def ask(self, room: int, length: int) -> int:
        return min(room, [2, 3, 0, 1][(sum(self.past) + self.accepted + length) % 4])

    def goes_on(self, drafted: int, confidence: float) -> bool:
        self.asked.append((drafted, confidence))
        if isnan(confidence):
            return (sum(self.past) + drafted) % 3 != 1
        return confidence > 0.5 or (drafted + self.accepted) % 2 == 0

    def keep(self, draft: Draft) -> int:
        stop = next((i for i, t in enumerate(draft.tokens) if t == 1), len(draft.tokens))
        return stop if self.accepted % 2 == 0 else len(draft.tokens) // 2

    def learn(self, played: Played) -> None:
        self.past += played.tokens
        self.accepted += played.accepted


def peeking(tokens: Sequence[int], k: int) -> Sequence[int]:
    return greedy_of(OTHER).draft(tokens, k).tokens


class EndFirst(ModelDrafter):
    """Reads the last token of the prompt at first, and all of it from the second draft on."""

    def start(self, sampler: Any) -> Any:
        session: Any = super().start(sampler)
        session.latest, drafted = 1, session.draft

        def draft(tokens: Sequence[int], k: int) -> Draft:
            made: Draft = drafted(tokens, k)
            session.latest = None
            return made

        session.draft = draft
        return session


DRAFTERS: dict[str, Callable[[], Any]] = {
    "end first": lambda: EndFirst(RecurrentModel(3, seed=5), 3),
    "model": lambda: ModelDrafter(TableModel(OTHER, 3), 3),
    "same model": lambda: ModelDrafter(TableModel(THREE, 3), 3),
    "copies": lambda: ForcedDrafter(peeking),
    "suffix": lambda: SuffixDrafter(min_probability=0),
}


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_no_controller_changes_the_law(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By enumeration, to 1e-12. A drawn token that is dropped, or a cut that knows it, would bias the answer."""
    prompt = [1, 2, 1] if kind in ("suffix", "end first") else [1]
    settings: dict[str, Any] = {
        "max_new_tokens": 4 if kind not in ("model", "end first") else 3,
        "temperature": temperature,
    }

    def program(dice: Any) -> tuple[int, ...]:
        with monkeypatch.context() as loaded:
            loaded_dice(loaded, dice)
            target = TableModel(THREE, 3)
            return tuple(decode(target, DRAFTERS[kind](), prompt, controller=Adversary(), **settings)[0])

    law = all_outcomes(program)
    expected = joint_law(THREE, prompt, settings["max_new_tokens"], lambda row, _: softmax(row / temperature, []))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert {s: law.get(s, 0.0) for s in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("policy", ["adversary", "adaptive", "halving"])
@pytest.mark.parametrize("kind", ["model", "copies"])
def test_no_controller_changes_the_law_by_chi_square(kind: str, policy: str) -> None:
    drafter, samples = DRAFTERS[kind](), 700
    shared = Adaptive()

    def answer(seed: int) -> tuple[int, ...]:
        chosen = (
            {"controller": Adversary()} if policy == "adversary" else {"k": shared if policy == "adaptive" else policy}
        )
        given = {"max_new_tokens": 5, "temperature": 1.0, "seed": seed, **chosen}
        return tuple(decode(TableModel(THREE, 3), drafter, [1], **given)[0])

    counts = Counter(answer(seed)[2:] for seed in range(samples))
    expected: Counter[Any] = Counter()
    for sequence, p in joint_law(THREE, [1], 5, softmax).items():
        expected[sequence[2:]] += p
    often = [s for s, p in expected.items() if samples * p >= 5]
    observed, wanted = [counts[s] for s in often], [samples * expected[s] for s in often]
    rest = samples - sum(wanted)
    assert chisquare([*observed, samples - sum(observed)], [*wanted, rest]).pvalue > 1e-3


@pytest.mark.parametrize("k", ["adaptive", "halving"])
@pytest.mark.parametrize("kind", ["model", "same", "oracle", "wrong", "suffix"])
def test_greedy_answers_stay_what_they_are(kind: str, k: str) -> None:
    expected = greedy(LAW, PROMPT, 60)
    made: dict[str, Any] = {
        "model": ModelDrafter(TableModel(random_law(V, seed=9), V), V),
        "same": ModelDrafter(TableModel(LAW, V), V),
        "oracle": oracle([*PROMPT, *expected]),
        "wrong": always_wrong([*PROMPT, *expected], V),
        "suffix": SuffixDrafter(min_probability=0),
    }
    assert decode(TableModel(LAW, V), made[kind], PROMPT, k=k, max_new_tokens=60)[0] == expected


# --- the gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_drafter_asks_before_each_pass_and_before_each_draw(temperature: float) -> None:
    """At temperature 0 every q is one-hot, so the confidence is that of the logits."""
    controller = Adversary()
    controller.ask = lambda room, length: min(room, 3)  # type: ignore[method-assign]
    controller.goes_on = lambda d, c: controller.asked.append((d, c)) or True  # type: ignore[func-returns-value,method-assign]
    controller.keep = lambda draft: len(draft.tokens)  # type: ignore[method-assign]
    decode(
        TableModel(LAW, V), ModelDrafter(TableModel(LAW, V), V), PROMPT, controller=controller, max_new_tokens=20,
        temperature=temperature,
    )  # fmt: skip
    asked = controller.asked
    assert [d for d, _ in asked[:6]] == [0, 0, 1, 1, 2, 2]
    assert all(isnan(c) for _, c in asked[::2])
    assert all(1 / V <= c <= 1 for _, c in asked[1::2])
    first = greedy(LAW, PROMPT, 1) if temperature == 0 else None
    if first is not None:
        assert asked[1][1] == pytest.approx(float(torch.softmax(LAW([*PROMPT, *first]), -1).max()))
        assert len({round(c, 6) for _, c in asked[1::2]}) > 3


def test_a_stopped_draft_says_so_and_costs_no_pass() -> None:
    draft = TableModel(LAW, V)
    session = ModelDrafter(draft, V).start(sampler())
    session.gate = lambda drafted, confidence: drafted < 2
    made = session.draft(PROMPT, 5)
    assert (len(made.tokens), made.ended, len(made.confidence)) == (2, "controller", 2)
    assert len(draft.calls) == 2
    session.gate = lambda drafted, confidence: False
    assert session.draft([*PROMPT, *made.tokens], 5) == Draft(ended="controller")
    assert len(draft.calls) == 2


def test_a_session_that_was_stopped_before_its_first_pass_catches_up() -> None:
    """It took tokens for read that it had only been shown, and cut its cache to more than was in it."""
    session = ModelDrafter(TableModel(LAW, V), V).start(sampler())
    session.gate = lambda drafted, confidence: False
    session.draft(PROMPT, 3)
    session.draft([*PROMPT, 1, 2], 3)
    session.gate = None
    assert session.draft([*PROMPT, 1, 2, 5], 3).tokens == tuple(greedy(LAW, [*PROMPT, 1, 2, 5], 3))


def sampler() -> Any:
    from slipstream.sampling import Sampler
    from slipstream.types import SamplingParams

    return Sampler(SamplingParams(), len(PROMPT), (), 0)


def test_copies_are_cut_and_say_so() -> None:
    expected = greedy(LAW, PROMPT, 12)
    controller = Adversary()
    controller.ask = lambda room, length: room  # type: ignore[method-assign]
    controller.keep = lambda draft: 1  # type: ignore[method-assign]
    answer, rounds = decode(
        TableModel(LAW, V), oracle([*PROMPT, *expected]), PROMPT, controller=controller, max_new_tokens=12
    )
    assert answer == expected
    assert [(r.num_drafted, r.ended) for r in rounds[1:4]] == [(1, "controller")] * 3
    assert rounds[1].k == 10
    assert rounds[0].ended is None
    assert rounds[1].sources == ("forced",)


# --- adaptive, simulated ----------------------------------------------------------------------------------------------


def linear(slope: float) -> Callable[[int], float]:
    return lambda n: 1 + slope * (n - 1)


def asked_places(result: Simulated) -> Iterator[tuple[int, Played]]:
    place = 0
    for played in result.played:
        yield place, played
        place += len(played.tokens)


@pytest.mark.parametrize(("step", "slope"), [(0.05, 0.02), (0.1, 0.05), (0.3, 0.05), (0.6, 0.1), (0.0, 0.1)])
@pytest.mark.parametrize("stepwise", [True, False])
def test_a_useless_draft_costs_next_to_nothing(step: float, slope: float, stepwise: bool) -> None:
    """W1. Within 60 rounds to plain decoding, by then at most 12 plain passes lost; then probes, one in 17 at most."""
    world = World(step, linear(slope), lambda _p, _j: 0.0, read=0.02 * step, stepwise=stepwise)
    result = simulate(world, Adaptive(), 1500)
    assert result.seconds <= 1.02 * result.tokens
    places = [place for place, played in asked_places(result) if played.kept]
    late = [place for place in places if place >= 60]
    assert len(late) <= 1500 / 16
    assert all(played.kept <= 1 for place, played in asked_places(result) if place >= 60)
    assert sum(p.draft_seconds + p.verify_seconds - 1 for place, p in asked_places(result) if place < 60) < 12
    if stepwise:
        assert all(not p.draft.tokens and not p.draft_seconds for p in result.played if not p.asked)


def test_short_answers_do_not_pay_for_a_probe_each() -> None:
    """W1. Two plain passes a request were free to probe with: a tenth of an answer of twenty tokens."""
    world, policy = World(0.2, linear(0.05), lambda _p, _j: 0.0, read=0.03), Adaptive()
    simulate(world, policy, 60, prompt=200)
    later = [simulate(world, policy, 20, prompt=200) for _ in range(60)]
    assert sum(one.seconds for one in later) <= 1.02 * sum(one.tokens for one in later)
    assert any(played.draft.tokens for one in later for played in one.played)  # but it is tried again


@pytest.mark.parametrize("step", [0.05, 0.1])
def test_it_recovers_between_short_answers(step: float) -> None:
    chance, policy, fresh = [0.0], Adaptive(), Adaptive()
    world = World(step, linear(0.05), lambda _p, _j: chance[0], read=0.02 * step)
    for _ in range(20):
        simulate(world, policy, 30, prompt=100)
    chance[0] = 0.9
    late, best = ([simulate(world, one, 30, prompt=100).seconds for _ in range(40)][-10:] for one in (policy, fresh))
    assert sum(late) < 1.05 * sum(best)


@pytest.mark.parametrize(("step", "slope", "rounds"), [(0.05, 0.02, 40), (0.1, 0.05, 40), (0.3, 0.05, 140)])
def test_it_recovers_when_the_text_turns_easy(step: float, slope: float, rounds: int) -> None:
    """At the next probe, which comes every 17 rounds, or as often as a hundredth of the time allows."""
    world = World(step, linear(slope), lambda place, _j: 0.9 if place >= 400 else 0.0, read=0.02 * step)
    result = simulate(world, Adaptive(), 1000)
    after = [played for place, played in asked_places(result) if place >= 400]
    assert sum(played.kept >= 1 for played in after[rounds:]) > 0.9 * len(after[rounds:])
    assert sum(len(played.tokens) for played in after[rounds:]) > 2.2 * len(after[rounds:])


class Timed(TableModel):
    """Each pass moves a clock on: by ``cost`` and 0.03 of it for each further row."""

    def __init__(self, clock: SimpleNamespace, cost: float, law: Any, vocab: int, name: str) -> None:
        super().__init__(law, vocab, name=name)
        self._clock, self._cost = clock, cost

    def forward(self, tokens: Sequence[int], cache: Any, num_logits: int) -> torch.Tensor:
        self._clock.now += self._cost * (0.97 + 0.03 * len(tokens))
        return super().forward(tokens, cache, num_logits)


def peaked(says: Callable[[int], int], vocab: int) -> Callable[[Sequence[int]], torch.Tensor]:
    """A law that gives 0.8 to what ``says`` of the number of tokens so far."""

    def law(tokens: Sequence[int]) -> torch.Tensor:
        row = torch.full((vocab,), -9.0, dtype=torch.float64)
        row[says(len(tokens))] = -0.2
        return row

    return law


class Dumb(ModelDrafter):
    """None of its tokens is one of the target's, as it may be with two tokenizers."""

    def start(self, sampler: Sampler) -> Any:
        session: Any = super().start(sampler)
        session._target_logits = lambda logits: None
        return session


TURN, AFTER = 400, 400
#: Members: c copies, m is a model that is right from TURN on, o the same without gate and confidence, x a model that is
#: always wrong, n one that reads and then has nothing to say.
SORTS = ["c", "m", "o", "n", "cm", "mc", "co", "oc", "cmx", "cx", "ox", "cn"]


@pytest.mark.parametrize("cost", [0.1, 0.2])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("sort", SORTS)
def test_every_drafter_falls_silent_and_comes_back(
    sort: str, repeats: bool, cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W1, W3, by the real decoder. In a cascade with copies a model that had fallen silent was never tried again."""
    clock, vocab, luck = SimpleNamespace(now=0.0), 2 * (TURN + AFTER), random.Random(1)
    monkeypatch.setattr("slipstream.decode.perf_counter", lambda: clock.now)
    text = luck.sample(range(vocab), TURN + AFTER + 100)
    if repeats:
        text[TURN:] = [text[i % 100] for i in range(len(text) - TURN)]
    target = Timed(clock, 1.0, peaked(text.__getitem__, vocab), vocab, "target")

    def guess(at: int, *, useless: bool) -> int:
        return (text[at] + (useless or at < TURN)) % vocab if at < len(text) else 0

    def own(tokens: Sequence[int], k: int) -> list[int]:
        clock.now += cost
        return [guess(len(tokens) + i, useless=False) for i in range(k)]

    def made(kind: str) -> Any:
        if kind in "co":
            return SuffixDrafter() if kind == "c" else ForcedDrafter(own)
        useless = kind == "x"
        law = peaked(lambda at: guess(at, useless=useless), vocab)
        return (Dumb if kind == "n" else ModelDrafter)(Timed(clock, cost, law, vocab, kind), vocab)

    members = [made(kind) for kind in sort]
    drafter = CascadeDrafter(members) if len(sort) > 1 else members[0]
    answer, rounds = decode(target, drafter, text[:16], k="adaptive", max_new_tokens=TURN + AFTER)
    assert answer == text[16 : 16 + TURN + AFTER]
    ends = list(accumulate(len(r.tokens) for r in rounds))
    before = [r for r, end in zip(rounds, ends, strict=True) if end <= TURN - 16]
    after = rounds[len(before) :]
    # At the beginning some plain passes go into finding out; then next to nothing does.
    assert sum(r.total_seconds for r in before) <= len(before) + 18
    half = before[len(before) // 2 :]
    assert sum(r.total_seconds for r in half) <= 1.025 * len(half)
    good = sort in ("m", "o", "cm", "co", "oc", "ox") or (repeats and "c" in sort)
    assert sum(r.total_seconds for r in after) < (0.75 if good else 1.02) * sum(len(r.tokens) for r in after)
    assert all(r.total_seconds == pytest.approx(r.draft_seconds + r.verify_seconds) for r in rounds)


def test_reading_what_was_missed_is_priced_in() -> None:
    """Probing had a draft model read hundreds of tokens for one guess."""
    dear = World(0.3, linear(0.05), lambda _p, _j: 0.0, read=0.1)
    result = simulate(dear, Adaptive(), 1500)
    assert result.seconds <= 1.02 * result.tokens


def test_a_long_prompt_is_not_read_by_a_draft_that_cannot_earn_it_back() -> None:
    world, policy = World(0.6, linear(0.05), lambda _p, _j: 0.7, read=0.06), Adaptive()
    assert any(played.draft.tokens for played in simulate(world, policy, 100).played)  # it knows what steps cost now
    result = simulate(world, policy, 100, prompt=5000)
    assert result.seconds <= 1.02 * result.tokens
    assert not any(played.draft.tokens for played in result.played)


BRIEF = World(0.2, linear(0.05), lambda _p, _j: 0.9, read=0.05)


def test_a_short_answer_to_a_long_prompt_does_not_wait_for_all_of_it_to_be_read() -> None:
    """Reading 400 tokens took longer than answering in 20."""
    prompt, count = 400, 20
    result = simulate(BRIEF, Adaptive(), count, prompt=prompt)
    assert any(played.draft.tokens for played in result.played)
    assert result.seconds <= count + 0.05 * 64


def test_a_draft_that_misses_the_beginning_reads_it_once_the_answer_is_long() -> None:
    lost = replace(BRIEF, chance_of_end=lambda _p, _j: 0.1)
    result = simulate(lost, Adaptive(), 800, prompt=400)
    brief, whole = (sum(len(p.tokens) for p in some) / len(some) for some in (result.played[:12], result.played[-60:]))
    assert whole > 2 * brief
    assert result.seconds <= 0.65 * result.tokens
    fine = simulate(replace(BRIEF, chance_of_end=lambda _p, _j: 0.9), Adaptive(), 800, prompt=400)
    assert fine.seconds <= result.seconds - 10


def test_nobody_reads_all_for_the_last_few_tokens() -> None:
    controller = Adaptive().start(SimpleNamespace(gate=None, latest=None), "d", repeatable=False, isolated=True)
    for length in range(500, 700):
        controller.ask(8, length)
        controller.learn(Played(length, 0, Draft(), 0, (1,), 0.0, 1.0))
    session = controller._session  # type: ignore[attr-defined]
    assert session.latest == 64


def test_against_every_fixed_k_with_hindsight(study: Any) -> None:
    """A sample of benchmarks/control.py: at least 0.95 of the best in a short run, and 0.98 of plain."""
    chosen = ["c=0.1 b=.05 alpha 0.8", "c=0.3 b=.05 alpha 0.5", "c=0.2 b=.02 switching .95/.1 every 100"]
    for name, world in study.worlds():
        if name in chosen:
            own = study.speed(world, Adaptive(shared=False), 1000, range(1))
            best, _ = study.best_fixed(world, 1000, range(1))
            assert own >= 0.95 * best, name
            assert own >= 0.98, name


def test_confidence_tells_where_to_stop(study: Any) -> None:
    """A drafter that knows when it is right beats any fixed k."""
    knows = study.known_chances(5)
    world = World(0.2, linear(0.05), lambda place, _j: knows(place), confidence=knows)
    best, _ = study.best_fixed(world, 1000, range(1))
    assert simulate(world, Adaptive(), 1000).speed > 1.03 * best


def test_requests_start_from_what_earlier_ones_saw() -> None:
    world = World(0.3, linear(0.05), lambda _p, _j: 0.0)
    together, apart = Adaptive(), Adaptive(shared=False)
    first = [simulate(world, policy, 150).seconds for policy in (together, apart)]
    again = [simulate(world, policy, 150).seconds for policy in (together, apart)]
    assert first[0] == first[1] == again[1]
    assert again[0] < first[0] - 1
    assert together.start(object(), "d", repeatable=False, isolated=True)._knowledge is not (  # type: ignore[attr-defined]
        together.start(object(), "d", repeatable=False, isolated=False)._knowledge  # type: ignore[attr-defined]
    )


# --- seeds ------------------------------------------------------------------------------------------------------------


def jumping_clock(steps: Sequence[float]) -> Callable[[], float]:
    """A clock that runs at another pace at every look."""
    now, looks = 0.0, 0

    def clock() -> float:
        nonlocal now, looks
        now += steps[looks % len(steps)]
        looks += 1
        return now

    return clock


@pytest.mark.parametrize("drafting", ["model", "suffix"])
def test_a_seeded_request_repeats_whatever_the_clock_says(drafting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """k followed the clock, and with k the random numbers that met each token."""
    law, other = random_law(V, seed=3, order=1), random_law(V, seed=4, order=1)

    def made() -> SpeculativeDecoding:
        draft: Any = TableModel(other, V) if drafting == "model" else "suffix"
        return SpeculativeDecoding(TableModel(law, V), draft, temperature=1.0, max_new_tokens=80)

    answers, paces = [], [[1.0], [0.001, 5.0, 0.2], [7.0, 0.1, 0.1, 3.0, 0.01], [1e-9]]
    one = made()
    for number, pace in enumerate(paces):
        monkeypatch.setattr("slipstream.decode.perf_counter", jumping_clock(pace))
        for spec in (one, made()):
            for history in range(number):
                spec.complete([[1, 2, history]])
            [output] = spec.complete([PROMPT], seed=11)
            answers.append(output.tokens)
    assert len(set(answers)) == 1
    [other_seed] = one.complete([PROMPT], seed=12)
    assert other_seed.tokens != answers[0]


def test_bit_exact_answers_do_not_depend_on_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers that belong to positions: there the clock may have its way."""
    law = random_law(V, seed=3, order=1)
    plain, _ = decode(TableModel(law, V), NoDrafter(), PROMPT, coupled=True, temperature=1.0, max_new_tokens=60)
    for pace in ([1.0], [0.001, 5.0, 0.2], [7.0, 0.1, 0.1, 3.0, 0.01]):
        monkeypatch.setattr("slipstream.decode.perf_counter", jumping_clock(pace))
        drafter = ModelDrafter(TableModel(random_law(V, seed=4, order=1), V), V)
        answer, rounds = decode(
            TableModel(law, V), drafter, PROMPT, k="adaptive", coupled=True, temperature=1.0, max_new_tokens=60
        )
        assert answer == plain
        assert any(r.num_drafted for r in rounds)


def test_isolated_requests_leave_nothing_behind() -> None:
    spec = SpeculativeDecoding(TableModel(LAW, V), "suffix", max_new_tokens=40)
    spec.complete([PROMPT], share=False)
    assert not spec.policy._knowledge  # type: ignore[attr-defined]
    spec.complete([PROMPT])
    assert spec.policy._knowledge  # type: ignore[attr-defined]


# --- estimates --------------------------------------------------------------------------------------------------------


def test_costs_before_anything_is_measured() -> None:
    costs = Costs(0.15)
    assert costs.verify()[1] == 1
    assert costs.verify()[5] == pytest.approx(1.2)
    assert (costs.draft().call, costs.draft().step) == (0, pytest.approx(0.15))


def test_costs_follow_what_is_measured() -> None:
    costs = Costs(0.15)
    for _ in range(5):
        costs.verified(1, 0.1)
        costs.verified(5, 0.14)
        costs.drafted(2, 1, 0.05)
        costs.drafted(4, 1, 0.09)
        costs.drafted(2, 100, 0.55)
    costs.verified(5, 30.0)  # a hiccup
    v = costs.verify()
    assert (v[1], v[5]) == (pytest.approx(0.1), pytest.approx(0.14))
    assert 0.1 < v[3] <= 0.12
    assert list(v) == sorted(v)
    draft = costs.draft()
    assert (draft.call, draft.step) == (pytest.approx(0.01), pytest.approx(0.02))
    assert draft.read == pytest.approx(0.005)


def test_a_pass_over_more_rows_is_never_taken_for_cheaper() -> None:
    costs = Costs(0.15)
    for rows, seconds in ((1, 1.0), (3, 1.4), (4, 1.2), (9, 1.1)):
        for _ in range(3):
            costs.verified(rows, seconds)
    assert list(costs.verify()) == sorted(costs.verify())
    assert len(costs.verify()) == MOST + 2


def test_fixed_costs_learn_nothing() -> None:
    costs = Costs(0.15, fixed=True)
    before = costs.verify(), costs.draft()
    costs.verified(1, 9.0)
    costs.drafted(3, 1, 9.0)
    assert (costs.verify(), costs.draft()) == before


def test_acceptance_follows_positions_and_confidence() -> None:
    acceptance = Acceptance(Prior(), OF_REQUEST)
    luck = torch.Generator().manual_seed(0)
    for _ in range(400):
        for position, rate in enumerate((0.9, 0.6)):
            sure = float(torch.rand((), generator=luck))
            right = float(torch.rand((), generator=luck)) < (rate if sure > 0.5 else rate - 0.4)
            acceptance.verified(position, sure, float(right))
        acceptance.end_round()
    first, second = acceptance.positions(2)
    assert first == pytest.approx(0.7, abs=0.12)
    assert second == pytest.approx(0.4, abs=0.12)
    assert acceptance.given(0.95) - acceptance.given(0.3) == pytest.approx(0.4, abs=0.15)


def test_acceptance_turns_with_the_text() -> None:
    """A hundred easy tokens took as many hard ones to be outweighed."""
    acceptance = Acceptance(Prior(), OF_REQUEST)
    for _ in range(200):
        acceptance.verified(0, None, 1.0)
    for _ in range(12):
        acceptance.verified(0, None, 0.0)
    assert acceptance.level < 0.5


def test_a_new_request_believes_the_earlier_ones_only_so_much() -> None:
    old = Acceptance(Prior(), OF_REQUEST)
    for _ in range(300):
        old.verified(0, 0.5, 0.0)
    new = Acceptance(old.summary(8.0), OF_REQUEST)
    assert new.level < 0.2
    for _ in range(20):
        new.verified(0, 0.5, 1.0)
    assert new.level > 0.6


# --- what is told -----------------------------------------------------------------------------------------------------


def test_statistics_of_drafts_from_several_sources() -> None:
    expected = greedy(LAW, PROMPT, 30)
    sequence = [*PROMPT, *expected]

    def propose(tokens: Sequence[int], k: int) -> Draft:
        right = tuple(sequence[len(tokens) : len(tokens) + min(k, 3)])
        return Draft(right, ended="no match", sources=("suffix", "model", "model")[: len(right)])

    spec = SpeculativeDecoding(TableModel(LAW, V), ForcedDrafter(propose), 5, max_new_tokens=30)
    stream = spec.stream(PROMPT)
    output = stream.finish()
    stats = output.stats
    assert list(output.tokens) == expected
    assert sum(stats.drafted_by.values()) == stats.drafted
    assert stats.drafted_by["model"] > stats.drafted_by["suffix"] > 5
    assert stats.accepted_by == stats.drafted_by
    assert stats.rounds_by_end == {"no match": sum(r.k > 0 for r in stream.rounds)}
    assert sum(stats.rounds_by_k.values()) == stats.rounds - 1
    assert stats.mean_k == pytest.approx(stats.drafted / (stats.rounds - 1))
    assert [r.k for r in stream.rounds[:4]] == [0, 5, 5, 5]


def test_ids_that_the_target_cannot_emit_end_a_draft_by_vocabulary() -> None:
    drafter = ForcedDrafter(lambda tokens, k: [0, V + 1, 0][:k])
    target = TableModel(LAW, V, embedding=V + 4)
    _, rounds = decode(target, drafter, PROMPT, k=3, max_new_tokens=9)
    assert {r.ended for r in rounds[1:-2]} == {"vocabulary"}


def test_the_simulator_is_the_arithmetic_of_the_theory() -> None:
    """S(k) = E(k) / (c k + v(k + 1)), with the costs and the acceptance that it was given."""
    world = World(0.1, linear(0.05), lambda _p, _j: 0.8)
    for k in (0, 1, 4):
        theory = sum(0.8**j for j in range(k + 1)) / (0.1 * k + 1 + 0.05 * k)
        result = simulate(replace(world, seed=k), Fixed(k), 3000)
        assert result.speed == pytest.approx(theory)
        assert result.tokens == pytest.approx(result.expected, rel=0.05)
