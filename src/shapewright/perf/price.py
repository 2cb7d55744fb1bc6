"""Price: the predicted time of an operation, with its reason and its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    Numeric = float | NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class Price:
    """Time of one execution; every field is a scalar, or an array for arrays of shapes.

    Attributes:
        time_s: Predicted time, start cost included. [s]
        low_s: Lower end of the 90 % interval. [s]
        high_s: Upper end of the 90 % interval. [s]
        compute_s: Part that arithmetic alone would take at this efficiency. [s]
        memory_s: Part that memory traffic alone would take. [s]
        start_s: Fixed cost of starting the kernel. [s]
        roofline_s: max(flops / peak, bytes / bandwidth): no price is below it. [s]
        calibration: Id of the record used, or ``uncalibrated``.
        shared_error: Share of its interval's variance that is one error of all operations on the device, as devices
            left out have it; 0 for an own record.
    """

    time_s: Numeric
    low_s: Numeric
    high_s: Numeric
    compute_s: Numeric
    memory_s: Numeric
    start_s: Numeric
    roofline_s: Numeric
    calibration: str
    shared_error: Numeric = 0.0

    @property
    def bound_by(self) -> str:
        """``compute``, ``memory``, or ``latency`` where the start cost outweighs both (scalar prices only)."""
        if self.start_s > max(self.compute_s, self.memory_s):
            return "latency"
        return "compute" if self.compute_s >= self.memory_s else "memory"


@dataclass(frozen=True, kw_only=True)
class AttentionPrice(Price):
    """Price of fused attention.

    Attributes:
        correction: Learned factor in time_s on what physics alone says; 1 where nothing was learned.
    """

    correction: Numeric = 1.0


@dataclass(frozen=True, kw_only=True)
class GemmPrice(Price):
    """Price of a GEMM, with the kernel that was assumed.

    Attributes:
        tile_m: Rows of an output tile. [element]
        tile_n: Columns of an output tile. [element]
        split_k: Parts that the contraction is cut into.
        num_tiles: Tiles, batch and split included.
        num_waves: Passes over the device.
        tile_efficiency: Share of the computed tile area that is output.
        wave_efficiency: Share of the slots of all waves that hold a tile.
        alignment_bytes: Smallest alignment of the contiguous dimensions, at most 128. [byte]
        alignment_factor: Slow-down of the kernel that this alignment allows; of a batch with a kernel of its own, the
            time that the same sizes would take aligned, over its time.
        rate_share: Share of the rate that a long contraction and far pages leave (perf.slow_cases).
        slow_factor: Time over that of the kernel with tiles; above 1 where a library runs a slow one (perf.slow_cases).
        correction: Learned factor in time_s on what physics alone says; 1 where nothing was learned.
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


def split_rows(kind: type[P], columns: Mapping[str, NDArray[Any]], calibration: str | Sequence[str]) -> list[P]:
    """Prices of single operations from columns over many, in their order.

    What calling ``kind`` for each does, several times faster: a price checks and derives nothing when it is made, and
    a step has a hundred.

    Args:
        kind: Price, or a kind of it.
        columns: All its fields but ``calibration``, 1-d arrays of one length.
        calibration: Their label, one for all or one for each.
    """
    assert columns.keys() | {"calibration"} == kind.__dataclass_fields__.keys(), sorted(columns)
    rows = list(zip(*(column.tolist() for column in columns.values()), strict=True))
    labels = [calibration] * len(rows) if isinstance(calibration, str) else calibration
    prices = []
    for row, label in zip(rows, labels, strict=True):
        price = object.__new__(kind)
        price.__dict__.update(zip(columns, row, strict=True), calibration=label)
        prices.append(price)
    return prices
