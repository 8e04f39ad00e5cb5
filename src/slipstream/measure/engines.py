"""What other engines are known to refuse or to do badly with a pair of models: a dated table, and its conditions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from slipstream.economics import tables
from slipstream.errors import InputError

Severity = Literal["note", "warning", "blocker"]
_SEVERITIES = ("note", "warning", "blocker")


@dataclass(frozen=True)
class Facts:
    """What a condition may ask of a pair."""

    target_rows: int
    draft_rows: int
    tokenizers_differ: bool
    texts_differ_from_5: bool
    """Whether some id from 5 on, which both have, stands for different texts."""
    bos_differs: bool
    can_roll_back: bool
    batch: int
    target_quantised: bool
    draft_quantised: bool


#: Every condition that a table may name.
CONDITIONS: Mapping[str, Callable[[Facts], bool]] = {
    "always": lambda _: True,
    "vocabulary sizes differ": lambda facts: facts.target_rows != facts.draft_rows,
    "vocabulary sizes differ by more than 128": lambda facts: abs(facts.target_rows - facts.draft_rows) > 128,
    "tokenizers differ": lambda facts: facts.tokenizers_differ,
    "token texts differ from id 5 on": lambda facts: facts.texts_differ_from_5,
    "BOS differs": lambda facts: facts.bos_differs,
    "cannot roll back": lambda facts: not facts.can_roll_back,
    "batch above 1": lambda facts: facts.batch > 1,
    "draft not quantised beside a quantised target": lambda f: f.target_quantised and not f.draft_quantised,
}


@dataclass(frozen=True)
class Combination:
    """One row of the table."""

    engine: str
    when: str
    severity: Severity
    what: str
    do: str
    date: str
    """When the source was read."""
    source: str


def read_combinations(path: str | None = None) -> list[Combination]:
    """The table of the package, or another one of the same layout.

    Raises:
        InputError: there is no such file, or it has another layout.
    """
    name = path or "the package's table of engines"
    try:
        own = files("slipstream.data").joinpath("engines.toml")
        text = Path(path).read_text(encoding="utf-8") if path else own.read_text(encoding="utf-8")
        rows = tables(text, "combination")
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read ({error}); give a TOML file with [[combination]] tables") from error
    return [_combination(row, name) for row in rows]


def _combination(row: Mapping[str, Any], where: str) -> Combination:
    try:
        found = Combination(**row)
    except TypeError as error:
        raise InputError(f"a [[combination]] of {where} has other entries than it should ({error})") from None
    wrong = next((entry for entry, value in row.items() if not isinstance(value, str)), None)
    if wrong is not None:
        raise InputError(
            f"a [[combination]] of {where} has {wrong} = {row[wrong]!r}, which is no text; put it in quotes"
        )
    if found.when not in CONDITIONS:
        known = ", ".join(CONDITIONS)
        raise InputError(f"{where} has the condition {found.when!r}, which is not known; use one of: {known}")
    if found.severity not in _SEVERITIES:
        raise InputError(f"{where} has the severity {found.severity!r}; use {', '.join(_SEVERITIES)}")
    return found


def that_apply(facts: Facts, table: list[Combination]) -> list[Combination]:
    """The rows whose condition holds, in the table's order."""
    return [row for row in table if CONDITIONS[row.when](facts)]
