"""A draft for code that is made by ``slipstream distill`` only: acceptance, cost, speed-up, before and after.

    python benchmarks/distill_code.py [TARGET] [--minutes 40] [--work DIR] [--out benchmarks/results/distill_code.json]

The corpus is Python's standard library, split by module. Acceptance is offline, on held-out modules, at T = 0 and 1.
The speed-up is end to end: ``slipstream bench`` continues beginnings of held-out modules greedily: plainly, with the
draft, with what training began from, with copies of the text, and with copies before either, in turns. "Before" is
the target with most of its layers taken out and the same output rows as the draft, neither fitted nor trained. Prints
a table and, as the last line, one JSON document. What follows ``--`` is handed to ``slipstream distill``, for example
``-- --init layers:0,1,28,29``. A run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import corpora

from slipstream.distill.documents import Document, read_documents, split
from slipstream.distill.student import Student, read_start, save_student, with_outputs
from slipstream.models.describe import describe
from slipstream.models.load import load_model

COPIES = "suffix"
RECIPE = ("--init", "prune:4", "--draft-vocab", "8192")
SLIPSTREAM = (sys.executable, "-c", "from slipstream.cli.main import main; main()")


def main() -> None:
    own, handed = split_arguments(sys.argv[1:])
    args = arguments(own)
    work = Path(args.work)
    corpus = corpora.code(work / "corpus")
    draft = train(args, ("code", corpus, "*.py"), work / "draft", handed)
    record = json.loads((draft / "distill.json").read_text(encoding="utf-8"))
    start = undistilled(args.target, record, draft, work / "start")
    prompts = write_prompts(held_out(corpus, record), work / "prompts.jsonl", args.prompts)
    found = bench(args, draft, start, prompts, work / "bench.json")
    result = {"distill": record, "bench": {k: found[k] for k in ("machine", "best", "contenders", "overall")}}
    show(record, found)
    line = json.dumps(result)
    if args.out:
        Path(args.out).write_text(line + "\n", encoding="utf-8")
    print(line)


def split_arguments(given: list[str]) -> tuple[list[str], list[str]]:
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("--minutes", type=float, default=40.0, help="of training")
    parser.add_argument("--steps", type=int, help="in place of minutes")
    parser.add_argument("--work", default="distill-code", help="folder for corpus, draft and prompts")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("-k", default="1,2,3,adaptive")
    parser.add_argument("--draft-weights", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out")
    return parser.parse_args(given)


def train(args: argparse.Namespace, data: tuple[str, Path, str], out: Path, handed: list[str]) -> Path:
    """The draft for ``data`` (name, folder, pattern of its files); one that is there already is taken."""
    name, corpus, pattern = data
    if not out.exists():
        length = ["--steps", str(args.steps)] if args.steps else ["--minutes", str(args.minutes)]
        command = [*SLIPSTREAM, "distill", args.target, *RECIPE, "--data", f"{name}={corpus}", "--pattern", pattern]
        command += [*length, "--out", str(out), *handed]
        if out.with_name(f"{out.name}.unfinished").exists():
            command.append("--resume")
        subprocess.run(command, check=True)
    return out


def undistilled(target: str, record: dict[str, Any], draft: Path, out: Path) -> Path:
    """What training began from, as a checkpoint."""
    if not out.exists():
        begun = read_start(record["start"]["init"], describe(target))
        ids = getattr(load_model(draft), "output_ids", None)
        out.mkdir(parents=True)
        start = begun if ids is None else with_outputs(begun, ids.tolist())
        save_student(Student(start), out, start.head.dtype)
    return out


def held_out(corpus: Path, record: dict[str, Any]) -> list[Document]:
    """The documents that the draft was not trained on."""
    settings = record["settings"]
    documents = read_documents([f"code={corpus}"], "*.py")
    return list(split(documents, settings["validation"], settings["seed"]).validation)


def write_prompts(documents: list[Document], file: Path, count: int) -> Path:
    """Beginnings of documents, some 30 lines each."""
    long = [d for d in documents if d.text.count("\n") > 60]
    chosen = long[:: max(1, len(long) // count)][:count]
    rows = [
        {"id": Path(d.id).name, "category": "code", "prompt": "\n".join(d.text.split("\n")[:30])[:2000]} for d in chosen
    ]
    names: dict[str, int] = {}
    for row in rows:
        names[row["id"]] = names.get(row["id"], 0) + 1
        if names[row["id"]] > 1:
            row["id"] += f"#{names[row['id']]}"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def bench(args: argparse.Namespace, draft: Path, start: Path, prompts: Path, out: Path) -> dict[str, Any]:
    drafts = [str(draft), str(start), COPIES, f"{COPIES},{draft}", f"{COPIES},{start}"]
    command = [*SLIPSTREAM, "bench", args.target, *(f"--draft={one}" for one in drafts), "-k", args.k]
    command += ["--prompts", str(prompts), "-n", str(args.max_new_tokens), "--repeat", str(args.repeat), "--ignore-eos"]
    command += ["--draft-weights", args.draft_weights, "--out", str(out)]
    subprocess.run(command, check=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def show(record: dict[str, Any], found: dict[str, Any]) -> None:
    print("\n| figure | before | after |\n|---|---|---|")
    for t in ("0", "1"):
        before, after = (interval(record[side]["rate"][t]) for side in ("before", "after"))
        print(f"| acceptance on held-out modules, T = {t} | {before} | {after} |")
    print(f"| draft step / target step | - | {record['costs']['draft_step']:.2f} |")
    for (copies, k), row in speed_ups(found).items():
        title = "speed-up over plain, with copies" if copies else "speed-up over plain"
        print(f"| {title}, k = {k} | " + " | ".join(row.get(side, "-") for side in ("start", "draft")) + " |")
    for (_, k), row in speed_ups(found).items():
        if COPIES in row:
            print(f"| copies alone, k = {k} | {row[COPIES]} | {row[COPIES]} |")


def speed_ups(found: dict[str, Any]) -> dict[tuple[bool, str], dict[str, str]]:
    """By whether there are copies, and k: of what training began from, of the draft, and of copies alone."""
    rows: dict[tuple[bool, str], dict[str, str]] = {}
    for contender in found["contenders"]:
        gain = found["overall"].get(contender["name"], {}).get("speed_up")
        if contender["draft"] and gain is not None:
            parts = contender["draft"].split(",")
            row = rows.setdefault((parts[0] == COPIES, str(contender["k"])), {})
            row[Path(parts[-1]).name] = f"{gain['median']:.2f} [{gain['low']:.2f}, {gain['high']:.2f}]"
    return rows


def interval(given: dict[str, float]) -> str:
    return f"{given['value']:.3f} [{given['low']:.3f}, {given['high']:.3f}]"


if __name__ == "__main__":
    main()
