"""Draft models with another tokenizer: what is shared, the text in the draft's ids, answers that stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Regex, pre_tokenizers

from fakes import (
    INF,
    Law,
    RecurrentModel,
    TableModel,
    all_outcomes,
    decode,
    joint_law,
    loaded_dice,
    random_law,
    softmax,
)
from slipstream import Draft, InputError, SamplingParams, SpeculativeDecoding, load_model
from slipstream.drafters import (
    CascadeDrafter,
    ModelDrafter,
    NoDrafter,
    SuffixDrafter,
    VocabularyDrafter,
    make_drafter,
)
from slipstream.drafters import vocabulary as module
from slipstream.drafters.vocabulary import SharedSession, StringSession
from slipstream.models.registry import resolve
from slipstream.models.spelling import Spelling
from slipstream.models.transcript import Transcript
from slipstream.models.vocabulary import Pairing, measure_sharing, pair_vocabularies
from slipstream.sampling import Sampler
from tokenizers_of_tests import KINDS, PROSE, TEXT, gpt2_like, llama2_like, of_tokens, qwen_like, wrapped

WAYS = ["shared tokens", "strings"]
PAIRS = [(a, b) for a in KINDS for b in KINDS if a != b]
ODD = (
    *(
        "你好世界",
        "こんにちは、",
        "👩‍👩‍👧",
        "🎉",
        "e\u0301",
        "a\u0300\u0301",
        "한국어",
        "ﷺ",
        "🇩🇪",
        "é",
        " Привет",
        "naïve",
    ),
    *("    ", "\n\n\n", "\t\t", " ", "  ", " " * 17, "\r\n", "def f(x):\n    return x\n", "don't", "12345", "3.14"),
    *("<|im_end|>", "<s>", "</s>", "<tool_call>", "—", " the", "internationalization", "<0x41>"),
)


def named(tokenizer: Any, name: str = "toy") -> Any:
    return SimpleNamespace(name=name, tokenizer=tokenizer)


def pair(target: str, draft: str) -> Pairing:
    return pair_vocabularies(named(KINDS[target]()), named(KINDS[draft]()))


def sampler(**params: Any) -> Sampler:
    return Sampler(SamplingParams(**params), 2, (), 0)


def random_text(rnd: random.Random, pieces: int = 25) -> str:
    def piece() -> str:
        start = rnd.randrange(len(TEXT))
        return rnd.choice(ODD) if rnd.random() < 0.5 else TEXT[start : start + rnd.randrange(30)]

    return "".join(piece() for _ in range(pieces))


# --- what ids stand for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_ids_stand_for_the_bytes_of_their_text(kind: str) -> None:
    spelling = Spelling(KINDS[kind](), kind)
    for text in (TEXT, *ODD[: -1 if kind == "unigram" else None]):  # Unigram finds <0x41> in a text that spells it
        wanted = text.replace("e\u0301", "é").replace("a\u0300\u0301", "à\u0301") if kind == "qwen" else text
        ids = spelling.encode(text).ids
        assert b"".join(map(spelling.bytes_of, ids)).decode() == wanted
        assert not spelling.special.keys() & set(ids), "text that spells a special token became one"


@pytest.mark.parametrize("kind", KINDS)
def test_plain_encoding_is_the_tokenizers_own(kind: str) -> None:
    """But for special tokens and the space before a text, which is put there by hand."""
    tokenizer = KINDS[kind]()
    spelling = Spelling(tokenizer, kind)
    for text in (TEXT, PROSE, " the", "a"):
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert spelling.encode(spelling.led(text, first=True)).ids == own
        assert tuple(tokenizer(text)["input_ids"]) == (*spelling.prefix, *own)


def test_the_tokenizer_is_left_alone() -> None:
    tokenizer = qwen_like()
    before, vocabulary = tokenizer.backend_tokenizer.to_str(), len(tokenizer)
    Spelling(tokenizer, "toy").encode("<tool_call> <|im_end|>")
    assert (tokenizer.backend_tokenizer.to_str(), len(tokenizer)) == (before, vocabulary)


def test_tokenizers_of_other_kinds_are_refused() -> None:
    from tokenizers import Tokenizer, models

    words = wrapped(Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
    for other, said in ((words, "way of its own"), (SimpleNamespace(get_vocab=dict), "SimpleNamespace")):
        with pytest.raises(InputError, match=f"tokenizer of odd .*{said}"):
            pair_vocabularies(named(gpt2_like()), named(other, "odd"))


# --- what two vocabularies share --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_shared_ids_stand_for_the_same_bytes(one: str, other: str) -> None:
    pairing = pair(one, other)
    target, draft, shared = pairing.target, pairing.draft, pairing.to_draft
    assert len(set(shared.values())) == len(shared)
    for own, its in shared.items():
        assert (own in target.special) == (its in draft.special)
        assert target.bytes_of(own) == draft.bytes_of(its)
    ours = {target.bytes_of(i) for i in target.tokens if i not in shared and not target.is_byte(i)}
    theirs = {draft.bytes_of(i) for i in draft.tokens if i not in shared.values() and not draft.is_byte(i)}
    assert not (ours & theirs) - {b""}


def test_bytes_across_spellings() -> None:
    """A leading space is Ġ in one spelling and ▁ in the other; a byte is a character in one and <0xNN> in the other."""
    pairing = pair("gpt2", "llama2")
    ours, theirs = gpt2_like().convert_tokens_to_ids, llama2_like().convert_tokens_to_ids
    assert pairing.to_draft[ours("Ġthe")] == theirs("▁the")
    assert pairing.to_draft[ours("ä")] == theirs("<0xE4>")
    assert pairing.to_draft[ours("e")] == theirs("e"), "<0x65> is there and never used"


def test_special_tokens_are_shared_by_role() -> None:
    """One name, or both the end of a text; never with text that spells one."""
    ours, theirs = qwen_like().convert_tokens_to_ids, gpt2_like().convert_tokens_to_ids
    shared = pair("qwen", "gpt2").to_draft
    assert shared[ours("<|im_start|>")] == theirs("<|im_start|>")
    assert shared[ours("<|im_end|>")] == theirs("<|endoftext|>")
    assert ours("<|fim|>") not in shared
    spelled = of_tokens(["a", "b", "<tool_call>"])
    spelled.add_special_tokens({"eos_token": "<|end|>"})
    plain = of_tokens(["b", "a", "<|end|>", "<tool_call>"])
    assert pair_vocabularies(named(spelled), named(plain)).to_draft == {0: 1, 1: 0, 2: 3}


def test_next_to_nothing_in_common_is_refused() -> None:
    greek, latin = of_tokens([*"abcdefghijklmnopqrstuvwxyz"]), of_tokens([*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"])
    with pytest.raises(InputError, match="small and the target big have only 0 tokens in common; choose"):
        pair_vocabularies(named(greek, "big"), named(latin, "small"))


def test_figures() -> None:
    pairing = pair_vocabularies(named(of_tokens(["a", "b", "c", "d"])), named(of_tokens(["b", "a"])))
    found = measure_sharing(pairing, "abac")
    assert (found.shared, found.of_target, found.of_draft, found.of_text) == (2, 0.5, 1.0, 0.75)
    assert measure_sharing(pairing, "").of_text == 0


# --- the text in the draft's ids --------------------------------------------------------------------------------------


def encoded_at_once(pairing: Pairing, tokens: Sequence[int]) -> list[int]:
    """The slow, obvious reference, for tokens without special ones."""
    raw = b"".join(map(pairing.target.bytes_of, tokens))
    whole = raw.decode(errors="ignore")  # drops an incomplete end, which is all that can be wrong here
    text = pairing.draft.led(pairing.target.unled(whole, first=True), first=True)
    rest = pairing.draft.encode_bytes(raw[len(whole.encode()) :])
    return [*pairing.draft.prefix, *pairing.draft.encode(text).ids, *(rest or [])]


def assert_read_as_at_once(pairing: Pairing, text: str, rnd: random.Random) -> None:
    ids = pairing.target.encode(text).ids
    transcript, before, end = Transcript(pairing), [*pairing.draft.prefix], 0
    while end < len(ids):
        end = min(end + rnd.randrange(1, 6), len(ids))
        own = list(transcript.read(ids[:end]))
        assert own == encoded_at_once(pairing, ids[:end])
        assert own[: transcript.stable] == before[: transcript.stable]
        before = own


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_reading_piece_by_piece_is_reading_at_once(target: str, draft: str) -> None:
    """V4. CJK, emoji, accents, code, runs of spaces, cut anywhere; characters cut in the middle too."""
    rnd = random.Random(f"{target} {draft}")
    for _ in range(3):
        assert_read_as_at_once(pair(target, draft), random_text(rnd), rnd)


def test_reading_where_no_word_begins() -> None:
    """Digits in groups of three from the left, tokens inside them: encoding from inside one regroups the rest."""
    numbers = [f"{n:02}" for n in range(0, 100, 3)]
    grouped = of_tokens([*"0123456789", *numbers], [" ".join(n) for n in numbers])
    grouped.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pairing, rnd = pair_vocabularies(named(of_tokens([*"0123456789"])), named(grouped)), random.Random(1)
    for _ in range(5):
        assert_read_as_at_once(pairing, "".join(rnd.choices("0123456789", k=120)), rnd)


def test_spelling_goes_on_inside_a_character() -> None:
    spelling = Spelling(gpt2_like(), "toy")
    before = [*spelling.encode("a 你").ids[:-2]]
    assert spelling.bytes_of(before[-1]) == b"\xe4"
    spelled = module._Border(spelling, before).spell(b"\xbd\xa0 the\xe4")
    assert b"".join(map(spelling.bytes_of, spelled)) == b"\xbd\xa0 the"
    assert module._Border(spelling, spelling.encode("wo").ids).spell(b"r the") == spelling.encode("r the").ids


def test_reading_costs_the_same_in_a_long_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """W2. Characters that are encoded for one more token, behind a text of 400 tokens and of 4,000."""
    pairing = pair("qwen", "gpt2")
    ids = pairing.target.encode(PROSE * 8).ids
    lengths: list[int] = []
    encode = pairing.draft.encode
    monkeypatch.setattr(pairing.draft, "encode", lambda text: lengths.append(len(text)) or encode(text))
    costs = []
    for size in (400, 4000):
        transcript = Transcript(pairing)
        transcript.read(ids[:size])
        lengths.clear()
        for end in range(size + 1, size + 41):
            transcript.read(ids[:end])
        costs.append(sum(lengths) / 40)
        assert len(transcript._text) < 3000
    assert max(costs) < 100


def test_special_tokens_in_a_text() -> None:
    """Shared ones become the draft's, others vanish, and text that spells one stays text."""
    pairing = pair("qwen", "gpt2")
    ours, theirs = qwen_like().convert_tokens_to_ids, gpt2_like().convert_tokens_to_ids
    text = pairing.target.encode("a <|im_end|>").ids
    tokens = [ours("<|im_start|>"), *text, ours("<|im_end|>"), ours("<|fim|>"), *text]
    plain = pairing.draft.encode("a <|im_end|>").ids
    expected = [theirs("<|im_start|>"), *plain, theirs("<|endoftext|>"), *plain]
    assert Transcript(pairing).read(tokens) == expected
    transcript = Transcript(pairing)
    for end in range(1, len(tokens) + 1):
        transcript.read(tokens[:end])
    assert transcript.ids == expected


