"""The losses as one would write them on paper: plain numbers, one position, one outcome after the other."""

from __future__ import annotations

from math import log

Row = list[float]


def kl(p: Row, q: Row) -> float:
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def reverse_kl(p: Row, q: Row) -> float:
    return kl(q, p)


def js(p: Row, q: Row) -> float:
    m = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    return kl(p, m) / 2 + kl(q, m) / 2


def tv(p: Row, q: Row) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


def acceptance(p: Row, q: Row) -> float:
    return -log(sum(min(a, b) for a, b in zip(p, q, strict=True)))


def ce(q: Row, token: int) -> float:
    return -log(q[token])


REFERENCES = {"kl": kl, "reverse-kl": reverse_kl, "js": js, "tv": tv, "acceptance": acceptance}
