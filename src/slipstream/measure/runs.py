"""Records: what one answer took, and which one it was."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.types import Round

#: The contender that the others are compared with.
PLAIN = "plain"


@dataclass(frozen=True)
class Answered:
    """One answer, by whatever engine, and what it took; times in seconds, from the prompt's ids on."""

    text: str
    tokens: tuple[int, ...] | None
    """None if the engine does not tell ids."""
    num_tokens: int
    first_token_seconds: float
    total_seconds: float
    peak_memory: int | None = None
    """Bytes, weights of others left out; None if it runs elsewhere."""
    drafted: int | None = None
    accepted: int | None = None
    rounds: tuple[Round, ...] = ()
    """What Slipstream's own decoder did; the first one read the prompt."""
    pass_seconds: float | None = None
    """Inside forward passes of target and draft, after the first token; None if not known."""

    @property
    def decode_seconds(self) -> float:
        """After the first token."""
        return self.total_seconds - self.first_token_seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first; None if there is none."""
        later = self.num_tokens - 1
        return self.decode_seconds / later if later > 0 and self.decode_seconds > 0 else None

    @property
    def seconds_per_token_of_all(self) -> float | None:
        """Of the whole answer, reading the prompt included; None if it is empty."""
        return self.total_seconds / self.num_tokens if self.num_tokens and self.total_seconds > 0 else None


@dataclass(frozen=True)
class Run:
    """One answer and its place in the measurement."""

    contender: str
    prompt: str
    category: str
    repeat: int
    answer: Answered

    @property
    def cell(self) -> tuple[str, int]:
        """What two runs must have in common to be compared."""
        return self.prompt, self.repeat
