"""Frozen dataclasses as JSON and back, and the JSON Schema of them. The annotations are all there is to say."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from math import isfinite
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slipstream.errors import InputError

_PLAIN: dict[Any, tuple[tuple[type, ...], str, str]] = {
    float: ((int, float), "a number", "number"),
    int: ((int,), "a whole number", "integer"),
    str: ((str,), "a text", "string"),
    bool: ((bool,), "true or false", "boolean"),
}


def to_json(value: Any) -> Any:
    """``value`` in JSON's types, numbers with six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    if is_dataclass(value):
        return {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return value


def from_json(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a ``kind``. Fields that ``kind`` does not have are left out.

    Args:
        kind: a dataclass, or what annotates a field of one.
        value: of JSON's types.
        where: how a message calls ``value``.

    Raises:
        InputError: it is something else.
    """
    if kind is Any:
        return value
    if is_dataclass(kind):
        return _object(kind, value, where)
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        if value not in parts:
            raise InputError(f"{where} is {value!r}; use {' or '.join(map(repr, parts))}")
        return value
    if origin in (Union, types.UnionType):
        some = next(part for part in parts if part is not types.NoneType)
        return None if value is None else from_json(some, value, where)
    if origin is tuple:
        _check(value, (list,), "a list", where)
        return tuple(from_json(parts[0], entry, f"{where}[{i}]") for i, entry in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _check(value, (dict,), "an object", where)
        return {_key(parts[0], key, where): from_json(parts[1], v, f"{where}.{key}") for key, v in value.items()}
    allowed, what, _ = _PLAIN[kind]
    _check(value, allowed, what, where)
    if isinstance(value, bool) and kind is not bool:
        raise InputError(f"{where} is {value!r}, which is not {what}; correct it")
    if kind is float and not isfinite(value):
        raise InputError(f"{where} is {value!r}, which is not a number; correct it")
    return float(value) if kind is float else value


def _object(kind: Any, value: Any, where: str) -> Any:
    _check(value, (dict,), "an object", where)
    hints, given = get_type_hints(kind), {}
    for f in fields(kind):
        if f.name in value:
            given[f.name] = from_json(
                hints[f.name], value[f.name], f"{where}: {f.name}" if ":" not in where else f"{where}.{f.name}"
            )
        elif _needed(f):
            raise InputError(f"{where} has no {f.name!r}; add it")
    return kind(**given)


def _needed(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _check(value: Any, allowed: tuple[type, ...], what: str, where: str) -> None:
    if not isinstance(value, allowed):
        raise InputError(f"{where} is {str(value)[:80]!r}, which is not {what}; correct it")


def _key(kind: Any, key: str, where: str) -> Any:
    if kind is not int:
        return key
    try:
        return int(key)
    except ValueError:
        raise InputError(f"{where} has the key {key!r}, which is not a whole number; correct it") from None


def schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema (2020-12) of ``kind``."""
    definitions: dict[str, Any] = {}
    top = _schema(kind, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **top, "$defs": definitions}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if kind is Any:
        return {}
    if is_dataclass(kind):
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        if name not in definitions:
            definitions[name] = {}
            hints = get_type_hints(kind)
            definitions[name] = {
                "type": "object",
                "description": (kind.__doc__ or "").strip(),
                "properties": {f.name: _schema(hints[f.name], definitions) for f in fields(kind)},
                "required": [f.name for f in fields(kind) if _needed(f)],
            }
        return {"$ref": f"#/$defs/{name}"}
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(p, definitions) if p is not types.NoneType else {"type": "null"} for p in parts]}
    if origin is tuple:
        return {"type": "array", "items": _schema(parts[0], definitions)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(parts[1], definitions)}
    return {"type": _PLAIN[kind][2]}
