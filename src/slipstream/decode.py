"""One round, and the loop: the only place that knows target and drafter together.

A round has four parts: ``ask`` for how many tokens, draft and ``cut``, read what is ``unread``, ``settle``.
``Decoder.rounds`` runs them for one request; the engine runs each part for many requests before it goes on to the next.

Invariant: after every round the target's cache holds all committed tokens but the last. So a round always feeds
``[last] + draft``, reading the prompt is the first round (with an empty draft), and plain decoding is a drafter that
has nothing to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
from slipstream.verify import RULES, check_draft_probs, match, verify


@dataclass
class Progress:
    """One request in the making."""

    tokens: list[int]
    """Prompt and committed output."""
    cache: Cache
    """The target's; between rounds it holds all of ``tokens`` but the last."""
    ended: Callable[[int], bool]
    reading: bool
    """Whether the next round is the first one, which reads the prompt."""
    done: bool = False

    def unread(self, draft: Draft) -> list[int]:
        """What the target has to read for a round with this draft."""
        return [*self.tokens[self.cache.length :], *draft.tokens]


@dataclass(frozen=True)
class Proposal:
    """A draft as it is to be verified, and how it came about."""

    asked: int = 0
    """The most tokens that the drafter was asked for; 0: it was not asked."""
    whole: Draft = field(default_factory=Draft)
    """Before the controller cut it."""
    draft: Draft = field(default_factory=Draft)


@dataclass(frozen=True)
class Clock:
    """When a round began, when its draft was there, and how long the target took before ``settle``; in seconds."""

    start: float
    drafted: float
    read: float


