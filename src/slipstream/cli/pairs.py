"""Loads a target with several drafts, for the commands that measure them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.cli.drafts import NONE, is_model, members
from slipstream.cli.run import check_threads
from slipstream.cli.screen import working
from slipstream.errors import InputError

if TYPE_CHECKING:
    from slipstream.measure.prompts import BenchPrompt
    from slipstream.models.base import Model
    from slipstream.models.load import Checkpoint


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded, and how."""

    target: str
    drafts: tuple[tuple[str, ...], ...]
    """Each one member, or several for a cascade."""
    weights: str = "auto"
    draft_weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    no_color: bool = False

    @property
    def draft_models(self) -> tuple[str, ...]:
        """Each model once."""
        return tuple(dict.fromkeys(m for draft in self.drafts for m in draft if is_model(m)))


@dataclass(frozen=True)
class Pairs:
    """The same, loaded."""

    target: Model
    drafters: dict[str, Any]
    """By what ``--draft`` takes."""
    members: dict[str, tuple[str, ...]]
    prompts: tuple[BenchPrompt, ...]
    target_weights: str
    """In which the target was loaded."""
    weights: dict[str, str]
    """In which each draft model was loaded, by path."""


def parse_drafts(text: str) -> tuple[tuple[str, ...], ...]:
    """``A,B,suffix,suffix+A``: drafts with commas between them, the members of a cascade with plus signs.

    >>> parse_drafts("small, suffix+small")
    (('small',), ('suffix', 'small'))

    Raises:
        InputError: a part is empty, named twice, or ``none``.
    """
    found = []
    for part in text.split(","):
        names = tuple(members(one.strip())[0] for one in part.split("+") if one.strip())
        if not names or NONE in names or len(set(names)) < len(names):
            raise InputError(f"--drafts {text!r} has a part that is no draft; write for example --drafts MODEL,suffix")
        found.append(names)
    if len(set(found)) < len(found):
        raise InputError(f"--drafts {text!r} names the same draft twice; leave one out")
    return tuple(found)


def load(wanted: Wanted, prompts: Sequence[BenchPrompt]) -> Pairs:
    """Check everything that can be checked without weights, then read them."""
    import torch

    from slipstream.drafters import check_names, make_drafter
    from slipstream.measure.prompts import encoded
    from slipstream.models.load import Kinds, open_models

    check_threads(wanted.threads)
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    with working(f"Loading {wanted.target}", wanted.no_color):
        kinds = Kinds(wanted.weights, wanted.draft_weights, wanted.device)
        target, opened = open_models(wanted.target, wanted.draft_models, kinds)
    check_names((name for draft in wanted.drafts for name in draft), target)
    ready = encoded(prompts, target.tokenizer, wanted.target) if prompts else []
    with working(f"Loading {wanted.target}", wanted.no_color):
        loaded = target.load()
    models: dict[str, Model] = {}
    for name, checkpoint in opened.items():
        with working(f"Loading {name}", wanted.no_color):
            models[name] = checkpoint.load()
    drafters, parts = {}, {}
    for draft in wanted.drafts:
        given = [models.get(name, name) for name in draft]
        drafter = make_drafter(given if len(given) > 1 else given[0], loaded)
        drafters[",".join(draft)] = drafter
        parts[",".join(draft)] = draft
    used = {name: str(getattr(model, "weights", "unknown")) for name, model in models.items()}
    return Pairs(loaded, drafters, parts, tuple(ready), str(getattr(loaded, "weights", "unknown")), used)


def check_room(prompts: Sequence[BenchPrompt], target: Checkpoint | Model) -> None:
    """Every prompt must leave room for the two tokens that a time per token needs.

    Raises:
        InputError: one does not.
    """
    limit = target.max_positions
    for prompt in prompts:
        if limit is not None and len(prompt.ids) + 2 > limit:
            raise InputError(
                f"the prompt {prompt.id!r} has {len(prompt.ids)} tokens, but {target.name} reads at most {limit}; "
                "leave it out"
            )
