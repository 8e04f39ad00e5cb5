"""What a monitor knows, in an SQLite file, so that a restart loses nothing. It does not grow without end."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InputError, SlipstreamError

#: Raised when an older file could not be read any more.
FORMAT = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS service (name TEXT PRIMARY KEY, state TEXT NOT NULL, time REAL NOT NULL);
CREATE TABLE IF NOT EXISTS sample (service TEXT NOT NULL, time REAL NOT NULL, stream TEXT NOT NULL, counts TEXT NOT
NULL); CREATE INDEX IF NOT EXISTS sample_time ON sample (service, time);
CREATE TABLE IF NOT EXISTS alarm (
    id INTEGER PRIMARY KEY, service TEXT NOT NULL, key TEXT NOT NULL, started REAL NOT NULL, ended REAL, body TEXT NOT
    NULL
);
CREATE INDEX IF NOT EXISTS alarm_open ON alarm (service, ended);
CREATE TABLE IF NOT EXISTS delivery (id INTEGER PRIMARY KEY, service TEXT NOT NULL, url TEXT NOT NULL, body TEXT NOT
NULL);
"""
_DAY = 86_400.0
_MOST_DELIVERIES = 1000


@dataclass(frozen=True)
class Kept:
    """For how long, and how much."""

    days: float = 30.0
    samples: int = 200_000
    """Of a service, at most."""


@dataclass(frozen=True)
class Logged:
    """An alarm in the file."""

    id: int
    key: str
    started: float
    ended: float | None
    body: Mapping[str, Any]


class Store:
    """One file; each ``look`` is one transaction.

    Args:
        path: of the file; ``:memory:`` keeps nothing.
        kept: how much of the past stays.

    Raises:
        InputError: it cannot be opened, or is something else.
    """

    def __init__(self, path: str, kept: Kept = Kept()) -> None:
        self._kept = kept
        try:
            if path != ":memory:":
                Path(path).expanduser().parent.mkdir(parents=True, exist_ok=True)
                path = str(Path(path).expanduser())
            self._db = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT):
                raise InputError(f"--state {path!r} is of a newer slipstream; use another file")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version={FORMAT}")
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"--state {path!r} cannot be used ({error}); choose another file") from error

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """All of what is written within, or nothing.

        Raises:
            SlipstreamError: the disk is full, or the file is locked.
        """
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise SlipstreamError(f"the monitor's state cannot be written ({error})") from error
            raise

    def state(self, service: str) -> dict[str, Any] | None:
        """What was known of a service; None if nothing."""
        try:
            row = self._db.execute("SELECT state FROM service WHERE name = ?", (service,)).fetchone()
            return json.loads(row[0]) if row else None
        except (sqlite3.Error, ValueError) as error:
            raise InputError(f"the monitor's state is damaged ({error}); choose another file with --state") from error

    def keep(self, service: str, time: float, state: Mapping[str, Any], samples: Iterable[tuple[str, Any]]) -> None:
        """Replace what is known of a service, and add samples: a stream's name and its counts."""
        self._db.execute(
            "INSERT INTO service VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET state = excluded.state, time = excluded.time",
            (service, json.dumps(state), time),
        )
        rows = [(service, time, stream, json.dumps(counts)) for stream, counts in samples]
        self._db.executemany("INSERT INTO sample VALUES (?, ?, ?, ?)", rows)
        self._prune(service, time)

    def _prune(self, service: str, time: float) -> None:
        oldest = time - self._kept.days * _DAY
        self._db.execute("DELETE FROM sample WHERE service = ? AND time < ?", (service, oldest))
        self._db.execute("DELETE FROM alarm WHERE service = ? AND ended IS NOT NULL AND ended < ?", (service, oldest))
        count = self._db.execute("SELECT count(*) FROM sample WHERE service = ?", (service,)).fetchone()[0]
        if count > self._kept.samples:
            self._db.execute(
                "DELETE FROM sample WHERE rowid IN (SELECT rowid FROM sample WHERE service = ? ORDER BY time LIMIT ?)",
                (service, count - self._kept.samples),
            )

    def samples(self, service: str, since: float = 0.0) -> list[tuple[float, str, dict[str, Any]]]:
        """Time, stream and counts of looks, oldest first."""
        rows = self._db.execute(
            "SELECT time, stream, counts FROM sample WHERE service = ? AND time >= ? ORDER BY time", (service, since)
        )
        return [(time, stream, json.loads(counts)) for time, stream, counts in rows]

    def alarms(self, service: str, *, over: bool = False) -> list[Logged]:
        """Those that go on; with ``over`` all that are kept."""
        rows = self._db.execute(
            "SELECT id, key, started, ended, body FROM alarm WHERE service = ? AND (ended IS NULL OR ?) "
            "ORDER BY started, id",
            (service, over),
        )
        return [Logged(i, key, started, ended, json.loads(body)) for i, key, started, ended, body in rows]

    def raise_alarm(self, service: str, key: str, time: float, body: Mapping[str, Any]) -> None:
        """An alarm begins."""
        self._db.execute(
            "INSERT INTO alarm (service, key, started, body) VALUES (?, ?, ?, ?)",
            (service, key, time, json.dumps(body)),
        )

    def update_alarm(self, alarm: Logged, body: Mapping[str, Any]) -> None:
        """An alarm goes on, with other figures."""
        self._db.execute("UPDATE alarm SET body = ? WHERE id = ?", (json.dumps(body), alarm.id))

    def end_alarm(self, alarm: Logged, time: float) -> None:
        """An alarm is over."""
        self._db.execute("UPDATE alarm SET ended = ? WHERE id = ?", (time, alarm.id))

    def queue(self, service: str, url: str, body: str) -> None:
        """Something to be sent; it stays until ``sent``. The oldest give way to more than a thousand."""
        self._db.execute("INSERT INTO delivery (service, url, body) VALUES (?, ?, ?)", (service, url, body))
        self._db.execute(
            "DELETE FROM delivery WHERE service = ? AND id NOT IN "
            "(SELECT id FROM delivery WHERE service = ? ORDER BY id DESC LIMIT ?)",
            (service, service, _MOST_DELIVERIES),
        )

    def unsent(self, service: str) -> list[tuple[int, str, str]]:
        """Number, address and body of what is still to be sent, oldest first."""
        rows = self._db.execute("SELECT id, url, body FROM delivery WHERE service = ? ORDER BY id", (service,))
        return [(number, url, text) for number, url, text in rows]

    def sent(self, number: int) -> None:
        """It arrived."""
        with self.together():
            self._db.execute("DELETE FROM delivery WHERE id = ?", (number,))
