"""Everything before the first step: data, start, target, and what each of them must be like."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from slipstream.distill import documents as docs
from slipstream.distill.answers import answers_to, with_answers
from slipstream.distill.documents import Document
from slipstream.distill.job import Job
from slipstream.distill.schedule import tokens_of_use, tokens_to_measure_at
from slipstream.distill.student import (
    Start,
    Student,
    is_pruned,
    read_start,
    train_adapters,
    train_exit,
    train_fully,
    with_outputs,
)
from slipstream.distill.tokens import Encoded, Rows, cut, encode_documents, fingerprint, frequent_ids, pack
from slipstream.errors import InputError
from slipstream.measure.footprint import Load, as_text, need
from slipstream.measure.machine import _memory as memory_here
from slipstream.models.base import Model
from slipstream.models.describe import Description, describe
from slipstream.models.load import load_model
from slipstream.types import SamplingParams

#: Fewer positions than these teach or tell nothing.
_LEAST_TRAINING, _LEAST_VALIDATION = 256, 32
#: What the target answered, in the folder of an unfinished run.
ANSWERS = "answers.jsonl"
#: There too: what was captured when the run began.
DOCUMENTS = "documents.jsonl"
#: Of a weight that is trained: itself, its gradient, two moments, the best one so far (fp32), and all but the gradient
#: once more while the state is written. Of one that is not: itself, and once more for comparing.
_TRAINED_BYTES, _FIXED_BYTES = 36, 8


@dataclass
class Target:
    """The target: described at once, loaded when it is first asked."""

    name: str
    weights: str = "auto"
    device: str = "cpu"

    @cached_property
    def description(self) -> Description:
        """Without weights."""
        found = describe(self.name)
        if found.obstacle is not None:
            raise InputError(found.obstacle)
        if not found.has_weights:
            raise InputError(f"the target {self.name} has no weights here; download it again")
        return found

    @cached_property
    def model(self) -> Model:
        """With its weights."""
        return load_model(self.name, weights=self.weights, device=self.device)

    @cached_property
    def hash(self) -> str:
        """Of its configuration and weights."""
        digest, path = hashlib.sha256(), self.description.path
        files = [path] if path.is_file() else sorted([*path.glob("config.json"), *path.glob("*.safetensors")])
        for file in files:
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Data:
    """What is learned from and measured on."""

    training: list[Encoded]
    validation: list[Encoded]
    """Windows."""
    documents: dict[str, int]
    """How many documents are on each side, how many were copies, and how many were left out for what reason."""
    hash: str


def read_data(job: Job, target: Target, say: Callable[[str], None] = lambda _: None) -> Data:
    """Read, split, answer, encode; of the training text no more than the steps can see.

    Raises:
        InputError: too little of it, or none that can be used.
    """
    found, given = _documents(job)
    if job.validation_data:
        sides = docs.given_split(found, given)
    else:
        sides = docs.split(found, job.validation, job.seed)
    about = target.description
    training, validation = docs.apart(*_answered(job, sides, target, say))
    shuffled = [training[i] for i in docs.order(len(training), job.seed)]
    encoded = encode_documents(shuffled, about.tokenizer, about.vocab_size, target.name, tokens_of_use(job))
    apart = encode_documents(validation, about.tokenizer, about.vocab_size, target.name)
    windows = cut(apart, _window(job, about), tokens_to_measure_at(job))
    counts = [sum(one.count for one in some) for some in (encoded, windows)]
    if counts[0] < _LEAST_TRAINING or counts[1] < _LEAST_VALIDATION:
        raise InputError(
            f"the data has {counts[0]} tokens to learn from and {counts[1]} to measure on, and at least "
            f"{_LEAST_TRAINING} and {_LEAST_VALIDATION} are needed; give more text"
        )
    read = {"training": len(encoded), "validation": len(apart), "copies": sides.copies}
    left = {"without an answer": len(sides.training) + len(sides.validation) - len(training) - len(validation)}
    left |= {"not needed": len(training) - len(encoded)}
    return Data(encoded, windows, read | {name: n for name, n in left.items() if n}, fingerprint(encoded, windows))


def _documents(job: Job) -> tuple[list[docs.Document], list[docs.Document]]:
    """All documents, and those of ``--validation-data``.

    A server may go on writing a capture, so a resumed run takes what there was when it began.
    """
    kept = job.work / DOCUMENTS
    if kept.exists():
        return docs.load(kept)
    found = docs.read_documents(job.data, job.pattern)
    found = found if job.latest is None else found[-job.latest :]
    given = docs.read_documents(job.validation_data, job.pattern) if job.validation_data else []
    if any(docs.is_captured(source) for source in (*job.data, *job.validation_data)):
        docs.keep(kept, found, given)
    return found, given


def _answered(job: Job, sides: docs.Split, target: Target, say: Callable[[str], None]) -> list[list[Document]]:
    """Both sides' documents with answers; of a run of so many minutes answering takes up to half as long."""
    both = [*sides.training, *sides.validation]
    mixed = [both[i] for i in docs.order(len(both), job.seed)]
    asking = sum(not d.answered for d in mixed)
    limit = math.inf if job.minutes is None else 30 * job.minutes
    if asking:
        time = "" if job.minutes is None else f", for {job.minutes / 2:g} minutes at most"
        say(f"the target answers {asking:,} prompts{time}")
    params = SamplingParams(max_new_tokens=job.answer_tokens, temperature=job.answer_temperature, seed=job.seed)
    answers = answers_to(mixed, lambda: target.model, params, job.work / ANSWERS, limit)
    return [with_answers(side, answers) for side in (sides.training, sides.validation)]


