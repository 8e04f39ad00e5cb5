"""Options of ``slipstream serve`` for what is around the server: keys, limits, logs, captures; what they turn into."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slipstream.cli.options import FiniteRange
from slipstream.errors import InputError
from slipstream.serve.visits import bare

if TYPE_CHECKING:
    from slipstream.serve.around import Around
    from slipstream.serve.capture import CaptureSettings
    from slipstream.serve.gate import GateSettings

Function = TypeVar("Function", bound=Callable[..., Any])

_LOG_FORMATS = ("json", "text")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_COUNT = click.IntRange(1)
#: Defaults of the options about captures, which mean nothing without --capture.
_CAPTURE: dict[str, Any] = {
    "capture_rate": 1.0,
    "capture_size": "1GB",
    "capture_file_size": "64MB",
    "capture_redact": None,
}


_CAPTURE_SIZES = ("capture_file_size", "capture_size")


def _new_key(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    from slipstream.serve.keys import VARIABLE, new_key

    secret, hashed = new_key()
    click.echo(f"key:  {secret}")
    click.echo(f"hash: {hashed}")
    click.echo(
        "\nThe key is for whoever asks, and is shown this once. The hash is for the server: name and hash below\n"
        f"[[keys]] in the file of --config, or {VARIABLE}=NAME={hashed[:14]}...",
        err=True,
    )
    ctx.exit()


def _config(ctx: click.Context, _: click.Parameter, path: str | None) -> Any:
    """What the file says becomes the options' defaults."""
    if path is None or ctx.resilient_parsing:
        return None
    from slipstream.serve.config import read_config

    config = read_config(path, ctx.command.params)
    ctx.default_map = dict(config.options)
    return config


_OPTIONS = (
    click.option(
        "--config", metavar="FILE", is_eager=True, callback=_config, help="A TOML file with any of these options."
    ),
    click.option(
        "--new-key",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_new_key,
        help="Print a new API key and its hash, and end.",
    ),
    click.option("--requests-per-minute", type=_COUNT, metavar="N", help="For each API key; without keys, for all."),
    click.option("--tokens-per-minute", type=_COUNT, metavar="N", help="Of prompts and answers, likewise."),
    click.option("--concurrent", type=_COUNT, metavar="N", help="Requests at a time, likewise."),
    click.option("--max-prompt", type=_COUNT, metavar="N", help="Tokens of a prompt (default: what TARGET reads)."),
    click.option("--max-body", default="4MB", metavar="SIZE", help="Of a request's body (default: 4MB)."),
    click.option("--timeout", type=FiniteRange(0), default=600.0, help="Seconds for an answer (600); 0: no limit."),
    click.option(
        "--cors-origin", multiple=True, metavar="ORIGIN", help="https://name whose pages may ask; repeatable."
    ),
    click.option("--allow-host", multiple=True, metavar="NAME", help="A name that this server goes by; repeatable."),
    click.option("--open-metrics", is_flag=True, help="/metrics needs no API key."),
    click.option("--stream-pace", is_flag=True, help="Spread streamed tokens that came together, for readers."),
    click.option("--log-format", type=click.Choice(_LOG_FORMATS), default="json", help="json (default) or text."),
    click.option("--log-level", type=click.Choice(_LOG_LEVELS), default="info", help="Default: info."),
    click.option("--log-prompts", is_flag=True, help="Log what was asked and answered, too."),
    click.option("--capture", metavar="DIR", help="Keep prompts and answers there, to train drafts with."),
    click.option(
        "--capture-rate",
        default=_CAPTURE["capture_rate"],
        type=FiniteRange(0, 1, min_open=True),
        help="Share of answers to keep (1).",
    ),
    click.option(
        "--capture-size",
        default=_CAPTURE["capture_size"],
        metavar="SIZE",
        help="Of all files; the oldest go (default: 1GB).",
    ),
    click.option(
        "--capture-file-size",
        default=_CAPTURE["capture_file_size"],
        metavar="SIZE",
        help="Of one file (default: 64MB).",
    ),
    click.option("--capture-redact", metavar="MODULE:FUNCTION", help="Changes a record, or drops it, before writing."),
)


def around_options(function: Function) -> Function:
    """Keys, limits, logs, captures."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def around_of(options: Mapping[str, Any], model: str) -> Around:
    """What they ask for.

    Raises:
        InputError: values without a meaning, or keys that cannot be used.
    """
    from slipstream.serve.around import Around

    return Around(_gate(options), _capture(options), options["log_prompts"], model, _bare(options["draft"]))


def _bare(draft: str) -> str:
    """A draft without the folders that it is in, which are nobody's business outside."""
    return ",".join(bare(part) for part in draft.split(","))


def _gate(options: Mapping[str, Any]) -> GateSettings:
    from slipstream.cli.serve_run import memory_size
    from slipstream.serve.gate import GateSettings, loopback_hosts
    from slipstream.serve.keys import KeyRing, keys_of_environment, keys_of_tables
    from slipstream.serve.limits import Allowance

    allowance = Allowance(options["requests_per_minute"], options["tokens_per_minute"], options["concurrent"])
    tables = options["config"].keys if options["config"] is not None else ()
    keys = [*keys_of_tables(tables, allowance), *keys_of_environment(os.environ, allowance)]
    local = loopback_hosts(options["host"])
    if not (body := memory_size(options["max_body"], "--max-body")):
        raise InputError("--max-body 0 lets no request in; give a size such as 4MB")
    return GateSettings(
        keys=KeyRing(keys),
        allowance=allowance,
        body_bytes=body,
        timeout=options["timeout"] or None,
        at_once=options["requests"] + options["queue"],
        hosts=(*local, *map(_host, options["allow_host"])),
        origins=tuple(_origin(origin) for origin in options["cors_origin"]),
        open_metrics=options["open_metrics"],
    )


def _origin(given: str) -> str:
    from urllib.parse import urlsplit

    parts = urlsplit(given.lower())
    if parts.scheme not in ("http", "https") or not parts.netloc or f"{parts.scheme}://{parts.netloc}" != given.lower():
        raise InputError(f"--cors-origin {given!r} is no origin; write https://name or https://name:port")
    return given.lower()


def _host(given: str) -> str:
    """A name as the Host header has it, without the port."""
    if not given or re.search(r"[/\s@]", given) or (":" in given and not re.fullmatch(r"\[[0-9a-fA-F:.]+\]", given)):
        raise InputError(f"--allow-host {given!r} is no name of a host; write name, without a port, or [IPv6 address]")
    return given.lower()


def _capture(options: Mapping[str, Any]) -> CaptureSettings | None:
    from slipstream.cli.serve_run import memory_size
    from slipstream.serve.capture import CaptureSettings

    if options["capture"] is None:
        for name, default in _CAPTURE.items():
            if options[name] != default:
                raise InputError(f"--{name.replace('_', '-')} is about --capture DIR, which is missing; add it")
        return None
    if not options["capture"]:
        raise InputError("--capture '' names no folder; give one")
    one, all_ = (memory_size(options[name], f"--{name.replace('_', '-')}") for name in _CAPTURE_SIZES)
    if not (one and all_):
        raise InputError(
            "--capture-size and --capture-file-size 0 keep nothing; give sizes such as 1GB, or no --capture"
        )
    return CaptureSettings(options["capture"], options["capture_rate"], one, all_, options["capture_redact"])
