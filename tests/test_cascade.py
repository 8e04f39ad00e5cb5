"""Several drafters in one draft: who proposes what, with which q, and what a session is asked."""

from __future__ import annotations

import random
import runpy
from collections.abc import Callable, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes import (
    INF,
    ForcedDrafter,
    RecurrentModel,
    TableModel,
    always_wrong,
    decode,
    greedy,
    oracle,
    random_law,
)
from slipstream import Draft, InputError, SamplingParams, SpeculativeDecoding
from slipstream.cli import drafts
from slipstream.controller import Adaptive, Played
from slipstream.drafters import NAMES, CascadeDrafter, ModelDrafter, NoDrafter, SuffixDrafter, make_drafter
from slipstream.drafters.cascade import joined
from slipstream.sampling import Sampler

V = 12
LAW = random_law(V, seed=3)
SMALL = random_law(V, seed=4)
EXAMPLES = Path(__file__).parents[1] / "examples"


def sampler(stop_ids: Sequence[int] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), 2, stop_ids, 0)


class Scripted:
    """A drafter and its session: proposes tokens with confidences, behind whatever; remembers what it was asked."""

    gate: Callable[[int, float], bool] | None = None
    copies = False

    def __init__(self, name: str, answer: Callable[[list[int]], list[tuple[int, float]]]) -> None:
        self.name = name
        self.answer = answer
        self.asked: list[tuple[int, int, int]] = []
        self.closed: list[list[int]] = []

    def start(self, sampler: Sampler) -> Scripted:
        return self

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        return self.draft_after(tokens, (), k)

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        self.asked.append((len(tokens), len(drafted), k))
        made: list[tuple[int, float]] = []
        for token, sure in self.answer([*tokens, *drafted]):
            if len(made) == k:
                break
            if self.gate is not None and not self.gate(len(made), sure):
                return Draft(tuple(t for t, _ in made), ended="controller", confidence=tuple(c for _, c in made))
            made.append((token, sure))
        ended = "limit" if len(made) == k else "no match"
        return Draft(tuple(t for t, _ in made), ended=ended, confidence=tuple(c for _, c in made))

    def close(self, tokens: Sequence[int]) -> None:
        self.closed.append(list(tokens))


def copier(*spans: tuple[int, list[float]]) -> Scripted:
    """Proposes 1s with the given confidences where the text so far has a given length."""
    known = dict(spans)
    made = Scripted("copier", lambda text: [(1, sure) for sure in known.get(len(text), [])])
    made.copies = True
    return made


def writer() -> Scripted:
    """Always proposes 2s, not very sure."""
    return Scripted("writer", lambda text: [(2, 0.3)] * 20)


# --- who drafts -------------------------------------------------------------------------------------------------------


def test_the_next_one_goes_on_where_the_first_is_not_sure_and_back() -> None:
    first, second = copier((3, [0.9, 0.8, 0.5]), (6, [0.95, 0.1])), writer()
    draft = CascadeDrafter([first, second], min_confidence=0.7).start(sampler()).draft([5, 6, 7], 6)
    assert draft == Draft(
        tokens=(1, 1, 2, 1, 2, 2),
        ended="limit",
        sources=("copier", "copier", "writer", "copier", "writer", "writer"),
        confidence=(0.9, 0.8, 0.3, 0.95, 0.3, 0.3),
    )
    # Who stopped is asked again only behind another's token; the later one is asked for one token at a time.
    assert first.asked == [(3, 0, 6), (3, 3, 3), (3, 5, 1)]
    assert second.asked == [(3, 2, 1), (3, 4, 1), (3, 5, 1)]


def test_why_a_cascade_ends() -> None:
    def ended(*drafters: Any, gate: Any = None, k: int = 4) -> tuple[tuple[int, ...], str]:
        one = CascadeDrafter(drafters).start(sampler())
        one.gate = gate
        draft = one.draft([5, 6, 7], k)
        return draft.tokens, draft.ended

    assert ended(copier((3, [0.9] * 9)), writer()) == ((1, 1, 1, 1), "limit")
    assert ended(writer(), copier((3, [0.9]))) == ((1,), "no match")
    assert ended(writer(), copier()) == ((), "no match")
    assert ended(copier((3, [0.9])), ForcedDrafter(lambda tokens, k: [])) == ((1,), "no match")
    assert ended(copier((3, [0.9, 0.2])), copier(), gate=lambda n, c, _: True) == ((1,), "no match")
    assert ended(copier((3, [0.9] * 9)), writer(), gate=lambda n, c, _: n < 2) == ((1, 1), "controller")
    assert ended(copier((3, [0.9])), writer(), gate=lambda n, c, _: n < 3) == ((1, 2, 2), "controller")
    assert ended(copier((3, [0.9])), writer(), gate=lambda n, c, _: c > 0.5) == ((1,), "controller")


