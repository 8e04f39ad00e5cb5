"""Copied drafts: the automaton against a search from scratch, and the store that requests share."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import byte_tokenizer
from fakes import TableModel, decode, greedy, random_law
from slipstream import Draft, InputError, SamplingParams, SpeculativeDecoding, load_model
from slipstream.drafters import SuffixDrafter, SuffixStore
from slipstream.drafters import automaton as automaton_module
from slipstream.drafters import store as store_module
from slipstream.drafters.automaton import SuffixAutomaton
from slipstream.drafters.suffix import confidence
from slipstream.errors import SlipstreamError
from slipstream.sampling import Sampler

V = 12
LAW = random_law(V, seed=3)
FORWARD = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def sampler(stop_ids: Sequence[int] = (), **params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), 2, stop_ids, 0)


def session(store: SuffixStore | None = None, **options: Any) -> Any:
    return SuffixDrafter(store, **options).start(sampler())


def drafted(tokens: Sequence[int], k: int = 4, **options: Any) -> Draft:
    return session(**{"min_probability": 0, "factor": inf, **options}).draft(tokens, k)


# --- the automaton ----------------------------------------------------------------------------------------------------


def followers(text: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """What followed each earlier occurrence of ``suffix``, in order: the slow, obvious way."""
    size = len(suffix)
    return [text[i + size] for i in range(len(text) - size) if list(text[i : i + size]) == list(suffix)]


def longest(text: Sequence[int], latest: Sequence[int]) -> int:
    """Length of the longest suffix of ``latest`` that something followed in ``text``."""
    return next((size for size in range(len(latest), 0, -1) if followers(text, latest[-size:])), 0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_the_longest_earlier_occurrence_and_its_counts_against_a_search(text: list[int]) -> None:
    """After every token: the length, how often what followed, and of equals the latest."""
    known = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        known.extend(text[end - 1 : end])
        so_far = text[:end]
        size = longest(so_far, so_far[1:] if end > 1 else [])
        found = next(iter(known.continuation(known.end)), None)
        assert (found.length if found else 0) == size
        if found:
            after = followers(so_far, so_far[-size:])
            counts = Counter(after)
            assert (found.count, found.total) == (max(counts.values()), len(after))
            assert found.token == [t for t in after if counts[t] == found.count][-1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.lists(st.integers(0, 2), max_size=30), other=st.lists(st.integers(0, 3), max_size=15))
def test_what_another_text_ends_with_against_a_search(text: list[int], other: list[int]) -> None:
    known = SuffixAutomaton()
    known.extend(text)
    occurs = [text[i:j] for i in range(len(text)) for j in range(i + 1, len(text) + 1)]
    expected = next((size for size in range(len(other), 0, -1) if other[-size:] in occurs), 0)
    found = known.find(other)
    assert found.length == expected
    assert known.find(other[5:], known.find(other[:5])) == found
    first = next(iter(known.continuation(found)), None)
    assert (first.length if first else 0) == longest(text, other)


def test_counts_stay_in_bounds_where_one_token_is_said_over_and_over() -> None:
    """The counts of the short runs stay behind there; a confidence above 1 must not come of it."""
    known = SuffixAutomaton()
    for _ in range(3):
        known.extend([5] * 3 * automaton_module.MOST_SUFFIXES + [1, 2])
        known.extend([5, 5, 5])
        for follower, _ in zip(known.continuation(known.end), range(50), strict=False):
            assert 0 < follower.count <= follower.total
            assert 0 < confidence(follower) < 1


class Lines:
    """Counts the lines of Python that run in the package's drafters."""

    def __init__(self) -> None:
        self.count = 0
        self._before: Any = None

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if "slipstream/drafters" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        self.count += event == "line"
        return self._trace


