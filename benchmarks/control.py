"""How the adaptive controller of k fares in simulation: against every fixed k with hindsight, and against plain.

python benchmarks/control.py [tokens]

Costs in plain target passes: c a draft step, v(n) a target pass over n tokens. The text's acceptance is stationary,
falls with the position in the draft, or switches; the drafter's confidence says nothing, or is the very acceptance.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

from slipstream.controller import Adaptive, Fixed, Policy
from slipstream.measure.simulation import Chance, Verify, World, simulate

STEPS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.6)
FIXED = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 20, 23)


def linear(slope: float) -> Verify:
    """v(n) = 1 + b (n - 1)."""
    return lambda n: 1 + slope * (n - 1)


def stepped(n: int) -> float:
    """Kernels that do six rows at a time."""
    return 1 + 0.8 * ((n - 1) // 6)


VERIFY: dict[str, Verify] = {"b=.02": linear(0.02), "b=.05": linear(0.05), "b=.1": linear(0.1), "steps of 6": stepped}


def stationary(alpha: float) -> Chance:
    """The same everywhere."""
    return lambda _place, _position: alpha


def falling(first: float, factor: float) -> Chance:
    """Worse the longer the draft."""
    return lambda _place, position: first * factor**position


def switching(good: float, bad: float, every: int) -> Chance:
    """Easy and hard stretches of a text."""
    return lambda place, _position: good if place // every % 2 == 0 else bad


TEXTS: dict[str, Chance] = {
    **{f"alpha {a}": stationary(a) for a in (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)},
    "falling .9": falling(0.9, 0.9),
    "falling .8": falling(0.8, 0.75),
    "switching .9/.3 every 200": switching(0.9, 0.3, 200),
    "switching .95/.1 every 100": switching(0.95, 0.1, 100),
}


def known_chances(seed: int) -> Callable[[int], float]:
    """A drafter that knows the acceptance of each of its tokens: many easy, the rest hard."""
    luck = random.Random(seed)
    chances = [luck.betavariate(6, 0.6) if luck.random() < 0.6 else luck.betavariate(1, 2) for _ in range(8192)]
    return lambda place: chances[place % len(chances)]


def worlds(*, stepwise: bool = True) -> Iterator[tuple[str, World]]:
    """All combinations."""
    knows = known_chances(5)
    for shape, verify in VERIFY.items():
        for step in STEPS if stepwise else (0.0,):
            world = World(step, verify, stationary(0), read=0.02 * step, stepwise=stepwise, noise=0.03)
            for text, chance in TEXTS.items():
                yield f"c={step} {shape} {text}", replace(world, chance=chance)
            yield f"c={step} {shape} informed", replace(world, chance=lambda at, _: knows(at), confidence=knows)


def speed(world: World, policy: Policy, count: int, seeds: range) -> float:
    """Tokens in the time of a plain pass, over several answers that know nothing of each other."""
    runs = (simulate(replace(world, seed=100 * seed), policy, count) for seed in seeds)
    return len(seeds) / sum(1 / run.speed for run in runs)


def best_fixed(world: World, count: int, seeds: range) -> tuple[float, int]:
    """The best speed of all fixed k, and that k; plain is k = 0."""
    return max((speed(replace(world, noise=0), Fixed(k), count, seeds), k) for k in FIXED)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    seeds = range(1)
    worst: list[tuple[float, str]] = []
    slowest: list[float] = []
    print("| setting | adaptive | best fixed | k | ratio |\n|---|---|---|---|---|")
    for stepwise in (True, False):
        for name, world in worlds(stepwise=stepwise):
            kind = "model" if stepwise else "copies"
            own = speed(world, Adaptive(shared=False), count, seeds)
            best, k = best_fixed(world, count, seeds)
            print(f"| {kind} {name} | {own:.2f} | {best:.2f} | {k} | {own / best:.3f} |")
            slowest.append(own)
            worst.append((own / best, f"{kind} {name}: {own:.2f} against {best:.2f} at k={k}"))
    worst.sort()
    print("\nworst:", *(f"{ratio:.3f} {name}" for ratio, name in worst[:12]), sep="\n  ")
    least, middle, most = (worst[at][0] for at in (0, len(worst) // 2, -1))
    print(f"\n{len(worst)} settings: ratio {least:.3f} to {most:.3f}, median {middle:.3f}")
    print(f"least against plain: {min(slowest):.3f}")


if __name__ == "__main__":
    main()
