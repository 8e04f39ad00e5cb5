"""Money: what a service costs with and without speculation, what is saved, and what that depends on. Arithmetic only.

A server is whatever a price per hour buys. Every figure says how it was obtained: ``measured here``, ``predicted from``
what, or ``assumed``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from math import ceil, floor, inf
from pathlib import Path
from typing import Any

from slipstream.errors import InputError

HOURS_A_MONTH = 730.0
_SECONDS_A_DAY = 86_400.0
#: A need of 2 + 1e-10 servers is a rounding error.
_ROUNDING = 1e-9
#: An input is varied by this share for the tornado.
SWING = 0.2


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from."""

    value: float
    how: str
    """Begins with "measured", "predicted from" or "assumed"."""


#: No input of a service is smaller or larger; what is added up from such inputs is finite.
_LEAST, _MOST = 1e-9, 1e15
_POSITIVE = ("requests_a_day", "tokens_a_request", "price", "plain_tokens_a_second", "speed_up", "untrained_speed_up")


@dataclass(frozen=True)
class Service:
    """A load and what serves it."""

    requests_a_day: float
    tokens_a_request: float
    price: float
    """Dollars per server-hour."""
    plain_tokens_a_second: float
    """Throughput of one server without speculation."""
    speed_up: float
    """Throughput with speculation / without, with the trained draft if one is trained."""
    untrained_speed_up: float = 1.0
    """The same with what there is without training: another draft, or plain decoding."""
    utilisation: float = 1.0
    """Share of a server's throughput that is planned to be used, so that peaks find room."""
    spare: int = 0
    """Servers beyond need, for when one fails."""
    training: float = 0.0
    """Dollars to train the draft once."""
    retraining_months: float | None = None
    """Months after which it is trained again; None: never."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not _LEAST <= (given := getattr(self, name)) <= _MOST:
                wanted = "a number above 0" if not given >= _LEAST else f"at most {_MOST:g}"
                raise InputError(f"{name.replace('_', ' ')} is {given:g}; use {wanted}")
        if not _LEAST <= self.utilisation <= 1:
            raise InputError(f"a utilisation of {self.utilisation:g} is no share; use a number above 0, at most 1")
        if not 0 <= self.spare <= _MOST:
            raise InputError(f"{self.spare} spare servers are not possible; use 0 or more")
        check_dollars("the training of the draft", self.training)
        if self.retraining_months is not None and not _LEAST <= self.retraining_months <= _MOST:
            raise InputError(f"retraining every {self.retraining_months:g} months is not possible; use more than 0")

    @property
    def tokens_a_second(self) -> float:
        """The load, averaged over the day."""
        return self.requests_a_day * self.tokens_a_request / _SECONDS_A_DAY

    def needed(self, speed_up: float) -> float:
        """Servers that the load needs at a ``speed_up``, as a fraction."""
        return self.tokens_a_second / (self.plain_tokens_a_second * speed_up * self.utilisation)

    def servers(self, speed_up: float) -> int:
        """Whole servers, the spare ones included."""
        return max(1, ceil(self.needed(speed_up) - _ROUNDING)) + self.spare


def check_dollars(what: str, price: float) -> None:
    """Refuse what is no price.

    Raises:
        InputError: it is negative, not a number, or beyond all bounds.
    """
    if not 0 <= price <= _MOST:
        raise InputError(f"{what} cannot cost {price:g} dollars; use 0 or more, at most {_MOST:g}")


@dataclass(frozen=True)
class Bill:
    """What one way of serving costs, in dollars; ``a_month`` without training."""

    servers: int
    needed: float
    """Before rounding up and without spare servers."""
    an_hour: float
    a_month: float
    a_million_tokens: float


@dataclass(frozen=True)
class Verdict:
    """Both bills and what is between them."""

    plain: Bill
    untrained: Bill
    speculative: Bill
    saved_an_hour: float
    """Of plain's server costs."""
    saved_a_month: float
    training_a_month: float
    """Training, spread over the months until it is done again; 0 if it is done once."""
    net_a_month: float
    payback_days: float | None
    """Until training has paid for itself by what it saves beyond the untrained draft; None if it never does."""
    break_even_speed_up: float | None
    """From which speculation saves more than retraining costs; None if no speed-up does."""


def bill(service: Service, speed_up: float) -> Bill:
    """The costs at a ``speed_up``; 1 is plain decoding."""
    servers = service.servers(speed_up)
    an_hour = servers * service.price
    tokens_an_hour = service.tokens_a_second * 3600
    return Bill(
        servers=servers,
        needed=service.needed(speed_up),
        an_hour=an_hour,
        a_month=an_hour * HOURS_A_MONTH,
        a_million_tokens=an_hour / tokens_an_hour * 1e6,
    )


