"""Text from tokens, one at a time, and the rules that end an answer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from conftest import byte_tokenizer
from fakes import Spelling
from slipstream import InputError
from slipstream.text import Detokenizer, Ending, encode

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: An emoji, one of several code points, CJK, a letter with two combining accents, right-to-left, and plain text.
TEXTS = (
    "a\N{GRINNING FACE}b",
    "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}\N{VARIATION SELECTOR-16} up",
    "日本語のテキスト",
    "e\N{COMBINING ACUTE ACCENT}\N{COMBINING DIAERESIS}x",
    "שלום, عالم",
    "  two  spaces\n\n\ttab ",
    "the café and the \N{SNOWMAN} in\r\nthe air\N{PILE OF POO}",
    "",
)


def sentencepiece_tokenizer() -> Any:
    """Like Llama 2's: words begin with a visible space, bytes stand in for other characters, a first space is lost."""
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdehlotwxé,\n", "▁a", "he", "▁t"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("h", "e"), ("▁", "t")]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


BYTES = byte_tokenizer()
PIECES = sentencepiece_tokenizer()
TOKENIZERS = {"bytes": BYTES, "sentencepiece": PIECES}


def pieces_of(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    one = Detokenizer(tokenizer)
    return [*(one.push(t) for t in ids), one.flush()]


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_pieces_add_up_and_hold_whole_characters(kind: str, text: str) -> None:
    """J3. Tokens that end inside a character were decoded to replacement characters."""
    ids = ids_of(TOKENIZERS[kind], text)
    pieces = pieces_of(TOKENIZERS[kind], ids)
    assert "".join(pieces) == whole(TOKENIZERS[kind], ids) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_is_as_early_as_can_be(text: str) -> None:
    """Text was held back for longer than the character needs."""
    tokenizer = Spelling([bytes([i]) for i in range(256)])
    pieces = pieces_of(tokenizer, list(text.encode()))[:-1]
    expected = [piece for c in text for piece in [*[""] * (len(c.encode()) - 1), c]]
    assert pieces == expected


@pytest.mark.parametrize("text", TEXTS[:4])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_an_answer_that_ends_at_any_byte(kind: str, text: str) -> None:
    """J3. An incomplete character at the end of an answer was dropped, or came out as several replacements."""
    tokenizer = TOKENIZERS[kind]
    ids = ids_of(tokenizer, text)
    for end in range(len(ids) + 1):
        pieces = pieces_of(tokenizer, ids[:end])
        assert not any(REPLACEMENT in piece for piece in pieces[:-1])
        if kind == "bytes":
            assert "".join(pieces) == whole(tokenizer, ids[:end])
        else:
            # The decoder spoils a whole run of bytes for one incomplete character; what was streamed stays as it was.
            good = "".join(pieces).rstrip(REPLACEMENT)
            assert text.startswith(good)
            assert whole(tokenizer, ids[:end]).rstrip(REPLACEMENT) in good


def test_a_replacement_character_in_the_text_itself() -> None:
    text = f"a{REPLACEMENT}b{REPLACEMENT}"
    assert "".join(pieces_of(BYTES, ids_of(BYTES, text))) == text


def test_bytes_that_are_no_text() -> None:
    tokenizer = Spelling([bytes([i]) for i in range(256)])
    ids = [0x61, 0xFF, 0xFE, 0x62, 0xF0, 0x9F, 0x63, 0xC3]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole(tokenizer, ids)
    assert "b" in "".join(pieces[:4])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_special_tokens_leave_no_trace(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    ids = [special[0], *ids_of(tokenizer, "a he"), special[0], special[1], *ids_of(tokenizer, " a"), special[1]]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == whole(tokenizer, ids)


def test_a_space_at_the_start_of_a_token_in_the_middle_is_kept() -> None:
    """Decoding tokens one by one loses each leading space with SentencePiece."""
    ids = ids_of(PIECES, "a t the lot")
    assert len(ids) > 3
    assert "".join(pieces_of(PIECES, ids)) == "a t the lot"
    assert "".join(PIECES.decode([t]) for t in ids) != "a t the lot"


def test_an_answer_that_begins_with_spaces() -> None:
    ids = ids_of(PIECES, "  a")
    assert "".join(pieces_of(PIECES, ids)) == whole(PIECES, ids)


def test_the_cost_of_a_token_does_not_grow() -> None:
    """Decoding everything again with each token costs the square of the answer's length."""

    class Counting(Spelling):
        decoded = 0

        def decode(self, ids: Sequence[int], **settings: Any) -> str:
            self.decoded += len(ids)
            return super().decode(ids, **settings)

    tokenizer = Counting(["a", "b"])
    pieces_of(tokenizer, [0, 1] * 500)
    assert tokenizer.decoded < 5 * 1000


# --- endings ----------------------------------------------------------------------------------------------------------

LETTERS = Spelling([*"abcdefg", "\n", "ab", "c\n\nd", "<eos>", "\N{GRINNING FACE}".encode()[:2]], special=[10])


def ending(tokenizer: Any = LETTERS, **rules: Any) -> Ending:
    return Ending(**{"stop_ids": (), "stop": (), "min_tokens": 0, "max_tokens": 100, **rules}, tokenizer=tokenizer)


def run(ids: Sequence[int], **rules: Any) -> tuple[list[str], str | None]:
    """The released pieces up to the end, and its reason."""
    one = ending(**rules)
    pieces = []
    for token in ids:
        pieces.append(one.push(token))
        if one.reason:
            break
    return pieces, one.reason


def test_nothing_ends() -> None:
    assert run([0, 1, 2]) == (["a", "b", "c"], None)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_stop_id_ends_and_is_no_text(at: int) -> None:
    pieces, reason = run([0] * at + [10, 1], stop_ids=[10])
    assert (pieces, reason) == (["a"] * at + [""], "stop")
    pieces, reason = run([0] * at + [2, 1], stop_ids=[2])  # not a special token
    assert (pieces, reason) == (["a"] * at + [""], "stop")


@pytest.mark.parametrize(
    ("ids", "stop", "text", "count"),
    [
        ([0, 1, 2, 3], ["c"], "ab", 3),
        ([0, 1, 2, 3], ["bc"], "a", 3),
        ([0, 1, 2, 3], ["abcd"], "", 4),
        ([0, 1, 2, 3], ["cd"], "ab", 4),
        ([0, 9, 1], ["\n\n"], "ac", 2),  # inside one token's text
        ([0, 9, 1], ["\n\nd"], "ac", 2),
        ([0, 2, 7, 7, 3], ["\n\n"], "ac", 4),
        ([8, 8, 2], ["ba"], "a", 2),  # begins inside one token, ends inside the next
        ([0, 0, 1, 2], ["aab"], "", 3),
        ([0, 0, 0, 1, 2], ["aab"], "a", 4),  # a false start
        ([0, 1, 0, 1, 2], ["abc"], "ab", 5),
        ([0, 1, 2], ["x", "c", "bc"], "a", 3),  # two at once: the one that begins first
        ([0, 1, 2], ["b", "abc"], "a", 2),  # the first one that is complete
    ],
)
def test_stop_strings(ids: list[int], stop: list[str], text: str, count: int) -> None:
    """S3."""
    pieces, reason = run(ids, stop=stop)
    assert ("".join(pieces), reason, len(pieces)) == (text, "stop", count)


def test_text_is_held_back_only_while_it_may_be_a_stop_string() -> None:
    """The beginning of a stop string was streamed before it was complete."""
    pieces, reason = run([0, 1, 3, 1, 2, 6], stop=["bcd"])
    assert (pieces, reason) == (["a", "", "bd", "", "", "bcg"], None)


def test_held_back_text_comes_out_at_the_end() -> None:
    one = ending(stop=["bcd"], stop_ids=[10])
    assert [one.push(t) for t in (0, 1, 2)] == ["a", "", ""]
    assert one.push(10) == "bc"
    pieces, reason = run([0, 1, 2], stop=["bcd"], max_tokens=3)
    assert (pieces, reason) == (["a", "", "bc"], "length")
    one = ending(stop=["bcd"])
    one.push(1)
    assert (one.flush(), one.reason) == ("b", None)
    assert one.flush() == ""


def test_an_incomplete_character_comes_out_at_the_end() -> None:
    """J3. Flush on eos, on the cap, and on cancelling; a stop string comes after it."""
    assert run([0, 11, 10], stop_ids=[10]) == (["a", "", REPLACEMENT], "stop")
    assert run([0, 11], max_tokens=2) == (["a", REPLACEMENT], "length")
    one = ending()
    assert [one.push(0), one.push(11), one.flush()] == ["a", "", REPLACEMENT]
    pieces, reason = run([0, 11, 2, 3], stop=["c"])
    assert ("".join(pieces), reason) == (f"a{REPLACEMENT}", "stop")


def test_stop_strings_across_multibyte_characters() -> None:
    tokenizer = Spelling([bytes([i]) for i in range(256)])
    pieces, reason = run(list("a日本語b".encode()), stop=["本語"], tokenizer=tokenizer)
    assert ("".join(pieces), reason, len(pieces)) == ("a日", "stop", 1 + 9)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5])