class Passing(Scripted):
    """Asks before each of its tokens whether a pass is worth it, as a model does."""

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        if self.gate is not None and not self.gate(0, nan):
            return Draft(ended="controller")
        return super().draft_after(tokens, drafted, k)


def passing() -> Passing:
    return Passing("model", lambda text: [(2, 0.3)] * 20)


def test_what_was_copied_less_surely_stands_in_for_a_model_that_is_not_worth_a_pass() -> None:
    """With a useless model a cascade copied less than the copier alone, since its copies had to beat the model's."""
    asked: list[tuple[int, float]] = []

    def gate(number: int, sure: float, source: str = "", /) -> bool:
        asked.append((number, sure))
        return sure > 0.4  # not NaN

    one = CascadeDrafter([copier((3, [0.9, 0.5, 0.45, 0.3]), (4, [0.5, 0.45, 0.3])), passing()]).start(sampler())
    one.gate = gate
    draft = one.draft([5, 6, 7], 6)
    assert (draft.tokens, draft.sources) == ((1, 1, 1), ("copier",) * 3)
    assert [number for number, sure in asked] == [0, 1, 1, 2, 3]


def test_a_copier_behind_a_model_that_is_not_worth_a_pass_is_asked() -> None:
    """Only a copier that was named first stood in: behind a useless model another one was never asked."""
    one = CascadeDrafter([passing(), copier((3, [0.5, 0.45, 0.3]))]).start(sampler())
    one.gate = lambda number, sure, _: sure > 0.4
    draft = one.draft([5, 6, 7], 6)
    assert (draft.tokens, draft.sources, draft.ended) == ((1, 1), ("copier",) * 2, "controller")
    one.gate = None
    assert one.copied([5, 6, 7], 6, sure=False).tokens == (1, 1, 1)
    assert one.copied([5, 6, 7], 6, sure=True).tokens == ()  # a draft begins with the model's


def test_a_drafter_without_a_gate_is_asked_and_cut_as_the_controller_says() -> None:
    """In a cascade nobody asked whether a drafter of one's own was worth its time, however long it took."""
    heard: list[tuple[int, bool, str]] = []
    most = [0]

    def gate(number: int, sure: float, source: str = "", /) -> bool:
        heard.append((number, isnan(sure), source))
        return number < most[0]

    own = ForcedDrafter(lambda tokens, k: [4] * k)
    one = CascadeDrafter([copier((3, [0.9])), own]).start(sampler())
    one.gate = gate
    for most[0], tokens, calls in ((0, (), 0), (3, (4, 4, 4), 1)):
        assert one.draft([5, 6], 6).tokens == tokens
        assert len(own.asked) == calls
    assert heard == [(0, True, "forced"), (0, True, "forced"), *((n, False, "forced") for n in range(4))]


def test_a_model_that_drafted_is_not_followed_by_unsure_copies() -> None:
    one = CascadeDrafter([copier((4, [0.6])), passing()]).start(sampler())
    one.gate = lambda number, sure, _: number == 0
    assert one.draft([5, 6, 7], 6).tokens == (2,)


def test_how_sure_a_copy_has_to_be_follows_the_model() -> None:
    """0.7 whatever the model: half as much would do for one that is hardly ever right."""
    told: list[tuple[float, str, str]] = []

    def prefer(sure: float, source: str, other: str, /) -> bool:
        told.append((sure, source, other))
        return sure > 0.4

    made = [CascadeDrafter([copier((3, [0.9, 0.5, 0.3])), writer()], min_confidence=m) for m in (None, 0.7)]
    sessions = [one.start(sampler()) for one in made]
    for session in sessions:
        session.prefer = prefer
    assert [session.draft([5, 6, 7], 3).tokens for session in sessions] == [(1, 1, 2), (1, 2, 2)]
    assert told == [(0.9, "copier", "writer"), (0.5, "copier", "writer"), (0.3, "copier", "writer")]


