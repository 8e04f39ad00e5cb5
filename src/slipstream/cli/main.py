"""``slipstream``: finds a command, and turns every failure that a user can mend into one sentence and an exit code.

Exit codes: 0 done, 1 the model or this program failed, 2 the input cannot be used, 130 interrupted, 141 the reader of
a pipe went away.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from slipstream.errors import InputError, SlipstreamError

#: Name of a command, which is also its module's, and what it does. Adding a command is one file and one line here.
COMMANDS = {
    "acceptance": "Measure how many of a draft's tokens a target would accept, without speculating.",
    "audit": "Test whether an engine's answers follow its target exactly.",
    "bench": "Measure what drafts gain on this machine, beside other engines.",
    "cost": "Tell what a service costs with and without speculation.",
    "costs": "Measure what passes of a model take, by rows and batch.",
    "distill": "Make a better draft model from your own text.",
    "demo": "See it work: one answer on a small real model, plain and then speculative.",
    "doctor": "Tell whether two models can work together, and what memory they need.",
    "export": "Hand a plan to another engine: launch commands, config files, Kubernetes.",
    "generate": "Answer a prompt, speculatively.",
    "models": "List the models in the cache, or fetch one.",
    "monitor": "Watch an engine's acceptance, and tell when it changes.",
    "plan": "Decide whether to speculate, with which draft and how many tokens, and what it brings.",
    "quality": "Compare target, speculation and draft alone on programming problems.",
    "serve": "Serve a model over HTTP, as OpenAI's API has it.",
}


class Commands(click.Group):
    """Imports a command's module when that command is asked for, so that ``--help`` is instant."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"slipstream.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        # Here rather than in main, where click has its own view of broken pipes (exit code 1).
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return _reader_left()

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit."""
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra) or 0
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = error.exit_code
        except click.Abort:
            code = _failed("interrupted", 130)
        except click.UsageError as error:
            code = _failed(f"{error.format_message()} ({_help_hint(error)})", 2)
        except click.ClickException as error:
            code = _failed(error.format_message(), error.exit_code)
        except InputError as error:
            code = _failed(str(error), 2)
        except SlipstreamError as error:
            code = _failed(str(error), 1)
        except BrokenPipeError:
            code = _reader_left()
        except OSError as error:
            code = _broke_off(error)
        sys.exit(code)


def _failed(sentence: str, code: int) -> int:
    # One line, whatever a path or another library's message holds.
    try:
        click.echo(f"slipstream: {' '.join(sentence.split())}", err=True)
    except OSError:  # stderr itself fails: nobody can be told
        _discard_rest(sys.stderr)
        return 1
    return code


def _help_hint(error: click.UsageError) -> str:
    return f"see: {error.ctx.command_path} --help" if error.ctx else "see: slipstream --help"


def _reader_left() -> int:
    _discard_rest(sys.stdout)
    return 141


def _broke_off(error: OSError) -> int:
    """A full disk, a file that went away."""
    what = f" with {error.filename}" if error.filename else ""
    _failed(f"cannot go on{what}: {error.strerror or error}", 1)
    _discard_rest(sys.stdout, sys.stderr)
    return 1


def _discard_rest(*streams: TextIO) -> None:
    # The interpreter flushes them once more as it exits; that must not fail again.
    for stream in streams:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@click.group(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: slipstream demo. Every command has --help with examples.",
)
@click.version_option(package_name="slipstream", prog_name="slipstream")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Make a language model answer faster, without changing what it answers."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    click.echo(f"slipstream: {' '.join(str(message).split())}", err=True)


def _open_closed_streams() -> None:
    """Python has None for a stream that the caller closed, and the next file opened would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (open to the end)


def main() -> NoReturn:
    """The console script."""
    _open_closed_streams()
    warnings.showwarning = _warn
    # What transformers has to say of a config.json is for developers; what cannot be used is refused in our words.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for stream in (sys.stdout, sys.stderr):
        # A model writes emoji also where the terminal's encoding has none.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    raise SystemExit(cli.main(prog_name="slipstream"))
