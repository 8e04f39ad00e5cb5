"""What earlier requests said, to copy from."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from zlib import crc32

from slipstream.drafters.automaton import SEPARATOR, SuffixAutomaton
from slipstream.errors import InputError
from slipstream.measure.files import write_whole

#: The documents are in this many automata, since an automaton cannot forget: the oldest goes as a whole.
PARTS = 4
#: Tokens that are added before readers get a turn.
_PIECE = 64
_MAGIC = b"slipstream suffix store "
_FORMAT = 1
_ID_BYTES = 4


class SuffixStore:
    """Finished requests, oldest first, for any number of threads; bounded by forgetting the oldest.

    Args:
        max_tokens: at most this many tokens are kept, at about 150 bytes each; of a longer document its end. When they
            are exceeded, about the oldest quarter goes.
        tokenizer: the one that its ids come from; without one it is that of the first target it is used with.
    """

    window = 32
    """A match in the store is looked for with this many of the latest tokens."""

    def __init__(self, max_tokens: int = 500_000, *, tokenizer: Any | None = None) -> None:
        if type(max_tokens) is not int or max_tokens < 1:
            raise InputError(f"max_tokens={max_tokens!r} is not usable; use a positive integer")
        self.max_tokens = max_tokens
        self._fingerprint = fingerprint(tokenizer)
        self._parts: list[_Part] = []
        self._adding = Lock()
        self._changing = Lock()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are kept."""
        with self._changing:
            return sum(part.num_tokens for part in self._parts)

    @property
    def documents(self) -> list[list[int]]:
        """What is kept, oldest first."""
        with self._changing:
            return [document.tolist() for part in self._parts for document in part.documents]

    def add(self, tokens: Sequence[int]) -> None:
        """Keep one document, a request's prompt and output."""
        document = array("i", tokens[-self.max_tokens :])
        if not document:
            return
        with self._adding:
            part = self._part_for(len(document))
            for start in range(0, len(document), _PIECE):
                with self._changing:
                    part.automaton.extend(document[start : start + _PIECE])
            with self._changing:
                part.automaton.extend([SEPARATOR])
                part.documents.append(document)

    @contextmanager
    def reading(self) -> Iterator[list[SuffixAutomaton]]:
        """The automata to look into; they do not change until the block ends, which should be soon."""
        with self._changing:
            yield [part.automaton for part in self._parts]

    def check_tokenizer(self, tokenizer: Any | None) -> None:
        """Refuse to be used with another tokenizer than before.

        Raises:
            InputError: the ids that are kept mean something else to ``tokenizer``.
        """
        found = fingerprint(tokenizer)
        if self._fingerprint is None:
            self._fingerprint = found
        elif found is not None and found != self._fingerprint:
            raise InputError("store= was filled with another tokenizer than the target's; use a store for each")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all documents to a file, which is whole or not there at all.

        Raises:
            SlipstreamError: it cannot be written.
        """
        with self._adding:
            documents = [document for part in self._parts for document in part.documents]
            ids = array("i", [token for document in documents for token in document])
            if sys.byteorder == "big":
                ids.byteswap()
            payload = ids.tobytes()
            header = {
                "tokenizer": self._fingerprint,
                "max_tokens": self.max_tokens,
                "lengths": [len(document) for document in documents],
                "crc32": crc32(payload),
            }
            start = _MAGIC + str(_FORMAT).encode() + b"\n" + json.dumps(header).encode() + b"\n"
            write_whole(Path(path), lambda place: place.write_bytes(start + payload))

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, tokenizer: Any | None = None, max_tokens: int | None = None
    ) -> SuffixStore:
        """What ``save`` wrote; takes some seconds for a million tokens.

        Args:
            path: the file.
            tokenizer: must be the one that the store was filled with, if both are known.
            max_tokens: another bound than it had.

        Raises:
            InputError: the file is missing, damaged, not a store, or of another tokenizer.
        """
        header, documents = _read(Path(path))
        store = cls(header["max_tokens"] if max_tokens is None else max_tokens)
        store._fingerprint = header["tokenizer"]
        if tokenizer is not None and store._fingerprint not in (None, fingerprint(tokenizer)):
            raise InputError(f"{str(path)!r} was filled with another tokenizer; use a store for each tokenizer")
        for document in documents:
            store.add(document)
        return store

    def _part_for(self, count: int) -> _Part:
        """The newest part, or a new one if ``count`` tokens are too many for it; old parts go as needed."""
        with self._changing:
            newest = self._parts[-1] if self._parts else None
            if newest is None or newest.num_tokens + count > self.max_tokens // PARTS:
                newest = _Part()
                self._parts.append(newest)
            while sum(part.num_tokens for part in self._parts) + count > self.max_tokens:
                del self._parts[0]
            return newest


class _Part:
    """Some documents and the automaton of all of them."""

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.documents: list[array[int]] = []

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))


def fingerprint(tokenizer: Any | None) -> str | None:
    """A digest of which id stands for which text; None without a tokenizer."""
    if tokenizer is None:
        return None
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _read(path: Path) -> tuple[dict[str, Any], list[array[int]]]:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}); give a file that SuffixStore.save wrote") from error
    if not data.startswith(_MAGIC):
        raise InputError(f"{str(path)!r} is not a suffix store; give a file that SuffixStore.save wrote")
    version, _, rest = data.removeprefix(_MAGIC).partition(b"\n")
    if version != str(_FORMAT).encode():
        raise InputError(
            f"{str(path)!r} has format {version[:20].decode(errors='replace')}, but this version reads {_FORMAT}; "
            "begin with an empty store"
        )
    first, _, payload = rest.partition(b"\n")
    header = _header(first, payload)
    if header is None:
        raise InputError(f"{str(path)!r} is damaged; delete it and begin with an empty store")
    ids = array("i")
    ids.frombytes(payload)
    if sys.byteorder == "big":
        ids.byteswap()
    documents, at = [], 0
    for length in header["lengths"]:
        documents.append(ids[at : at + length])
        at += length
    return header, documents


def _header(line: bytes, payload: bytes) -> dict[str, Any] | None:
    """The header if it is one and describes ``payload``."""
    try:
        header = json.loads(line)
        counts = [*header["lengths"], header["max_tokens"]]
        fits = _ID_BYTES * sum(header["lengths"]) == len(payload) and header["crc32"] == crc32(payload)
        known = isinstance(header["tokenizer"], str | None) and all(type(n) is int and n >= 1 for n in counts)
    except (ValueError, KeyError, TypeError):
        return None
    return header if fits and known else None
