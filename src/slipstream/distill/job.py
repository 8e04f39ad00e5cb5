"""What is asked for: target, start, data, recipe; and the checks that need no weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.distill.losses import CROSS_ENTROPY, NAMES
from slipstream.errors import InputError
from slipstream.measure.expectation import Costs
from slipstream.measure.files import write_whole

#: In the folder of an unfinished run: what a resumed one must have in common with it.
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Job:
    """One run of ``slipstream distill``, as the user put it."""

    target: str
    out: Path
    init: str
    data: tuple[str, ...]
    pattern: str = "*"
    """Of files in folders."""
    latest: int | None = None
    """Take only so many of the last documents."""
    validation_data: tuple[str, ...] = ()
    validation: float = 0.1
    """Share of the data that is set aside, where no validation data is given."""
    validation_tokens: int | None = None
    """Positions that drafts are measured at; None: 8192, or fewer in a short run."""
    draft_vocab: int | None = None
    full_vocab: bool = False
    lora: int | None = None
    early_exit: int | None = None
    """Make an exit head behind so many layers of the target instead of a draft model; ``init`` is empty then."""
    rank: int = 64
    """Of an exit head's adapter."""
    must_gain: bool = False
    """Refuse a draft whose acceptance is not surely higher than the start's."""
    fit: int = 32
    """Rows of text on which the output layer of a pruned start is fitted before training; 0: it is the target's."""
    embeddings: bool = False
    """Whether the table of input embeddings is trained too."""
    length: int = 512
    steps: int | None = None
    minutes: float | None = None
    loss: str = "kl"
    learning_rate: float = 1e-3
    batch: int = 2
    accumulate: int = 1
    bf16: bool = False
    on_policy: float = 0.0
    keep: int | None = None
    """Of each of the target's distributions keep so many tokens for the next epochs; 0 asks anew each time, None
    decides by how often rows are seen."""
    seed: int = 0
    evaluate_every: int | None = None
    """Steps; None: 50, or a fifth of all steps if that is less."""
    patience: int = 6
    """Evaluations without a better one after which training ends."""
    temperature: int = 0
    """0 or 1: for which the speed-up is predicted that training is to raise."""
    checkpoint_minutes: float = 5.0
    answer_tokens: int = 256
    """Of answers that the target writes to prompts."""
    answer_temperature: float = 0.0
    costs: Costs | None = None
    """Measured if None."""
    weights: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    logs: str | None = None
    """A folder for TensorBoard."""
    resume: bool = False
    command: str = ""
    """The words of the command line, for the record."""

    @property
    def work(self) -> Path:
        """The folder of what an unfinished run has so far."""
        return self.out.with_name(f"{self.out.name}.unfinished")

    def binding(self) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        free = {"out", "resume", "command", "logs", "threads", "checkpoint_minutes", "device", "costs"}
        return {k: v for k, v in json.loads(json.dumps(asdict(self), default=str)).items() if k not in free}