@pytest.mark.parametrize("kind", ["random", "periodic", "one token"])
def test_a_draft_takes_as_many_steps_behind_a_long_text(kind: str) -> None:
    """W2, in steps instead of seconds: four tokens and a draft, behind 1k and 16k tokens, with a store and without."""
    generator = torch.Generator().manual_seed(5)
    text = {
        "random": torch.randint(50, (17_000,), generator=generator).tolist(),
        "periodic": [i % 37 for i in range(17_000)],
        "one token": [7] * 17_000,
    }[kind]
    store = SuffixStore()
    store.add(text)
    for used in (None, store):
        steps = {}
        for size in (1000, 16_000):
            one = session(used)
            one.draft(text[:size], 8)
            with Lines() as lines:
                for end in range(size + 4, size + 204, 4):
                    one.draft(text[:end], 8)
            steps[size] = lines.count / 50
        assert steps[16_000] <= 1.5 * steps[1000]
        assert steps[16_000] < 4000


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "k", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 4, (3, 9, 1, 2)),
        ([1, 2, 3, 9, 1, 2], 1, (3,)),
        ([1, 2, 5, 1, 2, 6, 1, 2], 2, (6, 1)),  # of equals the latest
        ([1, 2, 5, 1, 2, 5, 1, 2, 6, 1, 2], 2, (5, 1)),  # the likeliest before the latest
        ([1, 2, 5, 7, 2, 6, 1, 2], 2, (5, 7)),  # a longer match before a later one
        ([4, 4, 4], 4, (4, 4, 4, 4)),  # what repeats goes on repeating
        ([1, 2, 1, 2, 1], 4, (2, 1, 2, 1)),
        ([1, 2, 3], 4, ()),
        ([1], 4, ()),
    ],
)
def test_what_is_copied(tokens: list[int], k: int, expected: tuple[int, ...]) -> None:
    draft = drafted(tokens, k)
    assert draft.tokens == expected
    assert draft.probs is None
    assert len(draft.confidence) == len(expected)


def test_why_a_draft_ends() -> None:
    text = [*FORWARD, 0, 1, 2]
    assert drafted(text, 3).ended == "limit"
    assert drafted([1, 2, 3], 3).ended == "no match"
    unsure = drafted(text, 20, min_probability=0.1)
    assert unsure.ended == "confidence"
    product = 1.0
    for sure in unsure.confidence:
        product *= sure
    assert product >= 0.1
    longer = drafted(text, len(unsure.tokens) + 1)
    assert product * longer.confidence[-1] < 0.1
    capped = drafted(text, 20, factor=2)
    assert (capped.tokens, capped.ended) == ((3, 4, 5, 6), "confidence")
    assert drafted(text, 4, factor=2).ended == "limit"
    assert drafted(text, 20, min_probability=0.5) == Draft(ended="confidence")


def test_confidence_grows_with_the_match_and_with_sightings() -> None:
    short, long = drafted([9, 1, 5, 0, 1], 1), drafted([*FORWARD, 0, *FORWARD[:-1]], 1)
    often = drafted([1, 5, 0, 1, 5, 2, 1, 5, 3, 1], 1)
    doubtful = drafted([1, 5, 0, 1, 6, 2, 1, 5, 3, 1], 1)
    assert short.confidence == (pytest.approx(1 / (1 + 3)),)
    assert long.confidence == (pytest.approx(1 / (1 + 3 / 8)),)
    assert often.confidence == (pytest.approx(3 / (3 + 3)),)
    assert doubtful.confidence == (pytest.approx(2 / (3 + 3)),)


def test_nothing_is_copied_behind_a_stop() -> None:
    one = SuffixDrafter(min_probability=0).start(sampler(stop_ids=[4]))
    draft = one.draft([*FORWARD, 0, 1, 2, 3], 5)
    assert (draft.tokens, draft.ended) == ((4,), "limit")


def test_the_gate_is_asked_before_each_token() -> None:
    one, asked = session(min_probability=0, factor=inf), []

    def gate(number: int, sure: float) -> bool:
        asked.append((number, sure))
        return number < 2

    ungated = one.draft([*FORWARD, 0, 1, 2], 4)
    one.gate = gate
    draft = one.draft([*FORWARD, 0, 1, 2], 4)
    assert draft == Draft(ungated.tokens[:2], ended="controller", confidence=ungated.confidence[:2])
    assert asked == list(enumerate(ungated.confidence[:3]))


