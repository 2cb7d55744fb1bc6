"""Alignment: the largest power of two of bytes that every row of an operand starts at.

Matrix units are fed by wide loads (16 bytes a thread on NVIDIA from Volta on, whole 128-byte lines by Hopper's bulk
copies). A row length that is no multiple of the width forces a kernel with narrower loads. Which row length counts
is a matter of memory layout: only contiguous dimensions do (operations.gemm.contiguous_dims).

What a tile loses is the share of its time that narrow loads add. Loading and issuing take cycles of an SM, as many
whatever its multipliers do meanwhile, so that the share follows how much faster or slower those are elsewhere
(carried_factors; docs/decisions/0003-gemm-calibration.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from shapewright.operations.gemm import contiguous_dims

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.operations.base import Count, Numeric

    Letters = Mapping[str, bool | NDArray[np.bool_]]

# Beyond a whole cache line nothing is gained. [byte] Source: 128-byte lines of every NVIDIA GPU since Fermi.
LARGEST_ALIGNMENT_BYTES = 128
ALIGNMENT_CLASSES_BYTES = (1, 2, 4, 8, 16, 32, 64, 128)
LAST_CLASS = len(ALIGNMENT_CLASSES_BYTES) - 1
# Width of the widest load of a thread: rows of this alignment are loaded as any other. [byte]
WIDEST_LOAD_BYTES = 16
WIDTH_MASK = 8 * LARGEST_ALIGNMENT_BYTES - 1
"""Lowest bits of a number of elements, which decide its class whatever an element's width is."""


def alignment_bytes(dim: Count | Numeric, element_bits: int) -> NDArray[np.int64]:
    """Largest power of two, at most 128, that divides the bytes of ``dim`` elements.

    >>> [int(alignment_bytes(width, 16)) for width in (4096, 4097, 50257, 80, 10922)]
    [128, 2, 2, 32, 4]
    """
    row_bits = np.asarray(dim, dtype=np.int64) * element_bits
    lowest_bit = row_bits & -row_bits
    aligned: NDArray[np.int64] = np.minimum(np.maximum(lowest_bit // 8, 1), LARGEST_ALIGNMENT_BYTES)
    return aligned


def alignment_class(align_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index into ALIGNMENT_CLASSES_BYTES.

    >>> alignment_class(np.array([1, 16, 128])).tolist()
    [0, 4, 7]
    """
    return np.log2(align_bytes).astype(np.int64)


def carried_factors(factors: NDArray[np.float64], rate_ratio: float) -> NDArray[np.float64]:
    """Rate factors of another SM, from those of a lender's.

        1 / factor = 1 + (1 / lender's factor - 1) * rate ratio        below the widest load, others as they are

    Args:
        factors: A lender's, by alignment class along the last axis.
        rate_ratio: What a busy SM multiplies in a clock, the device's over the lender's.

    >>> carried_factors(np.array([[0.5] * 4 + [0.9] * 4]), 2.0).round(3).tolist()
    [[0.333, 0.333, 0.333, 0.333, 0.9, 0.9, 0.9, 0.9]]
    """
    is_narrow = np.array(ALIGNMENT_CLASSES_BYTES) < WIDEST_LOAD_BYTES
    carried: NDArray[np.float64] = np.where(is_narrow, 1.0 / (1.0 + (1.0 / factors - 1.0) * rate_ratio), factors)
    return carried


@cache
def classes_of_widths(element_bits: int) -> NDArray[np.int64]:
    """Alignment class of every width of 0 to WIDTH_MASK elements; larger ones are those of their lowest bits.

    >>> [int(classes_of_widths(16)[width & WIDTH_MASK]) for width in (4096, 4097, 50257, 80, 10922)]
    [7, 1, 1, 5, 2]
    """
    widths = np.arange(WIDTH_MASK + 1)
    widths[0] = WIDTH_MASK + 1
    return alignment_class(alignment_bytes(widths, element_bits))


def contiguous_letters(layout: str | Sequence[str]) -> Letters:
    """Dimensions that are contiguous in some operand.

    Args:
        layout: How A and B lie in memory; one for all products, or one for each.

    Returns:
        By letter: True, or for which of many products.

    >>> contiguous_letters("NT")
    {'k': True, 'n': True}
    """
    if isinstance(layout, str):
        return dict.fromkeys(sorted(set(contiguous_dims(layout))), True)
    of_layout = {name: contiguous_dims(name) for name in set(layout)}
    letters = sorted({letter for dims in of_layout.values() for letter in dims})
    return {
        letter: all(letter in dims for dims in of_layout.values())
        or np.array([letter in of_layout[name] for name in layout])
        for letter in letters
    }
