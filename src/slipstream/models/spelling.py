"""What each id of a tokenizer stands for, and plain text as ids, without the tokenizer's rules for beginnings.

Two tokenizers are compared, and text is handed from one to the other, by bytes. Vocabularies spell bytes in two ways:
byte-level (GPT-2: each byte is one of 256 printable characters) and SentencePiece (``▁`` for a space, ``<0xNN>`` for
one byte). Special tokens stand for no text at all, however they are spelled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import InputError

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True)
class Encoded:
    """Ids of a text, and of each the first character, the one after its last, and the number of the word it is in.

    Words are what the tokenizer splits a text into first. Ids that share a character have the same first one.
    """

    ids: list[int]
    places: list[tuple[int, int, int]]


class Spelling:
    """The tokens of one tokenizer by the bytes they stand for.

    Args:
        tokenizer: a transformers tokenizer that the tokenizers library runs.
        name: of its model, for messages.

    Raises:
        InputError: a tokenizer of another kind.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"the tokenizer of {name} is a {type(tokenizer).__name__}, whose ids cannot be compared by their "
                "bytes; use a draft model with the target's tokenizer, or a tokenizer that has a tokenizer.json"
            )
        self._decoder = _Decoder.of(backend, name)
        added = tokenizer.added_tokens_decoder
        self.tokens: dict[int, str] = {i: token for token, i in tokenizer.get_vocab().items()}
        self.special = {i: token.content for i, token in added.items() if token.special}
        """Content of each special token by its id."""
        self._added = {i: token.content.encode() for i, token in added.items() if not token.special}
        self.eos: int | None = tokenizer.eos_token_id
        self._known: dict[int, bytes] = {}
        self._plain = _Plain(backend, self, [t for t in added.values() if not t.special], tokenizer.unk_token_id)
        self._lead = _Lead.of(backend)
        self.prefix = self._prefix(tokenizer)
        """Special tokens that the tokenizer puts before a text."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes that an id stands for inside a text; none for special tokens and for ids without a token."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spelled(token)
        return known

    def is_byte(self, token: int) -> bool:
        """Whether the id is spelled ``<0xNN>``: used for what no other token spells."""
        return self._decoder.fallback and _BYTE.match(self.tokens[token]) is not None

    def encode(self, text: str) -> Encoded:
        """The ids of ``text`` as it would be spelled in the middle of a longer one; none of them special."""
        return self._plain.encode(text)

    def led(self, text: str, *, first: bool) -> str:
        """``text`` with the space that the tokenizer puts before a text, or before text behind a special token."""
        always, applies = self._lead.even_a_space, self._lead.first if first else self._lead.again
        return f" {text}" if applies and text and (always or not text[0].isspace()) else text

    def unled(self, text: str, *, first: bool) -> str:
        """``text`` without that space."""
        return text[1:] if (self._lead.first if first else self._lead.again) and text[:1] == " " else text

    def encode_bytes(self, part: bytes) -> list[int] | None:
        """Ids of the first bytes of a character that is not complete; None if no ids stand for them."""
        ids = [self._byte_ids.get(byte) for byte in part]
        return None if None in ids else [i for i in ids if i is not None]

    @property
    def _byte_ids(self) -> dict[int, int]:
        if not hasattr(self, "_single"):
            single = ((self.bytes_of(i), i) for i in sorted(self.tokens, reverse=True))
            self._single = {spelled[0]: i for spelled, i in single if len(spelled) == 1}
        return self._single

    def _spelled(self, token: int) -> bytes:
        if token in self.special or token not in self.tokens:
            return b""
        if token in self._added:
            added: bytes = self._added[token]
            return added
        return self._decoder(self.tokens[token])

    def _prefix(self, tokenizer: Any) -> tuple[int, ...]:
        ids: list[int] = tokenizer("a")["input_ids"]
        end = next((n for n, i in enumerate(ids) if i not in self.special), len(ids))
        return tuple(ids[:end])


class _Plain:
    """A tokenizer's model, normalizer and splitting, with no special tokens and nothing put before a text.

    The model is shared, not copied; the tokenizer itself is left alone.
    """

    def __init__(self, backend: Any, spelling: Spelling, added: Sequence[Any], unknown: int | None) -> None:
        from tokenizers import Tokenizer

        shell = Tokenizer.from_str(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],
                    "normalizer": _without_lead(_state(backend.normalizer)),
                    "pre_tokenizer": _without_lead(_state(backend.pre_tokenizer)),
                    "model": {"type": "BPE", "vocab": {}, "merges": []},
                }
            )
        )
        self._tokenizer = Tokenizer(backend.model)
        if shell.normalizer is not None:
            self._tokenizer.normalizer = shell.normalizer
        if shell.pre_tokenizer is not None:
            self._tokenizer.pre_tokenizer = shell.pre_tokenizer
        self._tokenizer.add_tokens(list(added))
        ids = {content: i for i, content in spelling.tokens.items()}
        self._own = {self._tokenizer.token_to_id(t.content): ids[t.content] for t in added}
        # Some models list their special tokens among the others, and would find them in a text that spells them.
        self._forbidden = spelling.special.keys() - {unknown}

    def encode(self, text: str) -> Encoded:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        ids = [self._own.get(i, i) for i in found.ids]
        # an added token is a word of its own
        words = [-n if word is None else word for n, word in enumerate(found.word_ids, start=1)]
        places = [(a, b, word) for (a, b), word in zip(found.offsets, words, strict=True)]
        if self._forbidden.isdisjoint(ids):
            return Encoded(ids, places)
        start, end, _ = next(place for i, place in zip(ids, places, strict=True) if i in self._forbidden)
        if end - start < 2:
            kept = [(i, place) for i, place in zip(ids, places, strict=True) if i not in self._forbidden]
            return Encoded([i for i, _ in kept], [place for _, place in kept])
        head, tail = self.encode(text[: start + 1]), self.encode(text[start + 1 :])
        shifted = [(a + start + 1, b + start + 1, len(text) + word) for a, b, word in tail.places]
        return Encoded(head.ids + tail.ids, head.places + shifted)


@dataclass(frozen=True)
class _Decoder:
    """From how a vocabulary spells a token to the bytes it stands for."""

    byte_level: bool
    fallback: bool

    @classmethod
    def of(cls, backend: Any, name: str) -> _Decoder:
        parts = list(_parts(_state(backend.decoder)))
        kinds = {part["type"] for part in parts}
        if "ByteLevel" in kinds:
            return cls(byte_level=True, fallback=False)
        spaced = any(p["type"] == "Replace" and p.get("content") == " " for p in parts)
        if "Metaspace" in kinds or spaced:
            return cls(byte_level=False, fallback="ByteFallback" in kinds)
        ways = ", ".join(sorted(kinds)) or "no decoder"
        raise InputError(
            f"the tokenizer of {name} spells its tokens in a way of its own ({ways}), "
            "neither byte-level nor SentencePiece; use a draft model with the target's tokenizer"
        )

    def __call__(self, token: str) -> bytes:
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF.__getitem__, token))
            except KeyError:
                return token.encode()
        if self.fallback and (match := _BYTE.match(token)):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode()


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_of()


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _parts(state: Any) -> Iterator[dict[str, Any]]:
    """The elements of a normalizer, pre-tokenizer or decoder, sequences unpacked."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
    for inner in ("normalizers", "pretokenizers", "decoders"):
        for part in state.get(inner, ()):
            yield from _parts(part)