@pytest.mark.parametrize("right", [0.1, 0.9])
def test_a_controller_prefers_copies_to_a_model_that_is_seldom_right(right: float) -> None:
    luck = random.Random(0)
    controller = Adaptive().start(CascadeDrafter([copier(), writer()]).start(sampler()), "both", **ALONE)
    for length in range(20, 320, 2):
        if not controller.ask(8, length):  # a plain pass is due, to know what one costs
            controller.learn(Played(length, 0, Draft(), 0, (3,), 0.0, 1.0))
            continue
        stands = luck.random() < right
        draft = Draft((2,), confidence=(0.5,), sources=("writer",))
        controller.learn(Played(length, 8, draft, 1, (2, 3) if stands else (3,), 0.1, 1.0))
    assert controller.prefers(0.5, "copier", "writer") == (right < 0.5)


ALONE: dict[str, Any] = {"repeatable": False, "isolated": True}


def test_the_gate_hears_the_place_in_the_whole_draft() -> None:
    heard = []
    one = CascadeDrafter([copier((3, [0.9, 0.8, 0.5]), (6, [0.95])), writer()], min_confidence=0.7).start(sampler())
    one.gate = lambda number, sure, _: heard.append((number, sure)) or True  # type: ignore[func-returns-value]
    one.draft([5, 6, 7], 5)
    assert heard == [(0, 0.9), (1, 0.8), (2, 0.3), (3, 0.95), (4, 0.3)]


def test_a_gate_that_was_taken_away_is_not_asked() -> None:
    one = CascadeDrafter([copier((3, [0.9] * 9)), writer()]).start(sampler())
    one.gate = lambda number, sure, _: False
    assert one.draft([5, 6, 7], 2).tokens == ()
    one.gate = None
    assert one.draft([5, 6, 7], 2).tokens == (1, 1)


def test_nothing_is_drafted_behind_a_stop() -> None:
    one = CascadeDrafter([copier((3, [0.9])), writer()]).start(sampler(stop_ids=[1]))
    assert one.draft([5, 6, 7], 4).tokens == (1,)


def test_who_cannot_go_on_from_others_is_asked_at_the_start_only() -> None:
    stranger = ForcedDrafter(lambda tokens, k: [8, 9][:k])
    one = CascadeDrafter([copier((3, [0.9]), (6, [0.9])), stranger, writer()]).start(sampler())
    assert one.draft([5, 6, 7], 3).sources == ("copier", "writer", "writer")
    assert stranger.asked == []
    draft = one.draft([5, 6, 7, 8], 4)
    assert (draft.tokens, draft.sources) == ((8, 9, 1, 2), ("forced", "forced", "copier", "writer"))
    assert draft.confidence == (), "one of them cannot say"
    assert stranger.asked == [(4, 4)]


def test_cascades_in_a_cascade() -> None:
    heard = []
    inner = CascadeDrafter([copier((4, [0.9])), writer()])
    one = CascadeDrafter([copier((3, [0.9])), inner]).start(sampler())
    one.gate = lambda number, sure, _: heard.append(number) or True  # type: ignore[func-returns-value]
    draft = one.draft([5, 6, 7], 4)
    assert draft.tokens == (1, 1, 2, 2)
    assert draft.sources == ("copier", "copier", "writer", "writer")
    assert heard == [0, 1, 2, 3]


def test_everyone_hears_of_the_end() -> None:
    first, second = copier(), writer()
    target = TableModel(LAW, V)
    spec = SpeculativeDecoding(target, [first, ForcedDrafter(lambda tokens, k: []), second], max_new_tokens=5)
    output = spec.complete([1, 2])[0]
    assert first.closed == second.closed == [[1, 2, *output.tokens]]


# --- with which q -----------------------------------------------------------------------------------------------------


