"""``--config FILE``: every option of ``slipstream serve``, and the API keys, from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from slipstream.errors import InputError

#: What the file may hold beside options.
KEYS = "keys"


@dataclass(frozen=True)
class Config:
    """What a file says."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """By the name of the command's parameter; the command line wins over them."""
    keys: tuple[Any, ...] = ()
    """``[[keys]]`` tables, as they are."""


def read_config(path: str, parameters: Sequence[click.Parameter]) -> Config:
    """Read a file and check that it holds nothing but what ``parameters`` can take.

    Names are those of the options without the leading dashes: ``stream-pace = true``; underscores do as well.

    Raises:
        InputError: the file cannot be read, is no TOML, or has a setting that is unknown or of the wrong type.
    """
    table = _load(path)
    keys = table.pop(KEYS, [])
    if not isinstance(keys, list):
        raise InputError(f"{path}: {KEYS} is no list of tables; write [[{KEYS}]] and name = ..., hash = ... below")
    known = {spelling(parameter): parameter for parameter in parameters if takes_part(parameter)}
    options: dict[str, Any] = {}
    for name, value in table.items():
        parameter = known.get(name.replace("_", "-"))
        if parameter is None or parameter.name is None:
            raise InputError(f"{path} has an unknown setting {name!r}; {_suggestion(name, [*known, KEYS])}")
        if parameter.name in options:
            raise InputError(f"{path} has {spelling(parameter)} twice, with dashes and with underscores; keep one")
        options[parameter.name] = _checked(path, name, value, parameter)
    return Config(path, options, tuple(keys))


def spelling(parameter: click.Parameter) -> str:
    """A parameter's name in a file.

    >>> spelling(click.Option(["--max-queue", "-q"]))
    'max-queue'
    """
    longest = parameter.metavar if isinstance(parameter, click.Argument) else None
    longest = longest or max(parameter.opts, key=len)
    return longest.lstrip("-").lower().replace("_", "-")


def takes_part(parameter: click.Parameter) -> bool:
    """Whether a file may set it: not what prints something and ends, nor the file itself."""
    return parameter.expose_value and not parameter.is_eager


def _load(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror or error}; give a TOML file") from None
    except UnicodeDecodeError:
        raise InputError(f"--config {path} is not UTF-8 text; give a TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {path} is not TOML: {error}; mend that line") from None


def _suggestion(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name.replace("_", "-"), known, n=1)
    return f"did you mean {close[0]!r}?" if close else "`slipstream serve --help` lists what there is"


def _checked(path: str, name: str, value: Any, parameter: click.Parameter) -> Any:
    if getattr(parameter, "multiple", False):
        values = value if isinstance(value, list) else [value]
        return [_one(path, name, item, parameter) for item in values]
    return _one(path, name, value, parameter)


def _one(path: str, name: str, value: Any, parameter: click.Parameter) -> Any:
    """One value, of the type that its option takes; TOML has types, so "8000" is no port and 1 is no switch."""
    kinds, wanted = _kinds(parameter)
    if type(value) not in kinds:
        raise InputError(f"{path}: {name} = {value!r} has the wrong type; give {wanted}")
    try:
        parameter.type.convert(value, parameter, None)
    except click.BadParameter as error:
        raise InputError(f"{path}: {name} = {value!r} cannot be used: {error.message}") from None
    return value


def _kinds(parameter: click.Parameter) -> tuple[tuple[type, ...], str]:
    if getattr(parameter, "is_flag", False):
        return (bool,), "true or false"
    if isinstance(parameter.type, click.types.IntParamType):
        return (int,), "a whole number"
    if isinstance(parameter.type, click.types.FloatParamType):
        return (int, float), "a number"
    if isinstance(parameter.type, (click.types.StringParamType, click.Choice, click.Path)):
        return (str,), "text in quotes"
    return (str, int), "text in quotes or a whole number"
