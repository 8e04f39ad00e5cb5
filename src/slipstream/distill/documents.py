"""The texts that a draft is trained on: read from files, without copies, split into training and validation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from slipstream.errors import InputError
from slipstream.measure.files import write_whole
from slipstream.serve.capture import files_of

#: Lines shorter than this say nothing about where a text is from.
_TELLING = 20
#: A document of which so much occurs in others is a copy of them.
_COPY = 0.5
_LAYOUTS = '{"messages": [...]}, {"prompt": "..."}, either of them with an "answer", or {"text": "..."}'


@dataclass(frozen=True)
class Document:
    """One text or conversation."""

    id: str
    """Where it came from."""
    category: str
    group: str
    """What it belongs to: documents of one group are never on both sides of a split."""
    text: str = ""
    """Plain text; empty of a conversation."""
    prompt: str = ""
    """What comes before ``text`` and was not written by the model."""
    messages: tuple[Mapping[str, str], ...] = ()

    @property
    def answered(self) -> bool:
        """Whether it can be learned from as it is: a text, or a conversation that ends with an answer."""
        return not self.messages or self.messages[-1]["role"] == "assistant"

    @property
    def content(self) -> str:
        """Everything in it that was said by one side or the other."""
        return self.text or "\n".join(m["content"] for m in self.messages if m["role"] != "system")

    @property
    def written(self) -> str:
        """What is learned from or measured on, if it has that already: all of a text, the answers of a conversation."""
        return self.text or "\n".join(m["content"] for m in self.messages if m["role"] == "assistant")

    @property
    def key(self) -> str:
        """Equal of documents that say the same, whatever the white space around it."""
        said = [m["role"] + m["content"].strip() for m in self.messages] or [self.prompt, self.text.strip()]
        return hashlib.sha256("\0".join(said).encode("utf-8", "surrogatepass")).hexdigest()

    def answer_with(self, answer: str) -> Document:
        """The conversation with its answer."""
        return replace(self, messages=(*self.messages, {"role": "assistant", "content": answer}))


@dataclass(frozen=True)
class Split:
    """Documents to learn from, documents to measure on, and how many were left out as copies."""

    training: tuple[Document, ...]
    validation: tuple[Document, ...]
    copies: int = 0


def read_documents(sources: Sequence[str], pattern: str = "*") -> list[Document]:
    """What ``sources`` hold, in their order.

    Args:
        sources: files and folders, each ``PATH`` or ``CATEGORY=PATH``. ``.jsonl`` files hold one conversation, prompt
            or text a line; other files are texts. Of a folder every text that matches ``pattern`` counts, and what is
            below one of its entries is one group.
        pattern: such as ``*.py``.

    Raises:
        InputError: nothing there, or a line that cannot be used.
    """
    found = [document for source in sources for document in _of_source(source, pattern)]
    if not found:
        raise InputError(f"--data {', '.join(sources)} holds no text; give files of text or JSON lines: {_LAYOUTS}")
    return found


def is_captured(source: str) -> bool:
    """Whether a source of documents is a folder that a server captures to."""
    path = Path(_named(source)[1]).expanduser()
    return path.is_dir() and bool(files_of(path))


def keep(file: Path, documents: Sequence[Document], given: Sequence[Document]) -> None:
    """Write documents down, those to measure on behind the others, for ``load``."""
    rows = [json.dumps([side, asdict(d)]) for side, some in enumerate((documents, given)) for d in some]
    write_whole(file, lambda partial: partial.write_text("\n".join(rows) + "\n", encoding="utf-8"))


def load(file: Path) -> tuple[list[Document], list[Document]]:
    """What ``keep`` wrote."""
    sides: tuple[list[Document], list[Document]] = ([], [])
    for line in file.read_text(encoding="utf-8").splitlines():
        side, values = json.loads(line)
        sides[side].append(Document(**values | {"messages": tuple(values["messages"])}))
    return sides


def split(documents: Sequence[Document], share: float, seed: int = 0) -> Split:
    """Set whole groups aside for validation, about ``share`` of the text, and leave out copies.

    A document of which half the longer lines occur in training documents would be no test: it goes to training.

    Raises:
        InputError: too little is left on one side.
    """
    distinct = _distinct(documents)
    if not distinct:
        raise InputError(f"all {len(documents)} documents of the data are empty; give some with text or answers")
    held_out = _held_out(distinct, share, seed)
    training = [d for d in distinct if d.group not in held_out]
    validation = [d for d in distinct if d.group in held_out]
    training, validation = apart(training, validation)
    if not training or not validation:
        raise InputError(
            f"the data has {len(distinct)} different documents in {len({d.group for d in distinct})} groups, too few "
            "(or too alike) to set some aside for validation; give more, or --validation-data"
        )
    return Split(tuple(training), tuple(validation), len(documents) - len(distinct))


def apart(training: Sequence[Document], validation: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Both sides; validation documents that training documents hold, wholly or for the most part, go to training."""
    keys, lines = {d.key for d in training}, _lines(training)
    leaked = {d.id for d in validation if d.key in keys or _share_within(d, lines) >= _COPY}
    return [*training, *(d for d in validation if d.id in leaked)], [d for d in validation if d.id not in leaked]


