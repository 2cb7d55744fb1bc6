"""Parameter types of options: lists, fractions, counts and times, each a parser of its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from shapewright.core.units import NATS_FROM_BITS, parse_count, parse_scaled, parse_seconds

if TYPE_CHECKING:
    AnyParam = click.ParamType[Any]
else:  # generic since click 8.4 alone
    AnyParam = click.ParamType


class Parsed(AnyParam):
    """Type of an option whose text is parsed by a function.

    Args:
        name: Name of the type in help pages.
        parse: Parser; it raises a ValueError, KeyError or OverflowError for wrong texts.
        expected: What a text should be, for the message about a wrong one.
    """

    def __init__(self, name: str, parse: Callable[[str], Any], expected: str) -> None:
        self.name = name
        self._parse, self._expected = parse, expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse a text; other values are defaults and stay."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value.strip())
        except (ValueError, KeyError, OverflowError):
            self.fail(f"{value!r} is {self._expected}", param, ctx)


def count_of(things: str) -> Parsed:
    """Type of a count such as ``2.7b`` or ``300000000``."""
    return Parsed("count", parse_count, f"no number of {things} from 0 to less than 1e18, such as 2.7b")


def amount_of(things: str) -> Parsed:
    """Type of an amount, whole or not, such as ``5000``, ``20k`` or ``0.5``."""
    return Parsed("amount", parse_scaled, f"no number of {things} such as 5000 or 20k")


_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_SECONDS_OF_RATE = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
_HOURS_OF_TIME = {"h": 1.0, "d": 24.0}
_SECONDS_OF_BUDGET = {"s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_BUDGET_S = 1e7


def _parse_prices(text: str) -> dict[str, float]:
    """Return prices by name, from ``name=price`` between commas.

    Raises:
        ValueError: a part has no name or no number.
    """
    parts = [part.rpartition("=") for part in text.split(",") if part.strip()]
    if not all(name.strip() for name, _, _ in parts):
        raise ValueError(text)
    return {name.strip(): float(price) for name, _, price in parts}


def _parse_price(text: str) -> float | dict[str, float]:
    return _parse_prices(text) if "=" in text else float(text)


def _parse_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ValueError(text)
    return names


def _parse_rate(text: str) -> float:
    number, _, unit = text.partition("/")
    return float(number) / _SECONDS_OF_RATE[unit.strip()]


def _parse_budget(text: str) -> float:
    seconds = parse_scaled(text, _SECONDS_OF_BUDGET)
    if not 0.0 < seconds < _MOST_BUDGET_S:
        raise ValueError(text)
    return seconds


INTEGERS = Parsed(
    "int,int,...",
    lambda text: tuple(int(part) for part in text.split(",")),
    "not a list of integers such as 4096,0",
)
FLAGS = Parsed(
    "bool,bool,...",
    lambda text: tuple(_FLAGS[part.strip().lower()] for part in text.split(",")),
    "not a list of true and false such as false,true",
)
NAMES = Parsed("name,name,...", _parse_names, "not a list of names such as mamba2,attention")
SHARE = Parsed(
    "share",
    lambda text: float(text[:-1]) / 100.0 if text.endswith("%") else float(text),
    "not a fraction such as 2% or 0.02",
)
SECONDS = Parsed("time", parse_seconds, "not a time such as 300ms, 2s or 0.3")
HOURS = Parsed("hours", lambda text: parse_scaled(text, _HOURS_OF_TIME), "not a time such as 336, 336h or 14d")
NATS = Parsed("nats", float, f"no loss in nats per token such as 2.3; that is {NATS_FROM_BITS}")
BUDGET = Parsed("time", _parse_budget, "not a time such as 90s, 8m or 2h")
PRICE = Parsed("price", _parse_price, "not a price such as 2.5, or NAME=USD,... such as h100-sxm-80gb=2.5,l40s=0.9")
PRICES = Parsed("prices", _parse_prices, "not of the form NAME=USD,..., such as h100-sxm-80gb=2.1")
REQUEST_RATE = Parsed("rate", _parse_rate, "not a rate such as 12/s, 600/min or 0.5")