def test_what_stands_before_a_text() -> None:
    """A BOS belongs to the tokenizer that puts it there, and so does the space before the first word."""
    llama, qwen = llama2_like(), qwen_like()
    expected = qwen("Hello world", add_special_tokens=False)["input_ids"]
    assert Transcript(pair("llama2", "qwen")).read(llama("Hello world")["input_ids"]) == expected
    assert Transcript(pair("qwen", "llama2")).read(expected) == llama("Hello world")["input_ids"]


def test_a_character_that_never_gets_complete() -> None:
    """Random models say bytes that are no characters; what follows was waited for in vain."""
    pairing = pair("gpt2", "qwen")
    broken = [*pairing.target.encode("a").ids, gpt2_like().convert_tokens_to_ids("ä")]
    transcript = Transcript(pairing)
    assert pairing.draft.bytes_of(transcript.read(broken)[-1]) == b"\xe4"
    assert transcript.partial == b"\xe4"
    after = [*broken, *pairing.target.encode(" the").ids]
    assert b"".join(map(pairing.draft.bytes_of, transcript.read(after))).decode() == "a\N{REPLACEMENT CHARACTER} the"


@pytest.mark.real_weights
@pytest.mark.parametrize("other", ["qwen", "llama2"])
def test_reading_with_a_real_tokenizer(smollm2: Path, other: str) -> None:
    from transformers import AutoTokenizer

    real, made = named(AutoTokenizer.from_pretrained(smollm2)), named(KINDS[other]())
    rnd = random.Random(5)
    for pairing in (pair_vocabularies(real, made), pair_vocabularies(made, real)):
        for _ in range(3):
            assert_read_as_at_once(pairing, random_text(rnd), rnd)


