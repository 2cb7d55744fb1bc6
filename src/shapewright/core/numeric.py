"""Arithmetic for scalars and arrays alike, so that a formula is written once for one shape and for millions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Count = int | NDArray[np.integer[Any]] | NDArray[np.floating[Any]]
    Numeric = float | NDArray[np.floating[Any]]


@overload
def minimum(left: int, right: int) -> int: ...


@overload
def minimum(left: float, right: float) -> float: ...


@overload
def minimum(left: Numeric, right: Numeric) -> Numeric: ...


def minimum(left: Numeric, right: Numeric) -> Numeric:
    """Return the smaller of two numbers, elementwise if either is an array."""
    return -maximum(-left, -right)


@overload
def maximum(left: int, right: int) -> int: ...


@overload
def maximum(left: float, right: float) -> float: ...


@overload
def maximum(left: Numeric, right: Numeric) -> Numeric: ...


def maximum(left: Numeric, right: Numeric) -> Numeric:
    """Return the larger of two numbers, elementwise if either is an array."""
    if not (hasattr(left, "__array__") or hasattr(right, "__array__")):  # traced sizes of a search are numbers too
        return max(left, right)
    import numpy as np  # imported here, because scalar code must not wait for NumPy

    return np.maximum(left, right)


def largest(count: Any) -> int:
    """Return the largest number of an array; a single number, which may be traced, is returned as it is."""
    found: int = count.max() if hasattr(count, "__array__") else count
    return found


def ceil_div(amount: int, parts: int) -> int:
    """Return the largest share when an amount is split into integer parts.

    >>> ceil_div(7, 2)
    4
    """
    return -(-amount // parts)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least a value.

    >>> round_up(50257, 64), round_up(64, 64)
    (50304, 64)
    """
    return -(-value // multiple) * multiple


def divisors(value: int) -> tuple[int, ...]:
    """Return all divisors of a positive integer, in ascending order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [candidate for candidate in range(1, int(value**0.5) + 1) if value % candidate == 0]
    return tuple(sorted({*small, *(value // candidate for candidate in small)}))


def values_beside(wanted: int, allowed: Sequence[int]) -> str:
    """Format the allowed values next below and next above a wanted one.

    Args:
        allowed: In ascending order.

    >>> values_beside(6, [1, 2, 4, 8, 16])
    '4 or 8'
    """
    below = [value for value in allowed if value < wanted][-1:]
    above = [value for value in allowed if value > wanted][:1]
    return " or ".join(str(value) for value in below + above)
