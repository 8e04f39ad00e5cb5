"""Drafters: one file each. ``make_drafter`` turns what a user writes into one."""

from __future__ import annotations

from typing import Any

from slipstream.drafters.base import Drafter, DraftSession
from slipstream.drafters.cascade import CascadeDrafter
from slipstream.drafters.model import ModelDrafter, for_drafting
from slipstream.drafters.nothing import NoDrafter
from slipstream.drafters.store import SuffixStore
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.errors import InputError
from slipstream.models.base import Model

__all__ = [
    "NAMES",
    "CascadeDrafter",
    "DraftSession",
    "Drafter",
    "ModelDrafter",
    "NoDrafter",
    "SuffixDrafter",
    "SuffixStore",
    "make_drafter",
]

#: Drafters that need no model; "ngram" is what "suffix" was called before.
NAMES = ("suffix", "ngram")


def make_drafter(draft: Any, target: Model) -> Drafter:
    """``None``, ``"suffix"``, a drafter, a model of the target's tokenizer, or a list of these: a cascade.

    Raises:
        InputError: anything else.
    """
    if draft is None:
        return NoDrafter()
    if isinstance(draft, list | tuple) and draft:
        return CascadeDrafter([_member(one, target) for one in draft])
    if isinstance(draft, str) and draft in NAMES:
        return SuffixDrafter()
    made = not isinstance(draft, type)
    if made and hasattr(draft, "start"):
        if isinstance(draft, SuffixDrafter) and draft.store is not None:
            draft.store.check_tokenizer(target.tokenizer)
        drafter: Drafter = draft
        return drafter
    if made and hasattr(draft, "forward") and hasattr(draft, "new_cache"):
        return ModelDrafter(for_drafting(draft), target.vocab_size)
    kind = type(draft).__name__ if made else f"class {draft.__name__}"
    raise InputError(
        f"draft_model= is a {kind}, which is not a drafter; use a model, a path, 'suffix', None, an object with "
        "start(), or a list of them"
    )


def _member(draft: Any, target: Model) -> Drafter:
    if draft is None or isinstance(draft, list | tuple):
        raise InputError(
            f"draft_model= holds {draft!r}, which cannot be one of several; use models, paths and 'suffix'"
        )
    return make_drafter(draft, target)