def test_length(max_tokens: int) -> None:
    pieces, reason = run([0] * 9, max_tokens=max_tokens) if max_tokens else ([], ending(max_tokens=0).reason)
    assert (len(pieces), reason) == (max_tokens, "length")


def test_stop_wins_over_length_at_the_same_token() -> None:
    assert run([0, 10], stop_ids=[10], max_tokens=2)[1] == "stop"
    assert run([0, 1], stop=["b"], max_tokens=2) == (["a", ""], "stop")


@pytest.mark.parametrize("end", ["length", "eos", "cancel"])
def test_stop_string_that_an_incomplete_character_completes(end: str) -> None:
    """Bytes that are left over at the end come out as a replacement character: a stop string with one was missed."""
    ids = ids_of(BYTES, "abc\N{GRINNING FACE}")[:-1]
    one = ending(
        BYTES, stop=["c\N{REPLACEMENT CHARACTER}"], max_tokens=len(ids) if end == "length" else 99, stop_ids=[3]
    )
    text = "".join(one.push(t) for t in ids)
    text += one.push(3) if end == "eos" else one.flush()
    assert text == "ab"
    assert one.reason == {"length": "stop", "eos": "stop", "cancel": None}[end]


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    assert run([0, 1, 0, 1, 2], stop=["b"], min_tokens=3) == (["a", "b", "a", ""], "stop")
    assert run([0, 1, 0], stop=["b"], min_tokens=2) == (["a", ""], "stop")
    # Text from before is out; it cannot be cut any more.
    assert run([0, 1, 2, 0], stop=["ab"], min_tokens=3) == (["", "ab", "c", ""], None)


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert run([0, 1, 5], stop_ids=[5], tokenizer=None) == (["", "", ""], "stop")
    one = ending(tokenizer=None)
    one.push(0)
    assert one.flush() == ""