def test_copied_tokens_get_one_hot_rows_beside_drawn_ones() -> None:
    drawn = torch.rand(1, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pieces = [Draft((3, 4), sources=("a", "a")), Draft((7,), drawn, sources=("b",)), Draft((5,), sources=("a",))]
    draft = joined(pieces)
    assert draft.tokens == (3, 4, 7, 5)
    eye = torch.eye(V, dtype=torch.float64)
    assert draft.probs is not None
    assert torch.equal(draft.probs, torch.stack([eye[3], eye[4], drawn[0], eye[5]]))
    assert joined(pieces[:1]).probs is None
    assert joined([]) == Draft()


def test_an_id_that_the_others_do_not_have_ends_the_draft() -> None:
    """V1. A prompt may hold ids that the target reads and cannot emit; among drawn tokens there is no row for one."""
    rows = torch.full((2, V), 1 / V)
    draft = joined([Draft((3,), rows[:1], sources=("b",)), Draft((V, 4), sources=("a", "a"), confidence=(0.9, 0.9))])
    assert (draft.tokens, draft.ended, draft.sources) == ((3,), "vocabulary", ("b",))
    assert draft.probs is not None
    assert torch.equal(draft.probs, rows[:1])
    prompt = [1, 2, V + 1, 3, 1, 2]
    target = TableModel(LAW, V, embedding=V + 2)
    drafter = CascadeDrafter([SuffixDrafter(), ModelDrafter(TableModel(SMALL, V), V)], min_confidence=0.1)
    for seed in range(5):
        answer, _ = decode(target, drafter, prompt, k=4, max_new_tokens=12, temperature=1.0, seed=seed)
        assert max(answer) < V


@pytest.mark.parametrize("committed", range(5))
def test_a_model_rolls_back_what_others_drafted(committed: int) -> None:
    """It goes on from tokens that may be rejected; the next draft was made behind the rejected ones."""
    model = RecurrentModel(V)
    session = ModelDrafter(model, V).start(sampler())
    own = session.draft_after([1, 2, 3], [4, 5], 2).tokens
    assert own == ModelDrafter(RecurrentModel(V), V).start(sampler()).draft([1, 2, 3, 4, 5], 2).tokens
    tokens = [1, 2, 3, *[4, 5, *own][:committed], 0]
    for given in ([], [7], [4, 5]):
        fresh = ModelDrafter(RecurrentModel(V), V).start(sampler()).draft([*tokens, *given], 3)
        assert session.draft_after(tokens, given, 3) == fresh


def test_random_numbers_of_positions_count_what_others_drafted() -> None:
    """In bit-exact mode random numbers belong to the position in the text, not to the place in a draft."""

    def start() -> Any:
        return ModelDrafter(TableModel(SMALL, V), V).start(
            Sampler(SamplingParams(temperature=1.0), 2, (), 7, coupled=True)
        )

    behind, alone = start().draft_after([1, 2, 3], [4, 5], 6), start().draft([1, 2, 3, 4, 5], 6)
    assert behind.tokens == alone.tokens


@pytest.mark.parametrize("limit", range(3, 9))
def test_the_context_limit_of_a_model_behind_others(limit: int) -> None:
    """X2. The model asserts that it is never fed a position at or above its limit."""
    session = ModelDrafter(TableModel(SMALL, V, limit=limit), V).start(sampler())
    assert len(session.draft_after([1, 2, 3], [4, 5], 3).tokens) == max(0, min(3, limit - 5 + 1))


def cascade(model: Any, least: float = 0.3, **options: Any) -> CascadeDrafter:
    return CascadeDrafter([SuffixDrafter(**options), ModelDrafter(model, V)], min_confidence=least)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_greedy_answers_are_the_targets(k: int) -> None:
    """G1, and that both really take part."""
    law = random_law(V, seed=6, order=1)
    sources = set()
    for draft_law in (law, random_law(V, seed=7)):
        expected = greedy(law, [3, 1, 4], 60)
        drafter = cascade(TableModel(draft_law, V))
        session = drafter.start(sampler())
        for end in range(3, 20):
            sources |= set(session.draft([3, 1, 4, *expected][:end], k).sources)
        answer, rounds = decode(TableModel(law, V), drafter, [3, 1, 4], k=k, max_new_tokens=60)
        assert answer == expected
        if draft_law is law:
            assert all(r.num_accepted <= r.num_drafted for r in rounds)
    assert sources == {"suffix", "toy"}


def test_a_model_that_was_not_asked_for_rounds_catches_up() -> None:
    """C1: a model that drafts for itself is always right, behind copied tokens and after rounds of only copying."""
    target = TableModel(LAW, V)
    first = ForcedDrafter(lambda tokens, k: oracle(text).draft(tokens, k) if len(tokens) % 10 < 5 else [])
    text = [1, 2, *greedy(LAW, [1, 2], 80)]
    drafter = CascadeDrafter([first, ModelDrafter(target, V)])
    answer, rounds = decode(TableModel(LAW, V), drafter, [1, 2], k=3, max_new_tokens=80)
    assert answer == text[2:]
    assert all(r.num_accepted == r.num_drafted for r in rounds)


def test_cache_after_wrong_drafts_of_every_kind() -> None:
    """C. ``decode`` compares the target's cache after each round; wrong copies, then wrong and right models."""
    text = [1, 2, *greedy(LAW, [1, 2], 40)]
    for model in (TableModel(LAW, V), RecurrentModel(V)):
        drafter = CascadeDrafter([SuffixDrafter(min_probability=0), ModelDrafter(model, V)], min_confidence=0)
        assert decode(TableModel(LAW, V), drafter, [1, 2], k=4, max_new_tokens=40)[0] == text[2:]
        wrong = CascadeDrafter([always_wrong(text, V), ModelDrafter(model, V)])
        assert decode(TableModel(LAW, V), wrong, [1, 2], k=4, max_new_tokens=40)[0] == text[2:]


def few_ids(tokens: Sequence[int]) -> Tensor:
    """A draft head over the ids below 5 of the target's 12, otherwise the target itself."""
    row = LAW(tokens)
    row[5:] = -INF
    return row


def test_a_draft_head_over_few_ids() -> None:
    """V3. Greedy, the model's tokens are accepted exactly where the target's choice is among its ids."""
    text = [1, 2, *greedy(LAW, [1, 2], 80)]
    drafter = cascade(TableModel(few_ids, V), least=1.0)
    answer, rounds = decode(TableModel(LAW, V), drafter, [1, 2], k=1, max_new_tokens=80)
    assert answer == text[2:]
    done = [1, 2]
    for one in rounds:
        if one.num_drafted:
            assert one.num_accepted == (text[len(done)] < 5)
        done += one.tokens


def test_the_same_seed_gives_the_same_answer() -> None:
    """R1."""
    spec = SpeculativeDecoding(TableModel(LAW, V), ["suffix", TableModel(SMALL, V)], 4, max_new_tokens=15)
    answers = [spec.complete([1, 2], temperature=1.0, seed=seed)[0].tokens for seed in [*range(10), *range(10)]]
    assert answers[:10] == answers[10:]
    assert len(set(answers)) >= 9


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_list_is_a_cascade() -> None:
    target, small = TableModel(LAW, V), TableModel(SMALL, V, name="small")
    for names in (["suffix", small], ("ngram", small)):
        made = make_drafter(names, target)
        assert isinstance(made, CascadeDrafter)
        assert made.name == "suffix,small"
        suffix, model = made.drafters
        assert isinstance(suffix, SuffixDrafter)
        assert isinstance(model, ModelDrafter)


@pytest.mark.parametrize("draft", [[], [5], ["suffix", None], [["suffix"]], ["suffix", "no such name"]])
def test_what_is_no_cascade_is_refused(draft: Any) -> None:
    with pytest.raises(InputError, match=r"draft_model=|no such name"):
        SpeculativeDecoding(TableModel(LAW, V), draft)


def test_options_that_do_not_fit_are_refused() -> None:
    for least in (-0.1, 1.1):
        with pytest.raises(InputError, match="min_confidence="):
            CascadeDrafter([NoDrafter()], min_confidence=least)
    with pytest.raises(InputError, match="drafters="):
        CascadeDrafter([])


def test_what_may_be_written_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(NAMES) == {drafts.SUFFIX, drafts._SYNONYM}
    assert drafts.members("ngram") == drafts.members("suffix") == ("suffix",)
    assert drafts.members("suffix, a/b") == ("suffix", "a/b")
    assert drafts.short_name("suffix,a/b") == "suffix,b"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").mkdir()
    assert drafts.members("a,b") == ("a,b",)
    for wrong in ("suffix,", "suffix,none", ",", "suffix,ngram", "a,c,a"):
        with pytest.raises(InputError, match="--draft"):
            drafts.members(wrong)


# --- a drafter of one's own -------------------------------------------------------------------------------------------


def test_a_drafter_of_ones_own() -> None:
    """The example in examples/, with its class used as a stranger would."""
    book = runpy.run_path(str(EXAMPLES / "own_drafter.py"))["PhraseBook"]
    text = [1, 2, *greedy(LAW, [1, 2], 40)]
    phrases = [text[5:20], [9, 9, 9, 9, 9]]
    plain = SpeculativeDecoding(TableModel(LAW, V), None, max_new_tokens=40).complete([1, 2])[0]
    small = TableModel(SMALL, V)
    for draft in (book(phrases), [book(phrases), "suffix"], [book(phrases), small], ["suffix", book(phrases)]):
        output = SpeculativeDecoding(TableModel(LAW, V), draft, 4, max_new_tokens=40).complete([1, 2])[0]
        assert output.tokens == plain.tokens
        assert output.stats.accepted > 5


@pytest.mark.real_weights
def test_the_example_runs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rate = runpy.run_path(str(EXAMPLES / "own_drafter.py"))["main"](str(smollm2), max_new_tokens=30)
    assert rate > 0
    assert "the same answer" in capsys.readouterr().out
