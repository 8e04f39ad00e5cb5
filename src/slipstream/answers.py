"""One answer: how its decoding is set up, and what comes together of its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.controller import Policy
from slipstream.decode import Decoder
from slipstream.drafters.base import Drafter
from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.sampling import Sampler
from slipstream.stats import count_rounds
from slipstream.text import Ending
from slipstream.types import Output, Piece, Round, SamplingParams


def check_prompt(ids: Sequence[int], target: Model) -> None:
    """Check a prompt against the target's vocabulary and context.

    Raises:
        InputError: it is empty, too long, or holds ids that the target cannot read.
    """
    limit = target.max_positions
    if not ids:
        raise InputError("the prompt is empty; give at least one token")
    if not all(0 <= t < target.embedding_size for t in ids):
        wrong = next(t for t in ids if not 0 <= t < target.embedding_size)
        raise InputError(
            f"the prompt holds token id {wrong}, but ids of {target.name} go from 0 to "
            f"{target.embedding_size - 1}; encode it with that model's tokenizer"
        )
    if limit is not None and len(ids) > limit:
        raise InputError(
            f"the prompt has {len(ids)} tokens, but {target.name} reads at most {limit}; shorten the prompt"
        )


@dataclass(frozen=True)
class Setting:
    """What all answers have in common."""

    target: Model
    drafter: Drafter
    policy: Policy
    tokenizer: Any | None
    rule: str
    coupled: bool

    def start(self, prompt: tuple[int, ...], params: SamplingParams, index: int = 0) -> tuple[Decoder, Answer]:
        """Begin one answer, the prompt's sample number ``index``; prompt and parameters are checked ones."""
        target, limit = self.target, len(prompt) + params.max_new_tokens
        if target.max_positions is not None:
            limit = min(limit, target.max_positions)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(target.eos_token_ids))
        sampler = Sampler(params, len(prompt), stop_ids, _seed(params, index), coupled=self.coupled)
        ending = Ending(
            stop_ids=stop_ids,
            stop=params.stop,
            min_tokens=params.min_new_tokens,
            max_tokens=limit - len(prompt),
            tokenizer=self.tokenizer,
        )
        session = self.drafter.start(sampler)
        controller = self.policy.start(
            session, self.drafter.name, repeatable=repeatable(params, coupled=self.coupled), isolated=not params.share
        )
        decoder = Decoder(target, session, sampler, controller, limit, self.rule, self.drafter.name)
        return decoder, Answer(ending, prompt, index, wants_logprobs=params.logprobs is not None)


class Answer:
    """The rounds of one answer and its text, so far."""

    def __init__(self, ending: Ending, prompt: tuple[int, ...], index: int, *, wants_logprobs: bool) -> None:
        self.prompt = prompt
        self.rounds: list[Round] = []
        self._ending = ending
        self._index = index
        self._wants_logprobs = wants_logprobs
        self._text = ""
        self._fresh: list[str] = []

    @property
    def over(self) -> bool:
        """Whether a stop rule has ended it."""
        return self._ending.reason is not None

    def push(self, token: int) -> bool:
        """Take the next token; whether the answer ends with it."""
        self._fresh.append(self._ending.push(token))
        return self.over

    def add(self, r: Round) -> Piece:
        """Take the round whose tokens were pushed; what it adds to a stream."""
        text = "".join(self._fresh)
        self._fresh.clear()
        self._text += text
        self.rounds.append(r)
        return Piece(text, r.tokens, r.origins)

    def flush(self) -> None:
        """End the answer here."""
        self._text += self._ending.flush()

    @property
    def output(self) -> Output:
        """The answer so far; its ``finish_reason`` is None until it has ended."""
        rounds = self.rounds
        logprobs = tuple(entry for r in rounds for entry in r.logprobs or ())
        return Output(
            prompt_tokens=self.prompt,
            tokens=tuple(t for r in rounds for t in r.tokens),
            text=self._text,
            finish_reason=self._ending.reason,
            origins=tuple(o for r in rounds for o in r.origins),
            logprobs=logprobs if self._wants_logprobs else None,
            stats=count_rounds(rounds),
            index=self._index,
        )


def repeatable(params: SamplingParams, *, coupled: bool) -> bool:
    """Whether k must not depend on clocks or on other requests, lest other random numbers meet the same tokens."""
    return params.seed is not None and params.temperature > 0 and not coupled


def _seed(params: SamplingParams, index: int) -> int:
    """The seed of a prompt's sample number ``index``; without one, torch's global generator decides."""
    if params.seed is not None:
        return (params.seed + index * 0x9E3779B97F4A7C15) % 2**63
    return int(torch.randint(2**62, ())) if params.temperature > 0 else 0
