"""Everything before the first step: data, start, target, and what each of them must be like."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slipstream.distill import documents as docs
from slipstream.distill.answers import answered
from slipstream.distill.job import Job
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
#: fp32 weights, their gradients, and two moments of the optimiser.
_TRAINED_BYTES = 16


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
    """How many documents are on each side, and how many were copies."""
    hash: str


def read_data(job: Job, target: Target) -> Data:
    """Read, answer, split, encode.

    Raises:
        InputError: too little of it, or none that can be used.
    """
    found = docs.read_documents(job.data, job.pattern)
    if job.latest is not None:
        found = found[-job.latest :]
    if job.validation_data:
        sides = docs.given_split(found, docs.read_documents(job.validation_data, job.pattern))
    else:
        sides = docs.split(found, job.validation, job.seed)
    params = SamplingParams(
        max_new_tokens=job.answer_tokens, temperature=job.answer_temperature, seed=job.seed, logprobs=None
    )
    file = job.work / "answers.jsonl"
    parts = [answered(side, lambda: target.model, params, file) for side in (sides.training, sides.validation)]
    about = target.description
    training, validation = (encode_documents(p, about.tokenizer, about.vocab_size, target.name) for p in parts)
    windows = cut(validation, _window(job, about), job.validation_tokens)
    counts = [sum(one.count for one in some) for some in (training, windows)]
    if counts[0] < _LEAST_TRAINING or counts[1] < _LEAST_VALIDATION:
        raise InputError(
            f"the data has {counts[0]} tokens to learn from and {counts[1]} to measure on, and at least "
            f"{_LEAST_TRAINING} and {_LEAST_VALIDATION} are needed; give more text"
        )
    numbers = {"training": len(parts[0]), "validation": len(parts[1]), "copies": sides.copies}
    return Data(training, windows, numbers, fingerprint(training, windows))


def make_rows(job: Job, data: Data, target: Target) -> Rows:
    """The training data in rows."""
    return pack(data.training, _window(job, target.description), job.seed)


def _window(job: Job, about: Description) -> int:
    limit = about.max_positions
    if limit is not None and job.length > limit:
        raise InputError(f"--length {job.length} is beyond the target's {limit} positions; use {limit} or less")
    return job.length


def make_start(job: Job, target: Target, data: Data) -> Start:
    """The weights to begin with, with the output rows that the draft is to have."""
    if job.early_exit is not None:
        total = int(target.description.number("num_hidden_layers"))
        if job.early_exit >= total:
            raise InputError(f"--early-exit {job.early_exit} does not fit the target's {total} layers; use fewer")
        return read_start("layers:" + ",".join(map(str, range(job.early_exit))), target.description)
    start = read_start(job.init, target.description)
    if job.draft_vocab is None:
        return start
    special = _special_ids(target.description)
    size = len(start.tensors["model.embed_tokens.weight"])
    if job.draft_vocab < len(special) or job.draft_vocab > size:
        raise InputError(
            f"--draft-vocab {job.draft_vocab} is not usable; use {len(special)} (all special tokens) to {size}"
        )
    return with_outputs(start, frequent_ids(data.training, job.draft_vocab, special))


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
    numbers = sum(t.numel() for t in start.tensors.values()) + start.head.numel()
    rows = -(-job.batch // job.accumulate)
    wide = 4 * int(start.config["hidden_size"]) + 3 * int(start.config["intermediate_size"])
    states = rows * job.length * 4 * (wide * int(start.config["num_hidden_layers"]) + 4 * len(start.head))
    wanted = max(ours.loading, ours.running) + numbers * _TRAINED_BYTES + states
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
