"""API keys, of which a server knows hashes only.

A key is 32 random bytes, so that its SHA-256 tells nothing of it and a slow password hash would add nothing. What
people make up themselves is not safe this way; ``new_key`` makes keys.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any

from slipstream.errors import InputError
from slipstream.serve.limits import Allowance

#: ``name=sha256:...`` entries, with commas or spaces between them.
VARIABLE = "SLIPSTREAM_API_KEYS"
_PREFIX = "sk-slipstream-"
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Key:
    """Who may ask, and how much."""

    name: str
    """What logs and metrics call it."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key, 32 bytes."""
    allowance: Allowance = field(default_factory=Allowance)


def new_key() -> tuple[str, str]:
    """A fresh key for the one who asks, and its hash for the server."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    return secret, hash_of(secret)


def hash_of(secret: str) -> str:
    """What a configuration holds of a key.

    >>> hash_of("not a good key")[:20]
    'sha256:ae7910d10e9ce'
    """
    return f"sha256:{sha256(secret.encode()).hexdigest()}"


class KeyRing:
    """The keys of a server; without any, everybody may ask."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self.keys = tuple(keys)
        names = [key.name for key in self.keys]
        for name in names:
            if names.count(name) > 1:
                raise InputError(f"two API keys are called {name!r}; give each a name of its own")
        if len({key.digest for key in self.keys}) < len(names):
            raise InputError("two API keys have the same hash; make a key for each with `slipstream serve --new-key`")

    def __bool__(self) -> bool:
        return bool(self.keys)

    def find(self, secret: bytes) -> Key | None:
        """The key that ``secret`` is; how long that takes tells nothing of any hash."""
        given, found = sha256(secret).digest(), None
        for key in self.keys:  # to the end, whichever matches
            if hmac.compare_digest(given, key.digest):
                found = key
        return found


def bearer(header: bytes | None) -> bytes | None:
    """The token of an Authorization header; None if there is none."""
    scheme, _, token = (header or b"").strip().partition(b" ")
    return token.strip() or None if scheme.lower() == b"bearer" else None


def keys_of_environment(environment: Mapping[str, str], default: Allowance) -> list[Key]:
    """Keys of the variable ``SLIPSTREAM_API_KEYS``.

    Raises:
        InputError: an entry that is no ``name=sha256:...``; what it holds is not repeated, since it may be a key.
    """
    keys = []
    for number, entry in enumerate(re.split(r"[\s,]+", environment.get(VARIABLE, "").strip()), 1):
        if entry:
            name, _, hashed = entry.partition("=")
            keys.append(_key({"name": name, "hash": hashed}, f"entry {number} of {VARIABLE}", default))
    return keys


def keys_of_tables(tables: Sequence[Any], default: Allowance) -> list[Key]:
    """Keys of a configuration's ``[[keys]]`` tables; limits that a table lacks are those of ``default``.

    Raises:
        InputError: a name, hash or limit that cannot be used, or something else in a table.
    """
    return [_key(table, f"[[keys]] number {number}", default) for number, table in enumerate(tables, 1)]


def _key(table: Any, where: str, default: Allowance) -> Key:
    if not isinstance(table, Mapping):
        raise InputError(f"{where} is no table; write name = ... and hash = ... below [[keys]]")
    limits = [limit.name for limit in fields(Allowance)]
    for name in table:
        if name not in ("name", "hash", *limits):
            raise InputError(f"{where} has an unknown setting {name!r}; use name, hash, {', '.join(limits)}")
    name, hashed = table.get("name"), table.get("hash")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(f"{where} has no usable name; use up to 64 letters, digits, dots, dashes and underscores")
    match = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
    if match is None:
        raise InputError(
            f"{where} has no hash of the form sha256: and 64 hexadecimal digits; "
            "make one with `slipstream serve --new-key`, and never write the key itself there"
        )
    given = {limit: table.get(limit, getattr(default, limit)) for limit in limits}
    for limit, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{where} ({name}): {limit} = {value!r} is no limit; give a whole number from 1 on")
    return Key(name, bytes.fromhex(match[1]), Allowance(**given))
