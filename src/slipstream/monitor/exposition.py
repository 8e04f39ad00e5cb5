"""Prometheus' text format, read.

A small reader of its own, so that watching an engine needs no further package; tests hold it against the client
library's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite

from slipstream.errors import SlipstreamError

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One line."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Scrape:
    """A whole answer: samples and help texts by metric name."""

    samples: Mapping[str, tuple[Sample, ...]]
    help: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether there is such a metric, if only in name: a counter that never counted may have no line."""
        return name in self.samples or name in self.help or name.removesuffix("_total") in self.help

    def of(self, name: str) -> tuple[Sample, ...]:
        """The lines of one metric, but for those that say "no number" (NaN), or infinity."""
        return tuple(sample for sample in self.samples.get(name, ()) if isfinite(sample.value))


def parse(text: str) -> Scrape:
    r"""Read a whole answer.

    >>> parse('# HELP a_total What.\na_total{x="1\\"2"} 3 1700000000').of("a_total")
    (Sample(labels={'x': '1"2'}, value=3.0),)

    Raises:
        SlipstreamError: that is no such text.
    """
    samples: dict[str, list[Sample]] = {}
    texts: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip()
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) > 2 and words[1] == "HELP":
                texts[words[2]] = words[3] if len(words) > 3 else ""
            continue
        if line:
            name, sample = _sample(line, number)
            samples.setdefault(name, []).append(sample)
    return Scrape({name: tuple(some) for name, some in samples.items()}, texts)


def _sample(line: str, number: int) -> tuple[str, Sample]:
    found = _NAME.match(line)
    if found is None:
        raise SlipstreamError(f"line {number} of the metrics, {line[:60]!r}, is not in Prometheus' text format")
    rest, labels = line[found.end() :].lstrip(), {}
    if rest.startswith("{"):
        rest = rest[1:]
        while label := _LABEL.match(rest):
            labels[label[1]] = re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), label[2])
            rest = rest[label.end() :]
        rest = rest.lstrip()
        if not rest.startswith("}"):
            raise SlipstreamError(f"line {number} of the metrics has labels that do not end: {line[:60]!r}")
        rest = rest[1:]
    words = rest.split()
    try:
        return found[0], Sample(labels, float(words[0]))
    except (IndexError, ValueError):
        raise SlipstreamError(f"line {number} of the metrics has no value: {line[:60]!r}") from None


def line(name: str, labels: Mapping[str, str], value: float) -> str:
    r"""One line of an answer.

    >>> line("a", {"x": 'q"'}, 2)
    'a{x="q\\""} 2'
    """
    inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{'{' + inner + '}' if inner else ''} {value:.15g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
