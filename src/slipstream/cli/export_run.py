"""What ``export`` does: read the plan, choose, write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from slipstream.errors import InputError
from slipstream.export.kubernetes import Cluster, check_name, check_storage, objects
from slipstream.export.types import Export, Target
from slipstream.export.write import EXPORTERS, SCRIPT, documents, words
from slipstream.fields import to_json
from slipstream.measure.files import write_whole
from slipstream.plan import Plan, load

#: Raised when a reader of the document would have to change.
FORMAT = 1


@dataclass(frozen=True)
class ExportTask:
    """One call of ``export``, as the user put it."""

    plan: str
    engine: str
    out: str
    version: str | None = None
    target: str | None = None
    draft: str | None = None
    target_revision: str | None = None
    draft_revision: str | None = None
    tensor_parallel: int = 1
    memory_share: float | None = None
    max_requests: int | None = None
    copies: str = "ngram"
    port: int | None = None
    kubernetes: bool = False
    replicas: int = 2
    max_replicas: int | None = None
    nodes: int = 1
    name: str = "llm"
    image: str | None = None
    storage: str = "200Gi"
    force: bool = False
    as_json: bool = False


def run(task: ExportTask) -> int:
    """Do it; the exit code."""
    check(task)
    plan = load(task.plan)
    export = EXPORTERS[task.engine](plan, _target(task))
    files = documents(plan, export)
    files["plan.json"] = json.dumps(to_json(renamed(plan, task)), indent=1) + "\n"
    if task.kubernetes:
        files |= objects(plan, export, _cluster(task))
    _write(Path(task.out), files)
    _tell(task, export, files)
    return 0


def renamed(plan: Plan, task: ExportTask) -> Plan:
    """The plan with its models called as they are there, for `slipstream monitor --plan`."""
    if task.target:
        plan = replace(plan, target=replace(plan.target, model=task.target))
    if task.draft is None:
        return plan
    drafts = [
        replace(d, members=tuple(replace(m, model=task.draft if m.model else None) for m in d.members))
        if d.name == plan.verdict.draft
        else d
        for d in plan.drafts
    ]
    return replace(plan, drafts=tuple(drafts))


def check(task: ExportTask) -> None:
    """Refuse what cannot work, before anything is written."""
    for name, value, least, most in (
        ("--tensor-parallel", task.tensor_parallel, 1, 1024),
        ("--memory-share", task.memory_share, 0.05, 1),
        ("--max-requests", task.max_requests, 1, 65_536),
        ("--port", task.port, 1, 65_535),
        ("--replicas", task.replicas, 1, 10_000),
        ("--max-replicas", task.max_replicas, task.replicas, 10_000),
        ("--nodes", task.nodes, 1, 1024),
    ):
        if value is not None and not least <= value <= most:
            raise InputError(f"{name} {value} is not usable; use a number from {least} to {most}")
    if task.nodes > 1 and task.tensor_parallel % task.nodes:
        raise InputError(
            f"--tensor-parallel {task.tensor_parallel} does not divide into {task.nodes} machines; use a multiple"
        )
    check_name(task.name)
    check_storage(task.storage)
    out = Path(task.out)
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {task.out!r} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not task.force:
        raise InputError(f"--out {task.out!r} is not empty; choose another folder, or overwrite with --force")


def _target(task: ExportTask) -> Target:
    return Target(
        version=task.version,
        target=task.target,
        draft=task.draft,
        target_revision=task.target_revision,
        draft_revision=task.draft_revision,
        tensor_parallel=task.tensor_parallel,
        memory_share=task.memory_share,
        max_requests=task.max_requests,
        copies=task.copies,
        port=task.port,
    )


def _cluster(task: ExportTask) -> Cluster:
    return Cluster(
        name=task.name,
        replicas=task.replicas,
        max_replicas=task.max_replicas or 4 * task.replicas,
        nodes=task.nodes,
        accelerators=task.tensor_parallel,
        image=task.image,
        storage=task.storage,
        target_revision=task.target_revision or "main",
        draft_revision=task.draft_revision or "main",
    )


def _write(out: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda partial, text=text: partial.write_text(text, encoding="utf-8"))  # type: ignore[misc]
    script = out / SCRIPT
    script.chmod(script.stat().st_mode | 0o111)


def _tell(task: ExportTask, export: Export, files: Mapping[str, str]) -> None:
    if task.as_json:
        document = {
            "format": FORMAT,
            "kind": "slipstream export",
            "engine": export.engine,
            "version": export.version,
            "checked": export.checked,
            "command": words(export, task.out),
            "choices": [asdict(argument) for argument in export.arguments],
            "notes": export.notes,
            "warnings": export.warnings,
            "files": sorted(files),
        }
        click.echo(json.dumps(document))
        return
    click.echo(
        f"{export.engine} {export.version}: {len(files)} files in {task.out}; start with: sh {task.out}/{SCRIPT}"
    )
    for warning in export.warnings:
        click.echo(f"Warning: {warning}.")
    for note in export.notes:
        click.echo(f"Note: {note}.")
