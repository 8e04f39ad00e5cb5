"""Which prompts and parameters are tested: those where a fault would show."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from slipstream.audit.evidence import STRENGTH, samples_for
from slipstream.audit.law import IMPOSSIBLE, Row, Scorer, distribution, processed
from slipstream.audit.laws import LawPlan
from slipstream.audit.types import Engine, Prompt
from slipstream.types import SamplingParams

#: Text that repeats itself, so that copied drafts are confident, and open questions, where a target is not.
_TEXTS = (
    "red green blue red green blue red green",
    "The cat sat on the mat. The dog sat on the rug. The bird sat on the",
    "My favourite colour is",
    "One, two, three, one, two, three, one,",
    "The weather today is",
    "She opened the door and saw a",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
    "The three largest cities are",
)
_MOST_SAMPLES = 20_000


@dataclass(frozen=True)
class Settings:
    """What an audit is to find, and at which price of false alarms.

    ``alpha`` is the probability that an exact engine is called faulty, over all tests and looks together.
    """

    variation: float = 0.2
    alpha: float = 0.005
    tolerance: float = 1e-3
    """How far the engine's logits may be off, by arithmetic alone."""
    length: int = 6
    contexts: int = 3
    seed: int = 0


class Remembering:
    """A scorer that keeps the rows it computed last: many tests ask for the same ones."""

    def __init__(self, scorer: Scorer, rows: int = 600) -> None:
        self.name = scorer.name
        self.vocab_size = scorer.vocab_size
        self.eos_token_ids = scorer.eos_token_ids
        self.tokenizer = scorer.tokenizer
        self._scorer, self._most = scorer, rows
        self._rows: dict[tuple[int, tuple[int, ...]], Row] = {}

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Row:
        """As ``Scorer`` has it."""
        whole = (*prompt, *answer)
        keys = [(0, whole[:end]) for end in range(len(prompt), len(whole) + 1)]
        if any(key not in self._rows for key in keys):
            for key, row in zip(keys, self._scorer.logits(prompt, answer), strict=True):
                self._rows[key] = row
        found = np.stack([self._rows[key] for key in keys])
        while len(self._rows) > self._most:
            self._rows.pop(next(iter(self._rows)))
        return found


def candidates(scorer: Scorer, count: int, seed: int) -> list[tuple[int, ...]]:
    """Prompts to choose from: texts, or random ids that repeat themselves where there is no tokenizer of words."""
    words = scorer.vocab_size > 1000 and scorer.tokenizer is not None
    if words:
        return [tuple(scorer.tokenizer(text)["input_ids"]) for text in _TEXTS[:count]]  # type: ignore[misc]
    rng = random.Random(seed)
    ids = [i for i in range(min(scorer.vocab_size, 200)) if i not in scorer.eos_token_ids]
    return [(*part, *part[: rng.randint(1, 3)]) for part in (rng.choices(ids, k=4) for _ in range(count))]


def law_plans(scorer: Scorer, engine: Engine, settings: Settings) -> list[LawPlan]:
    """All tests of laws that ``engine`` can be put to."""
    scorer = Remembering(scorer)
    prompts = candidates(scorer, 8, settings.seed)
    # A usual filter, under which few tokens are left and drafts are filtered too.
    filtered = 4 if "top_k" in engine.honours else 0
    base = SamplingParams(temperature=0.8, top_k=filtered, max_new_tokens=settings.length)
    ranked = sorted(prompts, key=lambda prompt: -_spread(scorer, prompt, base))
    each = settings.alpha / (4 * 16)
    chosen = ranked[: settings.contexts]
    if len(chosen) > 1:
        chosen[-1] = _most_copied(scorer, [chosen[-1], *(_with_copy(scorer, p, base) for p in ranked)], base)
    plans = []
    for i, prompt in enumerate(chosen):
        free = _free_cells(scorer, prompt, base)
        samples = samples_for(settings.variation, free, each)
        plans.append(LawPlan(f"prompt {i + 1}", prompt, base, samples))
    for name, case in _parameter_cases(scorer, ranked[:4], engine, settings):
        plans.append(replace(case, name=name))
    return plans


def pair_plans(scorer: Scorer | None, settings: Settings) -> list[LawPlan]:
    """Prompts whose first one to three tokens and first few words are compared with a reference's, by their texts."""
    prompts: list[Prompt] = list(_TEXTS) if scorer is None else [*candidates(scorer, 8, settings.seed)]
    # Half of the samples are the other engine's; twelve texts are a usual number of cells.
    samples = 2 * samples_for(settings.variation, 12, settings.alpha / 16)
    params = SamplingParams(temperature=0.8, top_k=4)
    return [
        LawPlan(f"prompt {i + 1}, {length} tokens", prompt, replace(params, max_new_tokens=length), samples)
        for i, prompt in enumerate(prompts[: settings.contexts])
        for length in (1, 2, 3)
    ]


def _first(scorer: Scorer, prompt: tuple[int, ...]) -> Row:
    row: Row = scorer.logits(prompt, ())[0]
    return row


def _spread(scorer: Scorer, prompt: tuple[int, ...], params: SamplingParams) -> float:
    """How far the target is from being sure of the first token: 0 is sure."""
    probs = distribution(processed(_first(scorer, prompt), prompt, (), params, scorer.eos_token_ids), params)
    return 1.0 - float((probs**2).sum())