@pytest.mark.slow
@pytest.mark.real_weights
def test_reading_qwen_with_smollm2(smollm2: Path) -> None:
    """The pair that this is for; needs the tokenizer of Qwen2.5-Coder-1.5B in the model cache."""
    from transformers import AutoTokenizer

    folder = resolve("qwen2.5-coder-1.5b")
    if folder is None:
        pytest.skip("Qwen2.5-Coder-1.5B is not in the model cache")
    small, big = (named(AutoTokenizer.from_pretrained(path)) for path in (smollm2, folder))
    rnd = random.Random(6)
    pairing = pair_vocabularies(big, small)
    assert measure_sharing(pairing, PROSE).of_text > 0.95
    for _ in range(40):
        assert_read_as_at_once(pairing, random_text(rnd), rnd)


# --- toy models behind real tokenizers --------------------------------------------------------------------------------


def toy(kind: str, seed: int = 0, **settings: Any) -> RecurrentModel:
    """Everything that it was fed decides what comes next, so that nothing stale goes unnoticed."""
    tokenizer = KINDS[kind]()
    return RecurrentModel(len(tokenizer) + 3, seed, name=f"{kind} {seed}", tokenizer=tokenizer, **settings)


def prompt_of(kind: str, text: str = "The tides are 你好 the rise") -> list[int]:
    return KINDS[kind]()(text)["input_ids"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("target", "draft"), [("qwen", "gpt2"), ("gpt2", "llama2"), ("llama2", "qwen"), ("qwen", "unigram")]
)
def test_greedy_parity(target: str, draft: str, way: Any) -> None:
    """G1, V4. Random bytes, broken characters, special tokens in the answer: that of plain decoding all the same."""
    model, prompt = toy(target), prompt_of(target)
    expected, _ = decode(model, NoDrafter(), prompt, max_new_tokens=40)
    drafter = VocabularyDrafter(toy(draft, 1), model, way)
    for k in (1, 2, 5):
        answer, rounds = decode(model, drafter, prompt, k=k, max_new_tokens=40)
        assert answer == expected
        assert sum(r.num_drafted for r in rounds) > 5
    strings = model.tokenizer.decode(answer)
    assert strings == model.tokenizer.decode(expected)


