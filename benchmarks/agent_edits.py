"""An agent edits one file ten times: what a store of earlier requests gains over none.

    python benchmarks/agent_edits.py MODEL [--draft suffix] [-k adaptive] [-n 512] [--out FILE]

Each request is a chat prompt with the file and one change to make, and asks for the whole file. The ten requests are
answered once without a store, then twice with one: the first pass fills it, the second is what is quoted, request by
request against the same one without. All ways answer a request one after the other, repeatedly, in an order that moves
on. Greedy. Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import inspect
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream import Output, SpeculativeDecoding, load_model
from slipstream.drafters import SuffixDrafter, SuffixStore
from slipstream.errors import InputError
from slipstream.measure.document import tidy
from slipstream.measure.files import write_whole
from slipstream.measure.machine import describe_machine
from slipstream.measure.spread import spread

EDITS = (
    "rename the variable `prefix` to `indent_text`",
    "add type hints to every function",
    "replace the name `lines` by `rows` everywhere",
    "add a docstring of one line to each function that has none",
    "rename the function `indent` to `indent_lines`",
    "raise TypeError with a clear message if the text is not a str",
    "replace double quotes by single quotes in code",
    "rename the parameter `predicate` to `wanted`",
    "add a comment above each loop that says what it is for",
    "add a keyword `strip: bool = False` to the function `dedent` that strips the result",
)
SYSTEM = "You edit Python files. Reply with the whole file in one code block, and with nothing else."


@dataclass(frozen=True)
class Answer:
    """One answer of one way."""

    way: str
    request: int
    output: Output


def requests(lines: int) -> list[list[dict[str, str]]]:
    """Ten edits of the same file, as chat messages: functions of the standard library's textwrap."""
    source = "\n\n".join(inspect.getsource(function) for function in (textwrap.dedent, textwrap.indent))
    file = "\n".join(source.splitlines()[:lines])
    system = {"role": "system", "content": SYSTEM}
    return [[system, {"role": "user", "content": f"```python\n{file}\n```\n\nIn this file, {edit}."}] for edit in EDITS]


def drafter(names: str, models: dict[str, Any], store: SuffixStore | None) -> Any:
    """What ``--draft`` says, with a store for its suffix drafter or without."""
    parts = [SuffixDrafter(store) if name == "suffix" else models[name] for name in names.split(",")]
    return parts if len(parts) > 1 else parts[0]


def answer_all(ways: dict[str, SpeculativeDecoding], prompts: list[Any], params: dict[str, Any]) -> list[Answer]:
    """Every request by every way in turn."""
    found = []
    names = list(ways)
    for number, prompt in enumerate(prompts):
        begin = number % len(names)
        for name in (*names[begin:], *names[:begin]):
            output = ways[name].complete(prompt, **params)[0]
            found.append(Answer(name, number, output))
            print(f"{name}: request {number + 1}, {output.stats.seconds_per_token * 1e3:.1f} ms a token", flush=True)
    return found


def summarise(answers: list[Answer], base: list[Answer]) -> dict[str, Any]:
    """Ratios of the time a token, request by request, to ``base``."""
    before = {a.request: a.output for a in base}
    pairs = [(before[a.request], a.output) for a in answers]
    timed = [(b.stats, o.stats) for b, o in pairs if b.stats.seconds_per_token and o.stats.seconds_per_token]
    return {
        "speed_up": spread(b.seconds_per_token / o.seconds_per_token for b, o in timed),
        "tokens_a_round": spread(o.stats.mean_accepted_length for _, o in pairs),
        "acceptance": spread(o.stats.acceptance_rate for _, o in pairs),
        "same_answers": sum(b.tokens == o.tokens for b, o in pairs),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The first pass fills the store; in the second all ways take turns."""
    target = load_model(given.model, weights=given.weights)
    names = [name for name in given.draft.split(",") if name != "suffix"]
    models = {name: load_model(name, weights=given.draft_weights) for name in names}
    prompts = requests(given.lines)[: given.requests]
    params = {"max_new_tokens": given.max_new_tokens}
    store = SuffixStore(tokenizer=target.tokenizer)
    shared = SpeculativeDecoding(target, drafter(given.draft, models, store), given.k)
    alone = SpeculativeDecoding(target, drafter(given.draft, models, None), given.k)
    first = answer_all({"first pass": shared}, prompts, params)
    plain = {} if given.no_plain else {"plain": SpeculativeDecoding(target)}
    second = answer_all({**plain, "no store": alone, "store": shared}, prompts, params)
    by_way = {way: [a for a in second if a.way == way] for way in (*plain, "no store", "store")}
    found: dict[str, Any] = {"store over no store": summarise(by_way["store"], by_way["no store"])}
    found["no store alone"] = summarise(by_way["no store"], by_way["no store"])
    if plain:
        found["store over plain"] = summarise(by_way["store"], by_way["plain"])
        found["no store over plain"] = summarise(by_way["no store"], by_way["plain"])
    records = [
        {"way": a.way, "request": a.request, "tokens": len(a.output.tokens), "stats": a.output.stats}
        for a in (*first, *second)
    ]
    return {**found, "store_tokens": store.num_tokens, "records": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="suffix", help="suffix, or suffix,MODEL")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("-k", type=lambda k: int(k) if k.isdecimal() else k, default="adaptive")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=len(EDITS), help="the first of the ten")
    parser.add_argument("--lines", type=int, default=80, help="length of the file")
    parser.add_argument("--no-plain", action="store_true", help="leave plain decoding out")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if "suffix" not in given.draft.split(","):
        raise InputError(f"--draft {given.draft!r} has no store to measure; name suffix in it")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    found = measure(given)
    for name, figures in found.items():
        if isinstance(figures, dict):
            ratio, length = figures["speed_up"], figures["tokens_a_round"]
            shown = f"{ratio.median:.2f} [{ratio.low:.2f}-{ratio.high:.2f}]" if ratio else "-"
            print(f"{name}: {shown}, {length.median:.2f} tokens a round, {figures['same_answers']} the same")
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    document = {"settings": settings, "machine": describe_machine(torch.device("cpu")), **found}
    text = json.dumps(tidy(document))
    if given.out is not None:
        write_whole(given.out, lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
    print(text)


if __name__ == "__main__":
    main()
