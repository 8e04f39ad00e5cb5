"""An agent edits one file ten times: what a store of earlier requests gains over none.

    python benchmarks/agent_edits.py MODEL [--workload edit] [--draft suffix] [-k adaptive] [-n 512] [--out FILE]

Two workloads, each of ten requests about one file of Python:

- ``edit``: the prompt holds the file and one change to make, and asks for the whole file. Most of the answer can be
  copied from the prompt, store or not.
- ``rewrite``: the prompt describes the task and the changes asked for so far, one more each time, and holds no code. An
  agent that keeps its file elsewhere writes it anew each time, so only earlier answers can be copied from.

The requests are answered once with an empty store, which that pass fills, and then again by all ways, one after the
other, in an order that moves on: plainly, without a store, and with it. In this second pass the store holds an answer
to the very request, as when an agent starts its task again; the first pass is reported too, in which it holds earlier
versions only. Ratios are request by request against the same one without a store. Greedy. Prints a table and, as the
last line, one JSON document.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from output import publish

from slipstream import Output, SpeculativeDecoding, load_model
from slipstream.drafters import SuffixDrafter, SuffixStore
from slipstream.errors import InputError
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
WRITES = "You write Python files. Reply with the whole file in one code block, and with nothing else."
TASK = """Write the file `inventory.py`. It keeps the stock of a small shop: a class `Inventory` with the methods
`add(name, count, price)`, `remove(name, count)`, `total()` (the value of everything in stock), `find(text)` (names
that contain the text), `save(path)` and `load(path)` (JSON), and a function `main()` that adds three articles and
prints the total."""
CHANGES = (
    "every method has a docstring of one line",
    "`add` raises ValueError if the count is not positive",
    "`remove` raises KeyError if there is no such article",
    "all arguments and results have type hints",
    "`find` ignores upper and lower case",
    "there is a method `rename(old, new)`",
    "`save` writes keys in alphabetical order",
    "`main` prints each article on a line of its own first",
    "there is a method `cheapest()`",
    "prices are kept in cents, as integers",
)
WORKLOADS = ("edit", "rewrite")


@dataclass(frozen=True)
class Answer:
    """One answer of one way."""

    way: str
    request: int
    output: Output


def requests(workload: str, lines: int) -> list[list[dict[str, str]]]:
    """The ten requests of a workload, as chat messages."""
    return rewrites() if workload == "rewrite" else edits(lines)


def rewrites() -> list[list[dict[str, str]]]:
    """A task with one more wish each time, and no code."""
    found = []
    for count in range(1, len(CHANGES) + 1):
        wishes = "\n".join(f"- {change}" for change in CHANGES[:count])
        user = {"role": "user", "content": f"{TASK}\n\nSee to it that:\n{wishes}"}
        found.append([{"role": "system", "content": WRITES}, user])
    return found


def edits(lines: int) -> list[list[dict[str, str]]]:
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
        "tokens": sum(len(o.tokens) for _, o in pairs),
        "passes": sum(o.stats.rounds for _, o in pairs),
        "fewer_passes": spread(b.stats.rounds / o.stats.rounds for b, o in pairs),
        "same_answers": sum(b.tokens == o.tokens for b, o in pairs),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """The first pass fills the store; in the second all ways take turns."""
    target = load_model(given.model, weights=given.weights)
    names = [name for name in given.draft.split(",") if name != "suffix"]
    models = {name: load_model(name, weights=given.draft_weights) for name in names}
    prompts = requests(given.workload, given.lines)[: given.requests]
    params = {"max_new_tokens": given.max_new_tokens}
    store = SuffixStore(tokenizer=target.tokenizer)
    shared = SpeculativeDecoding(target, drafter(given.draft, models, store), given.k)
    alone = SpeculativeDecoding(target, drafter(given.draft, models, None), given.k)
    first = answer_all({"first pass": shared}, prompts, params)
    plain = {} if given.no_plain else {"plain": SpeculativeDecoding(target)}
    second = answer_all({**plain, "no store": alone, "store": shared}, prompts, params)
    by_way = {way: [a for a in second if a.way == way] for way in (*plain, "no store", "store")}
    found: dict[str, Any] = {"store over no store": summarise(by_way["store"], by_way["no store"])}
    found["first pass over no store"] = summarise(first, by_way["no store"])
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
    parser.add_argument("--workload", choices=WORKLOADS, default="edit")
    parser.add_argument("--draft", default="suffix", help="suffix, or suffix,MODEL")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("-k", type=lambda k: int(k) if k.isdecimal() else k, default="adaptive")
    parser.add_argument("-n", "--max-new-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=len(EDITS), help="the first of the ten")
    parser.add_argument("--lines", type=int, default=80, help="length of the file of edit")
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
            counted = f"{figures['tokens']} tokens in {figures['passes']} passes"
            print(f"{name}: {shown}, {length.median:.2f} tokens a round, {counted}, {figures['same_answers']} the same")
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    document = {"settings": settings, "machine": describe_machine(torch.device("cpu")), **found}
    publish(document, given.out)


if __name__ == "__main__":
    main()
