"""Documents as token ids, and token ids in rows of one length."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from slipstream.distill.documents import Document
from slipstream.errors import InputError
from slipstream.text import encode


@dataclass(frozen=True)
class Encoded:
    """A document's ids, and which of them a target would have written: all of a text, the answers of a conversation."""

    document: str
    category: str
    ids: tuple[int, ...]
    written: tuple[bool, ...]

    @property
    def count(self) -> int:
        """How many ids can be learned from; the first one follows nothing."""
        return sum(self.written[1:])


@dataclass(frozen=True)
class Rows:
    """N rows of L ids. What is predicted after position i of a row is learned from where ``scored``."""

    ids: Tensor
    """(N, L)"""
    labels: Tensor
    """(N, L) the ids one position further."""
    scored: Tensor
    """(N, L) bool"""

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, count: int) -> Rows:
        """So many of them."""
        return Rows(self.ids[:count], self.labels[:count], self.scored[:count])

    @property
    def count(self) -> int:
        """How many positions are scored."""
        return int(self.scored.sum())


def encode_documents(
    documents: Sequence[Document], tokenizer: Any, rows: int, name: str, most: float = math.inf
) -> list[Encoded]:
    """The documents' ids.

    Args:
        documents: answered ones.
        tokenizer: the target's.
        rows: ids from there on cannot be fed.
        name: the target's, for messages.
        most: enough where they have so many ids together; the documents behind are left out.

    Raises:
        InputError: no tokenizer, or conversations and no chat template.
    """
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer; put its tokenizer.json beside the weights")
    encoded: list[Encoded] = []
    total = 0
    for document in documents:
        if total >= most:
            break
        try:
            one = _encode_text(document, tokenizer) if document.text else _encode_chat(document, tokenizer)
        except InputError as error:
            raise InputError(f"{document.id}: {error}") from error
        if any(i >= rows for i in one.ids):
            raise InputError(f"{one.document} holds ids that {name} cannot be fed (it has {rows}); leave it out")
        if one.count:
            encoded.append(one)
            total += len(one.ids)
    return encoded


def _encode_text(document: Document, tokenizer: Any) -> Encoded:
    if not document.prompt:
        ids = encode(document.text, tokenizer)
        return Encoded(document.id, document.category, ids, (True,) * len(ids))
    before = encode(document.prompt, tokenizer)
    ids = (*before, *tokenizer(document.text, add_special_tokens=False)["input_ids"])
    return Encoded(document.id, document.category, ids, (False,) * len(before) + (True,) * (len(ids) - len(before)))


def _encode_chat(document: Document, tokenizer: Any) -> Encoded:
    """Every answer counts from after the header that the template puts before it."""
    ids: tuple[int, ...] = ()
    written: tuple[bool, ...] = ()
    messages = list(document.messages)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = encode(messages[:i], tokenizer)
        whole = _rendered(messages[: i + 1], tokenizer)
        if whole[: len(before)] != before or before[: len(ids)] != ids:
            # a template that rewrites what was said before: only its last rendering is what a target sees
            ids, written = (), ()
        if whole[: len(before)] != before:
            raise InputError("the chat template does not leave the messages as they are; give text")
        written += (False,) * (len(before) - len(ids)) + (True,) * (len(whole) - len(before))
        ids = whole
    return Encoded(document.id, document.category, ids, written)


def _rendered(messages: list[Any], tokenizer: Any) -> tuple[int, ...]:
    try:
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    except Exception as error:  # a template is a program
        raise InputError(f"the chat template does not take the messages ({error}); change them") from error
    return tuple(ids)


def pack(encoded: Sequence[Encoded], length: int, seed: int) -> Rows:
    """All documents, shuffled, one behind the other in rows of ``length``; the last row is filled up.

    A document sees those before it in its row. That makes no label wrong: the target is asked about the same row.
    """
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = list(chain.from_iterable(encoded[i].ids for i in order))
    # the first id of a document is no continuation of the one before
    written = list(chain.from_iterable((False, *encoded[i].written[1:]) for i in order))
    missing = -(len(ids) - 1) % length
    stream, scores = torch.tensor([*ids, *[0] * missing]), torch.tensor([*written, *[False] * missing])
    return Rows(stream[:-1].view(-1, length), stream[1:].view(-1, length), scores[1:].view(-1, length))


def cut(encoded: Sequence[Encoded], length: int, most: int) -> list[Encoded]:
    """Windows of up to ``length`` + 1 ids, evenly of all documents, with about ``most`` positions to score in all."""
    total = sum(one.count for one in encoded)
    share = min(1.0, most / total) if total else 0.0
    windows = []
    for one in encoded:
        wanted = max(1, round(one.count * share))
        for start in range(0, len(one.ids) - 1, length):
            part = slice(start, start + length + 1)
            window = Encoded(one.document, one.category, one.ids[part], (False, *one.written[part][1:]))
            if window.count and wanted > 0:
                windows.append(window)
                wanted -= window.count
    return windows


def frequent_ids(encoded: Iterable[Encoded], count: int, always: Iterable[int]) -> list[int]:
    """The ``count`` ids that are written most often, ``always`` among them, in ascending order."""
    seen = Counter(i for one in encoded for i, w in zip(one.ids, one.written, strict=True) if w)
    kept = dict.fromkeys(sorted(set(always)))
    ranked = sorted(seen, key=lambda i: (-seen[i], i))
    kept |= dict.fromkeys(ranked)
    return sorted(list(kept)[:count])


def fingerprint(*parts: Sequence[Encoded]) -> str:
    """A hash of everything that is learned from and measured on."""
    digest = hashlib.sha256()
    for part in parts:
        for one in part:
            digest.update(repr((one.ids, one.written)).encode())
        digest.update(b"|")
    return digest.hexdigest()
