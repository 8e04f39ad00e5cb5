"""How often a copied token is right, by the confidence that the suffix drafter gave it: texts replayed, no target run.

    python benchmarks/suffix_replay.py MODEL [FILE ...]

MODEL lends its tokenizer. Without files: the texts of ``quality.py`` (code, prose, a licence), a longer module of the
standard library, and that module twice with one name changed, as in an edit. Shows for each band of confidence how
many tokens fell into it and how many were right, and for each threshold how many tokens reach it.
"""

from __future__ import annotations

import argparse
import argparse as edited_module
from collections import defaultdict
from pathlib import Path
from typing import Any

from slipstream import SamplingParams
from slipstream.drafters import SuffixDrafter
from slipstream.models.load import open_checkpoint
from slipstream.sampling import Sampler

THRESHOLDS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
HERE = Path(__file__).parent


def texts(files: list[Path]) -> dict[str, str]:
    if files:
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    import textwrap

    code = Path(edited_module.__file__).read_text(encoding="utf-8")[:24_000]
    return {
        "code": Path(textwrap.__file__).read_text(encoding="utf-8"),
        "prose": (HERE / "texts" / "prose.txt").read_text(encoding="utf-8"),
        "licence": (HERE.parent / "LICENSE").read_text(encoding="utf-8"),
        "longer code": code,
        "edit": code + code.replace("action", "act"),
    }


def replay(ids: list[int]) -> list[tuple[float, bool]]:
    """Confidence of the one token drafted at each position, and whether it was right."""
    session = SuffixDrafter(min_probability=0).start(Sampler(SamplingParams(), 1, (), 0))
    found = []
    for end in range(1, len(ids)):
        draft = session.draft(ids[:end], 1)
        if draft.tokens:
            found.append((draft.confidence[0], draft.tokens[0] == ids[end]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    tokenizer: Any = open_checkpoint(given.model).tokenizer
    for name, text in texts(given.files).items():
        ids = list(tokenizer(text)["input_ids"])
        found = replay(ids)
        bands: dict[int, list[bool]] = defaultdict(list)
        for confidence, right in found:
            bands[min(9, int(10 * confidence))].append(right)
        print(f"\n{name}: {len(ids)} tokens, something to copy at {len(found) / len(ids):.0%}")
        print("  confidence  " + "".join(f"{band / 10:>7.1f}" for band in sorted(bands)))
        print("  tokens      " + "".join(f"{len(bands[band]):>7}" for band in sorted(bands)))
        print("  right       " + "".join(f"{sum(bands[b]) / len(bands[b]):>7.2f}" for b in sorted(bands)))
        for least in THRESHOLDS:
            above = [right for confidence, right in found if confidence >= least]
            if above:
                share = len(above) / len(ids)
                print(f"  at least {least}: {share:>4.0%} of all tokens, {sum(above) / len(above):.2f} of them right")


if __name__ == "__main__":
    main()
