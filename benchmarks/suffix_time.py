"""What a copied draft costs as the text grows: microseconds a draft behind 1k, 4k, 16k and 64k tokens.

    python benchmarks/suffix_time.py [--tokenizer MODEL] [--out benchmarks/results/suffix-time.json]

The text is the standard library's source, in a tokenizer's ids if one is named, else in words. Each timed draft follows
four committed tokens, as after a round; reading the text before it, which happens once a request, is timed by itself.
Prints a table and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from output import publish

from slipstream import SamplingParams
from slipstream.drafters import SuffixDrafter, SuffixStore
from slipstream.measure.machine import describe_machine
from slipstream.measure.spread import spread
from slipstream.sampling import Sampler

SIZES = (1_000, 4_000, 16_000, 64_000)
DRAFTS, STEP, K = 200, 4, 8


def read_ids(name: str | None, count: int) -> list[int]:
    """``count`` ids of the standard library's source."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[: 8 * count]
    if name is not None:
        from slipstream.models.load import open_checkpoint

        return list(open_checkpoint(name).tokenizer(text)["input_ids"])[:count]
    known: dict[str, int] = {}
    return [known.setdefault(word, len(known)) for word in re.findall(r"\w+|\s+|[^\w\s]", text)][:count]


def measure(ids: list[int], store: SuffixStore | None) -> list[dict[str, Any]]:
    """Time the first draft behind each number of tokens, and the ``DRAFTS`` after it, all sizes in turn."""
    sessions = [SuffixDrafter(store).start(Sampler(SamplingParams(), 1, (), 0)) for _ in SIZES]
    first = [timed_draft(session, ids[:size])[0] for session, size in zip(sessions, SIZES, strict=True)]
    drafts: list[list[tuple[float, int]]] = [[] for _ in SIZES]
    for number in range(1, DRAFTS + 1):
        for own, session, size in zip(drafts, sessions, SIZES, strict=True):
            own.append(timed_draft(session, ids[: size + STEP * number]))
    return [
        {
            "tokens": size,
            "first": start,
            "draft": spread(seconds for seconds, _ in own),
            "drafted": sum(count for _, count in own) / DRAFTS,
        }
        for size, start, own in zip(SIZES, first, drafts, strict=True)
    ]


def timed_draft(session: Any, tokens: list[int]) -> tuple[float, int]:
    """Seconds, and the number of tokens drafted."""
    start = perf_counter()
    draft = session.draft(tokens, K)
    return perf_counter() - start, len(draft.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", metavar="MODEL")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    need = 2 * SIZES[-1] + STEP * (DRAFTS + 1)
    ids = read_ids(given.tokenizer, need)
    store = SuffixStore()
    store.add(ids[-SIZES[-1] :])
    found: dict[str, Any] = {}
    for name, used in (("alone", None), ("with a store of 64k tokens", store)):
        rows = found[name] = measure(ids, used)
        print(f"{name}:")
        for row in rows:
            each = row["draft"].median * 1e6
            print(f"  {row['tokens']:>6} tokens: {each:6.0f} us a draft; read before in {row['first'] * 1e3:.0f} ms")
        print(f"  64k over 1k: {rows[-1]['draft'].median / rows[0]['draft'].median:.2f}")
    publish({"machine": describe_machine(torch.device("cpu")), **found}, given.out)


if __name__ == "__main__":
    main()