def continuation_law(tokenizer: Any, text: str) -> Law:
    """All on how ``text`` goes on behind the bytes that were said."""
    spelling, whole = Spelling(tokenizer, "toy"), text.encode()

    def law(tokens: Sequence[int]) -> torch.Tensor:
        said = b"".join(map(spelling.bytes_of, tokens))
        said = (spelling.led("x", first=True).startswith(" ") and said[1:]) or said
        row = torch.full((len(tokenizer),), -30.0, dtype=torch.float64)
        rest = whole[len(said) :]
        begun = len(rest) - len(rest.decode(errors="ignore").encode())
        if not whole.startswith(said) or not rest:
            row[len(tokens) % 50] = 0.0
        elif rest[0] & 0xC0 == 0x80:
            row[(spelling.encode_bytes(rest[:1]) or [])[0]] = 0.0
        else:
            row[spelling.encode(rest[: len(rest) - begun].decode()).ids[0]] = 0.0
        return row

    return law


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_two_models_that_know_one_text(target: str, draft: str, way: Any) -> None:
    """An oracle in other tokens. Strings are wrong only where a draft ends inside a token of the target."""
    text = PROSE[:200] + CODE_AND_MORE
    ours, theirs = (
        TableModel(continuation_law(t, text), len(t), tokenizer=t) for t in (KINDS[target](), KINDS[draft]())
    )
    prompt = ours.tokenizer(text[:40])["input_ids"][:-1]
    expected, _ = decode(ours, NoDrafter(), prompt, max_new_tokens=100)
    answer, rounds = decode(ours, VocabularyDrafter(theirs, ours, way), prompt, k=4, max_new_tokens=100)
    assert answer == expected
    rate = sum(r.num_accepted for r in rounds) / max(1, sum(r.num_drafted for r in rounds))
    assert rate > (0.7 if way == "strings" else 0.3)


