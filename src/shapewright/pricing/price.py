"""Price types: predicted time of an operation with its decomposition and interval; and the roofline bound.

Roofline: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.calibration.intervals import widen_by_error
from shapewright.pricing.calibration.source import CalibrationSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shapewright.core.numeric import Numeric
    from shapewright.hardware.device import Device


@dataclass(frozen=True, kw_only=True)
class Price:
    """Time of one execution; every field is a scalar, or an array for arrays of shapes.

    Attributes:
        time_s: Predicted time, including the fixed cost. [s]
        low_s: Lower end of the 90 % interval. [s]
        high_s: Upper end of the 90 % interval. [s]
        compute_s: Time of the arithmetic alone at its achieved rate. [s]
        memory_s: Time of the memory traffic alone. [s]
        start_s: Fixed cost of starting the kernel. [s]
        roofline_s: max(flops / peak, bytes / bandwidth): a lower bound of time_s. [s]
        calibration: Record used, and how far it was transferred.
        shared_error: Fraction of the interval's variance that all operations on the device have in common, from
            held-out devices; 0 for an own record.
    """

    time_s: Numeric
    low_s: Numeric
    high_s: Numeric
    compute_s: Numeric
    memory_s: Numeric
    start_s: Numeric
    roofline_s: Numeric
    calibration: CalibrationSource
    shared_error: Numeric = 0.0

    @property
    def bound_by(self) -> str:
        """``compute``, ``memory``, or ``latency`` where the fixed cost exceeds both (scalar prices only)."""
        if self.start_s > max(self.compute_s, self.memory_s):
            return "latency"
        return "compute" if self.compute_s >= self.memory_s else "memory"

    def scaled(self, ratio: float) -> Price:
        """Return the price of something that takes ``ratio`` times as long in every part."""
        names = ("time_s", "low_s", "high_s", "compute_s", "memory_s", "start_s", "roofline_s")
        return replace(self, **{name: ratio * getattr(self, name) for name in names})

    def widened(self, error: float) -> Price:
        """Return the price with an interval widened by an independent error, a factor; not below the roofline."""
        low, high = (np.asarray(end / self.time_s) for end in (self.low_s, self.high_s))
        low, high = widen_by_error((low, high), np.log(error))
        floor_s = np.minimum(self.roofline_s, self.low_s)
        return replace(self, low_s=np.maximum(self.time_s * low, floor_s), high_s=self.time_s * high)


@dataclass(frozen=True, kw_only=True)
class AttentionPrice(Price):
    """Price of fused attention.

    Attributes:
        correction: Residual correction contained in time_s; 1 where none applies.
    """

    correction: Numeric = 1.0


@dataclass(frozen=True, kw_only=True)
class GemmPrice(Price):
    """Price of a GEMM, with the kernel that was assumed.

    Attributes:
        tile_m: Rows of an output tile. [element]
        tile_n: Columns of an output tile. [element]
        split_k: Parts of the split contraction.
        num_tiles: Tiles, including batch and split.
        num_waves: Waves over the device.
        tile_efficiency: Fraction of the computed tile area that is output.
        wave_efficiency: Fraction of the slots of all waves that hold a tile.
        alignment_bytes: Smallest alignment of the contiguous dimensions, at most 128. [byte]
        alignment_factor: Rate factor of this alignment; for a batch with its own kernel, the time of the same sizes
            aligned over its time.
        rate_share: Fraction of the rate that remains after a long contraction and far pages (gemm.slow_cases).
        slow_factor: Time over that of the tiled kernel; above 1 where a library runs a slow one (gemm.slow_cases).
        correction: Residual correction contained in time_s; 1 where none applies.
    """

    tile_m: Numeric
    tile_n: Numeric
    split_k: Numeric
    num_tiles: Numeric
    num_waves: Numeric
    tile_efficiency: Numeric
    wave_efficiency: Numeric
    alignment_bytes: Numeric
    alignment_factor: Numeric
    rate_share: Numeric
    slow_factor: Numeric
    correction: Numeric


P = TypeVar("P", bound=Price)


def split_rows(
    kind: type[P], columns: Mapping[str, NDArray[Any]], sources: CalibrationSource | Sequence[CalibrationSource]
) -> list[P]:
    """Split columns over many operations into prices of single ones, in their order.

    Equals calling ``kind`` for each, several times faster: a price checks and derives nothing when it is made, and a
    step has a hundred.

    Args:
        columns: All its fields except ``calibration``, 1-d arrays of one length.
        sources: Its ``calibration``, one for all or one for each.
    """
    assert columns.keys() | {"calibration"} == kind.__dataclass_fields__.keys(), sorted(columns)
    rows = list(zip(*(column.tolist() for column in columns.values()), strict=True))
    each = [sources] * len(rows) if isinstance(sources, CalibrationSource) else sources
    prices = []
    for row, source in zip(rows, each, strict=True):
        price = object.__new__(kind)
        price.__dict__.update(zip(columns, row, strict=True), calibration=source)
        prices.append(price)
    return prices


def single_price(price: Price) -> Price:
    """Return the price of one operation whose numbers are arrays of one entry, with plain numbers."""
    columns = {name: np.atleast_1d(value) for name, value in vars(price).items() if name != "calibration"}
    return split_rows(Price, columns, price.calibration)[0]


# Upper end of the interval of an unmeasured device, over its roofline: the worst measured device's mean over GEMMs is
# 2.3 (A100, all shapes: roofline is 55 % below measurement, docs/decisions/0003).
ROOFLINE_HIGH_FACTOR = 2.5


def roofline_s(flops: Numeric, num_bytes: Numeric, device: Device, dtype: str) -> Numeric:
    """Lower bound of the time from the data sheet: max(flops / peak, bytes / bandwidth). [s]

    Args:
        flops: Arithmetic. [flop]
        num_bytes: Memory traffic. [byte]

    Raises:
        UnknownRateError: the device has no rate for this dtype.
    """
    return np.maximum(flops / device.peak_flops_per_s(dtype), num_bytes / device.memory_bandwidth_bytes_per_s)
