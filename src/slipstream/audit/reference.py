"""A small speculative decoder in which each published fault is one switch; without one it is right.

It shares no code with the rest of Slipstream: it is what an audit is tried on, in every run.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np

from slipstream.audit.law import Scorer, distribution, processed
from slipstream.audit.types import Answer, Counters, Prompt
from slipstream.errors import InputError
from slipstream.types import SamplingParams

#: The faults, each as it was reported of some released engine or follows from a slip of one line.
FAULTS = {
    "argmax-soft-q": "drafts the likeliest token, but verifies with the soft distribution",
    "unfiltered-q": "drafts from the filtered distribution, but verifies with the unfiltered one",
    "wrong-token": "takes the ratio P/q of another token than the one that it decides on",
    "inverted-ratio": "accepts with probability q/P in place of P/q",
    "shared-correction": "draws the corrected token with the random number that drew the draft token",
    "shared-acceptance": "accepts by the random number that drew the draft token",
    "no-residual": "draws the corrected token from P in place of what P has and q lacks",
    "stale-bonus": "draws the bonus token from the row before the last one",
    "kept-history": "goes on behind the rejected token, as if it had been emitted",
    "swallowed-token": "behind accepted tokens emits nothing for the corrected one, but goes on behind it",
    "ignored-parameters": "verifies draft tokens without bias, penalties, filters and minimum length",
    "ignored-min-p": "ignores min_p for draft tokens",
    "ignored-bias": "ignores logit_bias for draft tokens",
    "ignored-penalties": "ignores repetition, frequency and presence penalties for draft tokens",
    "ignored-minimum": "ignores min_new_tokens for draft tokens",
    "late-stop": "looks for the end of the answer once a round, and emits what follows it in the block",
    "batch-seed": "gives all requests of a batch the first one's random numbers",
    "wrong-counters": "counts corrected tokens as accepted",
}
_PLAIN = SamplingParams(temperature=1.0)
_IGNORED = {
    "ignored-parameters": (
        "logit_bias",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "min_new_tokens",
        "top_k",
        "top_p",
        "min_p",
    ),
    "ignored-min-p": ("min_p",),
    "ignored-bias": ("logit_bias",),
    "ignored-penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "ignored-minimum": ("min_new_tokens",),
}
Probs = tuple[float, ...]


@dataclass
class _Draft:
    tokens: list[int]
    laws: list[Probs]
    """q, as verification uses it."""
    uniforms: list[float]
    """The random number that drew each token."""


class ReferenceDecoder:
    """Plain Python, one request at a time; every law is computed from the whole text so far.

    Args:
        target: the law to follow.
        draft: another law over the same ids.
        k: draft tokens in a round.
        fault: one of ``FAULTS``; None decodes correctly.
    """

    honours = frozenset(f.name for f in fields(SamplingParams)) - {"logits_processors", "no_repeat_ngram_size", "share"}

    def __init__(self, target: Scorer, draft: Scorer, k: int = 3, fault: str | None = None) -> None:
        if fault is not None and fault not in FAULTS:
            raise InputError(f"fault {fault!r} is not known; use one of {', '.join(FAULTS)}")
        self.name = f"reference decoder, {fault or 'correct'}"
        self._target, self._draft, self._k, self._fault = target, draft, k, fault
        self._laws: dict[str, dict[tuple[int, ...], Probs]] = {}

    def complete(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]) -> list[Answer]:
        """As ``Engine`` has it."""
        requests: dict[Prompt, _Request] = {}
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            if prompt not in requests:
                requests[prompt] = self._request(prompt, params)
            used = seeds[0] if self._fault == "batch-seed" else seed
            answers += [_Run(requests[prompt], self._fault, used + 1_000_003 * i).answer() for i in range(params.n)]
        return answers

    def _request(self, given: Prompt, params: SamplingParams) -> _Request:
        target, draft = self._target, self._draft
        prompt = given if isinstance(given, tuple) else tuple(target.tokenizer(given)["input_ids"])  # type: ignore[misc]
        loose = replace(params, top_k=0, top_p=1.0, min_p=0.0)
        without = replace(params, **{name: getattr(_PLAIN, name) for name in _IGNORED.get(self._fault or "", ())})
        return _Request(
            target=target,
            prompt=prompt,
            params=params,
            k=self._k,
            p=self._laws_of(target, prompt, params),
            p_drafted=self._laws_of(target, prompt, without),
            q=self._laws_of(draft, prompt, params),
            q_unfiltered=self._laws_of(draft, prompt, loose),
            stop=frozenset({*params.stop_token_ids, *(() if params.ignore_eos else target.eos_token_ids)}),
        )

    def _laws_of(self, scorer: Scorer, prompt: tuple[int, ...], params: SamplingParams) -> _Laws:
        key = f"{scorer.name} {prompt} {params}"
        return _Laws(scorer, prompt, params, self._laws.setdefault(key, {}))


class _Laws:
    """Probabilities behind any tokens, under one set of parameters, remembered."""

    def __init__(
        self, scorer: Scorer, prompt: tuple[int, ...], params: SamplingParams, memory: dict[tuple[int, ...], Probs]
    ) -> None:
        self._scorer, self._prompt, self._params, self._memory = scorer, prompt, params, memory

    def __getitem__(self, answer: tuple[int, ...]) -> Probs:
        if answer not in self._memory:
            p = self._params
            logits = self._scorer.logits([*self._prompt, *answer], ())[0]
            stop = {*p.stop_token_ids, *(() if p.ignore_eos else self._scorer.eos_token_ids)}
            row = processed(logits, self._prompt, answer, p, stop)
            if p.temperature == 0:
                probs = np.eye(len(row))[int(row.argmax())]
            else:
                probs = distribution(row, p)
            self._memory[answer] = tuple(probs.tolist())
        return self._memory[answer]


@dataclass(frozen=True)
class _Request:
    """What all answers to a prompt have in common."""

    target: Scorer
    prompt: tuple[int, ...]
    params: SamplingParams
    k: int
    p: _Laws
    p_drafted: _Laws
    """P, as draft tokens are verified by it."""
    q: _Laws
    q_unfiltered: _Laws
    stop: frozenset[int]


class _Run:
    """One answer."""

    def __init__(self, request: _Request, fault: str | None, seed: int) -> None:
        self._request, self._params = request, request.params
        self._fault, self._random = fault, random.Random(seed)
        self._out: list[int] = []
        self._origins: list[str] = []
        self._seen: tuple[int, ...] = ()
        """What the decoder believes it has emitted."""
        self._rounds = self._drafted = self._accepted = 0

    def answer(self) -> Answer:
        """Run to the end."""
        reason = "length" if self._params.max_new_tokens == 0 else None
        while reason is None:
            reason = self._round()
        text = self._text()
        logprobs = self._logprobs() if self._params.logprobs is not None else None
        counters = Counters(self._rounds, self._drafted, self._accepted)
        tokens = tuple(self._out)
        return Answer(tokens, text, reason, logprobs, len(tokens), counters, tuple(self._origins))

    def _round(self) -> str | None:
        room = min(self._request.k, self._params.max_new_tokens - len(self._out) - 1)
        draft = self._propose(room if self._rounds else 0)
        accepted, last, seen_last = self._verify(draft)
        new = [*draft.tokens[:accepted], *last]
        self._seen = (*self._seen, *draft.tokens[:accepted], seen_last)
        origin = "bonus" if accepted == len(draft.tokens) else "corrected"
        origins = ["accepted"] * accepted + [origin] * len(last)
        kept, reason = self._cut(new)
        self._out += new[:kept]
        self._origins += origins[:kept]
        self._rounds += 1
        self._drafted += len(draft.tokens)
        self._accepted += min(accepted, kept)
        if self._fault == "wrong-counters" and origin == "corrected":
            self._accepted += 1
        return reason

    def _propose(self, count: int) -> _Draft:
        draft = _Draft([], [], [])
        for _ in range(count):
            before = (*self._seen, *draft.tokens)
            law = self._request.q[before]
            u = self._random.random()
            token = law.index(max(law)) if self._fault == "argmax-soft-q" else _drawn(law, u)
            draft.laws.append(self._request.q_unfiltered[before] if self._fault == "unfiltered-q" else law)
            draft.tokens.append(token)
            draft.uniforms.append(u)
        return draft

    def _verify(self, draft: _Draft) -> tuple[int, list[int], int]:
        """How many draft tokens stand, what is emitted behind them, and what the decoder believes comes there."""
        for i, token in enumerate(draft.tokens):
            p, q = self._request.p_drafted[(*self._seen, *draft.tokens[:i])], draft.laws[i]
            u = self._random.random()
            if self._fault == "shared-acceptance":
                u = draft.uniforms[i]
            if u < self._ratio(p, q, draft.tokens, i):
                continue
            v = draft.uniforms[i] if self._fault == "shared-correction" else self._random.random()
            left = p if self._fault == "no-residual" else tuple(max(0.0, a - b) for a, b in zip(p, q, strict=True))
            corrected = _drawn(left if sum(left) > 0 else p, v)
            if self._fault == "swallowed-token" and i:
                return i, [], corrected
            return i, [corrected], token if self._fault == "kept-history" else corrected
        behind = (*self._seen, *draft.tokens)
        stale = self._fault == "stale-bonus" and draft.tokens
        bonus = _drawn(self._request.p[behind[:-1] if stale else behind], self._random.random())
        return len(draft.tokens), [bonus], bonus

    def _ratio(self, p: Probs, q: Probs, tokens: Sequence[int], i: int) -> float:
        token = tokens[i]
        if self._params.temperature > 0:
            if self._fault == "wrong-token":
                token = tokens[i - 1] if i else tokens[-1]
            if self._fault == "inverted-ratio":
                p, q = q, p
        if q[token] == 0:
            return float(p[token] > 0)
        return p[token] / q[token]

    def _cut(self, new: Sequence[int]) -> tuple[int, str | None]:
        """How many of ``new`` are emitted, and why the answer ends, if it does."""
        room = self._params.max_new_tokens - len(self._out)
        for i, token in enumerate(new[:room]):
            before = len(self._out) + i
            ends = token in self._request.stop or self._says_stop([*self._out, *new[: i + 1]])
            if ends and before + 1 >= self._params.min_new_tokens:
                return (min(len(new), room) if self._fault == "late-stop" else i + 1), "stop"
        return min(len(new), room), "length" if len(new) >= room else None

    def _says_stop(self, tokens: Sequence[int]) -> bool:
        return bool(self._params.stop) and any(s in self._spelt(tokens) for s in self._params.stop)

    def _spelt(self, tokens: Sequence[int]) -> str:
        tokenizer = self._request.target.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _text(self) -> str:
        text = self._spelt(self._out)
        ends = [text.index(s) for s in self._params.stop if s in text]
        return text[: min(ends)] if ends else text

    def _logprobs(self) -> tuple[float, ...]:
        rows = self._request.target.logits(self._request.prompt, self._out[:-1])
        return tuple(float(r[t] - np.logaddexp.reduce(r)) for r, t in zip(rows, self._out, strict=True))


def _drawn(law: Sequence[float], u: float) -> int:
    """One index, by inverting the cumulative sum at ``u`` in [0, 1)."""
    sums = list(accumulate(law))
    index = min(bisect_right(sums, u * sums[-1]), len(sums) - 1)
    while law[index] == 0:
        index -= 1
    return index
