"""Tests that need no statistics: one answer shows a fault, or there is none to be seen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from slipstream.audit.law import Scorer, processed
from slipstream.audit.types import Abandoning, Answer, Constraining, Engine, Finding, Prompt
from slipstream.types import SamplingParams

Ids = tuple[int, ...]
_LONG = 32
_SHORT = 16
#: What a decoder writes for bytes that are no character.
_BROKEN = "\ufffd"


def _finding(name: str, hypothesis: str, faults: Sequence[str], samples: int) -> Finding:
    detail = "; ".join(list(faults)[:3]) or "no exception seen"
    return Finding(name, hypothesis, "fault" if faults else "pass", detail, samples)


def _skipped(name: str, hypothesis: str, why: str) -> Finding:
    return Finding(name, hypothesis, "skipped", why)


def single_tests(
    engine: Engine, scorer: Scorer, prompts: Sequence[Ids], tolerance: float, seed: int
) -> Iterator[Callable[[], Finding]]:
    """All of them, each to be called."""
    yield lambda: greedy(engine, scorer, prompts, tolerance)
    yield lambda: greedy(engine, scorer, prompts, tolerance, penalised=True)
    yield lambda: lengths(engine, prompts[0])
    yield lambda: stop_ids(engine, prompts[0])
    yield lambda: stop_strings(engine, prompts[0])
    yield lambda: seeds(engine, prompts[0], seed)
    yield lambda: isolation(engine, prompts, seed)
    yield lambda: samples_of_one(engine, prompts[0], seed)
    yield lambda: logprobs(engine, scorer, prompts[0], tolerance, seed)
    yield lambda: counters(engine, prompts, seed)
    if isinstance(engine, Constraining):
        yield from _grammar_tests(engine, _of_text(scorer, prompts[0]), seed)


def greedy(
    engine: Engine, scorer: Scorer, prompts: Sequence[Ids], tolerance: float, *, penalised: bool = False
) -> Finding:
    """Every token of greedy answers is the target's likeliest one, or tied with it."""
    name = "greedy parity, repetition_penalty" if penalised else "greedy parity"
    claim = f"greedy tokens are the target's likeliest, or within {2 * tolerance:g} of its logit"
    if penalised and "repetition_penalty" not in engine.honours:
        return _skipped(name, claim, "the engine has no repetition_penalty")
    params = SamplingParams(max_new_tokens=_LONG, repetition_penalty=1.3 if penalised else 1.0)
    answers = engine.complete(list(prompts), params, list(range(len(prompts))))
    faults: list[str] = []
    ties: list[str] = []
    seen = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer.tokens or ()
        seen += len(tokens)
        if strange := _outside(tokens, scorer):
            faults.append(strange)
            continue
        for i, (gap, said) in enumerate(_gaps(scorer, prompt, tokens, params)):
            if gap > 0:
                (faults if gap > 2 * tolerance else ties).append(f"position {i + 1}: {said}")
    finding = _finding(name, claim, faults, seen)
    return finding if faults or not ties else replace(finding, detail=f"{len(ties)} ties: {'; '.join(ties[:3])}")


def _outside(tokens: Ids, scorer: Scorer) -> str:
    """Which id the target does not have; it could not be asked about what follows."""
    return next((f"id {t} is outside of the vocabulary" for t in tokens if not 0 <= t < scorer.vocab_size), "")


def _gaps(scorer: Scorer, prompt: Ids, tokens: Ids, params: SamplingParams) -> Iterator[tuple[float, str]]:
    """How far each token's logit is below the largest, and both logits in words."""
    if not tokens:
        return
    for i, row in enumerate(scorer.logits(prompt, tokens[:-1])):
        row = processed(row, prompt, tokens[:i], params, scorer.eos_token_ids)
        best = int(row.argmax())
        said = f"token {tokens[i]} (logit {row[tokens[i]]:.5f}) in place of {best} ({row[best]:.5f})"
        yield float(row[best] - row[tokens[i]]), said


def lengths(engine: Engine, prompt: Ids) -> Finding:
    """Answers of every small length are beginnings of one another, and as long as asked for."""
    claim = "greedy answers of length 1, 2, ... are beginnings of the long one; counts and reasons agree"
    whole = _tokens(engine, prompt, SamplingParams(max_new_tokens=12))
    faults = []
    for length in range(1, 13):
        answer = engine.complete([prompt], SamplingParams(max_new_tokens=length), [0])[0]
        got, wanted = answer.tokens or (), whole[:length]
        if got != wanted:
            faults.append(f"length {length}: {got} in place of {wanted}")
        if answer.usage is not None and answer.usage != len(got):
            faults.append(f"length {length}: {len(got)} tokens, but it says {answer.usage}")
        if answer.finish_reason not in (None, "length", "stop"):
            faults.append(f"length {length}: it ended for {answer.finish_reason!r}")
    return _finding("lengths", claim, faults, 12)


