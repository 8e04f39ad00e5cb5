"""Whether trees of draft tokens can pay: expected accepted tokens of chains and small trees, with no speculation run.

    python benchmarks/tree.py TARGET --draft DRAFT [-t 0] [--nodes 8] [--prompts FILE] [--out FILE]

The target answers each prompt plainly; then both models read prompt and answer once (teacher-forced), and every chain
and every tree with at most two candidates at a position is valued at every position of the answer. At temperature 0
and with --ranked candidates are the draft's likeliest ids; otherwise they are drawn without replacement, and chains
stand by the block rule. A tree and a chain of equally many draft tokens cost the target equally many rows; a tree is
less deep, so it costs the draft fewer passes, of more rows. The best tree for a number of tokens is chosen on the other
half of the prompts, so that choosing among hundreds does not flatter it.

With --draft-cost c (a draft pass / a plain step) and --row-cost b (a further row of the target's pass / a plain step)
speed-ups are estimated too: (1 + accepted) / (1 + b nodes + c depth), with a draft's further rows for free. Prints a
table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from output import publish
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoding, load_model
from slipstream.measure.bootstrap import Interval, bootstrap
from slipstream.measure.machine import describe_machine
from slipstream.measure.prompts import encoded, read_prompts
from slipstream.models.base import feed
from slipstream.sampling import Sampler
from slipstream.tree import (
    Tree,
    chain,
    depth,
    expected_accepted,
    expected_block,
    ranked_shares,
    sampled_shares,
    size,
    trees,
)

_ROWS = 32


@dataclass(frozen=True)
class Answer:
    """One answer of the target: what each of its positions adds to chains and trees."""

    shares: Tensor
    """(2, n)"""
    blocks: dict[int, Tensor]
    """Expected accepted tokens of a chain under the block rule, by k; empty where candidates are not drawn."""

    @property
    def starts(self) -> int:
        return self.shares.shape[1]


def logits_of(model: Any, tokens: Sequence[int], count: int, vocab: int) -> Tensor:
    """Logits (count, V) of the last ``count`` of ``tokens``, over the target's ids."""
    known = [min(t, model.embedding_size - 1) for t in tokens[:-1]]
    logits = feed(model, known, model.new_cache(), count)[:, :vocab]
    return torch.nn.functional.pad(logits, (0, vocab - logits.shape[-1]), value=float("-inf"))


def rows(models: Sequence[Any], ids: Sequence[int], answer: Sequence[int], params: Any) -> Iterator[list[Tensor]]:
    """P, q and tokens of the answer, some rows at a time."""
    tokens, vocab = [*ids, *answer], models[0].vocab_size
    sampler = Sampler(params, len(ids), (), 0)
    logits = [logits_of(model, tokens, len(answer), vocab) for model in models]
    for start in range(0, len(answer), _ROWS):
        part = slice(start, start + _ROWS)
        text = answer[part]
        before = tokens[: len(ids) + start + len(text) - 1]
        yield [*(sampler.probs(each[part], before) for each in logits), torch.tensor(text)]


def answered(spec: SpeculativeDecoding, draft: Any, ids: Sequence[int], given: Any) -> Answer | None:
    """One prompt, answered plainly and looked at by both models; None if the answer is too short to say anything."""
    params = SamplingParams(temperature=given.temperature, top_p=given.top_p, seed=0)
    [output] = spec.complete([ids], params, max_new_tokens=given.max_new_tokens)
    if len(output.tokens) < 2 * given.nodes:
        return None
    ranked = given.ranked or given.temperature == 0
    shares, ratios = [], []
    for p, q, text in rows((spec.target, draft), ids, output.tokens, params):
        shares.append(ranked_shares(q, text, 2) if ranked else sampled_shares(p, q, text))
        index = text.unsqueeze(1)
        ratios.append((p.gather(1, index), q.gather(1, index)))
    p, q = (torch.cat(parts) for parts in zip(*ratios, strict=True))
    text = torch.zeros(len(p), dtype=torch.long)
    blocks = {} if ranked else {k: expected_block(p, q, text, k) for k in range(1, given.nodes + 1)}
    return Answer(torch.cat(shares, dim=1), blocks)


def values(answers: Sequence[Answer], tree: Tree, deepest: int) -> list[tuple[float, int]]:
    """For each answer the sum of a tree's expected accepted tokens over its positions, and how many these are."""
    kept = [answer.starts - deepest for answer in answers]
    return [(float(expected_accepted(tree, a.shares)[:n].sum()), n) for a, n in zip(answers, kept, strict=True)]


def chain_values(answers: Sequence[Answer], k: int, deepest: int) -> list[tuple[float, int]]:
    """The same of a chain, under the block rule if candidates are drawn."""
    if not answers[0].blocks:
        return values(answers, chain(k), deepest)
    return [(float(a.blocks[k][: a.starts - deepest].sum()), a.starts - deepest) for a in answers]


