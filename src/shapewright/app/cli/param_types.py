"""Parameter types of options: lists, fractions, counts and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shapewright.core.units import parse_count, parse_seconds

if TYPE_CHECKING:
    AnyParam = click.ParamType[Any]
    FloatParam = click.ParamType[float]
else:  # generic since click 8.4 alone
    AnyParam = FloatParam = click.ParamType


class IntegerList(AnyParam):
    """Comma-separated integers, such as ``4096,0``."""

    name = "int,int,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text into a tuple."""
        try:
            return tuple(int(part) for part in value.split(",")) if isinstance(value, str) else value
        except ValueError:
            self.fail(f"{value!r} is not a list of integers such as 4096,0", param, ctx)


class FlagList(AnyParam):
    """Comma-separated booleans, such as ``false,true``."""

    name = "bool,bool,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text into a tuple."""
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if not isinstance(value, str):
            return value
        parts = [part.strip().lower() for part in value.split(",")]
        if any(part not in words for part in parts):
            self.fail(f"{value!r} is not a list of true and false such as false,true", param, ctx)
        return tuple(words[part] for part in parts)


class NameList(AnyParam):
    """Comma-separated names, such as ``mamba2,attention``."""

    name = "name,name,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text into a tuple."""
        if not isinstance(value, str):
            return value
        parts = tuple(part.strip() for part in value.split(","))
        if not all(parts):
            self.fail(f"{value!r} is not a list of names such as mamba2,attention", param, ctx)
        return parts


class Share(AnyParam):
    """A fraction such as ``2%`` or ``0.02``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text into a fraction."""
        if not isinstance(value, str):
            return value
        try:
            text = value.strip()
            return float(text[:-1]) / 100.0 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is not a fraction such as 2% or 0.02", param, ctx)


class Count(AnyParam):
    """A count such as ``2.7b`` or ``300000000``.

    Args:
        things: What is counted, for messages.
    """

    name = "count"

    def __init__(self, things: str) -> None:
        self._things = things

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text into an integer."""
        if not isinstance(value, str):
            return value
        try:
            return parse_count(value)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no number of {self._things}, such as 2.7b", param, ctx)


class Seconds(AnyParam):
    """A duration, such as ``300ms``, ``2s`` or ``0.3``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text into seconds."""
        if not isinstance(value, str):
            return value
        try:
            return parse_seconds(value)
        except ValueError:
            self.fail(f"{value!r} is not a time such as 300ms, 2s or 0.3", param, ctx)


class RequestRate(FloatParam):
    """Requests per second, such as ``12/s``, ``600/min`` or ``12``."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the text into requests per second."""
        if not isinstance(value, str):
            return float(value)
        number, _, unit = value.strip().partition("/")
        seconds = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}
        try:
            return float(number) / seconds[unit.strip()]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not a rate such as 12/s, 600/min or 0.5", param, ctx)