def stop_ids(engine: Engine, prompt: Ids) -> Finding:
    """An answer ends with the first stop id, wherever in a block it stands."""
    claim = "an answer ends exactly with the first stop id"
    if "stop_token_ids" not in engine.honours:
        return _skipped("stop ids", claim, "the engine has no stop_token_ids")
    whole = _tokens(engine, prompt, SamplingParams(max_new_tokens=_SHORT))
    faults = []
    places = {token: whole.index(token) for token in whole}
    for token, at in list(places.items())[:10]:
        got = _tokens(engine, prompt, SamplingParams(max_new_tokens=_SHORT, stop_token_ids=(token,)))
        if got != whole[: at + 1]:
            faults.append(f"stop id {token}: {got} in place of {whole[: at + 1]}")
    return _finding("stop ids", claim, faults, len(places))


def stop_strings(engine: Engine, prompt: Ids) -> Finding:
    """The text is cut before a stop string, also where it spans tokens and blocks."""
    claim = "the text ends before the first stop string, also where it spans tokens"
    whole = engine.complete([prompt], SamplingParams(max_new_tokens=_SHORT), [0])[0].text
    if "stop" not in engine.honours or not whole or len(whole) < 8:
        return _skipped("stop strings", claim, "no stop strings here, or no text to look for them in")
    faults = []
    tried = [whole[i : i + size] for i in range(2, min(14, len(whole) - 4), 3) for size in (1, 3, 4)]
    tried = [stop for stop in tried if _BROKEN not in stop]  # bytes that no request can spell
    for stop in tried:
        answer = engine.complete([prompt], SamplingParams(max_new_tokens=_SHORT, stop=(stop,)), [0])[0]
        wanted = whole[: whole.index(stop)]
        if answer.text != wanted:
            faults.append(f"stop {stop!r}: {answer.text!r} in place of {wanted!r}")
    return _finding("stop strings", claim, faults, len(tried))


def seeds(engine: Engine, prompt: Ids, seed: int) -> Finding:
    """The same seed gives the same answer, other seeds others."""
    claim = "one seed gives one answer; ten seeds give at least two"
    if "seed" not in engine.honours:
        return _skipped("seeds", claim, "the engine has no seed")
    params = SamplingParams(temperature=1.0, max_new_tokens=_SHORT)
    first, again = (_sampled(engine, prompt, params, range(seed, seed + 10)) for _ in range(2))
    faults = [f"seed {seed + i}: {a} and {b}" for i, (a, b) in enumerate(zip(first, again, strict=True)) if a != b]
    if len(set(first)) == 1:
        faults.append("ten seeds gave one answer")
    return _finding("seeds", claim, faults, 20)


def isolation(engine: Engine, prompts: Sequence[Ids], seed: int) -> Finding:
    """A request's answer does not depend on what is asked beside or before it."""
    claim = "answers are the same alone, again, in a batch, after others, and after one that was abandoned"
    if "seed" not in engine.honours:
        return _skipped("isolation", claim, "without seeds sampled answers cannot be compared")
    params = SamplingParams(temperature=1.0, max_new_tokens=_SHORT)
    own = list(range(seed, seed + len(prompts)))
    # Other prompts than before, so that no cache knows their beginnings at first, and knows all of them later.
    fresh = [(*prompt[::-1], *prompt) for prompt in prompts]

    def alone() -> list[Ids | None]:
        return [engine.complete([p], params, [s])[0].tokens for p, s in zip(fresh, own, strict=True)]

    first = alone()
    others = {
        "the second time": alone(),
        "in a batch": [a.tokens for a in engine.complete(fresh, params, own)],
        "in a batch, turned round": [a.tokens for a in engine.complete(fresh[::-1], params, own[::-1])][::-1],
    }
    if isinstance(engine, Abandoning):
        for prompt in fresh:
            engine.abandon(prompt, replace(params, max_new_tokens=4 * _SHORT), seed + 1000)
        others["after one that was abandoned"] = alone()
    faults = [
        f"prompt {i + 1}: {a} alone, {b} {how}"
        for how, again in others.items()
        for i, (a, b) in enumerate(zip(first, again, strict=True))
        if a != b
    ]
    return _finding("isolation", claim, faults, (1 + len(others)) * len(prompts))


#: Six letters: what no model says by itself, and ends before any cap.
_PATTERN = "[xyz]{6}"


def _of_text(scorer: Scorer, prompt: Ids) -> Ids:
    """What is text of a prompt: an answer's text may begin with the broken character that its prompt ends with."""
    if scorer.tokenizer is None:
        return prompt
    return tuple(t for t in prompt if str(scorer.tokenizer.decode([t])).isascii()) or prompt


