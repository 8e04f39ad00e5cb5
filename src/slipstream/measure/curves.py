"""What passes of one model take on one machine, by rows and batch; kept in the cache folder for whoever asks later.

A *row* is a token of one sequence; a pass over n rows of each of b sequences has b n rows in all. Arithmetic and files
only; ``measure_curve`` has the clock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, Literal

import torch

from slipstream.errors import InputError
from slipstream.fields import from_json, to_json
from slipstream.measure.bandwidth import weight_bytes
from slipstream.measure.costs import synchronize
from slipstream.measure.files import write_whole
from slipstream.measure.ledger import Ledger
from slipstream.measure.machine import describe_machine, package_version
from slipstream.models.base import Item, Model, feed, forward_each
from slipstream.models.registry import cache_folder

FORMAT: Final = 1
KIND: Final = "slipstream costs"
#: Where curves are looked up; a name that the cache of models does not list.
FOLDER = ".costs"
ROWS: tuple[int, ...] = (*range(1, 10), 12, 16, 20, 24, 28, 32)
BATCHES = (1, 2, 4, 8, 16, 32)
#: Of batches, rows of each sequence that are measured; more rows in all than so many are predicted.
_BATCH_ROWS = (1, 2, 3, 4, 5, 9)
MOST_ROWS = 96
#: All sequences but the first are at most so long, since reading them takes longer than what is measured.
_BATCH_CONTEXT = 64
PREFILL = (32, 128)
TURNS = 5


@dataclass(frozen=True)
class Cell:
    """A pass over ``rows`` new tokens of each of ``batch`` sequences."""

    rows: int
    batch: int
    seconds: float
    """Median of the turns."""
    turns: int
    """0: predicted from other cells."""


@dataclass(frozen=True)
class Key:
    """What a curve belongs to: another of any of these is another curve."""

    model: str
    """Fingerprint of its architecture: sizes, not values."""
    weights: str
    device: str
    threads: int
    machine: str
    version: str


@dataclass(frozen=True)
class Curve:
    """What passes of a model take, in seconds."""

    key: Key
    name: str
    context: int
    """Tokens behind which the passes ran."""
    cells: tuple[Cell, ...]
    prefill: Mapping[int, float]
    """Reading so many tokens of a prompt at once, from an empty cache."""
    how: str
    created: str
    kind: Literal["slipstream costs"] = KIND
    format: Literal[1] = FORMAT

    def seconds(self, rows: int, batch: int = 1) -> float:
        """Of any pass: measured, or predicted from the measured ones with the nearest numbers of rows in all.

        Raises:
            InputError: nothing was measured.
        """
        found = {(c.rows, c.batch): c.seconds for c in self.cells}
        if (rows, batch) in found:
            return found[rows, batch]
        own = {c.rows * c.batch: c.seconds for c in self.cells if c.batch == batch}
        if len(own) > 1 and min(own) <= rows * batch <= max(own):
            return interpolated(own, rows * batch)
        totals: dict[int, list[float]] = {}
        for cell in self.cells:
            totals.setdefault(cell.rows * cell.batch, []).append(cell.seconds)
        return interpolated({n: float(median(some)) for n, some in totals.items()}, rows * batch)

    def v(self, rows: int, batch: int = 1) -> float:
        """The same, in passes over one token of each of ``batch`` sequences."""
        return self.seconds(rows, batch) / self.seconds(1, batch)

    @property
    def shape(self) -> dict[int, float]:
        """v(n) where it was measured, for one sequence."""
        return {c.rows: c.seconds / self.seconds(1) for c in self.cells if c.batch == 1}

    @property
    def prompt_token(self) -> float:
        """Seconds for each further token of a prompt."""
        if not self.prefill:
            return self.seconds(MOST_ROWS) / MOST_ROWS
        longest = max(self.prefill)
        return self.prefill[longest] / longest


def interpolated(points: Mapping[int, float], at: int) -> float:
    """Straight lines between ``points``; beyond the last one its slope, but never falling; before the first its value.

    >>> interpolated({1: 10.0, 3: 14.0}, 2), interpolated({1: 10.0, 3: 14.0}, 5)
    (12.0, 18.0)
    """
    if not points:
        raise InputError("no pass was measured; run `slipstream costs` again")
    known = sorted(points.items())
    if at <= known[0][0] or len(known) == 1:
        return known[0][1]
    after = next((i for i, (n, _) in enumerate(known) if n >= at), len(known) - 1)
    (n, low), (m, high) = known[after - 1], known[after]
    found = low + (high - low) * (at - n) / (m - n)
    return max(found, high) if at > m else found


# --- files ------------------------------------------------------------------------------------------------------------


def fingerprint(model: Any) -> str:
    """Of what decides the cost of a pass: the class and all sizes, whatever the weights' values."""
    names = ("num_layers", "heads", "kv_heads", "head_dim", "vocab_size", "embedding_size", "position_bytes")
    sizes = {name: getattr(model, name, None) for name in names}
    sizes |= {"class": type(model).__name__, "bytes": weight_bytes(model)}
    return hashlib.sha256(json.dumps(sizes, sort_keys=True, default=str).encode()).hexdigest()[:16]