def check(job: Job) -> None:
    """Refuse what cannot work.

    Raises:
        InputError: a number without a meaning, or a place that cannot be written to.
    """
    ranges: Mapping[str, tuple[float | None, float, float]] = {
        "--latest": (job.latest, 1, math.inf),
        "--validation": (job.validation, 0.001, 0.9),
        "--validation-tokens": (job.validation_tokens, 32, math.inf),
        "--draft-vocab": (job.draft_vocab, 1, math.inf),
        "--early-exit": (job.early_exit, 1, math.inf),
        "--fit": (job.fit, 0, math.inf),
        "--rank": (job.rank, 1, 4096),
        "--lora": (job.lora, 1, 4096),
        "--length": (job.length, 8, 1_000_000),
        "--threads": (job.threads, 1, math.inf),
        "--steps": (job.steps, 1, math.inf),
        "--minutes": (job.minutes, 0.01, math.inf),
        "--learning-rate": (job.learning_rate, 1e-9, 10),
        "--batch": (job.batch, 1, math.inf),
        "--accumulate": (job.accumulate, 1, job.batch),
        "--on-policy": (job.on_policy, 0, 1),
        "--keep": (job.keep, 0, 4096),
        "--evaluate-every": (job.evaluate_every, 1, math.inf),
        "--patience": (job.patience, 1, math.inf),
        "--checkpoint-minutes": (job.checkpoint_minutes, 0, math.inf),
        "--answer-tokens": (job.answer_tokens, 1, math.inf),
        "--answer-temperature": (job.answer_temperature, 0, 100),
    }
    for option, (value, low, high) in ranges.items():
        if value is not None and not low <= value <= high:
            most = f" to {high:g}" if high < math.inf else " or more"
            raise InputError(f"{option} {value:g} is not usable; use {low:g}{most}")
    if job.loss not in NAMES:
        raise InputError(f"--loss {job.loss!r} is not known; use one of {', '.join(NAMES)}")
    if job.temperature not in (0, 1):
        raise InputError(f"--temperature {job.temperature} is not usable; acceptance is told at 0 and at 1")
    if job.steps is not None and job.minutes is not None:
        raise InputError("--steps and --minutes are both given; give one of them")
    if job.full_vocab and job.draft_vocab is None:
        raise InputError("--full-vocab is for --draft-vocab; without it the draft has the full vocabulary anyway")
    if job.loss == CROSS_ENTROPY and job.on_policy:
        raise InputError(
            "--on-policy has no meaning with --loss ce: what the draft writes itself is no example; use kl"
        )
    if job.embeddings and (job.lora is not None or job.early_exit is not None):
        raise InputError("--embeddings has no meaning where only adapters are trained; leave it or --lora out")
    unfit = [
        o for o, given in (("--lora", job.lora), ("--draft-vocab", job.draft_vocab), ("--init", job.init)) if given
    ]
    if job.early_exit is not None and unfit:
        raise InputError(f"--early-exit trains a head only, so {unfit[0]} has no meaning with it; leave it out")
    if job.early_exit is None and not job.init:
        raise InputError("--init is missing; give a draft model, prune:4, or layers:0,9,19,29")
    _check_places(job)
    if job.logs is not None:
        _check_logs(job.logs)


def _check_places(job: Job) -> None:
    out = job.out
    if out.exists():
        raise InputError(f"--out {str(out)!r} exists already; give another folder, or remove it first")
    parent = out.resolve().parent
    if not parent.is_dir():
        raise InputError(f"--out {str(out)!r} is in a folder that does not exist; make the folder first")
    begun = (job.work / SETTINGS).exists()
    if begun and not job.resume:
        raise InputError(f"{str(job.work)!r} holds an unfinished run; go on with --resume, or remove it to start anew")
    if not begun and job.work.exists() and not _is_empty(job.work):
        raise InputError(
            f"{str(job.work)!r} is something else than an unfinished run; remove it, or give another --out"
        )
    if job.resume and not begun:
        raise InputError(f"there is no unfinished run in {str(job.work)!r}; leave --resume out")


def _is_empty(work: Path) -> bool:
    """Whether it is the folder of a run that was killed before it had anything; dots begin what was half written."""
    return work.is_dir() and all(file.name.startswith(".") for file in work.iterdir())


def _check_logs(folder: str) -> None:
    if find_spec("tensorboard") is None:
        raise InputError("--logs needs the package tensorboard; install it with: pip install tensorboard")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--logs {folder!r} cannot be made: {error.strerror or error}; give another folder") from error


def remember(file: Path, facts: Mapping[str, Any]) -> None:
    """Write down what a resumed run must have in common with this one, or hold a resumed run against it.

    Raises:
        InputError: a resumed run differs, or there is no room.
    """
    if not file.exists():
        write_whole(file, lambda partial: partial.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8"))
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{str(file)!r} is damaged; remove its folder to start anew") from error
    facts = json.loads(json.dumps(facts))
    unlike = next((k for k in {**before, **facts} if before.get(k) != facts.get(k)), None)
    if unlike is not None:
        raise InputError(
            f"the unfinished run in {str(file.parent)!r} had {unlike} {before.get(unlike)!r}, and this one has "
            f"{facts.get(unlike)!r}; resume with the same, or remove the folder"
        )
