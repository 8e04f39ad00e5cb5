"""One round, and the loop: the only place that knows target and drafter together.

Invariant: after every round the target's cache holds all committed tokens but the last. So a round always feeds
``[last] + draft``, reading the prompt is the first round (with an empty draft), and plain decoding is a drafter that
has nothing to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from time import perf_counter

import torch
from torch import Tensor

from slipstream.controller import Controller, Played
from slipstream.drafters.base import DraftSession
from slipstream.errors import InputError
from slipstream.models.base import Cache, Model, feed
from slipstream.sampling import Sampler
from slipstream.types import Draft, DraftEnd, Round, TokenLogprob
from slipstream.verify import RULES, match, verify


@dataclass(frozen=True)
class Decoder:
    """The decoding of one request. All of its state is in ``rounds``: abandon that generator and nothing is left.

    ``max_length`` is the length of prompt + output at which the answer ends at the latest; no draft reaches beyond it.
    """

    target: Model
    session: DraftSession
    sampler: Sampler
    controller: Controller
    max_length: int
    rule: str = RULES[0]
    drafter: str = ""
    """What statistics call the source of drafts that name none."""

    def rounds(self, prompt: Sequence[int], ended: Callable[[int], bool]) -> Iterator[Round]:
        """Generate until ``ended`` says so.

        Args:
            prompt: at least one token, fewer than ``max_length``.
            ended: called once with each new token, in order; True if the answer ends with it.
        """
        tokens = list(prompt)
        try:
            yield from self._rounds(tokens, ended)
        finally:  # also when the generator is closed half-way
            if hasattr(self.session, "close"):
                self.session.close(tokens)

    def _rounds(self, tokens: list[int], ended: Callable[[int], bool]) -> Iterator[Round]:
        """The rounds themselves; the new tokens are added to ``tokens``."""
        cache = self.target.new_cache()
        if share := getattr(self.session, "share", None):
            share(cache)
        done = False
        if self.controller.gated and hasattr(self.session, "gate"):
            self.session.gate = self.controller.goes_on
        while not done:
            start = perf_counter()
            asked = self._ask(tokens, cache)
            proposed = self._draft(tokens, asked)
            draft = self._cut(proposed)
            drafted_at = perf_counter()
            reading = cache.length < len(tokens) - 1
            new, logits = self._verify(tokens, draft, cache)
            verified_at = perf_counter()
            if not reading:
                self.controller.learn(
                    Played(
                        length=len(tokens),
                        asked=asked,
                        draft=proposed,
                        kept=len(draft.tokens),
                        tokens=tuple(new),
                        draft_seconds=drafted_at - start,
                        verify_seconds=verified_at - drafted_at,
                    )
                )
            kept: list[int] = []
            while not done and len(kept) < len(new):
                kept.append(new[len(kept)])
                done = ended(kept[-1])
            tokens += kept
            cache.truncate(len(tokens) - 1)
            yield Round(
                tokens=tuple(kept),
                num_drafted=len(draft.tokens),
                num_accepted=min(len(new) - 1, len(kept)),
                draft_seconds=drafted_at - start,
                verify_seconds=verified_at - drafted_at,
                total_seconds=perf_counter() - start,
                logprobs=self._logprobs(logits, kept),
                k=asked,
                ended=draft.ended if asked else None,
                sources=draft.sources or (self.drafter,) * len(draft.tokens),
            )

    def _ask(self, tokens: Sequence[int], cache: Cache) -> int:
        """How many tokens to draft at most: none while the prompt is unread, so that the first token is not delayed."""
        room = self.max_length - len(tokens) - 1
        if room <= 0 or cache.length < len(tokens) - 1:
            return 0
        return self.controller.ask(room, len(tokens))

    def _draft(self, tokens: Sequence[int], k: int) -> Draft:
        if k <= 0:
            return Draft()
        draft = self.session.draft(tokens, k)
        vocab = self.target.vocab_size
        if draft.probs is None:
            # The target may read ids that it cannot emit. With a one-hot q, cutting them off is rejecting them.
            usable = sum(1 for _ in takewhile(lambda t: t < vocab, draft.tokens))
            draft = _first(draft, usable, "vocabulary")
        if len(draft.tokens) > k or not all(0 <= t < vocab for t in draft.tokens):
            raise InputError(
                f"{type(self.session).__name__} drafted {draft.tokens}; a draft has at most the {k} tokens asked "
                f"for, with ids below {vocab}; correct the drafter"
            )
        return draft

    def _cut(self, draft: Draft) -> Draft:
        """Leave out what does not pay to verify; only of a one-hot draft, which is a function of the past."""
        if draft.probs is not None or not draft.tokens:
            return draft
        return _first(draft, self.controller.keep(draft), "controller")

    def _verify(self, tokens: list[int], draft: Draft, cache: Cache) -> tuple[list[int], Tensor]:
        """The tokens that this round adds, and the target's logits at each slot, (k+1, V)."""
        extended = [*tokens, *draft.tokens]
        logits = feed(self.target, extended[cache.length :], cache, len(draft.tokens) + 1)
        probs = self.sampler.probs(logits, extended)
        if self.sampler.coupled:
            verdict = match(draft.tokens, lambda slot: self.sampler.draw(probs[slot], len(tokens) + slot))
        else:
            drafted = torch.tensor(draft.tokens, dtype=torch.long)
            verdict = verify(probs, drafted, draft.probs, self.sampler.generator, self.rule)
        new = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
        unusable = probs[: len(new), 0].isnan()
        if bool(unusable.any()):
            # Behind tokens that stand, so plain decoding would be stuck here too: have the sampler say why.
            slot = int(unusable.long().argmax())
            self.sampler.probs(logits[slot : slot + 1], extended[: len(tokens) + slot])
        return new, logits

    def _logprobs(self, logits: Tensor, kept: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
        count = self.sampler.params.logprobs
        if count is None:
            return None
        scores = torch.log_softmax(logits[: len(kept)].to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        values, ids = scores.topk(min(count, scores.shape[-1]), dim=-1)
        return tuple(
            TokenLogprob(token, float(scores[i, token]), tuple(zip(ids[i].tolist(), values[i].tolist(), strict=True)))
            for i, token in enumerate(kept)
        )


def _first(draft: Draft, count: int, ended: DraftEnd) -> Draft:
    """The first ``count`` tokens of a one-hot draft."""
    if count >= len(draft.tokens):
        return draft
    return replace(
        draft,
        tokens=draft.tokens[:count],
        ended=ended,
        sources=draft.sources[:count],
        confidence=draft.confidence[:count],
    )