@dataclass(frozen=True)
class _Lead:
    """Where a tokenizer puts a space before a text: at the start, behind special tokens, even before another space."""

    first: bool = False
    again: bool = False
    even_a_space: bool = False

    @classmethod
    def of(cls, backend: Any) -> _Lead:
        lead = cls()
        for part in [*_parts(_state(backend.normalizer)), *_parts(_state(backend.pre_tokenizer))]:
            scheme = part.get("prepend_scheme")
            if part["type"] == "Prepend":
                return cls(first=True, again=True, even_a_space=True)
            if part.get("add_prefix_space") is True or scheme == "always":
                lead = cls(first=True, again=True)
            elif scheme == "first":
                lead = cls(first=True)
        return lead


def _without_lead(state: Any) -> Any:
    """The state of a normalizer or pre-tokenizer that puts nothing before a text."""
    if state is None:
        return None
    changed = dict(state)
    for inner in ("normalizers", "pretokenizers"):
        if inner in changed:
            changed[inner] = [_without_lead(part) for part in changed[inner] if part["type"] != "Prepend"]
    if "add_prefix_space" in changed:
        changed["add_prefix_space"] = False
    if "prepend_scheme" in changed:
        changed["prepend_scheme"] = "never"
    return None if changed["type"] == "Prepend" else changed