@dataclass(frozen=True)
class Decoder:
    """How one request is decoded. All of its state is in a ``Progress``: drop that and nothing is left.

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
        progress = self.begin(prompt, ended, self.target.new_cache())
        try:
            while not progress.done:
                yield self.round(progress)
        finally:  # also when the generator is closed half-way
            self.close(progress)

    def begin(self, prompt: Sequence[int], ended: Callable[[int], bool], cache: Cache) -> Progress:
        """Nothing is read yet; ``cache`` is an empty one of the target's."""
        progress = Progress(list(prompt), cache, ended, reading=len(prompt) > 1)
        self.share(progress)
        if self.controller.gated and hasattr(self.session, "gate"):
            self.session.gate = self.controller.goes_on
            if hasattr(self.session, "prefer"):
                self.session.prefer = getattr(self.controller, "prefers", None)
        return progress

    def share(self, progress: Progress) -> None:
        """Show the session the target's cache, if it wants to see it."""
        if share := getattr(self.session, "share", None):
            share(progress.cache)

    def close(self, progress: Progress) -> None:
        """The request is over, or given up."""
        if hasattr(self.session, "close"):
            self.session.close(progress.tokens)

    def room(self, progress: Progress) -> int:
        """How many tokens may be drafted: none while the prompt is unread, so that the first token is not delayed."""
        return 0 if progress.reading else max(0, self.max_length - len(progress.tokens) - 1)

    def ask(self, progress: Progress) -> int:
        """How many tokens to draft at most."""
        room = self.room(progress)
        return self.controller.ask(room, len(progress.tokens)) if room else 0

    def cut(self, draft: Draft, asked: int) -> Proposal:
        """What of a draft of ``asked`` tokens is to be verified: what the target can emit, and what pays.

        Raises:
            InputError: it has more tokens, or ids that do not exist.
        """
        vocab = self.target.vocab_size
        if draft.probs is None:
            # The target may read ids that it cannot emit. With a one-hot q, cutting them off is rejecting them.
            usable = sum(1 for _ in takewhile(lambda t: t < vocab, draft.tokens))
            draft = _first(draft, usable, "vocabulary")
        if len(draft.tokens) > asked or not all(0 <= t < vocab for t in draft.tokens):
            raise InputError(
                f"{type(self.session).__name__} drafted {draft.tokens}; a draft has at most the {asked} tokens asked "
                f"for, with ids below {vocab}; correct the drafter"
            )
        if draft.probs is not None:
            check_draft_probs(draft.probs, len(draft.tokens), vocab)
        if draft.probs is not None or not draft.tokens:  # drawn tokens must not be dropped
            return Proposal(asked, draft, draft)
        return Proposal(asked, draft, _first(draft, self.controller.keep(draft), "controller"))

    def settle(self, progress: Progress, proposal: Proposal, logits: Tensor, clock: Clock) -> Round:
        """Verify the draft and commit what comes of it: accept, cut by the stop rules, roll the cache back.

        Args:
            progress: the draft has been read.
            proposal: with a draft of k tokens.
            logits: the target's at each slot, (k+1, V).
            clock: for the round's times.
        """
        began, draft = perf_counter(), proposal.draft
        new, broken = self._verified(progress.tokens, draft, logits)
        clock = replace(clock, read=clock.read + perf_counter() - began)
        if not progress.reading:
            self.controller.learn(_played(progress, proposal, new, clock))
        kept: list[int] = []
        while not progress.done and len(kept) < len(new):
            if len(kept) == broken:
                # Plain decoding would be stuck here too: have the sampler say why.
                self.sampler.probs(logits[broken : broken + 1], [*progress.tokens, *kept])
            kept.append(new[len(kept)])
            progress.done = progress.ended(kept[-1])
        progress.tokens += kept
        progress.cache.truncate(len(progress.tokens) - 1)
        progress.reading = False
        return Round(
            tokens=tuple(kept),
            num_drafted=len(draft.tokens),
            num_accepted=min(len(new) - 1, len(kept)),
            draft_seconds=clock.drafted - clock.start,
            verify_seconds=clock.read,
            logprobs=self._logprobs(logits, kept),
            total_seconds=perf_counter() - clock.start,
            k=proposal.asked,
            ended=draft.ended if proposal.asked else None,
            sources=draft.sources or (self.drafter,) * len(draft.tokens),
        )

    def round(self, progress: Progress) -> Round:
        """One round of one request: draft, read, settle."""
        start = perf_counter()
        asked = self.ask(progress)
        proposal = self.cut(self.session.draft(progress.tokens, asked), asked) if asked else Proposal()
        drafted = perf_counter()
        unread, slots = progress.unread(proposal.draft), len(proposal.draft.tokens) + 1
        logits = feed(self.target, unread, progress.cache, slots)
        return self.settle(progress, proposal, logits, Clock(start, drafted, perf_counter() - drafted))

    def _verified(self, tokens: list[int], draft: Draft, logits: Tensor) -> tuple[list[int], int]:
        """The tokens that this round adds, and the first of them that could not be sampled (or how many there are).

        That one and those behind it mean nothing; which does not matter if the answer ends before.
        """
        extended = [*tokens, *draft.tokens]
        if self.sampler.greedy:
            chosen = self.sampler.choices(logits, extended)
            verdict = match(draft.tokens, chosen.__getitem__)
            new = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
            return new, len(new) - (verdict.next_token < 0)
        probs = self.sampler.probs(logits, extended)
        if self.sampler.coupled:
            verdict = match(draft.tokens, lambda slot: self.sampler.draw(probs[slot], len(tokens) + slot))
        else:
            drafted = torch.tensor(draft.tokens, dtype=torch.long)
            verdict = verify(probs, drafted, draft.probs, self.sampler.generator, self.rule)
        new = [*draft.tokens[: verdict.num_accepted], verdict.next_token]
        unusable = probs[: len(new), 0].isnan()
        return new, int(unusable.long().argmax()) if bool(unusable.any()) else len(new)

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


def _played(progress: Progress, proposal: Proposal, new: Sequence[int], clock: Clock) -> Played:
    """The round as a controller learns from it, before stop rules cut it."""
    return Played(
        length=len(progress.tokens),
        asked=proposal.asked,
        draft=proposal.whole,
        kept=len(proposal.draft.tokens),
        tokens=tuple(new),
        draft_seconds=clock.drafted - clock.start,
        verify_seconds=clock.read,
    )
