"""What ``--draft`` may say: a model, ``suffix``, ``early-exit:8``, ``none``, or several with commas between them."""

from __future__ import annotations

from pathlib import Path

from slipstream.errors import InputError

SUFFIX = "suffix"
#: What it was called before.
_SYNONYM = "ngram"
NONE = "none"
#: What comes before a number of layers.
EARLY_EXIT = "early-exit:"


def members(draft: str) -> tuple[str, ...]:
    """The drafts that ``draft`` names, in order; more than one are a cascade.

    >>> members("ngram, small-model")
    ('suffix', 'small-model')

    Raises:
        InputError: a part is empty, named twice, or ``none``.
    """
    whole = "," not in draft or _exists(draft)
    parts = [draft] if whole else [part.strip() for part in draft.split(",")]
    found = tuple(SUFFIX if part == _SYNONYM else part for part in parts)
    if not whole and ("" in found or NONE in found):
        raise InputError(f"--draft {draft!r} has a part that drafts nothing; write for example --draft suffix,MODEL")
    if len(set(found)) < len(found):
        raise InputError(f"--draft {draft!r} names the same draft twice; leave one out")
    return found


def is_model(member: str) -> bool:
    """Whether one of ``members`` is a model to load."""
    return member not in (SUFFIX, NONE) and not member.startswith(EARLY_EXIT)


def short_name(draft: str) -> str:
    """What to call it in a table: the last part of each path."""
    return ",".join(Path(member).name for member in members(draft))


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False