@pytest.mark.parametrize("stop", [["the "], [" a", "\n"], ["é"], ["\N{SNOWMAN}", "zz"], ["in\r\nthe"]])
def test_cutting_the_stream_never_differs_from_cutting_the_whole_text(stop: list[str]) -> None:
    """Against the obvious rule: decode more and more, look for the strings, cut at the first that begins."""
    text = TEXTS[6]
    for tokenizer in (BYTES, Spelling([bytes([i]) for i in range(256)])):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces, reason = run(ids, stop=stop, tokenizer=tokenizer)
        found = [at for s in stop if (at := text.find(s)) >= 0]
        assert reason == ("stop" if found else None)
        if found:
            assert "".join(pieces) == text[: min(found)]


# --- prompts ----------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "the café"}]


def test_text_gets_its_special_tokens_once() -> None:
    """A prompt that a chat template had rendered got a second BOS."""
    assert encode("the", BYTES) == tuple(BYTES("the")["input_ids"])
    assert encode("the", BYTES)[0] == BYTES.bos_token_id
    rendered = BYTES.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    ids = encode(rendered, BYTES)
    assert ids.count(BYTES.bos_token_id) == 1
    assert ids == encode(CHAT, BYTES)


def test_chat_messages_go_through_the_template_once() -> None:
    ids = encode(CHAT, BYTES)
    assert ids.count(BYTES.bos_token_id) == 1
    text = BYTES.decode(ids)
    assert text == "<s><|im_start|>user\nthe café<|im_end|>\n<|im_start|>assistant\n"


def test_ids_are_taken_as_they_are() -> None:
    import numpy as np
    import torch

    one_row = torch.tensor([[1, 1, 2]])
    for given in (
        [1, 1, 2],
        (1, 1, 2),
        one_row[0],
        one_row,
        np.array([1, 1, 2]),
        list(one_row[0]),
        list(np.int32([1, 1, 2])),
    ):
        assert encode(given, None) == (1, 1, 2)
        assert encode(given, BYTES) == (1, 1, 2)
        assert {type(token) for token in encode(given, None)} == {int}
    assert encode([], None) == ()


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "word"),
    [
        ("text", None, "tokenizer"),
        (CHAT, None, "chat template"),
        (CHAT, PIECES, "chat template"),
        ([1, "a"], BYTES, "neither"),
        ([1.0, 2.0], BYTES, "neither"),
        ([True, False], BYTES, "neither"),
        ([None], BYTES, "neither"),
        ([[1, 2], [3]], BYTES, "neither"),
        (5, BYTES, "neither"),
        (b"the", BYTES, "neither"),
        (BYTES("the"), BYTES, "neither"),
        (CHAT[0], BYTES, "neither"),
        (None, BYTES, "neither"),
        ([[1, 2]], BYTES, "neither"),
        ("", BYTES, "empty"),
        ("a\udcff", BYTES, "character 1"),
        ([{"role": "user", "content": "\udcff"}], BYTES, "chat template"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt: Any, tokenizer: Any, word: str) -> None:
    with pytest.raises(InputError, match=word):
        encode(prompt, tokenizer)


@pytest.mark.parametrize(
    ("template", "word"),
    [("{{ raise_exception('no\\nsystem') }}", "no system"), ("{% for %}", "Expected"), ("{{ x.y.z }}", "x")],
)
def test_a_template_that_does_not_take_the_messages(template: str, word: str) -> None:
    """Many templates refuse a system message; what jinja raises is no error of ours."""
    tokenizer = copy.copy(BYTES)
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=word) as caught:
        encode(CHAT, tokenizer)
    assert "\n" not in str(caught.value)
