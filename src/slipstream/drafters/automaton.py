"""A suffix automaton: every substring of a growing text, how often it occurred and what followed it most often.

One state stands for all substrings with the same set of occurrences; its *link* leads to the longest of their
suffixes that occurs elsewhere too. A token is added in amortised O(1) (Blumer et al. 1985; for drafting: Hu et al.,
SAM-Decoding, arXiv 2411.10666). On top of that each state counts its occurrences (as SuffixDecoding does in its tree,
arXiv 2411.04975) and keeps its likeliest follower at hand, so that a draft looks at one edge a token, however many
there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ROOT = 0
#: Stands between documents; no text that is looked up has it.
SEPARATOR = -1
_NO_TOKEN = -2
_NO_STATE = -1
#: How many suffixes of the text, longest first, get one occurrence more with each token. Usual texts have fewer that
#: differ in their occurrences; in one token said over and over, the counts of its short runs stay behind.
MOST_SUFFIXES = 32


@dataclass(frozen=True)
class Match:
    """The longest suffix of a text that an automaton knows: its state and its length in tokens."""

    state: int = ROOT
    length: int = 0


@dataclass(frozen=True)
class Follower:
    """A token that followed a match: how often, how often anything did, and how long the match was."""

    token: int
    count: int
    total: int
    length: int


class SuffixAutomaton:
    """Substrings of the tokens that were added, in flat arrays by state; about 100 bytes a token."""

    def __init__(self) -> None:
        self.size = 0
        """Number of tokens."""
        self._last = ROOT
        self._length = array("i")
        self._link = array("i")
        self._count = array("i")
        self._end = array("i")
        # The likeliest follower's edge is in two arrays; a state with several keeps the others in a dict.
        self._token = array("i")
        self._next = array("i")
        self._others: dict[int, dict[int, int]] = {}
        self._add_state(0)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add ``tokens`` to the end of the text, each in amortised O(1)."""
        for token in tokens:
            self._append(token)

    @property
    def end(self) -> Match:
        """The whole text, as a match of itself; ``continuation`` goes on from its longest earlier occurrence."""
        return Match(self._last, self.size)

    def find(self, tokens: Sequence[int], start: Match = Match()) -> Match:
        """The longest suffix of ``start`` followed by ``tokens`` that occurs in the text; O(1) amortised a token."""
        state, length = start.state, start.length
        for token in tokens:
            while (following := self._edge(state, token)) == _NO_STATE and state != ROOT:
                state = self._link[state]
                length = self._length[state]
            if following != _NO_STATE:
                state, length = following, length + 1
        return Match(state, length)

    def continuation(self, match: Match) -> Iterator[Follower]:
        """The likeliest follower of ``match``, its likeliest follower, and so on, while any is known.

        Of equals the latest. Where a match was never followed by anything, its longest suffix that was takes its place:
        so a text that repeats itself goes on repeating.
        """
        state, length = match.state, match.length
        while True:
            while self._next[state] == _NO_STATE and state != ROOT:
                state = self._link[state]
                length = self._length[state]
            if state == ROOT or self._token[state] == SEPARATOR:
                return
            token, following = self._token[state], self._next[state]
            at_end = self._end[state] == self.size
            count = self._count[following]
            yield Follower(token, count, max(count, self._count[state] - at_end), length)
            state, length = following, length + 1

    def _append(self, token: int) -> None:
        before = self._last
        self.size += 1
        new = self._add_state(self._length[before] + 1)
        state = before
        while state != _NO_STATE and self._edge(state, token) == _NO_STATE:
            self._connect(state, token, new)
            state = self._link[state]
        self._link[new] = ROOT if state == _NO_STATE else self._suffix_state(state, token)
        self._last = new
        self._count_occurrence(new)
        self._rank_followers(before, token)

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NO_STATE)
        self._count.append(0)
        self._end.append(0)
        self._token.append(_NO_TOKEN)
        self._next.append(_NO_STATE)
        return len(self._length) - 1

    def _edge(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._next[state]
        others = self._others.get(state)
        return _NO_STATE if others is None else others.get(token, _NO_STATE)

    def _connect(self, state: int, token: int, following: int) -> None:
        if self._token[state] in (token, _NO_TOKEN):
            self._token[state], self._next[state] = token, following
        else:
            self._others.setdefault(state, {})[token] = following

    def _suffix_state(self, state: int, token: int) -> int:
        """The state of exactly ``state``'s longest string followed by ``token``; split off if it shares one."""
        shared = self._edge(state, token)
        if self._length[shared] == self._length[state] + 1:
            return shared
        split = self._add_state(self._length[state] + 1)
        for column in (self._link, self._count, self._end, self._token, self._next):
            column[split] = column[shared]
        if shared in self._others:
            self._others[split] = dict(self._others[shared])
        while state != _NO_STATE and self._edge(state, token) == shared:
            self._connect(state, token, split)
            state = self._link[state]
        self._link[shared] = split
        return split

    def _count_occurrence(self, state: int) -> None:
        """The text now ends with the strings of ``state`` and of the states that its links lead to."""
        count, end, link, size = self._count, self._end, self._link, self.size
        for _ in range(MOST_SUFFIXES):
            if state == ROOT:
                return
            count[state] += 1
            end[state] = size
            state = link[state]

    def _rank_followers(self, state: int, token: int) -> None:
        """``token`` followed ``state``, and the states that its links lead to, once more: is it their likeliest now?"""
        first, link = self._token, self._link
        for _ in range(MOST_SUFFIXES):
            if state == ROOT:
                return
            if first[state] != token:
                self._overtake(state, token)
            state = link[state]

    def _overtake(self, state: int, token: int) -> None:
        others, leader = self._others[state], self._next[state]
        if self._count[others[token]] >= self._count[leader]:
            others[self._token[state]] = leader
            self._token[state], self._next[state] = token, others.pop(token)
