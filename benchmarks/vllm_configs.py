"""Whether vLLM parses every ``--speculative-config`` that ``slipstream export`` can write for its version.

    python benchmarks/vllm_configs.py write configs.json --target TARGET --draft DRAFT     # where slipstream is
    python benchmarks/vllm_configs.py parse configs.json --target TARGET                   # where vllm is

TARGET and DRAFT are folders of models that go together. No weights are loaded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("write", "parse"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--version", default="0.32.0")
    args = parser.parse_args()
    if args.action == "write":
        found = sorted(set(configs(args)))
        args.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} configs in {args.file}")
    else:
        parse(args)


def configs(args: argparse.Namespace) -> Iterator[str]:
    """Of the example plan with every draft, temperature, rule and way of copying, with and without a table of k."""
    from importlib.resources import files

    from slipstream.export.types import Target
    from slipstream.export.vllm import export
    from slipstream.plan import Sampling, load

    plan = load(str(files("slipstream.data") / "plan.example.json"))
    drafts = [draft.name for draft in plan.drafts]
    rules: Any = ("token", "block")
    for draft, k, t, rule, copies, batches in product(
        drafts, (1, 4), (0.0, 0.7), rules, ("ngram", "suffix"), (plan.batches, ())
    ):
        verdict = replace(plan.verdict, action="speculate", draft=draft, k=k)
        asked = replace(plan.asked, sampling=Sampling(temperature=t), rule=rule)
        wanted = replace(plan, verdict=verdict, asked=asked, batches=batches)
        how = Target(target=args.target, draft=args.draft, copies=copies, version=args.version)
        for argument in export(wanted, how).arguments:
            if argument.words[0] == "--speculative-config":
                yield argument.words[1]


def parse(args: argparse.Namespace) -> None:
    """With vLLM's own parser, each to a whole engine config."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    results = []
    for config in json.loads(args.file.read_text(encoding="utf-8")):
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        words = ["--model", args.target, "--max-num-seqs", "32", "--speculative-config", config]
        try:
            made = AsyncEngineArgs.from_cli_args(parser.parse_args(words)).create_engine_config()
            said = f"method {made.speculative_config.method}, k = {made.speculative_config.num_speculative_tokens}"
            results.append({"config": json.loads(config), "parsed": True, "said": said})
        except Exception as error:
            results.append({"config": json.loads(config), "parsed": False, "said": f"{type(error).__name__}: {error}"})
        print(results[-1]["parsed"], config, "->", results[-1]["said"], flush=True)
    print(json.dumps({"vllm": vllm.__version__, "configs": results}))


if __name__ == "__main__":
    main()
