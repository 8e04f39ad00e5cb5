"""Adaptive k and cascades on recorded texts: the real decoder and controllers, with nominal costs for a clock.

    python benchmarks/control_replay.py record TARGET --draft DRAFT --prompts FILE --texts texts.jsonl [-n 96]
    python benchmarks/control_replay.py replay texts.jsonl [--out FILE]

Timed runs of single answers are noisy, and k is chosen by the clock. So ``record`` keeps, for each prompt, the target's
greedy answer and what the draft would say at each of its places, after all of the prompt and after its end only; greedy
drafts follow from these. ``replay`` decodes each answer again with every k and every combination of drafters, one
request after the other, while passes take what ``passes.py`` measured; it needs no models and repeats exactly.
Prints tables and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoding, load_model
from slipstream.controller import BRIEF
from slipstream.drafters import CascadeDrafter, Drafter, ModelDrafter, NoDrafter, SuffixDrafter
from slipstream.measure.document import tidy
from slipstream.measure.files import write_whole
from slipstream.measure.prompts import encoded, read_prompts
from slipstream.models.base import feed

#: Milliseconds of passes over n tokens, as in docs/performance.md: fp16 target, int8 draft.
TARGET = {1: 118, 2: 124, 3: 139, 4: 154, 5: 158, 6: 171, 7: 222, 8: 235, 12: 334, 16: 445}
DRAFT = {1: 23, 2: 24, 3: 30, 4: 35, 5: 40, 6: 48, 7: 59, 8: 63, 12: 95, 16: 124, 64: 300}
#: Relative spread of the time of a pass.
NOISE = 0.04
FIXED = (1, 2, 4, 8)


# --- recording --------------------------------------------------------------------------------------------------------


def record(args: argparse.Namespace) -> None:
    """Write a line for each prompt."""
    target, draft = load_model(args.target, weights=args.weights), load_model(args.draft, weights="int8")
    writer = SpeculativeDecoding(target, [SuffixDrafter(), ModelDrafter(draft, target.vocab_size)])
    lines = []
    prompts = read_prompts(args.prompts)
    for prompt in track(encoded(prompts, target.tokenizer, args.target), console=Console(stderr=True)):
        ids = list(prompt.ids)
        answer = list(writer.complete(ids, max_new_tokens=args.new)[0].tokens)
        after = {"whole": says(draft, ids, answer), "brief": says(draft, ids[-BRIEF:], answer)}
        lines.append(json.dumps({"category": prompt.category, "prompt": ids, "answer": answer, **after}))
    write_whole(args.texts, lambda partial: partial.write_text("\n".join(lines) + "\n"))


def says(draft: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[int, float]]:
    """The draft's likeliest token at each place of the answer, and its probability."""
    logits = feed(draft, [*prompt, *answer[:-1]], draft.new_cache(), len(answer))
    peaks, ids = logits.softmax(dim=-1).max(dim=-1)
    return [(int(i), round(float(p), 4)) for i, p in zip(ids, peaks, strict=True)]


# --- replaying --------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Stands for ``perf_counter``: passes move it on."""

    now: float = 0.0
    luck: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self) -> float:
        return self.now

    def passes(self, known: dict[int, float], rows: int) -> None:
        """A pass over ``rows`` tokens, between and beyond the measured ones by straight lines."""
        few = max(n for n in known if n <= rows)
        many = min((n for n in known if n >= rows), default=0)
        if many > few:
            ms = known[few] + (known[many] - known[few]) * (rows - few) / (many - few)
        else:
            ms = known[few] * rows / few
        self.now += ms / 1e3 * self.luck.lognormvariate(0, NOISE)


@dataclass
class Length:
    """A cache that only counts, and remembers where it began."""

    length: int = 0
    whole: bool = True

    def truncate(self, length: int) -> None:
        self.length = length


@dataclass(frozen=True)
class Text:
    """One recorded answer, in ids from 0 on without gaps."""

    category: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    whole: tuple[tuple[int, float], ...]
    brief: tuple[tuple[int, float], ...]


class Recorded:
    """A model that says what was recorded of a text."""

    max_positions = None
    tokenizer = None
    device = torch.device("cpu")
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, name: str, vocab: int, clock: Clock, costs: dict[int, float]) -> None:
        self.name, self.vocab_size, self.embedding_size = name, vocab, vocab
        self._clock, self._costs = clock, costs
        self.text: Text | None = None

    def new_cache(self) -> Length:
        return Length()

    def forward(self, tokens: Sequence[int], cache: Length, num_logits: int) -> Tensor:
        """Rows of the places that follow the last tokens; time passes."""
        text = self.text
        assert text is not None
        if not cache.length:
            cache.whole = tuple(tokens[: len(text.prompt)]) == text.prompt[: len(tokens)]
        self._clock.passes(self._costs, len(tokens))
        cache.length += len(tokens)
        skipped = 0 if cache.whole else len(text.prompt) - BRIEF
        first = cache.length + skipped - len(text.prompt) - num_logits + 1
        return torch.stack([self._row(text, cache, first + i) for i in range(num_logits)]) if num_logits else EMPTY

    def _row(self, text: Text, cache: Length, place: int) -> Tensor:
        place = min(max(place, 0), len(text.answer) - 1)
        token, sure = text.answer[place], 1.0
        if self.name == "draft":
            token, sure = (text.whole if cache.whole else text.brief)[place]
        rest = max(1 - sure, 1e-6) / (self.vocab_size - 1)
        row = torch.full((self.vocab_size,), math.log(rest))
        row[token] = math.log(max(sure, 1e-6))
        return row


