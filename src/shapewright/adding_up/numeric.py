"""The larger and the smaller of numbers or of arrays: steps are added up one by one, and a million at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.operations.base import Numeric


def smaller(one: Numeric, other: Numeric) -> Numeric:
    """The smaller of two numbers, or of each pair where one is an array."""
    return -larger(-one, -other)


def larger(one: Numeric, other: Numeric) -> Numeric:
    """The larger of two numbers, or of each pair where one is an array."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)
