"""Checks of types and ranges of values that a user gave, with one form of error message for all packages."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

from shapewright.core.errors import ShapewrightError, short_repr
from shapewright.core.texts import Text

# Powers of two are printed as such from this exponent on.
_MIN_PRINTED_EXPONENT = 30
# Python refuses to read integers of more than 4300 digits; no size needs more than these.
_MOST_DIGITS = 300
_LARGEST_FLOAT = sys.float_info.max


def read_integer(text: str) -> int | None:
    """Return the integer that a text spells in ASCII digits; None if it is anything else, or has too many digits.

    >>> read_integer(" 12 "), read_integer("-3"), read_integer("1_000"), read_integer("9" * 5000)
    (12, -3, None, None)
    """
    digits = text.strip()
    if len(digits) > _MOST_DIGITS or not digits.removeprefix("-").isdecimal() or not digits.isascii():
        return None
    return int(digits)


def whole_number(value: Any) -> Any:
    """Return a float that is a whole number, as 1.5e9 is, as an integer, and other values as they are.

    >>> whole_number(1.5e9), whole_number(1.5), whole_number(None)
    (1500000000, 1.5, None)
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def check_integer(
    name: str, value: object, low: int, high: float = math.inf, *, error: type[ShapewrightError], hint: str = ""
) -> int:
    """Return a value as an int if it is an integer in a range.

    Args:
        name: Name of the field, for the message; a text of ``with_fields`` where it is not the name alone.
        value: The value; integers of NumPy are accepted, True and False are not.
        low: Lower bound, included.
        high: Upper bound, included.
        error: Class of the error to raise.
        hint: What to do, appended to the message.

    Raises:
        ShapewrightError: the value is not an integer in the range; an instance of ``error``.

    >>> check_integer("zero_stage", 4, 0, 3, error=ShapewrightError)
    Traceback (most recent call last):
    shapewright.core.errors.ShapewrightError: zero_stage=4 must be an integer from 0 to 3
    """
    if type(value) is int and low <= value <= high:  # the frequent case, in loops over many layouts
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        allowed = f"of at least {low}" if high == math.inf else f"from {low} to {_format_bound(high)}"
        raise error(_message(name, value, f"an integer {allowed}", hint), field=str(name))
    return number


def check_number(
    name: str,
    value: object,
    low: float,
    high: float = math.inf,
    *,
    error: type[ShapewrightError],
    hint: str = "",
    exclude_low: bool = False,
    exclude_high: bool = False,
) -> float:
    """Return a value if it is a finite number in a range.

    Args:
        name: Name of the field, for the message; a text of ``with_fields`` where it is not the name alone.
        value: The value; True and False are not accepted.
        low: Lower bound.
        high: Upper bound; infinite for none.
        error: Class of the error to raise.
        hint: What to do, appended to the message.
        exclude_low: Whether the lower bound itself is out of range.
        exclude_high: Whether the upper bound itself is out of range.

    Raises:
        ShapewrightError: the value is not a finite number in the range; an instance of ``error``.

    >>> check_number("memory_fraction", 0, 0, 1, exclude_low=True, error=ShapewrightError, hint="0.9 is usual")
    Traceback (most recent call last):
    shapewright.core.errors.ShapewrightError: memory_fraction=0 must be a number above 0 and at most 1; 0.9 is usual
    """
    # Integers that no float can hold are not finite numbers either: dividing them fails.
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_FLOAT:
        is_above = value > low if exclude_low else value >= low
        if is_above and (value < high if exclude_high else value <= high):
            return value
    start = f"above {_format_bound(low)}" if exclude_low else f"from {_format_bound(low)}"
    end = (
        f"below {_format_bound(high)}" if exclude_high else f"{'at most ' if exclude_low else ''}{_format_bound(high)}"
    )
    if high == math.inf:
        allowed = start if exclude_low else f"of at least {_format_bound(low)}"
    else:
        allowed = f"{start} {'and' if exclude_low else 'to'} {end}"
    raise error(_message(name, value, f"a number {allowed}", hint), field=str(name))


def check_text(name: str, value: object, *, error: type[ShapewrightError]) -> str:
    """Return a value if it is text.

    Args:
        name: Name of the field, for the message.
        error: Class of the error to raise.

    Raises:
        ShapewrightError: the value is something else; an instance of ``error``.
    """
    if isinstance(value, str):
        return value
    raise error(_message(name, value, "text", ""), field=str(name))


def _message(name: str, value: object, allowed: str, hint: str) -> str:
    fact = Text(name, f"={short_repr(value)} must be {allowed}")
    return Text(fact, "; ", hint) if hint else fact


def _format_bound(bound: float) -> str:
    if isinstance(bound, int):
        exponent = bound.bit_length() - 1
        if bound.bit_count() == 1 and exponent >= _MIN_PRINTED_EXPONENT:
            return f"2**{exponent}"
        short = f"{bound:g}"  # such as 1e+14
        return short if int(float(short)) == bound else str(bound)
    return f"{bound:g}"
