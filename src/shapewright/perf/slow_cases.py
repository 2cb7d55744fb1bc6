"""Products that a library runs on slow kernels, or whose operands outgrow what caches and page tables reach.

Tiles and alignment classes of perf.kernels say nothing of these; records of devices where they were measured do, in a
section's ``slow_cases``. Legend: m, n, k in BLAS letters, one entry per shape.

    long      rate / (1 + k / long_k)                 SMs that share operands drift apart along a long contraction
    reach     rate * (1 - reach_loss r), r = 1 / (1 + (reach_bytes / bytes of B)^4)     pages beyond the tables' reach
    narrow    a dimension of odd length, contiguous and below narrow_edge: no tile fits, a kernel without matrix units
    small     m, n <= small_edge and at most small_outputs of C: a kernel made for latency, whatever the contraction

A slow kernel runs at a share of the device's peak that does not depend on tiles: it is a floor under the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.alignment import Letters

    Array = NDArray[np.float64]

# How sharply operands leave the reach of page tables; a smooth stand-in for a step.
_REACH_STEEPNESS = 4.0


@dataclass(frozen=True, kw_only=True)
class SlowCases:
    """What a record knows of slow cases; the defaults are none.

    Attributes:
        long_k: Contraction at which a tile takes twice as long per element as a short one, 0 for never. [element]
        reach_bytes: Size of B at which half of reach_loss is lost, 0 for never. [byte]
        reach_loss: Share of the rate that is lost beyond it.
        narrow_edge: Odd contiguous dimensions below this leave the matrix units. [element]
        narrow_contracted_fraction: Share of the device's peak that is left where the contracted one is such.
        narrow_free_fraction: The same for a free one.
        small_edge: Largest m and n of a small product. [element]
        small_outputs: Largest number of its outputs, batch included. [element]
        small_fraction: Share of the device's peak that it reaches at most, 0 where small products are like others.
    """

    long_k: float = 0.0
    reach_bytes: float = 0.0
    reach_loss: float = 0.0
    narrow_edge: float = 0.0
    narrow_contracted_fraction: float = 1.0
    narrow_free_fraction: float = 1.0
    small_edge: float = 0.0
    small_outputs: float = 0.0
    small_fraction: float = 0.0


def read_slow_cases(raw: Mapping[str, Any] | None) -> SlowCases | None:
    """Unfold ``slow_cases`` of a record's section; None where it has none.

    Raises:
        CalibrationError: a name is unknown.
    """
    if raw is None:
        return None
    known = {field.name for field in fields(SlowCases)}
    unknown = sorted(set(raw) - known)
    if unknown:
        raise CalibrationError(f"slow_cases knows no {', '.join(unknown)}; it knows {', '.join(sorted(known))}")
    return SlowCases(**{name: float(value) for name, value in raw.items()})


def rate_share(n: Array, k: Array, element_bytes: float, cases: SlowCases) -> Array | float:
    """Share of the rate that long contractions and far pages leave, in (0, 1].

    Args:
        n: Columns of C. [element]
        k: Contraction. [element]
        element_bytes: Width of an element of B. [byte]
        cases: What the record knows.
    """
    share: Array | float = 1.0
    if cases.long_k:
        share = 1.0 / (1.0 + k / cases.long_k)
    if cases.reach_bytes:
        beyond = 1.0 / (1.0 + (cases.reach_bytes / (n * k * element_bytes)) ** _REACH_STEEPNESS)
        share = share * (1.0 - cases.reach_loss * beyond)
    return share


def narrow_floor_s(
    m: Array, n: Array, k: Array, batch: Array, letters: Letters, flops_per_s: float, cases: SlowCases
) -> Array:
    """Time under which a product with a narrow odd dimension cannot come, 0 for all others. [s]

    Args:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        batch: Independent products.
        letters: Contiguous dimensions, see perf.alignment.contiguous_letters.
        flops_per_s: Peak of the device. [flop/s]
        cases: What the record knows.
    """
    floor_s = np.zeros(np.shape(m))
    if not cases.narrow_edge:
        return floor_s
    dims = {"m": m, "n": n, "k": k}
    alone_s = 2.0 * batch * m * n * k / flops_per_s
    for letter, is_contiguous in letters.items():
        is_narrow = (dims[letter] % 2 == 1) & (dims[letter] < cases.narrow_edge) & is_contiguous
        fraction = cases.narrow_contracted_fraction if letter == "k" else cases.narrow_free_fraction
        floor_s = np.maximum(floor_s, np.where(is_narrow, alone_s / fraction, 0.0))
    return floor_s


def small_floor_s(m: Array, n: Array, k: Array, batch: Array, flops_per_s: float, cases: SlowCases) -> Array:
    """Time under which a small product cannot come, 0 for all others. [s]; arguments as in narrow_floor_s."""
    if not cases.small_fraction:
        return np.zeros(np.shape(m))
    is_small = (np.maximum(m, n) <= cases.small_edge) & (batch * m * n <= cases.small_outputs)
    return np.where(is_small, 2.0 * batch * m * n * k / (flops_per_s * cases.small_fraction), 0.0)
