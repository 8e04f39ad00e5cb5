"""Several drafters, best first: what the first is not sure of, the next one drafts.

Whoever proposes a token, it is verified with the q that it was drawn from, so the output stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from slipstream.drafters.base import Drafter, Gate, Preference, Read, Steps, run
from slipstream.errors import InputError
from slipstream.models.base import Cache, Model
from slipstream.sampling import Sampler
from slipstream.types import Draft, DraftEnd

#: How sure all but the last must be of a token; see the lab notes.
MIN_CONFIDENCE = 0.7
#: What a controller is told of tokens whose drafter does not say how sure it is; it learns how often they stand.
_UNKNOWN = 0.5


class CascadeDrafter:
    """Asks ``drafters`` in order for each token; the last one is what is left if no other is confident.

    Args:
        drafters: the preferred one first, such as ``[SuffixDrafter(), ModelDrafter(...)]``.
        min_confidence: a drafter before the last one is asked for as many tokens as it is that sure of. None: as many
            as are worth more than what a pass of the next drafter would bring, where k is adaptive, else 0.7.
    """

    def __init__(self, drafters: Sequence[Drafter], *, min_confidence: float | None = None) -> None:
        if not drafters:
            raise InputError("drafters=[] has no drafter to ask; name at least one")
        if min_confidence is not None and not 0 <= min_confidence <= 1:
            raise InputError(f"min_confidence={min_confidence!r} is not usable; use a number in [0, 1]")
        self.drafters = tuple(drafters)
        self.min_confidence = min_confidence
        self.name = ",".join(drafter.name for drafter in drafters)

    def start(self, sampler: Sampler) -> CascadeSession:
        """Begin one request."""
        return CascadeSession(self, sampler)


class CascadeSession:
    """A session of each drafter.

    The first one drafts as much as it can; every later one is asked token by token, so that those before it may go on
    from there. A session without ``draft_after`` cannot go on from another's tokens: it is asked at the start of a
    draft only, and for all of it.
    """

    gate: Gate | None = None
    """Asked before each token with the number drafted so far and the token's confidence; False ends the draft."""
    prefer: Preference | None = None
    """Asked whether to take a token of one drafter rather than to ask the next one, unless a confidence was given."""

    def __init__(self, drafter: CascadeDrafter, sampler: Sampler) -> None:
        self._names = [one.name for one in drafter.drafters]
        self._sessions: list[Any] = [one.start(sampler) for one in drafter.drafters]
        self._set = drafter.min_confidence is not None
        self._least = MIN_CONFIDENCE if drafter.min_confidence is None else drafter.min_confidence
        self._stop_ids = sampler.stop_ids
        self._unsure = False
        self._refused = False
        self._passed = False
        copying = [getattr(session, "copies", False) for session in self._sessions]
        self._copier = copying.index(True) if True in copying else None
        self.copies = any(copying)
        """Whether some of the tokens cost nothing."""
        self.draws = self.copies and not all(copying)
        """Whether others of them cost passes."""
        self.copying = {name for name, copies in zip(self._names, copying, strict=True) if copies}
        """Whose cost nothing."""
        self.whole = {name for name, one in zip(self._names, self._sessions, strict=True) if not hasattr(one, "gate")}
        """Who drafts without asking before each token."""

    @property
    def latest(self) -> int | None:
        """How many of the latest tokens members read that have not begun to; None: all."""
        return next((one.latest for one in self._sessions if hasattr(one, "latest")), None)

    @latest.setter
    def latest(self, count: int | None) -> None:
        for one in self._sessions:
            if hasattr(one, "latest"):
                one.latest = count

    def draft(self, tokens: Sequence[int], k: int) -> Draft:
        """Up to ``k`` tokens of all drafters; copied ones have one-hot rows if others were drawn."""
        return self.draft_after(tokens, (), k)

    def draft_after(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Draft:
        """The same behind ``drafted`` tokens of other drafters, which may yet be rejected."""
        return run(self.steps(tokens, drafted, k))

    def copied(self, tokens: Sequence[int], k: int, *, sure: bool) -> Draft:
        """Up to ``k`` tokens of the first one that copies; with ``sure``, those that a draft would begin with."""
        if self._copier is None or (sure and self._copier > 0):
            return Draft()
        return run(self._ask(self._copier, tokens, (), k, 0, sure=sure))

    def steps(self, tokens: Sequence[int], drafted: Sequence[int], k: int) -> Steps:
        """``draft_after``, a pass at a time."""
        pieces: list[Draft] = []
        made: list[int] = []
        self._refused = self._passed = False
        member = 0
        while member < len(self._sessions) and len(made) < k and not (made and made[-1] in self._stop_ids):
            piece = yield from self._ask(member, tokens, [*drafted, *made], k - len(made), len(made))
            pieces.append(piece)
            made += piece.tokens
            if piece.ended == "controller":
                if self._refused and not self._passed and self._copier is not None:
                    # No pass is worth its time: what would have been copied less surely costs none.
                    room, after = k - len(made), [*drafted, *made]
                    copied = yield from self._ask(self._copier, tokens, after, room, len(made), sure=False)
                    pieces += [copied] if copied.tokens else []
                break
            # Who stopped by itself is asked again once another one has found the next token.
            member = 0 if piece.tokens and member > 0 else member + 1
        return joined(pieces)

    def share(self, cache: Cache) -> None:
        """``cache`` is the target's cache of this request."""
        for session in self._sessions:
            if hasattr(session, "share"):
                session.share(cache)

    def lend(self, new_cache: Callable[[Model], Cache]) -> None:
        """Start anew with caches from ``new_cache``."""
        for session in self._sessions:
            if hasattr(session, "lend"):
                session.lend(new_cache)

    def catch_up(self, tokens: Sequence[int], most: int) -> Generator[Read, Tensor, int]:
        """Each member that reads reads up to ``most``; returns how many the one furthest behind has left."""
        left = 0
        for session in self._sessions:
            if hasattr(session, "catch_up"):
                left = max(left, (yield from session.catch_up(tokens, most)))
        return left

    def close(self, tokens: Sequence[int]) -> None:
        """The request is over, with ``tokens`` (prompt + output)."""
        for session in self._sessions:
            if hasattr(session, "close"):
                session.close(tokens)

    def _ask(
        self, member: int, tokens: Sequence[int], drafted: Sequence[int], room: int, count: int, *, sure: bool = True
    ) -> Steps:
        """What one drafter adds to a draft that has ``count`` tokens; ``sure``: only what it is sure of."""
        session = self._sessions[member]
        goes_on = hasattr(session, "draft_after")
        if drafted and not goes_on:
            return Draft(ended="no match")
        self._unsure = False
        if hasattr(session, "gate"):
            session.gate = self._gate(member, count, sure=sure)
        most = room if member == 0 or not sure or not goes_on else 1
        if hasattr(session, "steps"):
            draft: Draft = yield from session.steps(tokens, drafted, most)
        elif hasattr(session, "gate"):
            draft = session.draft_after(tokens, drafted, most) if goes_on else session.draft(tokens, room)
        else:
            draft = self._whole(member, tokens, drafted, room, count)
        ended: DraftEnd = "confidence" if self._unsure else draft.ended
        return replace(draft, ended=ended, sources=draft.sources or (self._names[member],) * len(draft.tokens))

    def _whole(self, member: int, tokens: Sequence[int], drafted: Sequence[int], room: int, count: int) -> Draft:
        """What a drafter without a gate adds: asked where a pass would be worth its time, and cut where it copied."""
        session, gate, name = self._sessions[member], self.gate, self._names[member]
        if gate is not None:
            self._refused = not gate(count, nan, name)
            if self._refused:
                return Draft(ended="controller")
            self._passed = True
        draft: Draft = session.draft_after(tokens, drafted, room) if drafted else session.draft(tokens, room)
        if gate is None or draft.probs is not None:  # drawn tokens must not be dropped
            return draft
        sure = draft.confidence or (_UNKNOWN,) * len(draft.tokens)
        kept = next((at for at, one in enumerate(sure) if not gate(count + at, one, name)), len(sure))
        ended: DraftEnd = draft.ended if kept == len(sure) else "controller"
        return Draft(draft.tokens[:kept], None, ended, draft.sources[:kept], sure[:kept])

    def _gate(self, member: int, count: int, *, sure: bool) -> Gate:
        """Demands confidence of all but the last drafter, then asks this session's own gate, ``count`` tokens on."""
        demanding = sure and member < len(self._sessions) - 1

        def gate(number: int, confidence: float, source: str = "", /) -> bool:
            asked, before = source or self._names[member], isnan(confidence)
            self._unsure = demanding and not before and not self._preferred(confidence, asked, self._names[member + 1])
            goes_on = not self._unsure and (self.gate is None or self.gate(count + number, confidence, asked))
            self._passed |= before and goes_on
            self._refused = before and not goes_on
            return goes_on

        return gate

    def _preferred(self, confidence: float, source: str, following: str) -> bool:
        """Whether ``source`` is sure enough of a token that ``following`` need not be asked."""
        if not self._set and self.prefer is not None:
            return self.prefer(confidence, source, following)
        return confidence >= self._least


def joined(pieces: Sequence[Draft]) -> Draft:
    """Drafts of one round, each of which goes on where the one before it ended, as one draft.

    If any tokens were drawn, the copied ones get one-hot rows. An id that those who draw do not have cannot have such a
    row; the draft then ends before it.
    """
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    sources = tuple(source for piece in pieces for source in piece.sources)
    confidence = tuple(sure for piece in pieces for sure in piece.confidence)
    ended = pieces[-1].ended if pieces else "limit"
    if len(confidence) < len(tokens):
        confidence = ()
    like = next((piece.probs for piece in pieces if piece.probs is not None), None)
    if like is None:
        return Draft(tokens, None, ended, sources, confidence)
    vocab = like.shape[-1]
    known = next((i for i, token in enumerate(tokens) if token >= vocab), len(tokens))
    if known < len(tokens):
        tokens, sources, confidence, ended = tokens[:known], sources[:known], confidence[:known], "vocabulary"
    rows = [_rows(piece, like) for piece in pieces if piece.tokens]
    return Draft(tokens, torch.cat(rows)[:known], ended, sources, confidence)


def _rows(piece: Draft, like: Tensor) -> Tensor:
    """The q of each token, (k, V); an id of V or above gets a row of zeros."""
    if piece.probs is not None:
        return piece.probs
    ids = torch.tensor(piece.tokens, device=like.device).unsqueeze(1)
    fitting = ids < like.shape[-1]
    rows = torch.zeros(len(ids), like.shape[-1], dtype=like.dtype, device=like.device)
    return rows.scatter_(1, ids * fitting, fitting.to(like.dtype))
