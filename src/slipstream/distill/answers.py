"""Answers to prompts that came without: the target writes them, many at once, and each is kept as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from slipstream.distill.documents import Document
from slipstream.errors import InputError
from slipstream.models.base import Model
from slipstream.text import encode
from slipstream.types import Request, SamplingParams


def answered(
    documents: Sequence[Document], target: Callable[[], Model], params: SamplingParams, file: Path
) -> list[Document]:
    """The documents, each with an answer; those that have none get one from ``file`` or else from the target.

    Answers that the target writes are added to ``file`` (JSON lines) one by one, so none is asked for twice.
    """
    kept = _read(file)
    missing = [d for d in documents if not d.answered and d.key not in kept]
    if missing:
        with file.open("a", encoding="utf-8") as out:
            for document, text in _ask(missing, target(), params):
                kept[document.key] = text
                out.write(json.dumps({"key": document.key, "id": document.id, "answer": text}) + "\n")
                out.flush()
    done = [d if d.answered else d.answer_with(kept[d.key]) for d in documents]
    return [d for d in done if d.text or d.messages[-1]["content"].strip()]


def _read(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    kept = {}
    for line in file.read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(line)
            kept[row["key"]] = row["answer"]
        except (ValueError, KeyError, TypeError):
            continue  # a line that was cut off, or an empty one
    return kept


def _ask(documents: Sequence[Document], target: Model, params: SamplingParams) -> Iterator[tuple[Document, str]]:
    """Each with its answer, as it comes."""
    from slipstream.answers import Setting
    from slipstream.drafters import make_drafter
    from slipstream.engine import Engine
    from slipstream.goodput import Goodput
    from slipstream.verify import RULES

    setting = Setting(target, make_drafter("suffix", target), Goodput(), target.tokenizer, RULES[0], coupled=False)
    engine = Engine(setting)
    asked: dict[int, Document] = {}
    for document in documents:
        try:
            asked[engine.add(Request(encode(document.messages, target.tokenizer), params))] = document
        except InputError as error:
            raise InputError(f"{document.id}: {error}") from error
    while engine.unfinished:
        for event in engine.step():
            if event.error is not None:
                raise event.error
            if event.output is not None:
                yield asked[event.id], event.output.text
