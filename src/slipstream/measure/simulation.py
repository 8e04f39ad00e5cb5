"""Rounds without models: what a controller of k would do, and how fast, for given costs and a given text.

Acceptance belongs to places of the text: whether the draft is right at place t is fixed by one random number for that
place, the same for every controller. So two controllers are compared on the same text, and a run takes milliseconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.controller import Controller, Played, Policy
from slipstream.types import Draft

#: (place in the text, position in the draft from 0) -> probability that the draft token there is accepted.
Chance = Callable[[int, int], float]
#: Number of rows -> time of a target pass over them; 1 row takes 1.
Verify = Callable[[int], float]


@dataclass(frozen=True)
class World:
    """Costs in plain target passes, and a text."""

    step: float
    """Time of a draft step."""
    verify: Verify
    chance: Chance
    read: float = 0.0
    """Time a draft model takes to read a token that it missed."""
    chance_of_end: Chance | None = None
    """Acceptance while it has read the end of the prompt only, if that is another one."""
    stepwise: bool = True
    """Whether the drafter asks the gate; otherwise it copies, and its drafts may be cut."""
    confidence: Callable[[int], float] = lambda _place: 0.7
    """How sure the drafter is of its token at a place."""
    noise: float = 0.0
    """Relative error of every time that is measured."""
    seed: int = 0


@dataclass
class Simulated:
    """What came of it."""

    seconds: float = 0.0
    tokens: int = 0
    expected: float = 0.0
    """Tokens that these rounds bring on average; less noisy than ``tokens``."""
    played: list[Played] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Expected tokens in the time of a plain pass: the speed-up."""
        return self.expected / self.seconds


@dataclass
class _Session:
    """Stands for a session that asks the gate, and for what its model has read."""

    world: World
    gate: None = None
    latest: int | None = None
    brief: bool = False
    read: int = 0

    def missed(self, length: int) -> int:
        """Tokens to be read before a first step, beyond the one or two of every round."""
        if not self.read and self.latest is not None:
            self.read = max(0, length - self.latest)
            self.brief = self.read > 0
        elif self.brief and self.latest is None:
            self.brief, self.read = False, 0
        return max(0, length - self.read - 2)

    @property
    def chance(self) -> Chance:
        """Acceptance with what was read."""
        return self.world.chance_of_end if self.brief and self.world.chance_of_end else self.world.chance


def simulate(world: World, policy: Policy, count: int, prompt: int = 16) -> Simulated:
    """One answer of at least ``count`` tokens after ``prompt`` tokens."""
    session = _Session(world)
    controller = policy.start(session if world.stepwise else object(), "draft", repeatable=False, isolated=False)
    luck, jitter = random.Random(world.seed), random.Random(world.seed + 1)
    lucky = [luck.random() for _ in range(count + 64)]
    result = Simulated()
    while result.tokens < count:
        length = prompt + result.tokens
        asked = controller.ask(max(64, count - result.tokens), length)
        size, passes = _drafted(world, controller, asked, result.tokens)
        draft = _draft(world, size, result.tokens)
        kept = size if world.stepwise or not asked else min(controller.keep(draft), size)
        drafting = 0.0
        if passes:
            drafting = world.step * passes + world.read * session.missed(length)
            session.read = length + size
        right = 0
        while right < kept and lucky[result.tokens + right] < session.chance(result.tokens + right, right):
            right += 1
        tokens = _tokens(draft, right, kept, lucky, session.chance, result.tokens)
        verify = world.verify(kept + 1)
        played = Played(
            length, asked, draft, kept, tokens, drafting * _noisy(jitter, world), verify * _noisy(jitter, world)
        )
        controller.learn(played)
        result.seconds += drafting + verify
        result.expected += _expected(session.chance, kept, result.tokens)
        result.tokens += right + 1
        result.played.append(played)
    return result


def _drafted(world: World, controller: Controller, asked: int, place: int) -> tuple[int, int]:
    """Number of draft tokens and of draft passes."""
    if not world.stepwise or not controller.gated:
        return asked, asked
    size = passes = 0
    while size < asked and controller.goes_on(size, math.nan):
        passes += 1
        if not controller.goes_on(size, world.confidence(place + size)):
            break
        size += 1
    return size, passes


def _expected(chance: Chance, kept: int, place: int) -> float:
    """Tokens of a round, on average."""
    tokens = reach = 1.0
    for i in range(kept):
        reach *= chance(place + i, i)
        tokens += reach
    return tokens


def _draft(world: World, size: int, place: int) -> Draft:
    confidence = tuple(world.confidence(place + i) for i in range(size))
    return Draft(tuple(range(1, size + 1)), confidence=confidence)


def _tokens(draft: Draft, right: int, kept: int, lucky: Sequence[float], chance: Chance, place: int) -> tuple[int, ...]:
    """Accepted ones, and one more: the copied one that was cut off, if it would have stood."""
    more = right == kept < len(draft.tokens) and lucky[place + right] < chance(place + right, right)
    return (*draft.tokens[:right], draft.tokens[right] if more else 0)


def _noisy(jitter: random.Random, world: World) -> float:
    return math.exp(jitter.gauss(0, world.noise)) if world.noise else 1.0