def _grammar_tests(engine: Constraining, prompt: Ids, seed: int) -> Iterator[Callable[[], Finding]]:
    """The test of grammars, if the engine has them."""
    params = SamplingParams(temperature=1.0, max_new_tokens=4 * _SHORT)
    if engine.constrained(prompt, _PATTERN, params, [seed]) is not None:
        yield lambda: grammar(engine, prompt, seed)


def grammar(engine: Constraining, prompt: Ids, seed: int) -> Finding:
    """Sampled answers keep to a regular expression, whatever is drafted."""
    params = SamplingParams(temperature=1.0, max_new_tokens=4 * _SHORT)
    texts = engine.constrained(prompt, _PATTERN, params, range(seed, seed + 10)) or []
    faults = [f"{text!r} does not match {_PATTERN}" for text in texts if not re.fullmatch(_PATTERN, text)]
    return _finding("grammar", "answers keep to a regular expression", faults, len(texts))


def samples_of_one(engine: Engine, prompt: Ids, seed: int) -> Finding:
    """The ``n`` answers to one request are different draws."""
    claim = "n = 4 gives four answers, and not four copies"
    if "n" not in engine.honours:
        return _skipped("n", claim, "the engine has no n")
    params = SamplingParams(temperature=1.0, max_new_tokens=_SHORT, n=4)
    groups = [engine.complete([prompt], params, [seed + i]) for i in range(5)]
    faults = [f"{len(group)} answers where 4 were asked for" for group in groups if len(group) != 4]
    if all(len({a.tokens or a.text for a in group}) == 1 for group in groups):
        faults.append("four copies, five times")
    return _finding("n", claim, faults, 20)


def logprobs(engine: Engine, scorer: Scorer, prompt: Ids, tolerance: float, seed: int) -> Finding:
    """Log-probabilities are those that the target gives the emitted tokens, whatever slot they came from."""
    claim = "the log-probability of every token is the target's"
    if "logprobs" not in engine.honours:
        return _skipped("logprobs", claim, "the engine has no logprobs")
    params = SamplingParams(temperature=1.0, max_new_tokens=_SHORT, logprobs=1)
    answer = engine.complete([prompt], params, [seed])[0]
    tokens = answer.tokens or ()
    if not tokens or answer.logprobs is None or all(said is None for said in answer.logprobs):
        return _skipped("logprobs", claim, "the engine returned none")
    if strange := _outside(tokens, scorer):
        return _finding("logprobs", claim, [strange], len(tokens))
    rows = scorer.logits(prompt, tokens[:-1])
    wanted = [float(r[t] - np.logaddexp.reduce(r)) for r, t in zip(rows, tokens, strict=True)]
    faults = [
        f"position {i + 1}: {said:.5f} in place of {right:.5f}"
        for i, (said, right) in enumerate(zip(answer.logprobs, wanted, strict=False))
        if said is not None and not abs(said - right) <= 4 * tolerance
    ]
    if len(answer.logprobs) != len(tokens):
        faults.append(f"{len(answer.logprobs)} log-probabilities for {len(tokens)} tokens")
    return _finding("logprobs", claim, faults, len(tokens))


def counters(engine: Engine, prompts: Sequence[Ids], seed: int) -> Finding:
    """What an engine says of its drafts fits with what it emitted."""
    claim = "tokens = accepted + one a round, less what an end cut off; accepted <= drafted"
    params = SamplingParams(temperature=1.0, max_new_tokens=_SHORT)
    answers = engine.complete(list(prompts), params, [seed + i for i in range(len(prompts))])
    told = [a for a in answers if a.counters is not None]
    if not told:
        return _skipped("counters", claim, "the engine has none")
    return _finding("counters", claim, [said for a in told if (said := _miscounted(a))], len(told))


def _miscounted(answer: Answer) -> str:
    c, emitted = answer.counters, len(answer.tokens or ())
    assert c is not None
    said = f"{c.accepted} accepted of {c.drafted} in {c.rounds} rounds, {emitted} tokens"
    fits = 0 <= c.accepted <= c.drafted and emitted in (c.accepted + c.rounds, c.accepted + c.rounds - 1)
    return "" if fits else said


def _tokens(engine: Engine, prompt: Prompt, params: SamplingParams) -> Ids:
    return engine.complete([prompt], params, [0])[0].tokens or ()


def _sampled(engine: Engine, prompt: Prompt, params: SamplingParams, seeds: Sequence[int]) -> list[Ids | str | None]:
    return [a.tokens or a.text for a in engine.complete([prompt] * len(seeds), params, list(seeds))]
