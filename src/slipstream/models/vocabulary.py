"""Whether two models read the same tokenizer: id by id, by each id's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from slipstream.errors import InputError


@dataclass(frozen=True)
class Difference:
    """The lowest id that stands for different texts."""

    token: int
    target_text: str
    draft_text: str


def first_difference(target_tokenizer: Any, draft_tokenizer: Any) -> Difference | None:
    """The lowest id whose text differs between two transformers tokenizers; None if there is none.

    Added tokens are compared too. An id that only one tokenizer has a text for is padding to the other and no
    difference: the embeddings of one tokenizer are padded to different sizes, and later models of a family add tokens.
    Texts are compared as the vocabularies spell them, byte-level or SentencePiece.
    """
    if target_tokenizer is draft_tokenizer:
        return None
    # get_vocab() of both is most of the time that this takes; set operations on the items are the rest
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    if target == draft:
        return None
    only_target = {token: text for text, token in target.items() - draft.items()}
    only_draft = {token: text for text, token in draft.items() - target.items()}
    differing = min(only_target.keys() & only_draft.keys(), default=None)
    if differing is None:
        return None
    return Difference(differing, only_target[differing], only_draft[differing])


class Named(Protocol):
    """A model, or a checkpoint that is not loaded yet."""

    @property
    def name(self) -> str:
        """What to call it in messages."""
        ...

    @property
    def tokenizer(self) -> Any | None:
        """A transformers tokenizer, or None."""
        ...


def check_same_tokenizer(target_model: Named, draft_model: Named) -> None:
    """Refuse a draft model whose ids mean other texts than the target's.

    Where a model has no tokenizer there is nothing to compare, and the pair is accepted.

    Raises:
        InputError: the two tokenizers differ; the message names the first differing id and its two texts.
    """
    target, draft = target_model.tokenizer, draft_model.tokenizer
    if target is None or draft is None:
        return
    difference = first_difference(target, draft)
    if difference is not None:
        raise InputError(
            f"the draft model {draft_model.name} has another tokenizer than the target {target_model.name}: "
            f"id {difference.token} is {difference.draft_text!r} in the draft and {difference.target_text!r} in the "
            "target; choose a draft model with the target's tokenizer"
        )
