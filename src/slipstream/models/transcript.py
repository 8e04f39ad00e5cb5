"""The text of a growing list of one tokenizer's ids, in another tokenizer's ids.

What is appended can change the ids before it ("wor" + "ld" is "world"), but not far before it. So each time the latest
few ids are encoded again together with what is new, from where a word begins; the cost does not grow with the text.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Sequence

from slipstream.models.vocabulary import Pairing

#: So many of the latest ids are encoded again, twice as many if the first of them came out differently, up to a limit.
_LOOK_BACK = 8
_FARTHEST = 128
#: From there, so many ids farther back for the beginning of a word.
_WORD = 32


class Transcript:
    """Reads ids of the target, which are only ever appended, and keeps ids of the draft.

    A special token that the two share becomes the draft's, any other one vanishes; what the target puts before a text
    becomes what the draft puts there. Bytes that are not a character yet become ids of single bytes.
    """

    def __init__(self, pairing: Pairing) -> None:
        self._pairing = pairing
        self.ids = list(pairing.draft.prefix)
        self.stable = len(self.ids)
        """So many leading ids are those of the reading before."""
        self.complete = True
        """Whether the ids stand for all of the text; not if the draft has no ids for an incomplete character."""
        self.count = 0
        """Number of the target's ids that were read."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_partial = 0
        self._first = True
        self._open()

    def read(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids of ``tokens``, which begin with those of the call before. The list belongs to this object."""
        self.stable = len(self.ids) - self._num_partial
        del self.ids[self.stable :]
        target = self._pairing.target
        if self.count == 0 and tuple(tokens[: len(target.prefix)]) == target.prefix:
            self.count = len(target.prefix)
        fresh = ""
        for token in tokens[self.count :]:
            if token in target.special:
                self._append(fresh + self._utf8.decode(b"", final=True))
                fresh = ""
                self._close(self._pairing.to_draft.get(token))
            else:
                fresh += self._utf8.decode(target.bytes_of(token))
        self._append(fresh)
        self.count = max(self.count, len(tokens))
        self._add_partial()
        return self.ids

    @property
    def partial(self) -> bytes:
        """The first bytes of a character that is not complete yet."""
        return self._utf8.getstate()[0]

    def _open(self) -> None:
        """Begin a stretch of text behind a special token or at the start."""
        self._fixed = len(self.ids)
        self._places: list[tuple[int, int, int]] = []
        self._begun = False
        self._text = ""
        self._base = 0

    def _close(self, special: int | None) -> None:
        if special is not None:
            self.ids.append(special)
        self._utf8.reset()
        self._first = False
        self._open()

    def _add_partial(self) -> None:
        ids = self._pairing.draft.encode_bytes(self.partial)
        self.complete = ids is not None
        self.ids += ids or []
        self._num_partial = len(ids or [])

    def _append(self, fresh: str) -> None:
        """Add characters to the stretch and encode again what they may have changed."""
        if fresh and not self._begun:
            self._begun = True
            fresh = self._pairing.target.unled(fresh, first=self._first)
        if not self._places:
            fresh = self._pairing.draft.led(fresh, first=self._first)
        if not fresh:
            return
        text = self._text + fresh
        back = _LOOK_BACK
        while True:
            start = self._boundary(back)
            begin = self._places[start][0] if start else 0
            encoded = self._pairing.draft.encode(text[begin - self._base :])
            same = _common(self.ids, self._fixed + start, encoded.ids)
            if start == 0 or back >= _FARTHEST or same >= _LOOK_BACK // 2:
                break
            back *= 2
        self.stable = min(self.stable, self._fixed + start + same)
        self.ids[self._fixed + start :] = encoded.ids
        words = self._places[start - 1][2] + 1 if start else 0
        self._places[start:] = [(a + begin, b + begin, words + word) for a, b, word in encoded.places]
        self._keep_end_of(text)

    def _boundary(self, back: int) -> int:
        """Index in the stretch of the id to encode from: ``back`` ids before its end or more, where a word begins."""
        near = len(self._places) - back
        if near <= 0:
            return 0
        choices = [i for i in range(near, max(near - _WORD, 0), -1) if self._places[i - 1][1] <= self._places[i][0]]
        poor = (self._joins_nothing, bool) if near > _WORD else ()
        for good in (self._begins_word, *poor):
            if found := next((i for i in choices if good(i)), 0):
                return found
        return 0

    def _joins_nothing(self, index: int) -> bool:
        return not unicodedata.combining(self._text[self._places[index][0] - self._base])

    def _begins_word(self, index: int) -> bool:
        return self._places[index - 1][2] != self._places[index][2]

    def _keep_end_of(self, text: str) -> None:
        """Forget characters that will not be encoded again."""
        keep = len(self._places) - 2 * _FARTHEST - _WORD
        start = self._places[keep][0] if keep > 0 else 0
        self._text, self._base = text[max(start - self._base, 0) :], max(start, self._base)


def _common(ids: Sequence[int], start: int, others: Sequence[int]) -> int:
    """How many of ``others`` are equal to what follows ``start`` in ``ids``."""
    limit = min(len(ids) - start, len(others))
    return next((n for n in range(limit) if ids[start + n] != others[n]), limit)