CODE_AND_MORE = "\n\ndef mean(values):\n    if not values:\n        return 0.0\n\n你好 Привет, naïve café 🎉 don't 3.14"


def permuted(tokens: Sequence[str], seed: int) -> list[str]:
    return random.Random(seed).sample(list(tokens), len(tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_model_under_two_numberings_is_always_accepted(temperature: float) -> None:
    """C1. A draft that is the target with its ids renumbered: anything stale or shifted would be a rejection."""
    letters = [*"abcdefghijklmnop"]
    other = permuted(letters, 3)
    to_draft = [other.index(letter) for letter in letters]
    law = random_law(len(letters), seed=4, order=3)

    def renumbered(tokens: Sequence[int]) -> torch.Tensor:
        return law([letters.index(other[t]) for t in tokens])[[letters.index(letter) for letter in other]]

    target = TableModel(law, 16, tokenizer=of_tokens(letters))
    draft = TableModel(renumbered, 16, tokenizer=of_tokens(other))
    drafter = make_drafter(draft, target)
    assert isinstance(drafter, VocabularyDrafter)
    assert [drafter.to_draft[i] for i in range(16)] == to_draft
    for way in WAYS if temperature == 0 else WAYS[:1]:
        drafter = VocabularyDrafter(draft, target, way)
        answer, rounds = decode(target, drafter, [1, 2], k=4, max_new_tokens=200, temperature=temperature, seed=2)
        assert len(answer) == 200
        assert [r.num_accepted for r in rounds] == [r.num_drafted for r in rounds]
        assert len(rounds) == 1 + 40


# --- the law ----------------------------------------------------------------------------------------------------------

OURS, THEIRS = of_tokens(["a", "b", "ab"], ["a b"]), of_tokens(["ba", "b", "a", "aa"], ["b a", "a a"])
LAW = random_law(3, seed=21, order=1, spread=1.5)


def small_pair() -> tuple[TableModel, VocabularyDrafter]:
    target = TableModel(LAW, 3, tokenizer=OURS)
    draft = TableModel(random_law(4, seed=22, order=2, spread=1.5), 4, tokenizer=THEIRS)
    return target, VocabularyDrafter(draft, target, "shared tokens")


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("least_mass", [0.0, 0.5])
def test_joint_law_with_shared_tokens_by_enumeration(
    k: int, least_mass: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4. Two of three ids are shared, the draft's own ids change behind it, drafts end where little is shared."""
    monkeypatch.setattr(module, "_LEAST_MASS", least_mass)
    assert_law(small_pair, monkeypatch, k=k, temperature=1.0)


@pytest.mark.parametrize("k", [1, 3])
def test_joint_law_in_a_cascade_by_enumeration(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """D4. Behind copies, which may be what the draft lacks, it is asked for nothing; at the start it draws."""

    def made() -> tuple[TableModel, Any]:
        target, drafter = small_pair()
        return target, CascadeDrafter([SuffixDrafter(min_probability=0, factor=1), drafter], min_confidence=0.4)

    assert_law(made, monkeypatch, k=k, temperature=1.0)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 2},
        {"temperature": 1.4, "top_p": 0.8},
        {"repetition_penalty": 1.8, "frequency_penalty": 0.7},
        {"logit_bias": {0: -INF, 1: 0.8}},
        {"logit_bias": {0: -INF, 1: -INF}},
    ],
)
def test_joint_law_with_processors_by_enumeration(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """D2, P1, P4. Filters and penalties act on the target's ids; if they forbid all shared ids, none is drafted."""
    assert_law(small_pair, monkeypatch, k=2, **{"temperature": 1.0, **settings})


def test_joint_law_with_strings_by_enumeration(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[TableModel, VocabularyDrafter]:
        target, drafter = small_pair()
        drafter.way = "strings"
        return target, drafter

    assert_law(made, monkeypatch, k=2, temperature=1.0)


def assert_law(made: Callable[[], tuple[TableModel, Any]], patch: Any, k: int, **settings: Any) -> None:
    drafted = 0

    def program(dice: Any) -> tuple[int, ...]:
        nonlocal drafted
        with patch.context() as loaded:
            loaded_dice(loaded, dice)
            target, drafter = made()
            answer, rounds = decode(target, drafter, [1], k=k, max_new_tokens=3, **settings)
            drafted += sum(r.num_drafted for r in rounds)
            return tuple(answer)

    law = all_outcomes(program)
    one = Sampler(SamplingParams(**settings), 1, (), 0)
    plain = settings == {"temperature": 1.0}
    expected = joint_law(LAW, [1], 3, softmax if plain else lambda logits, tokens: one.probs(logits[None], tokens)[0])
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    for sequence, probability in expected.items():
        assert law.get(sequence, 0.0) == pytest.approx(probability, abs=1e-12), sequence
    forbidden = [t for t, bias in settings.get("logit_bias", {}).items() if bias == -INF]
    assert (drafted > 0) == (len(forbidden) < 2)


# --- sessions by themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.3, "top_p": 0.6}]
)
def test_q_is_over_shared_ids_and_what_was_drawn_from(params: dict[str, Any]) -> None:
    target, model = toy("qwen"), toy("gpt2", 1)
    drafter = VocabularyDrafter(model, target, "shared tokens")
    tokens = prompt_of("qwen")
    draft = drafter.start(sampler(**params)).draft(tokens, 4)
    assert draft.probs is not None
    own, cache = list(Transcript(drafter.pairing).read(tokens)), model.new_cache()
    for token, q, sure in zip(draft.tokens, draft.probs, draft.confidence, strict=True):
        logits = model.forward(own[cache.length :], cache, 1)[0]
        row = torch.full((target.vocab_size,), -INF, dtype=torch.float64)
        for ours, theirs in drafter.to_draft.items():
            row[ours] = logits[theirs]
        expected = sampler(**params).probs(row[None], [*tokens])[0]
        assert torch.equal(q, expected)
        assert q[token] > 0
        assert sure == float(q.max())
        own.append(drafter.to_draft[token])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize(("target", "draft"), [("qwen", "gpt2"), ("gpt2", "llama2")])
def test_a_session_rolls_back_and_catches_up(target: str, draft: str, brief: bool, way: Any) -> None:
    """After any number of tokens stood and others followed, the next draft is as a fresh session's."""
    drafter = VocabularyDrafter(toy(draft, 1), toy(target), way)
    rnd, ids = random.Random(9), drafter.pairing.target.encode(random_text(random.Random(3), 8)).ids
    tokens = prompt_of(target)
    own = Sampler(SamplingParams(), len(tokens), (), 0)
    session = drafter.start(own)
    session.latest = 2 if brief else None
    for _ in range(25):
        drafted, fresh = session.draft(tokens, 4), drafter.start(own)
        fresh.latest = session.latest
        assert drafted == fresh.draft(tokens, 4)
        tokens = [*tokens, *drafted.tokens[: rnd.randrange(5)], rnd.choice(ids)]


@pytest.mark.parametrize("way", WAYS)
def test_the_context_limit_of_the_draft_is_in_its_own_ids(way: Any) -> None:
    """X2. The model asserts that it is never fed a position at or above its limit."""
    target = toy("qwen")
    prompt = prompt_of("qwen")
    drafts = []
    for limit in range(1, 32):
        drafter = VocabularyDrafter(toy("gpt2", limit, limit=limit), target, way)
        drafts.append(len(drafter.start(sampler()).draft(prompt, 4).tokens))
        answer, _ = decode(target, drafter, prompt, max_new_tokens=12)
        assert len(answer) == 12
    assert drafts[0] == 0 < max(drafts)


@pytest.mark.parametrize("way", WAYS)
def test_a_gate_ends_a_draft(way: Any) -> None:
    drafter = VocabularyDrafter(toy("gpt2", 1), toy("qwen"), way)
    asked: list[tuple[int, float]] = []
    session = drafter.start(sampler())
    session.gate = lambda count, sure: asked.append((count, sure)) or count < 1
    draft = session.draft(prompt_of("qwen"), 6)
    assert draft.ended == "controller"
    assert [count for count, sure in asked if isnan(sure)] == [0, 1]  # before each pass
    asked = [(count, sure) for count, sure in asked if not isnan(sure)]
    assert [count for count, _ in asked] == [0]
    assert all(0 < sure <= 1 for _, sure in asked)
    assert len(draft.confidence) == len(draft.tokens)
    if way == "shared tokens":
        assert draft.confidence == tuple(sure for _, sure in asked[:1])


def test_a_draft_ends_where_the_next_token_is_not_shared() -> None:
    target = TableModel(LAW, 3, tokenizer=OURS)
    only_theirs = TableModel(lambda tokens: torch.tensor([9.0, 0, 0, 9.0], dtype=torch.float64), 4, tokenizer=THEIRS)
    draft = VocabularyDrafter(only_theirs, target, "shared tokens").start(sampler(temperature=1.0)).draft([0, 1], 3)
    assert draft == Draft(ended="vocabulary")
    strings = VocabularyDrafter(only_theirs, target, "strings").start(sampler()).draft([0, 1], 2)
    assert strings.tokens == (1, 2), "'baba' is spelled b, ab, a"


def test_no_ids_for_half_a_character() -> None:
    """A draft without single bytes cannot read what the target has begun, and waits."""
    target = TableModel(random_law(len(gpt2_like()), 1), len(gpt2_like()), tokenizer=gpt2_like())
    letters = of_tokens([*"abcdefghijklmnopqrstuvwxyz", "Ġ"])
    draft = TableModel(random_law(27, 2), 27, tokenizer=letters)
    session = VocabularyDrafter(draft, target, "shared tokens").start(sampler())
    tokens = [*gpt2_like()("a")["input_ids"], gpt2_like().convert_tokens_to_ids("ä")]
    assert session.draft(tokens, 3) == Draft(ended="vocabulary")
    assert session.draft([*tokens, *gpt2_like()(" the")["input_ids"]], 3).tokens


def test_strings_confidence_is_that_of_what_is_written() -> None:
    """Two of the draft's tokens for one of the target's: sure of both; one for two: the second follows by itself."""
    target = TableModel(LAW, 3, tokenizer=OURS)
    sure = {1: 3.0, 2: 2.0}

    def law(tokens: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(4, dtype=torch.float64)
        wanted = 1 if tokens[-1] == 2 else 2  # a, b, a, b
        row[wanted] = sure[wanted]
        return row

    draft = VocabularyDrafter(TableModel(law, 4, tokenizer=THEIRS), target, "strings").start(sampler()).draft([1], 2)
    assert draft.tokens == (2,)
    peaks = [torch.softmax(torch.tensor([0, 0, 0, s]), -1).max() for s in (2.0, 3.0)]
    assert draft.confidence[0] == pytest.approx(float(peaks[0] * peaks[1]))


# --- the choice, and whole runs ---------------------------------------------------------------------------------------


def test_the_way_is_chosen_by_request(capsys: pytest.CaptureFixture[str]) -> None:
    module._say_once.cache_clear()
    target, model = toy("qwen"), toy("gpt2", 1)
    drafter = make_drafter(model, target)
    assert isinstance(make_drafter(model, target), VocabularyDrafter)
    assert isinstance(drafter.start(sampler()), StringSession)
    for params in ({"temperature": 1.0}, {"repetition_penalty": 1.1}):
        assert type(drafter.start(sampler(**params))) is SharedSession
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "gpt2 1 has another tokenizer than the target qwen 0" in said
    assert "414 ids in common, 59%" in said
    assert type(make_drafter(toy("qwen", 2), target)) is ModelDrafter
    model.tokenizer = None
    assert type(make_drafter(model, target)) is ModelDrafter
    with pytest.raises(InputError, match="way='both'"):
        VocabularyDrafter(toy("gpt2", 1), target, "both")  # type: ignore[arg-type]


def test_a_draft_whose_rows_are_all_unshared_is_refused() -> None:
    target = TableModel(LAW, 3, tokenizer=OURS)
    with pytest.raises(InputError, match="no token that the draft model toy can propose"):
        VocabularyDrafter(TableModel(random_law(1, 0), 1, tokenizer=THEIRS), target)


@pytest.mark.parametrize("params", [{}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "seed": 3}])
def test_two_checkpoints(tiny_checkpoint: Path, other_tokenizer_checkpoint: Path, params: dict[str, Any]) -> None:
    """V2. As many ids in another order, with a BOS and a chat template: answers and their text are those of plain."""
    target: Any = load_model(tiny_checkpoint, weights="fp32")
    plain = SpeculativeDecoding(target)
    spec = SpeculativeDecoding(target, load_model(other_tokenizer_checkpoint, weights="fp32"), k=3)
    for prompt in ("the café — 你好", [{"role": "user", "content": "<|im_end|> and"}]):
        (ours,), (theirs,) = (s.complete(prompt, max_new_tokens=30, **params) for s in (spec, plain))
        if "temperature" not in params:
            assert (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, theirs.finish_reason)
        assert ours.stats.drafted > 0
        assert ours.tokens == spec.complete(prompt, max_new_tokens=30, **params)[0].tokens


def test_bit_exact_answers_do_not_depend_on_the_draft(tiny_checkpoint: Path, other_tokenizer_checkpoint: Path) -> None:
    given = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5}
    target: Any = load_model(tiny_checkpoint, weights="fp32")
    plain = SpeculativeDecoding(target, bit_exact=True).complete("the", **given)[0]
    spec = SpeculativeDecoding(target, other_tokenizer_checkpoint, bit_exact=True)
    assert spec.complete("the", **given)[0].tokens == plain.tokens


def test_a_pair_without_anything_in_common_is_refused_before_weights_are_read(
    tiny_checkpoint: Path, stranger_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.llama.LlamaModel.__init__", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(InputError, match="only 0 tokens in common"):
        SpeculativeDecoding(tiny_checkpoint, stranger_checkpoint)
