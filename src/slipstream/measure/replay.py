"""What rounds of speculation would have made of a known answer: how many, how long, how much of them accepted.

For each position at which a round could begin it is known what would be drafted there and how likely its first tokens
stand, given that the answer comes out as it is. From that the expected numbers of rounds follow by going through the
answer once. Arithmetic only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Start:
    """A round that begins here."""

    reach: tuple[float, ...]
    """Probability that at least 1, 2, ... of its draft tokens stand; not longer than the answer's rest."""
    passed: tuple[int, ...] | None = None
    """Passes of a draft model for each token, and at the end those that found none; None: one for each token."""

    def passes(self, count: int) -> int:
        """Passes for a draft of up to ``count`` tokens."""
        return min(count, len(self.reach)) if self.passed is None else sum(self.passed[:count])


@dataclass
class Walk:
    """Expected counts of one answer (or, added up, of several)."""

    rounds: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    """Rounds after the first by (passes of the draft model, draft tokens)."""
    emitted: float = 0.0
    """Tokens of these rounds."""
    accepted: float = 0.0
    reached: list[float] = field(default_factory=list)
    """At position 1, 2, ...: drafts whose tokens before it all stood."""
    stood: list[float] = field(default_factory=list)
    """Of these: those in which it stood too."""

    @property
    def count(self) -> float:
        """Number of rounds."""
        return sum(self.rounds.values())

    @property
    def drafted(self) -> float:
        """Draft tokens."""
        return sum(n * often for (_, n), often in self.rounds.items())

    @property
    def rate(self) -> float | None:
        """accepted / drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_round(self) -> float:
        """The corrected or bonus token included."""
        return self.emitted / self.count if self.count else 1.0

    def position(self, j: int) -> float | None:
        """Acceptance at position ``j`` (from 1), given the ones before; None if no draft is so long."""
        return self.stood[j - 1] / self.reached[j - 1] if j <= len(self.reached) and self.reached[j - 1] else None

    def add(self, other: Walk) -> None:
        """Count another answer too."""
        for key, often in other.rounds.items():
            self.rounds[key] += often
        self.emitted += other.emitted
        self.accepted += other.accepted
        for mine, theirs in ((self.reached, other.reached), (self.stood, other.stood)):
            mine += [0.0] * (len(theirs) - len(mine))
            for at, value in enumerate(theirs):
                mine[at] += value


def walk(starts: Callable[[int], Start] | Sequence[Start], tokens: int, k: int, *, limited: bool) -> Walk:
    """Go through an answer of ``tokens`` tokens, of which the first one comes with the prompt.

    Args:
        starts: the round that begins after so many tokens of the answer, 1 to ``tokens`` - 1.
        tokens: length of the answer.
        k: the most draft tokens of a round; 0 decodes plainly.
        limited: the answer ended because it was long enough, so no draft reaches as far as its last token.
    """
    look = starts if callable(starts) else starts.__getitem__
    found = Walk()
    begins = [0.0] * (tokens + 1)
    begins[min(1, tokens)] = 1.0
    for at in range(1, tokens):
        here = begins[at]
        if here == 0:
            continue
        room = tokens - at - 1 if limited else tokens - at
        start = look(at) if k and room else Start(())
        count = min(k, room, len(start.reach))
        found.rounds[start.passes(min(k, room)), count] += here
        _count(found, start.reach[:count], here)
        for kept in range(count + 1):
            stands = 1.0 if kept == 0 else start.reach[kept - 1]
            longer = start.reach[kept] if kept < count else 0.0
            begins[min(at + kept + 1, tokens)] += here * (stands - longer)
    found.emitted = float(max(tokens - 1, 0))
    return found


def _count(found: Walk, reach: Sequence[float], often: float) -> None:
    more = len(reach) - len(found.reached)
    found.reached += [0.0] * more
    found.stood += [0.0] * more
    before = 1.0
    for at, now in enumerate(reach):
        found.reached[at] += often * before
        found.stood[at] += often * now
        found.accepted += often * now
        before = now