def verdict(service: Service) -> Verdict:
    """What speculation saves."""
    plain, fast = bill(service, 1.0), bill(service, service.speed_up)
    untrained = bill(service, service.untrained_speed_up)
    saved = plain.an_hour - fast.an_hour
    training = _training_a_month(service)
    return Verdict(
        plain=plain,
        untrained=untrained,
        speculative=fast,
        saved_an_hour=saved,
        saved_a_month=saved * HOURS_A_MONTH,
        training_a_month=training,
        net_a_month=saved * HOURS_A_MONTH - training,
        payback_days=payback_days(service.training, untrained.an_hour - fast.an_hour),
        break_even_speed_up=break_even_speed_up(service),
    )


def payback_days(training: float, saved_an_hour: float) -> float | None:
    """Days until ``saved_an_hour`` has paid for ``training``; None if it never does.

    >>> payback_days(600, 10.0)
    2.5
    """
    if training == 0:
        return 0.0
    return training / (saved_an_hour * 24) if saved_an_hour > 0 else None


def break_even_speed_up(service: Service) -> float | None:
    """The lowest speed-up at which fewer servers save more than retraining costs; None if not even one server does."""
    # Strictly more must be saved than retraining costs, so at least one server less, and one more than it is worth.
    fewer = floor(_training_a_month(service) / (service.price * HOURS_A_MONTH)) + 1
    left = service.servers(1.0) - service.spare - fewer
    return service.needed(1.0) / left if left > 0 else None


def _training_a_month(service: Service) -> float:
    return service.training / service.retraining_months if service.retraining_months else 0.0


def throughput_for(servers: int, requests_a_day: float, tokens_a_request: float, utilisation: float) -> float:
    """The throughput of one server if ``servers`` are just fully used by this load."""
    if servers < 1:
        raise InputError(f"{servers} servers serve nobody; use 1 or more")
    return requests_a_day * tokens_a_request / _SECONDS_A_DAY / servers / utilisation


@dataclass(frozen=True)
class Swing:
    """What happens to net savings a month if one input is lower or higher."""

    name: str
    low: float
    high: float
    """The input's values."""
    net_low: float
    net_high: float
    base: float
    """Net savings a month with the input as it is."""

    @property
    def width(self) -> float:
        """How much is at stake."""
        nets = (self.net_low, self.base, self.net_high)
        return max(nets) - min(nets)


_VARIED = (
    ("speed-up", "speed_up"),
    ("requests a day", "requests_a_day"),
    ("tokens a request", "tokens_a_request"),
    ("price an hour", "price"),
    ("tokens a second, plain", "plain_tokens_a_second"),
    ("utilisation", "utilisation"),
    ("training", "training"),
)


def tornado(service: Service, swing: float = SWING) -> list[Swing]:
    """Net savings a month with each input lower and higher by ``swing``, those that matter most first.

    Whole servers, as they are paid: an input may not matter at all, or by a whole server.
    """
    found, base = [], verdict(service).net_a_month
    for name, field in _VARIED:
        value = getattr(service, field)
        low, high = value * (1 - swing), value * (1 + swing)
        if field == "utilisation":
            high = min(high, 1.0)
        net_low, net_high = (verdict(replace(service, **{field: v})).net_a_month for v in (low, high))
        found.append(Swing(name, low, high, net_low, net_high, base))
    return sorted(found, key=lambda s: -s.width)


# --- prices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Price:
    """One line of the price table."""

    name: str
    what: str
    dollars: float
    """Per server-hour."""
    date: str
    source: str


def read_prices(path: str | None = None) -> dict[str, Price]:
    """The price table of the package, or another one of the same layout.

    Raises:
        InputError: there is no such file, or it has another layout.
    """
    name = path or "the package's price table"
    try:
        text = Path(path).read_text(encoding="utf-8") if path else _own("prices.toml")
        rows = tables(text, "server")
    except (OSError, ValueError) as error:
        raise InputError(f"{name} cannot be read ({error}); give a TOML file with [[server]] tables") from error
    return {row.name: row for row in (_price(row, name) for row in rows)}


def tables(text: str, name: str) -> list[Mapping[str, Any]]:
    """The ``[[name]]`` tables of a TOML text.

    Raises:
        ValueError: it is no TOML, has none of them, or something else under this name.
    """
    found = tomllib.loads(text).get(name)
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise ValueError(f"it has no [[{name}]] tables")
    return found


def _own(file: str) -> str:
    return files("slipstream.data").joinpath(file).read_text(encoding="utf-8")


def _price(row: Mapping[str, Any], where: str) -> Price:
    try:
        found = Price(**{key: str(row[key]) for key in ("name", "what", "date", "source")}, dollars=row["dollars"])
    except KeyError as error:
        raise InputError(f"a [[server]] of {where} has no {error.args[0]}; add it") from None
    number = isinstance(found.dollars, int | float) and not isinstance(found.dollars, bool)
    if not number or not 0 < found.dollars < inf:
        raise InputError(f"the price of {found.name} in {where} is {found.dollars!r}; use dollars above 0")
    return found


def find_price(prices: Mapping[str, Price], name: str) -> Price:
    """One of ``prices``.

    Raises:
        InputError: there is none of this name.
    """
    if name not in prices:
        raise InputError(f"--server {name!r} is not in the price table; use one of {', '.join(prices)}, or --price")
    return prices[name]
