"""Whole numbers: what is one, and what divides what."""

from __future__ import annotations


def is_whole(value: object, smallest: int, largest: int) -> bool:
    """Whether a value that a caller gave is a whole number in a range; True and False are none.

    >>> is_whole(3, 1, 4), is_whole(3.0, 1, 4), is_whole(True, 1, 4), is_whole("3", 1, 4), is_whole(5, 1, 4)
    (True, False, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and smallest <= value <= largest


def is_number(value: object, smallest: float, largest: float) -> bool:
    """Whether a value that a caller gave is a number in a range, ends included; True and False are none.

    >>> is_number(0.5, 0, 1), is_number(1, 0, 1), is_number("0.5", 0, 1), is_number(float("nan"), 0, 1)
    (True, True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and smallest <= value <= largest


def divisors(value: int) -> tuple[int, ...]:
    """All divisors of a positive number, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [candidate for candidate in range(1, int(value**0.5) + 1) if value % candidate == 0]
    return tuple(sorted({*small, *(value // candidate for candidate in small)}))