def _with_copy(scorer: Scorer, prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """The prompt behind a likely answer to it of two tokens, for copies to find."""
    answer: tuple[int, ...] = ()
    for _ in range(2):
        row = processed(scorer.logits(prompt, answer)[-1], prompt, answer, params, scorer.eos_token_ids)
        row[list(scorer.eos_token_ids)] = -np.inf
        answer = (*answer, int(row.argmax()))
    return (*answer, *prompt)


def _most_copied(scorer: Scorer, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> tuple[int, ...]:
    """The prompt behind which a draft copied from it is neither sure to be accepted nor to be rejected.

    After the first token x, n-grams copy what followed x in the prompt. What counts is the chance of an x that occurs
    there, times the variance of accepting what followed.
    """

    def chance(prompt: tuple[int, ...]) -> float:
        first = distribution(processed(_first(scorer, prompt), prompt, (), params, scorer.eos_token_ids), params)
        total = 0.0
        for token in sorted(set(prompt), key=lambda token: -first[token])[:3]:
            followers = [b for a, b in pairwise(prompt) if a == token]
            if not followers or first[token] < 0.02:
                continue
            row = processed(scorer.logits(prompt, (token,))[-1], prompt, (token,), params, scorer.eos_token_ids)
            p = float(distribution(row, params)[followers[-1]])
            total += float(first[token]) * p * (1 - p)
        return total

    return max(prompts, key=chance)


def _free_cells(scorer: Scorer, prompt: tuple[int, ...], params: SamplingParams) -> int:
    """Free parameters of the joint law of two tokens, cells taken together as tests do."""
    probs = distribution(_first(scorer, prompt), params)
    kinds = min(9, int((probs > 0.002).sum()))
    return max(1, kinds * kinds - 1)


# --- parameters -------------------------------------------------------------------------------------------------------


def _parameter_cases(
    scorer: Scorer, prompts: Sequence[tuple[int, ...]], engine: Engine, settings: Settings
) -> Iterator[tuple[str, LawPlan]]:
    """For each parameter the prompt where ignoring it shows most, and the answers it takes to see that."""
    for name in TESTED_IN_ORDER:
        if name not in engine.honours:
            continue
        tried = []
        for prompt in prompts:
            wanted, ignored = _case(name, scorer, prompt, engine, settings.length)
            tried.append((_gain(scorer, prompt, wanted, ignored, settings.seed), prompt, wanted))
        gain, prompt, wanted = max(tried, key=lambda one: one[0])
        if gain < 0.01:
            continue
        samples = _samples_to_gain(gain, settings.alpha / (4 * 16))
        yield name, LawPlan(name, prompt, wanted, samples, f"{name} ignored behind the first token")


TESTED_IN_ORDER = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "min_new_tokens",
    "stop_token_ids",
)


#: All of them.
TESTED = frozenset(TESTED_IN_ORDER)


def _case(
    name: str, scorer: Scorer, prompt: tuple[int, ...], engine: Engine, length: int
) -> tuple[SamplingParams, SamplingParams]:
    """Parameters with ``name`` set so that it shows, and the same without it."""
    row = _first(scorer, prompt)
    order = [int(i) for i in np.argsort(-row, kind="stable")[:4] if int(i) not in scorer.eos_token_ids]
    base = SamplingParams(temperature=1.0, max_new_tokens=length)
    # A favourite makes tokens repeat, which is what penalties are about.
    biased = "logit_bias" in engine.honours
    favourite = {order[0]: 3.0} if biased and name.endswith("penalty") else {}
    if name == "min_new_tokens" and scorer.eos_token_ids and biased:
        others = np.delete(row, list(scorer.eos_token_ids))
        favourite = {e: float(np.logaddexp.reduce(others) - row[e]) for e in scorer.eos_token_ids[:1]}
    ignored = replace(base, logit_bias=favourite)
    values: dict[str, Any] = {
        "temperature": 0.4,
        "top_k": 2,
        "top_p": 0.6,
        "min_p": 0.3,
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.5,
        "presence_penalty": 2.0,
        "logit_bias": {order[0]: -100.0, order[1]: 2.0},
        "min_new_tokens": 3,
        "stop_token_ids": (order[0], order[1]),
    }
    return replace(ignored, **{name: values[name]}), ignored


def _gain(
    scorer: Scorer, prompt: tuple[int, ...], wanted: SamplingParams, ignored: SamplingParams, seed: int, draws: int = 12
) -> float:
    """Mean log likelihood ratio of an answer whose parameter is ignored behind the first token, over three tokens."""
    rng = np.random.default_rng(seed)
    total = 0.0
    for _ in range(draws):
        answer: tuple[int, ...] = ()
        for depth in range(min(3, wanted.max_new_tokens)):
            row = scorer.logits(prompt, answer)[-1]
            right = _law(row, prompt, answer, wanted, scorer)
            wrong = right if depth == 0 else _law(row, prompt, answer, ignored, scorer)
            token = int(rng.choice(len(wrong), p=wrong / wrong.sum()))
            total += math.log(wrong[token] / max(right[token], IMPOSSIBLE))
            answer = (*answer, token)
            if token in scorer.eos_token_ids:
                break
    if wanted.stop_token_ids:
        return max(1.0, total / draws)
    return total / draws


def _law(row: Row, prompt: tuple[int, ...], answer: tuple[int, ...], params: SamplingParams, scorer: Scorer) -> Row:
    stop = {*scorer.eos_token_ids, *params.stop_token_ids}
    return distribution(processed(row, prompt, answer, params, stop), params)


def _samples_to_gain(gain: float, alpha: float) -> int:
    """Answers after which the bettor has seen enough, with room for chance and for what learning costs."""
    samples = 60
    while samples <= _MOST_SAMPLES:
        learning = 4 * math.log1p(samples / STRENGTH) + 36 * math.log1p(samples / 9 / STRENGTH)
        if samples * gain > 1.5 * (math.log(1 / alpha) + learning):
            break
        samples = math.ceil(samples * 1.1)
    return samples
