"""The block rule against the token rule: accepted draft tokens a round, sampled, on the same prompts.

    python benchmarks/rules.py TARGET --draft DRAFT [-k 4,8] [--prompts FILE] [--out benchmarks/results/rules.json]

Each prompt is answered under both rules with the same seeds. *Counted* is what they accepted. *Expected* is what both
rules accept in expectation of one and the same drafts, from the P and q of all those rounds: the same figure with far
less noise, since only the drafts are left to chance. Intervals are of 95 %, over prompts, prompt by prompt. Counts do
not depend on how busy the machine is. Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from output import publish
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import slipstream.decode
from slipstream import SpeculativeDecoding, Verdict, load_model
from slipstream.measure.bootstrap import bootstrap
from slipstream.measure.machine import describe_machine
from slipstream.measure.prompts import BenchPrompt, encoded, read_prompts
from slipstream.verify import RULES, accept_probs, block_weights, verify


@dataclass
class Tally:
    """Sums over the rounds of one prompt, by the rule that they were run under."""

    rounds: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    counted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    expected: dict[str, float] = field(default_factory=lambda: dict.fromkeys(RULES, 0.0))
    """By the rule that is asked, over the rounds of all runs."""

    def add(self, rule: str, verdict: Verdict, accept: Tensor, weights: Sequence[float]) -> None:
        self.rounds[rule] += 1
        self.counted[rule] += verdict.num_accepted
        self.expected["token"] += float(accept.double().cumprod(0).sum())
        self.expected["block"] += sum(weights[1:])


@contextmanager
def watched(tally: Tally) -> Iterator[None]:
    """Have the decoder's verifications of drafts counted."""

    def watching(p: Tensor, drafted: Tensor, q: Tensor | None, generator: Any, rule: str) -> Verdict:
        verdict = verify(p, drafted, q, generator, rule)
        if len(drafted):
            tally.add(rule, verdict, accept_probs(p, drafted, q), block_weights(p, drafted, q))
        return verdict

    slipstream.decode.verify = watching
    try:
        yield
    finally:
        slipstream.decode.verify = verify


def measure(specs: dict[str, SpeculativeDecoding], prompts: Sequence[BenchPrompt], given: Any) -> list[Tally]:
    """One tally a prompt."""
    tallies = []
    for prompt in track(prompts, description=f"k = {specs['block'].k}", console=Console(stderr=True)):
        tallies.append(Tally())
        with watched(tallies[-1]):
            for seed in range(given.repeat):
                for spec in specs.values():
                    settings = {"temperature": given.temperature, "top_p": given.top_p, "seed": seed}
                    spec.complete([prompt.ids], max_new_tokens=given.max_new_tokens, **settings)
    return [t for t in tallies if all(t.rounds.values())]


def counted(some: Sequence[Tally], rule: str) -> float:
    """Accepted tokens a round."""
    return sum(t.counted[rule] for t in some) / sum(t.rounds[rule] for t in some)


def expected(some: Sequence[Tally], rule: str) -> float:
    """The same in expectation, over the drafts of all runs."""
    return sum(t.expected[rule] for t in some) / sum(sum(t.rounds.values()) for t in some)


def figures(tallies: Sequence[Tally]) -> dict[str, Any]:
    """Both rules, and by how much tokens a round (the corrected or bonus token included) grow with the block rule."""
    found: dict[str, Any] = {"prompts": len(tallies), "rounds": sum(sum(t.rounds.values()) for t in tallies)}
    for name, mean in (("counted", counted), ("expected", expected)):
        found[name] = {rule: bootstrap(tallies, lambda some, r=rule, m=mean: m(some, r)) for rule in RULES}
        found[name]["gain"] = bootstrap(
            tallies, lambda some, m=mean: (1 + m(some, "block")) / (1 + m(some, "token")) - 1
        )
    return found


def show(rows: dict[int, dict[str, Any]]) -> None:
    table = Table("k", "", "token rule", "block rule", "more tokens a round", title="accepted draft tokens a round")
    for k, found in rows.items():
        for name in ("expected", "counted"):
            one = found[name]
            cells = [f"{one[r].value:.3f} [{one[r].low:.3f}-{one[r].high:.3f}]" for r in ("token", "block")]
            gain = one["gain"]
            table.add_row(str(k), name, *cells, f"{gain.value:+.1%} [{gain.low:+.1%} to {gain.high:+.1%}]")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", required=True, help="a model, or suffix")
    parser.add_argument("-k", dest="ks", default="4,8")
    parser.add_argument("--prompts", help="as in slipstream bench (default: the package's own)")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("-t", "--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=1, help="seeds 0, 1, ...")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    target = load_model(given.target, weights=given.weights)
    draft = given.draft if given.draft == "suffix" else load_model(given.draft, weights=given.draft_weights)
    prompts = encoded(read_prompts(given.prompts, given.limit), target.tokenizer, given.target)
    rows = {}
    for k in map(int, given.ks.split(",")):
        specs = {rule: SpeculativeDecoding(target, draft, k, rule=rule) for rule in RULES}
        tallies = measure(specs, prompts, given)
        rows[k] = figures(tallies) | {"by_prompt": [asdict(t) for t in tallies]}
    show(rows)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    publish({"settings": settings, "machine": describe_machine(torch.device("cpu")), "k": rows}, given.out)


if __name__ == "__main__":
    main()