def given_split(training: Sequence[Document], validation: Sequence[Document]) -> Split:
    """A split that the user made.

    Raises:
        InputError: a validation document occurs in the training data, wholly or for the most part.
    """
    ours, theirs = _distinct(training), _distinct(validation)
    keys, lines = {d.key for d in ours}, _lines(ours)
    for document in theirs:
        if document.key in keys or _share_within(document, lines) >= _COPY:
            raise InputError(
                f"{document.id} of the validation data occurs in the training data, so it would measure nothing; take "
                "it out of one of them"
            )
    if not ours or not theirs:
        raise InputError("training and validation data need one document each at least; give more")
    return Split(tuple(ours), tuple(theirs), len(training) + len(validation) - len(ours) - len(theirs))


def order(count: int, seed: int) -> list[int]:
    """0 to ``count`` - 1 in an order that only ``seed`` decides."""
    found = list(range(count))
    Random(seed).shuffle(found)
    return found


def _distinct(documents: Iterable[Document]) -> list[Document]:
    """The first of each that says the same."""
    return list({d.key: d for d in reversed(list(documents)) if d.content.strip()}.values())[::-1]


def _held_out(documents: Sequence[Document], share: float, seed: int) -> set[str]:
    """Groups, in an order that only names and seed decide, of every category until ``share`` of its text is reached."""
    chosen: set[str] = set()
    groups = {d.category: {e.group for e in documents if e.category == d.category} for d in documents}
    if all(len(some) < 2 for some in groups.values()):  # single files, each with a category of its own
        documents = [replace(d, category="") for d in documents]
    for category in sorted({d.category for d in documents}):
        sizes: dict[str, int] = {}
        for d in documents:
            if d.category == category:
                sizes[d.group] = sizes.get(d.group, 0) + len(d.content)
        order = sorted(sizes, key=lambda group: (_drawn(group, seed), group))
        wanted, taken = share * sum(sizes.values()), 0
        for group in order[:-1]:  # one is left to learn from
            # a group that alone is most of the text is no sample of it
            if taken >= wanted or (taken and taken + sizes[group] > 2 * wanted):
                continue
            chosen.add(group)
            taken += sizes[group]
    return chosen


def _drawn(group: str, seed: int) -> bytes:
    """By its own name: the same text in another folder is split in the same way."""
    return hashlib.sha256(f"{seed}/{Path(group).name}".encode()).digest()


def _telling(document: Document) -> list[str]:
    # of a conversation the answers: questions may all begin alike, and are not what is measured
    return [line for line in map(str.strip, document.written.split("\n")) if len(line) >= _TELLING]


def _lines(documents: Iterable[Document]) -> set[int]:
    return {hash(line) for d in documents for line in _telling(d)}


