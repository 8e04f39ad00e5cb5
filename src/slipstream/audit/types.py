"""The values that travel through an audit: what an engine is asked and answers, and what a test found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, runtime_checkable

from slipstream.errors import SlipstreamError
from slipstream.types import SamplingParams

#: Token ids; text only where nobody here knows the engine's tokenizer.
Prompt = tuple[int, ...] | str
Result = Literal["pass", "fault", "undecided", "skipped"]
#: The sampling parameters that there are tests for.
EVERY_PARAMETER = frozenset(f.name for f in fields(SamplingParams)) - {
    "logits_processors",
    "no_repeat_ngram_size",
    "share",
}
#: One value of each parameter that an engine may refuse.
_PROBES: Mapping[str, Any] = {
    "top_k": 2,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {1: 1.0},
    "min_new_tokens": 1,
    "stop_token_ids": (1,),
    "stop": ("never",),
    "logprobs": 1,
    "n": 2,
}


@dataclass(frozen=True)
class Counters:
    """What an engine says of its own drafting in one answer."""

    rounds: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Answer:
    """One answer of an engine. What it does not tell is None."""

    tokens: tuple[int, ...] | None
    """All generated ids, the end-of-sequence id that ended the answer included."""
    text: str | None = None
    finish_reason: str | None = None
    """"stop" or "length"."""
    logprobs: tuple[float | None, ...] | None = None
    """Of each token, under the target before any processing; None where it is not told."""
    usage: int | None = None
    """How many tokens the engine says it generated."""
    counters: Counters | None = None
    origins: tuple[str, ...] = ()


class EngineError(SlipstreamError):
    """An engine gave no answer to a request that it should be able to answer."""


class RefusedError(EngineError):
    """An engine does not take what it was asked for, and says so."""


class ComparisonError(EngineError):
    """What an engine is compared with gave no answer; that says nothing of the engine."""


class Engine(Protocol):
    """Something that completes prompts and is said to follow the target exactly."""

    name: str
    honours: frozenset[str]
    """The sampling parameters that it takes; what it does not take is not tested."""

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """``params.n`` answers to each prompt, asked for together, each prompt with its own seed."""
        ...


@runtime_checkable
class Abandoning(Protocol):
    """An engine of which one can hang up."""

    def abandon(self, prompt: Prompt, params: SamplingParams, seed: int) -> None:
        """Begin an answer, take its first part, and do without the rest."""
        ...


@runtime_checkable
class Refusing(Protocol):
    """An engine that may refuse a parameter aloud, which deceives nobody."""

    honours: frozenset[str]
    unsupported: Mapping[str, str]
    """Parameters that it refuses, with what it says."""

    def probe(self) -> None:
        """Ask for each parameter once; what is refused is not honoured, and not tested."""
        ...


def refusals(names: AbstractSet[str], ask: Callable[[SamplingParams], object]) -> dict[str, str]:
    """What ``ask`` says, with a ``RefusedError``, against each of the named parameters that it does not take."""
    found: dict[str, str] = {}
    for name, value in _PROBES.items():
        if name in names:
            try:
                ask(replace(SamplingParams(temperature=1.0, max_new_tokens=2), **{name: value}))
            except RefusedError as error:
                found[name] = str(error)
    return found


@runtime_checkable
class Constraining(Protocol):
    """An engine that may have grammars."""

    def constrained(
        self, prompt: Prompt, pattern: str, params: SamplingParams, seeds: Sequence[int]
    ) -> list[str] | None:
        """Texts of answers that a regular expression was asked of, one a seed; None if there are no grammars."""
        ...


@dataclass(frozen=True)
class Finding:
    """What one test says: its hypothesis, on how many answers, with which result, and why."""

    name: str
    hypothesis: str
    result: Result
    detail: str
    samples: int = 0
    p_value: float | None = None
    """Valid whenever one looks; None where the test is not a statistical one."""
    detects: str | None = None
    """What a fault must be like to be found with probability 0.95 by this many answers."""
    table: tuple[dict[str, Any], ...] = ()
    """Observed against expected, the worst first."""
    more: dict[str, Any] = field(default_factory=dict)
