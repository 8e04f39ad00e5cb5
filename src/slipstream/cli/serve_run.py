"""What ``serve`` does: load, assemble, listen."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.drafts import EARLY_EXIT, SUFFIX, members
from slipstream.cli.prompt import Prompt
from slipstream.cli.run import Task, check, load_all, open_all
from slipstream.cli.screen import note
from slipstream.cli.serve_around import around_of
from slipstream.errors import InputError
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine import Engine
    from slipstream.serve.renewal import Opened

#: Modules of the extra ``server``.
_NEEDED = ("fastapi", "uvicorn", "pydantic", "llguidance", "prometheus_client")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def run(options: Mapping[str, Any]) -> int:
    """Serve until told to end; the exit code.

    Raises:
        InputError: options or models that cannot be used.
    """
    check_installed()
    tls = _tls(options)
    _check_free(options["host"], options["port"])
    name = options["name"] or Path(options["model"]).name

    from slipstream.serve.around import Surroundings
    from slipstream.serve.gate import loopback_hosts
    from slipstream.serve.logs import set_up, tell
    from slipstream.serve.renewal import Renewal
    from slipstream.serve.run import Binding, serve
    from slipstream.serve.service import Options, Service

    around = around_of(options, name)
    surroundings = Surroundings(around)
    try:
        engine = load_engine(options)
        set_up(sys.stderr, form=options["log_format"], prompts=options["log_prompts"], level=options["log_level"])
        if not around.gate.keys and not loopback_hosts(options["host"]):
            tell("there are no API keys: whoever reaches this port can use it", logging.WARNING)
        allowed = (options["max_tokens"], options["max_n"], options["queue"], options["max_prompt"])
        service = Service(engine, Options(name, *allowed, pace=options["stream_pace"]))
        binding = Binding(options["host"], options["port"], options["drain_seconds"], tls)
        note(f"Serving {name} on {'https' if tls else 'http'}://{binding.host}:{binding.port}/v1")
        surroundings.metrics.runs(target_version(options) | draft_versions(options))
        renewal = Renewal(engine, draft_loader(options, engine), surroundings.metrics)
        return serve(surroundings.surround(service), service, binding, renewal)
    finally:
        surroundings.close()


def check_installed() -> None:
    """Raise InputError if the extra ``server`` is not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InputError(f"`slipstream serve` needs {', '.join(missing)}; run: pip install 'slipstream[server]'")


def load_engine(options: Mapping[str, Any]) -> Engine:
    """The engine, with models loaded.

    Raises:
        InputError: models or limits that cannot be used.
    """
    task = _task(options)
    check(task)
    memory = None if options["memory"] is None else memory_size(options["memory"])
    if task.threads is not None:
        import torch

        torch.set_num_threads(task.threads)
    models = load_all(task, *open_all(task))

    from slipstream.seats import Limits
    from slipstream.speculative import SpeculativeDecoding

    decoding = SpeculativeDecoding(models.target, models.draft, k=task.k, rule=task.rule)
    return decoding.engine(Limits(memory=memory, requests=options["requests"], rows=options["rows"]))


def draft_loader(options: Mapping[str, Any], engine: Engine) -> Callable[[], Opened] | None:
    """What opens the draft of ``engine`` again, as it is on disk by then; None if nothing of it is on disk."""
    task = _task(options)
    named = members(task.draft)
    if task.plain or set(named) == {SUFFIX}:
        return None

    def load() -> Opened:
        from slipstream.drafters import make_drafter
        from slipstream.models.load import Kinds, open_models
        from slipstream.serve.renewal import Opened

        found = draft_versions(options)
        kinds = Kinds(task.weights, task.draft_weights, task.device)
        _, opened = open_models(task.model, task.draft_models, kinds)
        parts = [opened[name].load() if name in opened else name for name in named]
        return Opened(make_drafter(parts if len(parts) > 1 else parts[0], engine.setting.target), found)

    return load


def target_version(options: Mapping[str, Any]) -> dict[str, str]:
    """Of the target as it is on disk."""
    from slipstream.models.load import find
    from slipstream.models.version import version_of

    return {"target_version": version_of(find(options["model"]))}


def draft_versions(options: Mapping[str, Any]) -> dict[str, str]:
    """Of the draft as it is on disk, and of the target that it was distilled for."""
    from slipstream.models.load import find
    from slipstream.models.version import trained_for, version_of

    task = _task(options)
    drafts = [find(name) for name in task.draft_models]
    exits = [] if task.plain else [member for member in members(task.draft) if member.startswith(EARLY_EXIT)]
    drafts += [head for one in exits if (head := Path(one.removeprefix(EARLY_EXIT))).is_dir()]
    return {
        "draft_version": ",".join(filter(None, map(version_of, drafts))),
        "draft_trained_for": next(filter(None, map(trained_for, drafts)), ""),
    }


def _task(options: Mapping[str, Any]) -> Task:
    names = {f.name for f in fields(Task)}
    given = {name: value for name, value in options.items() if name in names}
    return Task(prompt=Prompt("", False, None), params=SamplingParams(), **given)


def memory_size(given: str, option: str = "--memory") -> int:
    """Bytes.

    >>> memory_size("1.5 GB"), memory_size("64MiB"), memory_size("1000")
    (1500000000, 67108864, 1000)

    Raises:
        InputError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?)?B?", given.strip().upper())
    if found is None:
        raise InputError(f"{option} {given!r} is no size; write for example {option} 4GB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def _tls(options: Mapping[str, Any]) -> tuple[str, str] | None:
    files = options["tls_cert"], options["tls_key"]
    if files == (None, None):
        return None
    if None in files:
        raise InputError("--tls-cert and --tls-key belong together; give both")
    for file in files:
        if not Path(file).is_file():
            raise InputError(f"{file!r} is not a file; name certificate and key in PEM format")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(files[0], files[1], _no_password)
    except OSError as error:
        what = f"--tls-cert {files[0]} and --tls-key {files[1]} cannot be used ({error.strerror or error}); "
        raise InputError(f"{what}give a certificate and its key, without a password, in PEM format") from error
    return files[0], files[1]


def _no_password() -> str:
    """What OpenSSL is told instead of asking at the terminal."""
    return ""


def _check_free(host: str, port: int) -> None:
    """Raise InputError if nobody can listen there; before models are loaded."""
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, proto) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot listen on --host {host} --port {port} ({said}); choose others") from error
