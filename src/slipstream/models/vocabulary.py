"""Whether two models read the same tokenizer, id by id; and if not, which ids stand for the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from slipstream.errors import InputError
from slipstream.models.spelling import Spelling

#: Two vocabularies that share less than this of the smaller one are of no use to each other.
_LEAST_SHARED = 0.05

K = TypeVar("K")


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


@dataclass(frozen=True)
class Pairing:
    """Two vocabularies and what they have in common."""

    target: Spelling
    draft: Spelling
    to_draft: Mapping[int, int]
    """The draft's id of each id of the target that both have."""

    def within(self, target_rows: int, draft_rows: int) -> dict[int, int]:
        """``to_draft`` as far as models with so many rows have both ids."""
        return {t: d for t, d in self.to_draft.items() if t < target_rows and d < draft_rows}


def pair_vocabularies(target_model: Named, draft_model: Named) -> Pairing:
    """What two different tokenizers share: ids that stand for the same bytes, and special tokens of one role.

    Special tokens have one role if both tokenizers call them by one name, or both end a text with them. They are never
    paired with text, however it is spelled. Of several ids for the same bytes the one that is used counts.

    Raises:
        InputError: tokenizers that cannot be compared by bytes, or that have next to nothing in common.
    """
    target = Spelling(target_model.tokenizer, target_model.name)
    draft = Spelling(draft_model.tokenizer, draft_model.name)
    shared = _same_keys(_by_bytes(target), _by_bytes(draft))
    if len(shared) < _LEAST_SHARED * min(len(target.tokens), len(draft.tokens)):
        raise InputError(
            f"the tokenizers of the draft model {draft_model.name} and the target {target_model.name} have only "
            f"{len(shared)} tokens in common; choose a draft model whose tokenizer is closer to the target's"
        )
    shared |= _same_keys({c: i for i, c in target.special.items()}, {c: i for i, c in draft.special.items()})
    ends_are_free = target.eos not in shared and draft.eos not in shared.values()
    if target.eos is not None and draft.eos is not None and ends_are_free:
        shared[target.eos] = draft.eos
    return Pairing(target, draft, shared)


def _by_bytes(spelling: Spelling) -> dict[bytes, int]:
    """The id that is used for each string of bytes: not ``<0xNN>`` where there is another, else the lowest."""
    lowest_last = sorted(spelling.tokens, reverse=True)
    found = {spelling.bytes_of(i): i for i in lowest_last if spelling.is_byte(i)}
    found |= {spelling.bytes_of(i): i for i in lowest_last if not spelling.is_byte(i)}
    found.pop(b"", None)
    return found


def _same_keys(target: Mapping[K, int], draft: Mapping[K, int]) -> dict[int, int]:
    return {target[key]: draft[key] for key in target if key in draft}


@dataclass(frozen=True)
class SharedVocabulary:
    """How much two vocabularies have in common, in figures."""

    shared: int
    """Number of ids that both have."""
    of_target: float
    """Their share of the target's ids."""
    of_draft: float
    """Their share of the draft's ids."""
    of_text: float
    """Their share of the target's ids of a given text: how often the draft can propose what the target would say."""


def measure_sharing(pairing: Pairing, text: str) -> SharedVocabulary:
    """Figures of a pair; ``text`` should be like what the models are to write."""
    ids, shared = pairing.target.encode(text).ids, pairing.to_draft
    return SharedVocabulary(
        shared=len(shared),
        of_target=len(shared) / len(pairing.target.tokens),
        of_draft=len(shared) / len(pairing.draft.tokens),
        of_text=sum(i in shared for i in ids) / len(ids) if ids else 0.0,
    )


def have_same_tokenizer(target_model: Named, draft_model: Named) -> bool:
    """Whether ids mean the same to both; taken for granted where a model has no tokenizer to compare."""
    target, draft = target_model.tokenizer, draft_model.tokenizer
    return target is None or draft is None or first_difference(target, draft) is None


def check_pair(target_model: Named, draft_model: Named) -> None:
    """Refuse a draft model whose tokens cannot be handed to the target in any way.

    Raises:
        InputError: as ``pair_vocabularies``.
    """
    if not have_same_tokenizer(target_model, draft_model):
        pair_vocabularies(target_model, draft_model)
