"""Drafters: one file each. ``make_drafter`` turns what a user writes into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.drafters.base import Drafter, DraftSession
from slipstream.drafters.cascade import CascadeDrafter
from slipstream.drafters.early_exit import PREFIX, EarlyExitDrafter, check_early_exit, early_exit
from slipstream.drafters.model import ModelDrafter, for_drafting
from slipstream.drafters.nothing import NoDrafter
from slipstream.drafters.store import SuffixStore
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.vocabulary import VocabularyDrafter
from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.models.vocabulary import have_same_tokenizer

if TYPE_CHECKING:
    from slipstream.models.load import Checkpoint

__all__ = [
    "NAMES",
    "CascadeDrafter",
    "DraftSession",
    "Drafter",
    "EarlyExitDrafter",
    "ModelDrafter",
    "NoDrafter",
    "SuffixDrafter",
    "SuffixStore",
    "VocabularyDrafter",
    "check_names",
    "is_name",
    "make_drafter",
    "predicting",
]

#: Drafters that need no model; "ngram" is what "suffix" was called before.
NAMES = ("suffix", "ngram")


def is_name(draft: Any) -> bool:
    """Whether ``draft`` names a drafter that needs no second model."""
    return isinstance(draft, str) and (draft in NAMES or draft.startswith(PREFIX))


def check_names(drafts: Iterable[Any], target: Checkpoint) -> None:
    """Refuse names among ``drafts`` that do not fit ``target``, before its weights are read.

    Raises:
        InputError: there is one; as ``make_drafter``.
    """
    for draft in drafts:
        if isinstance(draft, str) and draft.startswith(PREFIX):
            check_early_exit(draft, target.config, target.name)


def make_drafter(draft: Any, target: Model) -> Drafter:
    """``None``, ``"suffix"``, ``"early-exit:8"``, a drafter, a model, or a list of these: a cascade.

    A model may have another tokenizer than the target.

    Raises:
        InputError: anything else.
    """
    if draft is None:
        return NoDrafter()
    if isinstance(draft, list | tuple) and draft:
        return CascadeDrafter([_member(one, target) for one in draft])
    if isinstance(draft, str) and is_name(draft):
        return SuffixDrafter() if draft in NAMES else early_exit(draft, target)
    made = not isinstance(draft, type)
    if made and hasattr(draft, "start"):
        if isinstance(draft, SuffixDrafter) and draft.store is not None:
            draft.store.check_tokenizer(target.tokenizer)
        drafter: Drafter = draft
        return drafter
    if made and hasattr(draft, "forward") and hasattr(draft, "new_cache"):
        model = for_drafting(draft)
        if have_same_tokenizer(target, draft):
            return ModelDrafter(model, target.vocab_size)
        return VocabularyDrafter(model, target)
    kind = type(draft).__name__ if made else f"class {draft.__name__}"
    raise InputError(
        f"draft_model= is a {kind}, which is not a drafter; use a model, a path, 'suffix', None, an object with "
        "start(), or a list of them"
    )


def predicting(drafter: Drafter, prediction: Sequence[int]) -> Drafter:
    """``drafter`` for requests that will probably repeat ``prediction`` in part; it copies from that first."""
    if isinstance(drafter, SuffixDrafter):
        return drafter.predicting(prediction)
    if isinstance(drafter, CascadeDrafter) and any(isinstance(one, SuffixDrafter) for one in drafter.drafters):
        members = [one.predicting(prediction) if isinstance(one, SuffixDrafter) else one for one in drafter.drafters]
        return CascadeDrafter(members, min_confidence=drafter.min_confidence)
    copying = SuffixDrafter(prediction=prediction)
    if isinstance(drafter, NoDrafter):
        return copying
    return CascadeDrafter([copying, *(drafter.drafters if isinstance(drafter, CascadeDrafter) else [drafter])])


def _member(draft: Any, target: Model) -> Drafter:
    if draft is None or isinstance(draft, list | tuple):
        raise InputError(
            f"draft_model= holds {draft!r}, which cannot be one of several; use models, paths and 'suffix'"
        )
    return make_drafter(draft, target)
