"""Two drafts of one target, one for code and one for legal text, each measured on both: a matrix of acceptances.

    python benchmarks/distill_domains.py [TARGET] [--minutes 20] [--work DIR] [--out benchmarks/results/domains.json]

Code is Python's standard library, split by module; legal text the licence and copyright files of a Debian machine,
split by package, near copies left out of what is measured. Both drafts come from one command each, with the same
recipe; what
follows ``--`` is added to it. Prints the matrix and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import corpora
from distill_code import interval, split_arguments, train

from slipstream.distill.acceptance import Exact, Overlaps, figures
from slipstream.distill.documents import read_documents, split
from slipstream.distill.run import along
from slipstream.distill.schedule import VALIDATION
from slipstream.distill.student import Student, read_start
from slipstream.distill.tokens import Encoded, cut, encode_documents
from slipstream.measure.document import tidy
from slipstream.measure.expectation import Costs
from slipstream.models.describe import Description, describe
from slipstream.models.load import load_model

DOMAINS = {"code": (corpora.code, "*.py"), "legal": (corpora.legal, "*")}


def main() -> None:
    own, handed = split_arguments(sys.argv[1:])
    args = arguments(own)
    work, about = Path(args.work), describe(args.target)
    drafts, windows = {}, {}
    for domain, (corpus, pattern) in DOMAINS.items():
        folder = corpus(work / domain / "corpus")
        drafts[domain] = train(args, (domain, folder, pattern), work / domain / "draft", handed)
        windows[domain] = measured_on(folder, pattern, drafts[domain], about)
    found = matrix(args.target, drafts, windows, about)
    print("\n| draft for | " + " | ".join(f"{text}, T = {t}" for text in DOMAINS for t in (0, 1)) + " |")
    print("|---|" + "---|" * 2 * len(DOMAINS))
    for draft, row in found.items():
        print(
            f"| {draft} | " + " | ".join(interval(row[text]["rate"][t]) for text in DOMAINS for t in ("0", "1")) + " |"
        )
    line = json.dumps(found)
    if args.out:
        Path(args.out).write_text(line + "\n", encoding="utf-8")
    print(line)


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, for each draft")
    parser.add_argument("--steps", type=int, help="in place of minutes")
    parser.add_argument("--work", default="distill-domains", help="folder for corpora and drafts")
    parser.add_argument("--out")
    return parser.parse_args(given)


def measured_on(corpus: Path, pattern: str, draft: Path, about: Description) -> list[Encoded]:
    """The windows of text that the draft's own run set aside."""
    settings = json.loads((draft / "distill.json").read_text(encoding="utf-8"))["settings"]
    documents = split(read_documents([str(corpus)], pattern), settings["validation"], settings["seed"]).validation
    encoded = encode_documents(documents, about.tokenizer, about.vocab_size, about.name)
    return cut(encoded, settings["length"], settings["validation_tokens"] or VALIDATION)


def matrix(
    target: str, drafts: dict[str, Path], windows: dict[str, list[Encoded]], about: Description
) -> dict[str, dict[str, Any]]:
    """Figures by draft and text."""
    model, costs = load_model(target), Costs.linear(0.2, 0.1)
    students = {name: Student(read_start(str(folder), about)) for name, folder in drafts.items()}
    found: dict[str, dict[str, Any]] = {name: {} for name in drafts}
    for text, some in windows.items():
        overlaps: list[list[Overlaps]] = Exact(model, some).compare(
            [along(s) for s in students.values()], [s.output_ids for s in students.values()]
        )
        for name, one in zip(students, overlaps, strict=True):
            found[name][text] = tidy({"rate": figures(one, costs).rate})
    return found


if __name__ == "__main__":
    main()