def key_of(model: Any) -> Key:
    """What a curve of ``model``, here and now, belongs to."""
    device = torch.device(model.device)
    return Key(
        model=fingerprint(model),
        weights=str(getattr(model, "weights", "unknown")),
        device=str(device),
        threads=torch.get_num_threads(),
        machine=_machine(device),
        version=package_version(),
    )


def _machine(device: torch.device) -> str:
    found = describe_machine(device)
    kernels = os.environ.get("SLIPSTREAM_NATIVE", "1")
    told = (found.cpu, found.cores, found.instructions, found.accelerator, found.system, kernels)
    return " | ".join(map(str, told))


def path_of(key: Key) -> Path:
    """Where a curve is kept."""
    digest = hashlib.sha256(json.dumps(to_json(key), sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / FOLDER / f"{digest}.json"


def keep(curve: Curve) -> Path:
    """Put ``curve`` into the cache folder, whole or not at all; returns where it is."""
    path = path_of(curve.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(curve), indent=1) + "\n"
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
    return path


def find(model: Any) -> Curve | None:
    """The curve that is kept for ``model`` here; None if there is none, or none that can be read."""
    if not (cache_folder() / FOLDER).is_dir():
        return None
    try:
        return read(path_of(key_of(model)))
    except (InputError, OSError, AttributeError, TypeError, RuntimeError):
        return None


def read(path: Path) -> Curve:
    """A curve from a file.

    Raises:
        InputError: no such file, or another kind of file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} cannot be read ({error}); run `slipstream costs`") from error
    curve: Curve = from_json(Curve, found, repr(str(path)))
    return curve


def begin_with_measured(policy: Any, target: Any, drafter: Any) -> None:
    """Let an adaptive policy begin with the curves that are kept for these models, if there are any.

    It changes how many tokens are drafted, never which answers come out.
    """
    curve = find(target)
    if curve is None:
        return
    policy.shape = curve.shape
    models = [one.model for one in getattr(drafter, "drafters", (drafter,)) if hasattr(one, "model")]
    steps_ = [found.seconds(1) for model in models if (found := find(model)) is not None]
    if steps_ and len(steps_) == len(models):
        policy.step = sum(steps_) / curve.seconds(1)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """A pass that can be repeated."""

    model: Model
    rows: int
    caches: tuple[Any, ...]
    tokens: tuple[int, ...]
    """Of each sequence."""

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.caches)

    def seconds(self) -> float:
        """Run it once, and cut the caches back."""
        before = [cache.length for cache in self.caches]
        items = [Item(self.tokens, cache, self.rows) for cache in self.caches]
        start = perf_counter()
        for found in forward_each(self.model, items):
            if isinstance(found, Exception):
                raise found
        synchronize(self.model.device)
        taken = perf_counter() - start
        for cache, length in zip(self.caches, before, strict=True):
            cache.truncate(length)
        return taken


def grid(rows: Sequence[int] = ROWS, batches: Sequence[int] = BATCHES, most: int = MOST_ROWS) -> list[tuple[int, int]]:
    """The (rows, batch) that are measured."""
    alone = [(n, 1) for n in rows]
    return alone + [(n, b) for b in batches if b > 1 for n in _BATCH_ROWS if n in rows and (n == 1 or n * b <= most)]


def passes(model: Model, tokens: Sequence[int], context: int, cells: Sequence[tuple[int, int]]) -> list[Pass]:
    """The passes of ``cells`` behind ``context`` of ``tokens``, which are repeated if need be."""
    batches = max((b for _, b in cells), default=1)
    longest = max((n for n, _ in cells), default=1)
    limit = model.max_positions
    context = context if limit is None else max(1, min(context, limit - longest))
    cycle = [min(t, model.embedding_size - 1) for t in tokens]
    cycle *= 1 + (context + longest) // len(cycle)
    caches = []
    for number in range(batches):
        cache = model.new_cache()
        feed(model, cycle[: min(context, _BATCH_CONTEXT) if number else context], cache, 0)
        caches.append(cache)
    after = cycle[context:]
    room = longest if limit is None else limit - context
    return [Pass(model, n, tuple(caches[:b]), tuple(after[:n])) for n, b in cells if n <= room]


def prefill_seconds(model: Model, tokens: Sequence[int], count: int) -> float:
    """Read ``count`` tokens from nothing, once."""
    cycle = [min(t, model.embedding_size - 1) for t in tokens]
    cycle *= 1 + count // len(cycle)
    cache = model.new_cache()
    start = perf_counter()
    feed(model, cycle[:count], cache, 1)
    synchronize(model.device)
    return perf_counter() - start


@dataclass
class Timing:
    """Seconds by what was timed, a list of turns each."""

    cells: dict[tuple[int, int], list[float]]
    prefill: dict[int, list[float]]

    def curve(self, model: Any, context: int, created: str, how: str) -> Curve:
        """What they come to."""
        cells = [Cell(n, b, median(some), len(some)) for (n, b), some in sorted(self.cells.items()) if some]
        prefill = {n: median(some) for n, some in self.prefill.items() if some}
        return Curve(key_of(model), model.name, context, tuple(cells), prefill, how, created)

    def add(self, other: Timing) -> None:
        """Count another's times too."""
        for cell, seconds in other.cells.items():
            self.cells[cell] += seconds
        for count, seconds in other.prefill.items():
            self.prefill[count] += seconds


@dataclass(frozen=True)
class Kept:
    """Turns that are on disk as soon as they are over, so that an interrupt loses one turn at most."""

    ledger: Ledger
    name: str

    def __contains__(self, turn: int) -> bool:
        return self._name(turn) in self.ledger

    def turn(self, turn: int) -> Timing:
        """What one turn took."""
        cells, prefill = self.ledger[self._name(turn)]
        return Timing({(n, b): [seconds] for n, b, seconds in cells}, {n: [seconds] for n, seconds in prefill})

    def keep(self, turn: int, took: Timing) -> None:
        """Remember it."""
        cells = [[n, b, seconds] for (n, b), [seconds] in took.cells.items()]
        self.ledger.put(self._name(turn), [cells, [[n, seconds] for n, [seconds] in took.prefill.items()]])

    def _name(self, turn: int) -> str:
        return f"{self.name} turn {turn}"


def measure_curve(
    model: Model,
    tokens: Sequence[int],
    context: int,
    cells: Sequence[tuple[int, int]],
    turns: int = TURNS,
    kept: Kept | None = None,
) -> Generator[str, None, Timing]:
    """Time all ``cells`` turn by turn, each turn beginning at another one; tells what comes next.

    The first turn is not counted: it pays for what happens only once. Turns that ``kept`` has are not run again.
    """
    timing = Timing({cell: [] for cell in cells}, {n: [] for n in PREFILL if _fits(model, n)})
    missing = [turn for turn in range(turns) if kept is None or turn not in kept]
    yield f"{model.name}: reading {context} tokens"
    probes = passes(model, tokens, context, cells) if missing else []
    for turn in (-1, *range(turns)):
        yield f"{model.name}: {'warm-up' if turn < 0 else f'turn {turn + 1} of {turns}'}"
        if turn >= 0 and turn not in missing:
            assert kept is not None
            timing.add(kept.turn(turn))
        elif missing:
            took = _one_turn(model, tokens, probes, turn, list(timing.prefill) if turn in (-1, 0, turns - 1) else [])
            if turn >= 0:
                timing.add(took)
                if kept is not None:
                    kept.keep(turn, took)
    return timing


def _one_turn(model: Model, tokens: Sequence[int], probes: Sequence[Pass], turn: int, prompts: Sequence[int]) -> Timing:
    """Every pass once, and reading each of ``prompts``."""
    order = [probes[(i + turn) % len(probes)] for i in range(len(probes))]
    cells = {(probe.rows, probe.batch): [probe.seconds()] for probe in order}
    return Timing(cells, {count: [prefill_seconds(model, tokens, count)] for count in prompts})


def _fits(model: Model, count: int) -> bool:
    return model.max_positions is None or count <= model.max_positions


def steps(turns: int = TURNS) -> int:
    """How many times ``measure_curve`` tells something."""
    return turns + 2
