"""Drafters: one file each. ``make_drafter`` turns what a user writes into one."""

from __future__ import annotations

from typing import Any

from slipstream.drafters.base import Drafter, DraftSession
from slipstream.drafters.model import ModelDrafter, for_drafting
from slipstream.drafters.ngram import NgramDrafter
from slipstream.drafters.nothing import NoDrafter
from slipstream.drafters.vocabulary import VocabularyDrafter
from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.models.vocabulary import have_same_tokenizer

__all__ = ["DraftSession", "Drafter", "ModelDrafter", "NgramDrafter", "NoDrafter", "VocabularyDrafter", "make_drafter"]


def make_drafter(draft: Any, target: Model) -> Drafter:
    """``None``, ``"ngram"``, a drafter, or a model, which may have another tokenizer than the target.

    Raises:
        InputError: anything else.
    """
    if draft is None:
        return NoDrafter()
    if isinstance(draft, str) and draft == "ngram":
        return NgramDrafter()
    made = not isinstance(draft, type)
    if made and hasattr(draft, "start"):
        drafter: Drafter = draft
        return drafter
    if made and hasattr(draft, "forward") and hasattr(draft, "new_cache"):
        model = for_drafting(draft)
        if have_same_tokenizer(target, draft):
            return ModelDrafter(model, target.vocab_size)
        return VocabularyDrafter(model, target)
    kind = type(draft).__name__ if made else f"class {draft.__name__}"
    raise InputError(
        f"draft_model= is a {kind}, which is not a drafter; use a model, a path, 'ngram', None, or an object with "
        "start()"
    )