def make_rows(job: Job, data: Data, target: Target) -> Rows:
    """The training data in rows."""
    return pack(data.training, _window(job, target.description), job.seed)


def _window(job: Job, about: Description) -> int:
    limit = about.max_positions
    if limit is not None and job.length > limit:
        raise InputError(f"--length {job.length} is beyond the target's {limit} positions; use {limit} or less")
    return job.length


def read_base(job: Job, target: Target) -> Start:
    """The weights to begin with, with all the output rows that they have; refuses what no data could make right."""
    _window(job, target.description)
    if job.lora is not None and find_spec("peft") is None:
        raise InputError("--lora needs the package peft; install it with: pip install peft")
    if job.early_exit is not None:
        total = int(target.description.number("num_hidden_layers"))
        if job.early_exit >= total:
            raise InputError(f"--early-exit {job.early_exit} does not fit the target's {total} layers; use fewer")
        return read_start("layers:" + ",".join(map(str, range(job.early_exit))), target.description)
    start = read_start(job.init, target.description)
    if job.draft_vocab is None:
        return start
    if start.output_ids is not None:
        raise InputError("the draft to begin with has a reduced vocabulary already; leave --draft-vocab out")
    special, size = len(_special_ids(target.description)), len(start.tensors["model.embed_tokens.weight"])
    if not special <= job.draft_vocab <= size:
        raise InputError(f"--draft-vocab {job.draft_vocab} is not usable; use {special} (all special tokens) to {size}")
    return start


def make_start(job: Job, target: Target, base: Start, data: Data) -> Start:
    """``base`` with the output rows that the draft is to have."""
    if job.draft_vocab is None:
        return base
    return with_outputs(base, frequent_ids(data.training, job.draft_vocab, _special_ids(target.description)))


def _special_ids(about: Description) -> list[int]:
    tokenizer: Any = about.tokenizer
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    return sorted({*tokenizer.all_special_ids, *added, *about.eos_token_ids})


def is_fitted(job: Job, start: Start) -> bool:
    """Whether the start gets an output layer of its own before training."""
    return job.fit > 0 and is_pruned(job.init) and not start.tied


def make_student(job: Job, start: Start) -> Student:
    """The draft, with what is trained of it marked."""
    torch.manual_seed(job.seed)
    student = Student(start)
    if job.early_exit is not None:
        train_exit(student, job.rank)
    elif job.lora is not None:
        train_adapters(student, job.lora)
        student.head.requires_grad_(start.output_ids is not None or is_fitted(job, start))
    else:
        train_fully(student, job.embeddings)
    return student


def check_memory(job: Job, target: Target, start: Start) -> None:
    """Refuse a run that would not fit.

    Raises:
        InputError: more is needed than there is.
    """
    if job.device != "cpu":
        return
    about = target.description
    ours = need(about, "fp16" if about.ours else "fp32", Load(job.length, 1, min(job.length, 256)))
    size = _TRAINED_BYTES if job.lora is None and job.early_exit is None else _FIXED_BYTES
    outputs = job.draft_vocab or len(start.head)
    numbers = sum(t.numel() for t in start.tensors.values()) + outputs * start.head.shape[1]
    rows = -(-job.batch // job.accumulate)
    wide = 4 * int(start.config["hidden_size"]) + 3 * int(start.config["intermediate_size"])
    states = rows * job.length * 4 * (wide * int(start.config["num_hidden_layers"]) + 4 * outputs)
    wanted = max(ours.loading, ours.running) + numbers * size + states
    here = memory_here()
    if here is not None and wanted > here:
        raise InputError(
            f"about {as_text(wanted)} of memory are needed for the target {target.name} and the draft in training, and "
            f"this machine has {as_text(here)}; lower --batch or --length, raise --accumulate, or use --lora"
        )


def free_disk(folder: Path, wanted: int) -> None:
    """Refuse a run whose results would not fit.

    Raises:
        InputError: less is free than ``wanted`` bytes.
    """
    import shutil

    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise InputError(
            f"{str(folder)!r} has {as_text(free)} free, and about {as_text(wanted)} are needed; make room, or choose "
            "another --out"
        )
