"""Answers to prompts that came without: the target writes them, many at once, and each is kept as it comes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter

from slipstream.distill.documents import Document
from slipstream.errors import InputError, SlipstreamError
from slipstream.models.base import Model
from slipstream.text import encode
from slipstream.types import Request, SamplingParams

#: In the file of answers: the time was over, and what has none is left out.
_OVER = "over"


def answers_to(
    documents: Sequence[Document],
    target: Callable[[], Model],
    params: SamplingParams,
    file: Path,
    seconds: float = math.inf,
) -> dict[str, str]:
    """Answers by their documents' keys: from ``file``, and what it lacks from the target, in the documents' order.

    Answers that the target writes are added to ``file`` (JSON lines) one by one, so none is asked for twice.

    Args:
        documents: some without an answer.
        target: asked for only if it is needed.
        params: of the answers.
        file: of the answers so far; whether the time was over is in it too.
        seconds: nothing is asked any more after that; what is being answered then is finished.

    Raises:
        InputError: prompts of which none can be answered, or a full disk; the answers so far are in the file.
    """
    kept = _read(file)
    over = kept.pop(_OVER, None) is not None
    missing = [d for d in documents if not d.answered and d.key not in kept]
    if over or not missing:
        return kept
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write("\n")  # a line that was cut off stays one by itself
            asked = 0
            for document, text in _ask(missing, target(), params, seconds):
                asked += 1
                kept[document.key] = text
                out.write(json.dumps({"key": document.key, "id": document.id, "answer": text}) + "\n")
                out.flush()
            if asked < len(missing):
                out.write(json.dumps({"key": _OVER, "answer": ""}) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write {str(file)!r}: {error.strerror or error}; make room and go on with --resume, the answers so "
            "far are kept"
        ) from error
    return kept


def with_answers(documents: Sequence[Document], answers: Mapping[str, str]) -> list[Document]:
    """The documents that have an answer, or get one, and not an empty one."""
    done = [d if d.answered else d.answer_with(answers.get(d.key, "")) for d in documents]
    return [d for d in done if d.text or d.messages[-1]["content"].strip()]


def _read(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    kept = {}
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            kept[row["key"]] = row["answer"]
        except (ValueError, KeyError, TypeError):
            continue  # a line that was cut off, or an empty one
    return kept


def _ask(
    documents: Sequence[Document], target: Model, params: SamplingParams, seconds: float
) -> Iterator[tuple[Document, str]]:
    """Each with its answer, as it comes; one that cannot be asked, since it is too long for example, with none.

    Raises:
        InputError: none can be asked.
    """
    from slipstream.answers import Setting
    from slipstream.drafters import make_drafter
    from slipstream.engine import Engine
    from slipstream.goodput import Goodput
    from slipstream.verify import RULES

    setting = Setting(target, make_drafter("suffix", target), Goodput(), target.tokenizer, RULES[0], coupled=False)
    engine = Engine(setting)
    asked: dict[int, Document] = {}
    left, end = iter(documents), perf_counter() + seconds
    unfit: list[InputError] = []
    while True:
        while engine.unfinished < engine.limits.requests and perf_counter() < end:
            document = next(left, None)
            if document is None:
                break
            try:
                asked[engine.add(Request(encode(document.messages, target.tokenizer), params))] = document
            except InputError as error:
                unfit.append(InputError(f"{document.id}: {error}"))
                if len(unfit) == len(documents):
                    raise unfit[0] from error
                yield document, ""
        if not engine.unfinished:
            return
        for event in engine.step():
            if event.error is not None:
                raise SlipstreamError(f"{asked[event.id].id}: {event.error}") from event.error
            if event.output is not None:
                yield asked[event.id], event.output.text
