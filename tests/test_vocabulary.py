"""Comparing two tokenizers id by id."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from conftest import byte_tokenizer
from slipstream.models.vocabulary import Difference, check_pair, first_difference, have_same_tokenizer


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


def test_models_without_tokenizer_are_taken_to_have_the_same() -> None:
    """A bare transformers model object has no tokenizer to compare."""
    tokenizer = Vocabulary("a")
    for target, draft in ((None, tokenizer), (tokenizer, None), (None, None)):
        assert have_same_tokenizer(model("big", target), model("small", draft))
        check_pair(model("big", target), model("small", draft))
    assert not have_same_tokenizer(model("big", tokenizer), model("small", Vocabulary("b")))


def test_large_vocabularies_are_compared_quickly() -> None:
    """A call per id takes seconds for 150,000 ids."""
    target, draft = (Vocabulary(*(f"token{i}" for i in range(150_000)), last) for last in "ab")
    start = time.process_time()
    assert first_difference(target, draft) == Difference(150_000, "a", "b")
    assert time.process_time() - start < 1