EMPTY = torch.empty(0)


def read_texts(path: Path) -> tuple[list[Text], int]:
    """The texts, and how many ids they use."""
    numbers: dict[int, int] = {}

    def short(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(t, len(numbers)) for t in ids)

    texts = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        said = [
            tuple(zip(short([t for t, _ in row[k]]), [p for _, p in row[k]], strict=True)) for k in ("whole", "brief")
        ]
        texts.append(Text(row["category"], short(row["prompt"]), short(row["answer"]), said[0], said[1]))
    return texts, len(numbers)


def ways(draft: Recorded) -> dict[str, tuple[Callable[[], Drafter], int | str]]:
    """What is compared, by name."""
    model = lambda: ModelDrafter(draft, draft.vocab_size)  # noqa: E731
    cascade = lambda: CascadeDrafter([SuffixDrafter(), model()])  # noqa: E731
    fixed: dict[str, tuple[Callable[[], Drafter], int | str]] = {f"k={k}": (cascade, k) for k in FIXED}
    return {
        "plain": (NoDrafter, 0),
        **fixed,
        "adaptive": (cascade, "adaptive"),
        "suffix": (SuffixDrafter, "adaptive"),
        "draft": (model, "adaptive"),
    }


def replay(texts: Sequence[Text], vocab: int, way: str) -> list[float]:
    """Seconds of each answer after its first token."""
    clock = Clock()
    target, draft = Recorded("target", vocab, clock, TARGET), Recorded("draft", vocab, clock, DRAFT)
    make, k = ways(draft)[way]
    took = []
    with mock.patch("slipstream.decode.perf_counter", clock):
        spec = SpeculativeDecoding(target, make(), k=k)
        for text in texts:
            target.text = draft.text = text
            stream = spec.stream(list(text.prompt), SamplingParams(max_new_tokens=len(text.answer), ignore_eos=True))
            next(stream)
            begun = clock.now
            output = stream.finish()
            assert output.tokens == text.answer, "the replay left the text"
            took.append(clock.now - begun)
    return took


def by_category(texts: Sequence[Text], took: Sequence[float]) -> dict[str, float]:
    """Seconds for each token after the first."""
    sums: dict[str, list[float]] = {}
    for text, seconds in zip(texts, took, strict=True):
        entry = sums.setdefault(text.category, [0.0, 0.0])
        entry[0] += seconds
        entry[1] += len(text.answer) - 1
    return {category: seconds / tokens for category, (seconds, tokens) in sums.items()}


def mean(ratios: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    writes = actions.add_parser("record")
    writes.add_argument("target")
    writes.add_argument("--draft", required=True)
    writes.add_argument("--prompts", required=True)
    writes.add_argument("--texts", type=Path, required=True)
    writes.add_argument("--weights", default="fp16")
    writes.add_argument("-n", dest="new", type=int, default=96)
    writes.set_defaults(run=record)
    reads = actions.add_parser("replay")
    reads.add_argument("texts", type=Path)
    reads.add_argument("--out", type=Path)
    reads.set_defaults(run=report)
    args = parser.parse_args()
    args.run(args)


def report(args: argparse.Namespace) -> None:
    """Replay all ways, and compare."""
    texts, vocab = read_texts(args.texts)
    texts = [text for text in texts if len(text.answer) > 1]
    names = list(ways(Recorded("draft", vocab, Clock(), DRAFT)))
    speed = {way: by_category(texts, replay(texts, vocab, way)) for way in track(names, console=Console(stderr=True))}
    rows: dict[str, dict[str, float]] = {}
    for category, plain in speed["plain"].items():
        gain = {way: plain / speed[way][category] for way in names}
        rows[category] = {
            **gain,
            "over fixed": gain["adaptive"] / max(gain[f"k={k}"] for k in FIXED),
            "over members": gain["adaptive"] / max(gain["suffix"], gain["draft"]),
        }
    columns = [*names[1:], "over fixed", "over members"]
    overall = {column: mean([row[column] for row in rows.values()]) for column in columns}
    table = Table("category", *columns)
    for category, row in {**rows, "geometric mean": overall}.items():
        table.add_row(category, *(f"{row[column]:.2f}" for column in columns))
    Console(width=140).print(table)
    document = json.dumps(tidy({"costs": {"target": TARGET, "draft": DRAFT}, "categories": rows, "overall": overall}))
    if args.out:
        write_whole(args.out, lambda partial: partial.write_text(document + "\n"))
    print(document)


if __name__ == "__main__":
    main()
