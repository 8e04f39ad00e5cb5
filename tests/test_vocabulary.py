"""Comparing two tokenizers id by id."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import byte_tokenizer
from slipstream import InputError
from slipstream.models.vocabulary import Difference, check_same_tokenizer, first_difference


class Vocabulary:
    """As much of a tokenizer as the comparison needs: texts by id, None where there is no token."""

    def __init__(self, *texts: str | None) -> None:
        self._ids = {text: i for i, text in enumerate(texts) if text is not None}

    def get_vocab(self) -> dict[str, int]:
        return self._ids


def model(name: str, tokenizer: Any) -> Any:
    return SimpleNamespace(name=name, tokenizer=tokenizer)


def test_same_tokenizer_in_two_objects() -> None:
    """Two folders of one family hold two copies of its tokenizer."""
    assert first_difference(byte_tokenizer(), byte_tokenizer()) is None


def test_same_object_is_not_compared() -> None:
    """Comparing 150,000 ids takes a fifth of a second, which draft = target need not pay."""
    tokenizer = Vocabulary("a")
    tokenizer.get_vocab = None  # type: ignore[assignment, method-assign]
    assert first_difference(tokenizer, tokenizer) is None


def test_permuted_vocabulary_of_the_same_size() -> None:
    """V2 of the case list: equal sizes say nothing, the first differing id is the answer."""
    target, draft = byte_tokenizer(), byte_tokenizer(order=lambda tokens: tokens[::-1])
    difference = first_difference(target, draft)
    assert difference is not None
    texts = target.convert_ids_to_tokens(difference.token), draft.convert_ids_to_tokens(difference.token)
    assert texts == (difference.target_text, difference.draft_text)
    assert difference.token == len(target.all_special_tokens)


def test_lowest_difference_is_found_in_either_direction() -> None:
    """Swapped ids differ twice; the lower one is named, with each side's own text."""
    target, draft = Vocabulary("a", "b", "c", "d"), Vocabulary("a", "d", "c", "b")
    assert first_difference(target, draft) == Difference(1, "b", "d")
    assert first_difference(draft, target) == Difference(1, "d", "b")


def test_ids_beyond_the_end_are_padding() -> None:
    """V1: embeddings padded to different sizes, and tokens that a later model of the family added, do no harm."""
    short, long = Vocabulary("a", "b"), Vocabulary("a", "b", "<think>")
    assert first_difference(short, long) is None
    assert first_difference(long, short) is None


def test_hole_is_padding_too() -> None:
    """A tokenizer that skips an id has no text for it, so no text can differ."""
    assert first_difference(Vocabulary("a", None, "c"), Vocabulary("a", "b", "c")) is None
    assert first_difference(Vocabulary("a", None, "c"), Vocabulary("a", "b", "d")) == Difference(2, "c", "d")


def test_added_tokens_count() -> None:
    """Chat models of one base often differ in added tokens only."""
    target, draft = byte_tokenizer(), byte_tokenizer()
    target.add_tokens(["<think>"])
    draft.add_tokens(["<tool>"])
    assert first_difference(target, draft) == Difference(len(draft) - 1, "<think>", "<tool>")


def test_refusal_names_id_and_texts() -> None:
    """The message is what the user has to find the mix-up with."""
    with pytest.raises(InputError) as caught:
        check_same_tokenizer(model("big", Vocabulary("a", "b\n")), model("small", Vocabulary("a", "x")))
    message = str(caught.value)
    for part in ("big", "small", "id 1", r"'b\n'", "'x'"):
        assert part in message
    assert "\n" not in message


def test_models_without_tokenizer_are_accepted() -> None:
    """A bare transformers model object has no tokenizer to compare."""
    tokenizer = Vocabulary("a")
    for target, draft in ((None, tokenizer), (tokenizer, None), (None, None)):
        check_same_tokenizer(model("big", target), model("small", draft))


def test_large_vocabularies_are_compared_quickly() -> None:
    """A call per id takes seconds for 150,000 ids."""
    target, draft = (Vocabulary(*(f"token{i}" for i in range(150_000)), last) for last in "ab")
    start = time.process_time()
    assert first_difference(target, draft) == Difference(150_000, "a", "b")
    assert time.process_time() - start < 1