def test_drafts_leave_nothing() -> None:
    """One session over a growing text, drafting all the way (also behind others' tokens), equals a fresh one."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(3, (120,), generator=generator).tolist()
    one, end, found = session(min_probability=0, factor=inf), 1, 0
    while end <= len(text):
        one.draft_after(text[:end], [0, 1, 0], 3)
        draft = one.draft(text[:end], 4)
        assert draft == drafted(text[:end], 4)
        found += bool(draft.tokens)
        end += 1 + end % 4
    assert found > 10


def test_going_on_from_anothers_tokens() -> None:
    one = session(min_probability=0)
    assert one.draft([*FORWARD, 0], 3) == Draft(ended="no match")
    assert one.draft_after([*FORWARD, 0], [4, 5], 3).tokens == (6, 7, 8)
    assert one.draft_after([*FORWARD, 0], [11], 3).tokens == ()
    assert one.draft([*FORWARD, 0, 7], 2).tokens == (8, 9)
    assert session(filled(FORWARD)).draft_after([20], [2, 3, 4], 2).tokens == (5, 6)


@pytest.mark.parametrize(
    "options",
    [{"min_probability": -0.1}, {"min_probability": 1.5}, {"factor": 0}, {"factor": float("nan")}, {"store": "file"}],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InputError, match=f"{name}="):
        SuffixDrafter(**options)


def test_always_wrong_copies_cost_no_passes() -> None:
    """W1. A text whose repetitions always go on otherwise: rounds at most as many as plain passes, output the same."""
    law = random_law(V, seed=8, order=1)

    def never_again(tokens: Sequence[int]) -> torch.Tensor:
        row = law(tokens)
        row[list(followers(tokens, tokens[-1:]))] = -50.0
        return row

    target = TableModel(never_again, V)
    expected = greedy(never_again, [1, 2], 60)
    answer, rounds = decode(target, SuffixDrafter(min_probability=0), [1, 2], k=4, max_new_tokens=60)
    assert answer == expected
    assert sum(r.num_drafted for r in rounds) > 40
    assert len(target.calls) <= 60
    assert all(r.draft_seconds >= 0 and r.verify_seconds > 0 for r in rounds)


# --- the store --------------------------------------------------------------------------------------------------------


def filled(*documents: Sequence[int], **options: Any) -> SuffixStore:
    store = SuffixStore(**options)
    for document in documents:
        store.add(document)
    return store


def test_other_requests_are_copied_from() -> None:
    store = filled(FORWARD, [30, 31])
    draft = session(store).draft([20, 2, 3, 4], 3)
    assert (draft.tokens, draft.ended) == ((5, 6, 7), "limit")
    assert session().draft([20, 2, 3, 4], 3).tokens == ()


def test_the_better_of_both_matches_is_taken() -> None:
    """Its own text says 50 behind "4"; the store says 5, behind more tokens, or behind the same with more sightings."""
    own = [4, 50, 51, 0, 4]
    assert session(filled(FORWARD), min_probability=0).draft([*own[:-1], 2, 3, 4], 1).tokens == (5,)
    assert session(filled([4, 5], [4, 5], [4, 5]), min_probability=0).draft(own, 1).tokens == (5,)
    assert session(filled([4, 5]), min_probability=0).draft([4, 50, 4, 50, 4], 1).tokens == (50,)


def test_a_draft_does_not_cross_from_one_document_into_another() -> None:
    store = filled([1, 2, 3], [4, 5, 6], [1, 2, 3])
    draft = session(store, min_probability=0, factor=inf).draft([9, 1, 2], 8)
    assert (draft.tokens, draft.ended) == ((3,), "no match")


def test_the_oldest_are_forgotten_first() -> None:
    store = SuffixStore(max_tokens=100)
    documents = [[number] * (5 + number % 7) for number in range(1, 60)]
    for document in documents:
        store.add(document)
        kept = store.documents
        assert store.num_tokens == sum(map(len, kept)) <= 100
        assert kept[-1] == document
        assert kept == documents[documents.index(document) + 1 - len(kept) : documents.index(document) + 1]
    assert store.num_tokens > 100 * (1 - 1 / store_module.PARTS) - 12
    assert session(store, min_probability=0).draft([1, 1], 1).tokens == (1,)
    assert session(store, min_probability=0).draft([0, 1], 1).tokens == ()
    assert session(store, min_probability=0).draft([0, 59], 1).tokens == (59,)


def test_of_a_long_document_the_end_is_kept() -> None:
    store = filled([1], range(50), max_tokens=10)
    assert store.documents == [list(range(40, 50))]
    store.add([])
    assert len(store.documents) == 1


def spec(target: Any, store: SuffixStore, **options: Any) -> SpeculativeDecoding:
    return SpeculativeDecoding(target, SuffixDrafter(store), 4, max_new_tokens=30, **options)


def test_requests_leave_their_text_and_the_next_one_is_sooner() -> None:
    store = SuffixStore()
    one = spec(TableModel(LAW, V), store)
    first, second = (one.complete([1, 2])[0] for _ in range(2))
    assert first.tokens == second.tokens == tuple(greedy(LAW, [1, 2], 30))
    assert store.documents[0] == [1, 2, *first.tokens]
    assert second.stats.rounds < first.stats.rounds
    assert second.stats.acceptance_rate > 0.9


def test_an_abandoned_request_leaves_what_was_committed() -> None:
    store = SuffixStore()
    stream = spec(TableModel(LAW, V), store).stream([1, 2])
    pieces = [next(stream), next(stream)]
    stream.close()
    assert store.documents == [[1, 2, *(t for piece in pieces for t in piece.tokens)]]
    dropped = spec(TableModel(LAW, V), store).stream([3])
    token = next(dropped).tokens
    del dropped
    gc.collect()  # a stream is part of a cycle
    assert store.documents[1:] == [[3, *token]]
    spec(TableModel(LAW, V), store).stream([4]).close()
    assert len(store.documents) == 2, "nothing was committed"


def test_a_request_that_does_not_share_neither_reads_nor_leaves_anything() -> None:
    store = SuffixStore()
    one = spec(TableModel(LAW, V), store)
    alone = one.complete([1, 2], share=False)[0]
    assert store.documents == []
    one.complete([1, 2])
    kept = store.documents
    again = one.complete([1, 2], share=False)[0]
    assert store.documents == kept
    assert (again.stats.rounds, again.stats.drafted) == (alone.stats.rounds, alone.stats.drafted)
    without = SpeculativeDecoding(TableModel(LAW, V), "suffix", 4, max_new_tokens=30).complete([1, 2])[0]
    assert (again.tokens, again.stats.drafted) == (without.tokens, without.stats.drafted)
    assert one.complete([1, 2])[0].stats.rounds < again.stats.rounds


def test_share_must_be_said_clearly() -> None:
    with pytest.raises(InputError, match="share="):
        spec(TableModel(LAW, V), SuffixStore()).complete([1], share=1)


def test_seeded_answers_do_not_depend_on_earlier_calls() -> None:
    """R1, without a store or without sharing."""
    for one in (
        SpeculativeDecoding(TableModel(LAW, V), "suffix", 4),
        SpeculativeDecoding(TableModel(LAW, V), SuffixDrafter(SuffixStore()), 4, share=False),
    ):
        answers = []
        for seed in [*range(10), *range(10)]:
            answers.append(one.complete([1, 2], temperature=1.0, max_new_tokens=12, seed=seed)[0].tokens)
        assert answers[:10] == answers[10:]
        assert len(set(answers)) >= 9


def test_ids_that_the_target_cannot_emit_are_not_drafted() -> None:
    store = filled([1, 2, 3, V + 5, 4], [1, 2, 3, V + 5, 4])
    answer, _ = decode(TableModel(LAW, V), SuffixDrafter(store, min_probability=0), [1, 2, 3], max_new_tokens=20)
    assert answer == greedy(LAW, [1, 2, 3], 20)


def test_many_threads_at_once() -> None:
    """Readers and writers together: nobody sees half a change, and every document is whole at the end."""
    store, errors = SuffixStore(max_tokens=3000), []
    ready = threading.Barrier(6)

    def work(number: int) -> None:
        try:
            ready.wait()
            for turn in range(12):
                text = [number * 100 + (i * (turn + 1)) % 17 for i in range(150)]
                one = session(store)
                for end in range(20, 150, 26):
                    draft = one.draft(text[:end], 6)
                    assert all(0 < sure < 1 for sure in draft.confidence)
                    assert all(token // 100 == number for token in draft.tokens)
                one.close(text)
                assert store.num_tokens <= 3000
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert all(len(d) == 150 and len({t // 100 for t in d}) == 1 for d in store.documents)
    for part in store._parts:
        fresh = SuffixAutomaton()
        for document in part.documents:
            fresh.extend([*document, automaton_module.SEPARATOR])
        assert vars(fresh) == vars(part.automaton)


# --- files ------------------------------------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    store = filled(FORWARD, [7, 8], [9], tokenizer=tokenizer, max_tokens=50)
    store.save(tmp_path / "store")
    assert [f.name for f in tmp_path.iterdir()] == ["store"]
    loaded = SuffixStore.load(tmp_path / "store", tokenizer=byte_tokenizer())
    assert loaded.documents == store.documents
    assert loaded.max_tokens == 50
    assert session(loaded).draft([20, 2, 3, 4], 3) == session(store).draft([20, 2, 3, 4], 3)
    small = SuffixStore.load(tmp_path / "store", max_tokens=3)
    assert small.documents == [[7, 8], [9]] or small.documents == [[9]]
    SuffixStore().save(tmp_path / "empty")
    assert SuffixStore.load(tmp_path / "empty").documents == []


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    filled(FORWARD).save(path)
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(SlipstreamError, match="No space"):
            filled([1, 2]).save(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def spoilt() -> dict[str, tuple[Callable[[bytes], bytes], str]]:
    magic = b"slipstream suffix store "
    return {
        "empty": (lambda data: b"", "is not a suffix store"),
        "foreign": (lambda data: b"\x89PNG\r\n", "is not a suffix store"),
        "newer": (lambda data: data.replace(magic + b"1", magic + b"2"), "has format 2"),
        "cut short": (lambda data: data[:-4], "is damaged"),
        "cut inside an id": (lambda data: data[:-1], "is damaged"),
        "only a start": (lambda data: data[:26], "is damaged"),
        "one bit turned": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "is damaged"),
        "no header": (lambda data: magic + b"1\n[1, 2]\n", "is damaged"),
        "a count that is no integer": (
            lambda data: re.sub(rb'"max_tokens": (\d+)', rb'"max_tokens": \1.5', data),
            "is damaged",
        ),
        "a length below 0": (lambda data: re.sub(rb'"lengths": \[', b'"lengths": [-2, 2, ', data), "is damaged"),
        "header of another kind": (lambda data: magic + b'1\n{"lengths": "ab", "crc32": 0}\n', "is damaged"),
    }


@pytest.mark.parametrize("kind", spoilt())
def test_spoilt_files_are_refused(kind: str, tmp_path: Path) -> None:
    spoil, message = spoilt()[kind]
    path = tmp_path / "store"
    filled(FORWARD).save(path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(InputError, match=message) as error:
        SuffixStore.load(path)
    assert str(path) in str(error.value)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            SuffixStore.load(path)
    for wrong in (0, -1, 1.5, True, None):
        with pytest.raises(InputError, match="max_tokens="):
            SuffixStore(wrong)  # type: ignore[arg-type]


def test_another_tokenizer_is_refused(tmp_path: Path, tiny_checkpoint: Path, other_tokenizer_checkpoint: Path) -> None:
    target, other = load_model(tiny_checkpoint), load_model(other_tokenizer_checkpoint)
    store = SuffixStore()
    SpeculativeDecoding(target, [SuffixDrafter(store), target])
    SpeculativeDecoding(target, SuffixDrafter(store))
    for draft in (SuffixDrafter(store), [SuffixDrafter(store), other]):
        with pytest.raises(InputError, match="another tokenizer"):
            SpeculativeDecoding(other, draft)
    store.save(tmp_path / "store")
    with pytest.raises(InputError, match="another tokenizer"):
        SuffixStore.load(tmp_path / "store", tokenizer=other.tokenizer)
    loaded = SuffixStore.load(tmp_path / "store")
    with pytest.raises(InputError, match="another tokenizer"):
        SpeculativeDecoding(other, SuffixDrafter(loaded))


TEXT = "the  cat\n\n  and the \t 猫 🐈‍⬛ and the  cat\n\n  and the \t 猫 🐈‍⬛"


@pytest.mark.parametrize("draft", ["suffix", "store", "cascade"])
def test_texts_of_every_kind(draft: str, tiny_checkpoint: Path, tiny_draft_checkpoint: Path) -> None:
    """V4. Double spaces, newlines, emoji, CJK: streamed and whole, the text is that of plain decoding."""
    target = load_model(tiny_checkpoint, weights="fp32")
    small = load_model(tiny_draft_checkpoint, weights="fp32")
    store = SuffixStore()
    drafter: Any = {"suffix": "suffix", "store": SuffixDrafter(store), "cascade": [SuffixDrafter(store), small]}[draft]
    one = SpeculativeDecoding(target, drafter, 5, max_new_tokens=40, ignore_eos=True)
    plain = SpeculativeDecoding(target, None, max_new_tokens=40, ignore_eos=True).complete(TEXT)[0]
    for _ in range(2):
        stream = one.stream(TEXT)
        for _ in stream:
            pass
        assert stream.output.text == plain.text
        assert stream.output.tokens == plain.tokens
        assert stream.output.stats.drafted > 0
    if draft != "suffix":
        assert stream.output.stats.acceptance_rate > 0.9
