"""Why not simply use the small model: how many programming problems each way solves at the first try (pass@1).

Chen et al. 2021 (arXiv 2107.03374), HumanEval. Arithmetic and text only; ``sandbox`` runs the programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_Z = 1.959964
#: Below this the difference of two ways is taken for real.
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Problem:
    """One of HumanEval's."""

    id: str
    prompt: str
    entry_point: str
    test: str


def program(problem: Problem, answer: str) -> str:
    """What is run: the answer's function, or the prompt's completed by the answer, and the test."""
    blocks, defines = _BLOCK.findall(answer), re.compile(rf"^def\s+{re.escape(problem.entry_point)}\b", re.MULTILINE)
    # An answer may show tests of its own, or how to call it, at greater length than the function.
    code = max(filter(defines.search, blocks), key=len, default=max(blocks, key=len, default=answer))
    if defines.search(code):
        # The prompt's imports and helpers come first; its own function is then defined anew.
        code = f"{_before(problem)}\n{code}"
    else:
        code = problem.prompt + code
    return f"{code}\n{problem.test}\ncheck({problem.entry_point})\n"


def _before(problem: Problem) -> str:
    found = re.search(rf"^def\s+{re.escape(problem.entry_point)}\b", problem.prompt, re.MULTILINE)
    return problem.prompt[: found.start()] if found else ""


@dataclass(frozen=True)
class Score:
    """pass@1 with its 95 % interval."""

    passed: int
    count: int
    rate: float
    low: float
    high: float


def score(outcomes: Sequence[bool]) -> Score:
    """Wilson's interval, which also holds near 0 and 1.

    >>> score([True] * 8 + [False] * 2).rate
    0.8
    """
    n, passed = len(outcomes), sum(outcomes)
    if not n:
        return Score(0, 0, 0.0, 0.0, 1.0)
    rate, spread = passed / n, _Z * _Z / n
    centre = (rate + spread / 2) / (1 + spread)
    half = _Z * sqrt(rate * (1 - rate) / n + spread / (4 * n)) / (1 + spread)
    return Score(passed, n, rate, max(0.0, centre - half), min(1.0, centre + half))


@dataclass(frozen=True)
class Comparison:
    """Two ways on the same problems."""

    only_first: int
    """Problems that only the first solved."""
    only_second: int
    p: float
    """Probability of at least so uneven a split if both were alike (McNemar's exact test)."""
    difference: float
    """Of the rates, second less first."""
    low: float
    high: float
    same_answers: float | None = None
    """Share of problems with the same text from both."""

    @property
    def alike(self) -> bool:
        """Whether nothing speaks for a difference."""
        return self.p >= SIGNIFICANT


def compare(first: Mapping[str, bool], second: Mapping[str, bool], same_answers: float | None = None) -> Comparison:
    """Paired by problem. The interval of the difference is the usual one of paired proportions.

    >>> compare({"a": True, "b": False}, {"a": True, "b": False}).p
    1.0
    """
    both = [key for key in first if key in second]
    n = max(len(both), 1)
    b = sum(first[key] and not second[key] for key in both)
    c = sum(second[key] and not first[key] for key in both)
    difference = (c - b) / n
    half = _Z * sqrt(max(b + c - (c - b) ** 2 / n, 0.0)) / n
    return Comparison(b, c, mcnemar(b, c), difference, difference - half, difference + half, same_answers)


def mcnemar(b: int, c: int) -> float:
    """Two-sided exact p of ``b`` and ``c`` disagreements.

    >>> mcnemar(0, 5)
    0.0625
    """
    n = b + c
    tail = float(sum(comb(n, i) for i in range(min(b, c) + 1)) / 2**n)
    return min(1.0, 2 * tail)


def statement(found: Comparison, count: int) -> str:
    """What is to be said of speculation against the target."""
    if not found.only_first and not found.only_second:
        return f"Speculation solves exactly the problems that the target solves ({count})."
    said = (
        f"Of {count} problems {found.only_first} were solved by the target only and {found.only_second} by speculation "
        f"only (p = {found.p:.2f})"
    )
    if found.alike:
        return f"{said}: statistically, speculation is the target."
    return f"{said}: that is more than chance; run `slipstream audit`."