def mean(some: Sequence[Sequence[float]]) -> float:
    return sum(total for total, _, *_ in some) / sum(count for _, count, *_ in some)


def best_tree(answers: Sequence[Answer], nodes: int, deepest: int) -> tuple[Tree, list[Tree], list[tuple[float, int]]]:
    """The best real tree, those chosen on one half of the answers each, and what they are worth on the other half."""
    shapes = [shape for shape in trees(nodes) if depth(shape) < nodes]
    worth = {shape: values(answers, shape, deepest) for shape in shapes}
    halves = [max(shapes, key=lambda s, h=h: mean(worth[s][h::2])) for h in (0, 1)]
    crossed = [worth[halves[1 - i % 2]][i] for i in range(len(answers))]
    return max(shapes, key=lambda s: mean(worth[s])), halves, crossed


def drawn(tree: Tree) -> str:
    """``1(2 1)``: how many candidates there are, and in brackets what is behind each of them."""
    inner = [drawn(behind) for behind in tree if behind]
    return f"{len(tree)}({' '.join(drawn(behind) if behind else '0' for behind in tree)})" if inner else str(len(tree))


def speed_up(accepted: float, nodes: int, passes: int, given: Any) -> float | None:
    if given.draft_cost is None:
        return None
    return (1 + accepted) / (1 + given.row_cost * nodes + given.draft_cost * passes)


def compare(answers: Sequence[Answer], given: Any) -> list[dict[str, Any]]:
    """Chain and best tree, for each number of draft tokens."""
    found = []
    for nodes in range(1, given.nodes + 1):
        line = chain_values(answers, nodes, given.nodes)
        row: dict[str, Any] = {"nodes": nodes, "chain": bootstrap(line, mean)}
        row["chain_speed_up"] = speed_up(row["chain"].value, nodes, nodes, given)
        if nodes > 1:
            tree, halves, worth = best_tree(answers, nodes, given.nodes)
            pairs = [(*t, *c) for t, c in zip(worth, line, strict=True)]
            row["tree"] = bootstrap(worth, mean)
            row["tree_less_chain"] = bootstrap(pairs, lambda some: mean(some) - mean([(p[2], p[3]) for p in some]))
            row["shape"], row["depth"] = drawn(tree), depth(tree)
            row["shapes_of_halves"] = [drawn(half) for half in halves]
            row["tree_speed_up"] = speed_up(row["tree"].value, nodes, depth(tree), given)
            assert size(tree) == nodes
        found.append(row)
    return found


def show(found: list[dict[str, Any]]) -> None:
    def said(one: Interval | None, form: str = "{:.3f}") -> str:
        return "-" if one is None else f"{form.format(one.value)} [{form.format(one.low)} to {form.format(one.high)}]"

    table = Table("draft tokens", "chain", "best tree", "less the chain", "shape", "depth", "est. speed-up chain, tree")
    for row in found:
        gains = [row.get("chain_speed_up"), row.get("tree_speed_up")]
        table.add_row(
            str(row["nodes"]),
            said(row["chain"]),
            said(row.get("tree")),
            said(row.get("tree_less_chain"), "{:+.3f}"),
            row.get("shape", "-"),
            str(row.get("depth", "-")),
            ", ".join("-" if g is None else f"{g:.2f}" for g in gains),
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--nodes", type=int, default=8, help="draft tokens at most (default: 8)")
    parser.add_argument("--prompts", help="as in slipstream bench (default: the package's own)")
    parser.add_argument("--limit", type=int)
    parser.add_argument("-n", "--max-new-tokens", type=int, default=128)
    parser.add_argument("-t", "--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--ranked", action="store_true", help="candidates are the likeliest ids, also when sampling")
    parser.add_argument("--draft-cost", type=float)
    parser.add_argument("--row-cost", type=float, default=0.1)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    target = load_model(given.target, weights=given.weights)
    # As it would be used for drafting.
    draft = SpeculativeDecoding(target, load_model(given.draft, weights=given.draft_weights)).drafter.model  # type: ignore[attr-defined]
    prompts = encoded(read_prompts(given.prompts, given.limit), target.tokenizer, given.target)
    spec = SpeculativeDecoding(target)
    told = track(prompts, description="answers", console=Console(stderr=True))
    answers = [a for p in told if (a := answered(spec, draft, p.ids, given)) is not None]
    found = compare(answers, given)
    show(found)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    about = {"settings": settings, "machine": describe_machine(torch.device("cpu")), "answers": len(answers)}
    publish({**about, "rows": found}, given.out)


if __name__ == "__main__":
    main()
