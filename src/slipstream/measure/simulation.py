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


class _Stepwise:
    """Stands for a session that asks the gate."""

    gate = None


def simulate(world: World, policy: Policy, count: int, prompt: int = 16) -> Simulated:
    """One answer of at least ``count`` tokens after ``prompt`` tokens."""
    session = _Stepwise() if world.stepwise else object()
    controller = policy.start(session, "draft", repeatable=False, isolated=False)
    luck, jitter = random.Random(world.seed), random.Random(world.seed + 1)
    lucky = [luck.random() for _ in range(count + 64)]
    result, read = Simulated(), prompt - 1
    while result.tokens < count:
        length = prompt + result.tokens
        asked = controller.ask(64, length)
        size, passes = _drafted(world, controller, asked, result.tokens)
        draft = _draft(world, size, result.tokens)
        kept = size if world.stepwise or not asked else min(controller.keep(draft), size)
        right = 0
        while right < kept and lucky[result.tokens + right] < world.chance(result.tokens + right, right):
            right += 1
        drafting = world.step * passes + (world.read * max(0, length - read - 2) if passes else 0.0)
        if passes:
            read = length + size
        tokens = _tokens(draft, right, kept, lucky, world, result.tokens)
        verify = world.verify(kept + 1)
        played = Played(
            length, asked, draft, kept, tokens, drafting * _noisy(jitter, world), verify * _noisy(jitter, world)
        )
        controller.learn(played)
        result.seconds += drafting + verify
        result.expected += _expected(world, kept, result.tokens)
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


def _expected(world: World, kept: int, place: int) -> float:
    """Tokens of a round, on average."""
    tokens = reach = 1.0
    for i in range(kept):
        reach *= world.chance(place + i, i)
        tokens += reach
    return tokens


def _draft(world: World, size: int, place: int) -> Draft:
    confidence = tuple(world.confidence(place + i) for i in range(size))
    return Draft(tuple(range(1, size + 1)), confidence=confidence)


def _tokens(draft: Draft, right: int, kept: int, lucky: Sequence[float], world: World, place: int) -> tuple[int, ...]:
    """Accepted ones, and one more: the copied one that was cut off, if it would have stood."""
    more = right == kept < len(draft.tokens) and lucky[place + right] < world.chance(place + right, right)
    return (*draft.tokens[:right], draft.tokens[right] if more else 0)


def _noisy(jitter: random.Random, world: World) -> float:
    return math.exp(jitter.gauss(0, world.noise)) if world.noise else 1.0
