"""Whole numbers: what divides what."""

from __future__ import annotations


def divisors(value: int) -> tuple[int, ...]:
    """All divisors of a positive number, in order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [candidate for candidate in range(1, int(value**0.5) + 1) if value % candidate == 0]
    return tuple(sorted({*small, *(value // candidate for candidate in small)}))