def _share_within(document: Document, lines: set[int]) -> float:
    """How much of a document's longer lines is among ``lines``, by length."""
    own = _telling(document)
    total = sum(map(len, own))
    return sum(len(line) for line in own if hash(line) in lines) / total if total else 0.0


def _named(source: str) -> tuple[str, str]:
    """Category and path of ``CATEGORY=PATH``."""
    category, _, name = source.partition("=") if "=" in source and not Path(source).exists() else ("", "", source)
    return category, name


def _of_source(source: str, pattern: str) -> Iterator[Document]:
    category, name = _named(source)
    path = Path(name).expanduser()
    if path.is_dir():
        category = category or path.resolve().name
        for file in sorted(f for f in path.rglob(pattern) if f.is_file()):
            inside = file.relative_to(path)
            if not any(part.startswith(".") for part in inside.parts):
                yield from _of_file(file, category, f"{path}/{inside.parts[0]}", strict=False)
    elif path.is_file():
        yield from _of_file(path, category or path.stem, str(path), strict=True)
    else:
        raise InputError(f"--data {name!r} is neither a file nor a folder; give one of these")


def _of_file(file: Path, category: str, group: str, *, strict: bool) -> Iterator[Document]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        if strict:
            raise InputError(f"--data {str(file)!r} cannot be read ({error.strerror}); check its permissions") from None
        return
    except UnicodeDecodeError as error:
        if strict:
            raise InputError(f"--data {str(file)!r} is not UTF-8 text (byte {error.start}); convert it") from None
        return
    if file.suffix == ".jsonl":
        yield from _of_lines(text, str(file), category)
    elif text.strip() and "\0" not in text:
        yield Document(str(file), category, group, text=text)


def _of_lines(text: str, file: str, category: str) -> Iterator[Document]:
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"line {number} of {file}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) > 1:
                continue  # a machine that stopped in the middle of writing it
            raise InputError(f"{where} is not JSON ({error.msg}); write one object a line: {_LAYOUTS}") from None
        if not isinstance(row, dict):
            raise InputError(f"{where} is not a JSON object; write {_LAYOUTS}")
        document = _of_row(row, Document(f"{file}:{number}", str(row.get("category", category)), ""))
        if document is not None:
            yield document
        elif "finish_reason" not in row:  # captured traffic may hold anything
            raise InputError(f"{where} has no usable text or messages; write {_LAYOUTS}")


def _of_row(row: Mapping[str, Any], named: Document) -> Document | None:
    """The row's document; None if it has none. Answers to the same question are one group."""
    answer = row.get("answer")
    if isinstance(row.get("text"), str):
        return replace(named, text=row["text"], group=named.id)
    if isinstance(row.get("prompt"), str) and isinstance(answer, str):
        return replace(named, text=answer, prompt=row["prompt"], group=_hash(row["prompt"]))
    if isinstance(row.get("prompt"), str):
        given: Any = [{"role": "user", "content": row["prompt"]}]
    else:
        given = row.get("messages", _turns(row))
    messages = [_message(m) for m in given] if isinstance(given, list) else []
    kept = tuple(m for m in messages if m is not None)
    if not kept or len(kept) < len(messages):
        return None
    first = next((m["content"] for m in kept if m["role"] == "user"), kept[0]["content"])
    document = replace(named, messages=kept, group=_hash(first))
    return document.answer_with(answer) if isinstance(answer, str) and answer else document


def _turns(row: Mapping[str, Any]) -> Any:
    """The first turn of a conversation of which only the questions are known."""
    turns = row.get("turns")
    return [{"role": "user", "content": turns[0]}] if isinstance(turns, list) and turns else None


def _message(given: Any) -> dict[str, str] | None:
    """A message with its content as one text; None if it is none."""
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        return None
    content = given.get("content")
    if isinstance(content, list):  # parts, as OpenAI's interface has them
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    return {"role": given["role"], "content": content} if isinstance(content, str) else None


def _hash(text: str) -> str:
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()
