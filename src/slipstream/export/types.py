"""What an export consists of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import InputError
from slipstream.plan import Plan

Version = tuple[int, ...]


def version_text(version: Version) -> str:
    """As the engine writes it.

    >>> version_text((0, 32))
    '0.32'
    """
    return ".".join(map(str, version))


@dataclass(frozen=True)
class Target:
    """Where the engine is to run, and on what."""

    version: str | None = None
    """Of the engine; None is the newest one that was checked."""
    target: str | None = None
    """Path or name of the target there, if it is another than the plan's."""
    draft: str | None = None
    target_revision: str | None = None
    draft_revision: str | None = None
    tensor_parallel: int = 1
    memory_share: float | None = None
    """Of an accelerator's memory that the engine may use."""
    max_requests: int | None = None
    """Answered at a time, at most; None takes the plan's largest batch."""
    copies: str = "ngram"
    """What stands for copies from earlier text: "ngram", or "suffix" where the engine has it."""
    host: str = "0.0.0.0"
    port: int | None = None


@dataclass(frozen=True)
class Argument:
    """A part of the command, and the reason for it."""

    words: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Export:
    """What an engine is started with."""

    engine: str
    version: str
    checked: str
    """Versions that names and meanings were checked against, and when."""
    program: str
    arguments: tuple[Argument, ...]
    port: int
    files: Mapping[str, str] = field(default_factory=dict)
    """Config files by name; arguments refer to them as ``FILES/name``."""
    notes: tuple[str, ...] = ()
    """What the engine cannot do, and the nearest thing that it can."""
    warnings: tuple[str, ...] = ()
    image: str = ""
    image_program: str = ""
    """What the program is called in its image, if otherwise."""
    cpu_only: bool = False
    """Whether it needs no accelerator."""
    health: str = "/health"
    metrics: str = "/metrics"
    running: str = ""
    """Its metric of requests in progress."""
    environment: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    draft: str | None = None


#: Stands for the folder of config files in an argument.
FILES = "FILES"


@dataclass(frozen=True)
class Support:
    """The versions of an engine that an exporter knows."""

    engine: str
    oldest: str
    newest: str
    checked: str
    """How and when."""

    def find(self, version: str | None) -> tuple[str, Version, tuple[str, ...]]:
        """The version asked for as text and numbers, and what is to be said of it.

        Raises:
            InputError: it is no version, or too old.
        """
        # "+cpu" and the like say how it was built.
        text = (version or self.newest).lower().removeprefix("v").removeprefix("b").partition("+")[0]
        if not re.fullmatch(r"\d+(\.\d+)*([.-]?(post|rc|dev|a|b)\d*)?", text):
            raise InputError(f"--version {version!r} is no version of {self.engine}; write one such as {self.newest}")
        numbers = _numbers(text)
        if numbers < _numbers(self.oldest):
            raise InputError(
                f"{self.engine} {text} is older than {self.oldest}, the oldest that is known here; use a newer one"
            )
        warnings: tuple[str, ...] = ()
        if numbers > _numbers(self.newest):
            warnings = (
                f"{self.engine} {text} is newer than {self.newest}, the newest that was checked: "
                "look at what it says when it starts",
            )
        return text, numbers, warnings


def _numbers(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[.-]?(?:post|rc|dev|a|b)", text)[0]))


@dataclass(frozen=True)
class Wanted:
    """What of a plan is to be exported, after what the engine cannot do was replaced by the nearest thing."""

    plan: Plan
    kinds: tuple[str, ...]
    """Of the draft's members, in order: "model", "suffix"; empty decodes plainly."""
    model: str | None
    """Of the draft model."""
    k: int
    why: str
    """The measured reason for draft and k."""
    schedule: tuple[tuple[int, int, int, str], ...]
    """(from, to, k, reason) by number of requests at a time, without gaps from 1 on; empty if there is none."""
    max_requests: int
    notes: tuple[str, ...]

    @property
    def ks(self) -> tuple[int, ...]:
        """Every k of the schedule."""
        return tuple(k for _, _, k, _ in self.schedule)


#: YAML and JSON documents.
Document = dict[str, Any]
