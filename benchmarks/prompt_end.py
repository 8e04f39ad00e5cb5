"""How much of a prompt a draft model has to read: how often its likeliest token is the target's, with its end only.

    python benchmarks/prompt_end.py TARGET --draft DRAFT [--prompts FILE] [--out benchmarks/results/prompt-end.json]

The target answers each prompt greedily; then the draft model reads the last 16, 32, 64, 128 tokens of the prompt, or
all of it, and the answer once. Shares of the answers' places, by category and over all. They do not depend on how busy
the machine is. Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from slipstream import SpeculativeDecoding
from slipstream.measure.document import tidy
from slipstream.measure.files import write_whole
from slipstream.measure.machine import describe_machine
from slipstream.measure.prompts import encoded, read_prompts
from slipstream.models.base import feed
from slipstream.models.load import Kinds, open_models

ENDS: tuple[int | None, ...] = (16, 32, 64, 128, None)


def agreement(draft: Any, prompt: Sequence[int], answer: Sequence[int], end: int | None) -> list[float]:
    """For each place of the answer 1 if the draft's likeliest token is there, else 0."""
    read = [*(prompt if end is None else prompt[-end:]), *answer[:-1]]
    logits = feed(draft, read, draft.new_cache(), len(answer))
    return (logits.argmax(dim=-1) == torch.tensor(answer)).float().tolist()


def measure(given: Any) -> dict[str, Any]:
    """Shares by category and number of tokens read."""
    kinds = Kinds(given.weights, given.draft_weights)
    target, drafts = open_models(given.target, [given.draft], kinds)
    models = target.load(), drafts[given.draft].load()
    spec = SpeculativeDecoding(*models, tokenizer=target.tokenizer)
    found: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in ENDS])
    sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    prompts = encoded(read_prompts(given.prompts, given.limit), target.tokenizer, given.target)
    for prompt in track(prompts, description="Prompts", console=Console(stderr=True)):
        [output] = spec.complete([prompt.ids], temperature=0.0, max_new_tokens=given.max_new_tokens)
        sizes[prompt.category].append((len(prompt.ids), len(output.tokens)))
        for name in (prompt.category, "all"):
            for values, end in zip(found[name], ENDS, strict=True):
                values += agreement(models[1], prompt.ids, output.tokens, end)
    shares = {name: [sum(values) / len(values) for values in some] for name, some in found.items()}
    return {"ends": ENDS, "shares": shares, "prompt_and_answer_tokens": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", help="as in slipstream bench (default: the package's own)")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=160)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure(given)
    table = Table("", *("all" if end is None else f"last {end}" for end in ENDS))
    for name, shares in found["shares"].items():
        table.add_row(name, *(f"{share:.3f}" for share in shares))
    Console(width=100).print(table)
    document = {
        "benchmark": "prompt_end",
        "target": given.target,
        "draft": given.draft,
        "machine": tidy(describe_machine(torch.device("cpu"))),
        **found,
    }
    line = json.dumps(document)
    if given.out is not None:
        write_whole(given.out, lambda path: path.write_text(line + "\n", encoding="utf-8"))
    print(line)


if __name__ == "__main__":
    main()
