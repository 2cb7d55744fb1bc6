"""Alignment: the largest power of two of bytes that divides every row length of an operand.

Matrix units are fed by wide loads (16 bytes per thread on NVIDIA since Volta, whole 128-byte lines by Hopper's bulk
copies). A row length that is not a multiple of the load width forces a kernel with narrower loads. Only contiguous
dimensions count (operations.gemm.contiguous_dims).

A poorly aligned tile loses the fraction of its time that narrow loads add. Loading and issuing take cycles of an SM
regardless of its multiplier rate, so the loss scales with that rate on other SMs (transfer_alignment_factors;
docs/decisions/0016).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from shapewright.lowering.operations.gemm import contiguous_dims

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.typing import NDArray

    from shapewright.core.numeric import Count, Numeric

    Letters = Mapping[str, bool | NDArray[np.bool_]]

    AnyInt = Int[np.ndarray, "..."]
    PerClass = Float[np.ndarray, "... classes"]

# Alignment beyond a whole cache line has no effect. [byte] Source: 128-byte lines of every NVIDIA GPU since Fermi.
LARGEST_ALIGNMENT_BYTES = 128
ALIGNMENT_CLASSES_BYTES = (1, 2, 4, 8, 16, 32, 64, 128)
LAST_CLASS = len(ALIGNMENT_CLASSES_BYTES) - 1
# Width of the widest load of a thread: rows with this alignment need no narrow loads. [byte]
WIDEST_LOAD_BYTES = 16
ROLES = ("contracted", "free", "contracted_batched", "free_batched")
"""Roles of a contiguous dimension, in the order of GemmParameters.alignment_factor: of a single GEMM, then of a
batch, for which libraries use other kernels (on A100 an odd contraction length costs a batch much less).
"""
WIDTH_MASK = 8 * LARGEST_ALIGNMENT_BYTES - 1
"""Mask of the lowest bits of a number of elements, which decide its alignment class for any element width."""


def alignment_bytes(dim: Count | Numeric, element_bits: int) -> AnyInt:
    """Largest power of two, at most 128, that divides the bytes of ``dim`` elements.

    >>> [int(alignment_bytes(width, 16)) for width in (4096, 4097, 50257, 80, 10922)]
    [128, 2, 2, 32, 4]
    """
    row_bits = np.asarray(dim, dtype=np.int64) * element_bits
    lowest_bit = row_bits & -row_bits
    aligned: AnyInt = np.minimum(np.maximum(lowest_bit // 8, 1), LARGEST_ALIGNMENT_BYTES)
    return aligned


def alignment_class(align_bytes: AnyInt) -> AnyInt:
    """Index into ALIGNMENT_CLASSES_BYTES.

    >>> alignment_class(np.array([1, 16, 128])).tolist()
    [0, 4, 7]
    """
    found: AnyInt = np.log2(align_bytes).astype(np.int64)
    return found


def transfer_alignment_factors(factors: PerClass, rate_ratio: float) -> PerClass:
    """Rate factors on another SM, from those of a donor.

        1 / factor = 1 + (1 / donor's factor - 1) * rate ratio        below the widest load; others unchanged

    Args:
        factors: The donor's factors, by alignment class along the last axis.
        rate_ratio: Multiplications of a busy SM per clock, the device's over the donor's.

    >>> transfer_alignment_factors(np.array([[0.5] * 4 + [0.9] * 4]), 2.0).round(3).tolist()
    [[0.333, 0.333, 0.333, 0.333, 0.9, 0.9, 0.9, 0.9]]
    """
    is_narrow = np.array(ALIGNMENT_CLASSES_BYTES) < WIDEST_LOAD_BYTES
    carried: PerClass = np.where(is_narrow, 1.0 / (1.0 + (1.0 / factors - 1.0) * rate_ratio), factors)
    return carried


@cache
def classes_of_widths(element_bits: int) -> Int[np.ndarray, " widths"]:
    """Alignment class of every width from 0 to WIDTH_MASK elements; larger widths have the class of their lowest bits.

    >>> [int(classes_of_widths(16)[width & WIDTH_MASK]) for width in (4096, 4097, 50257, 80, 10922)]
    [7, 1, 1, 5, 2]
    """
    widths = np.arange(WIDTH_MASK + 1)
    widths[0] = WIDTH_MASK + 1
    return alignment_class(alignment_bytes(widths, element_bits))


def contiguous_letters(layout: str | Sequence[str]) -> Letters:
    """Dimensions that are contiguous in at least one operand.

    Args:
        layout: Memory layout of A and B; one for all GEMMs, or one for each.

    Returns:
        By letter: True, or a mask of the GEMMs where it is contiguous.

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
