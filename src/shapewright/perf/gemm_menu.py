"""The menu of kernels of one device and dtype, as a record holds it; perf.kernels times them.

Every number comes from a calibration record and is a fraction, a count of elements or seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES
from shapewright.perf.batch_menu import BatchKernels, read_batch_kernels
from shapewright.perf.slow_cases import SlowCases, read_slow_cases

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Roles of a contiguous dimension, in the order of GemmParameters.alignment_factor: of one product, and of a batch, for
# which libraries take other kernels (on A100 an odd contracted one costs a batch much less).
ROLES = ("contracted", "free", "contracted_batched", "free_batched")
ALIGNMENT_FROM = "alignment_from"
"""Key of a section whose alignment factors were not measured on the record's device: the device that they are of."""
# Numbers of a section that stand in it by themselves.
_SCALARS = (
    "start_s",
    "split_start_s",
    "bandwidth_fraction",
    "feed_ratio",
    "overlap_power",
    "wave_give_back",
    "power_drop_fraction",
    "power_half_flops",
    "k_step",
    "hot_cache_speedup",
    "hot_cache_share",
    "cast_bytes_per_element",
    "cast_row_s",
    "write_ratio",
)


@dataclass(frozen=True, kw_only=True)
class StartGrowth:
    """How the fixed cost of a grouped kernel grows to the whole of it: sorting rows, and setting groups up, is work.

    Attributes:
        first_share: What the first row, or group, takes of the whole. [fraction]
        half_count: Further ones that take half of the rest.
        counts_groups: Whether groups are counted (CUTLASS sets each up as a problem of its own), and not rows.
    """

    first_share: float
    half_count: float
    counts_groups: bool

    def missing_share(self, m: Array, batch: Array) -> Array:
        """Share of the whole fixed cost that products of m rows in each of some groups do not have yet."""
        further = (batch if self.counts_groups else m * batch) - 1.0
        share: Array = (1.0 - self.first_share) * self.half_count / (self.half_count + np.maximum(further, 0.0))
        return share


@dataclass(frozen=True, kw_only=True, eq=False)
class GemmParameters:
    """What a record knows of one device and dtype, ready for arithmetic. The menu is every tile with every split.

    Attributes:
        tile_m: Rows of each tile. [element]
        tile_n: Columns of each tile. [element]
        split_k: Parts of the contraction, for each split.
        tile_rate_fraction: Rate of a busy SM running this tile, as a fraction of its peak.
        fill_k: Prologue and epilogue of a tile, in elements of k that would take as long. [element]
        start_s: Fixed cost of a kernel. [s]
        split_start_s: Added cost of the reduction after a split contraction. [s]
        bandwidth_fraction: Achieved share of memory bandwidth.
        feed_ratio: Most that one SM can draw, in units of its share of memory bandwidth.
        overlap_power: The exponent p.
        wave_give_back: Share of the last wave's emptiness that the kernel wins back, 0 to 1.
        power_drop_fraction: Share of the rate lost to power limits on endless work.
        power_half_flops: Work at which half of that is lost. [flop]
        power_run_steepness: How sharply a run of products comes to lose it as its work grows; 0 where none was fitted,
            and a product of which no run is known counts by its own work.
        k_step: Granularity of the contraction loop. [element]
        hot_cache_speedup: Rate of the last-level cache over that of memory, for operands left there by a previous run.
        hot_cache_share: Share of the cache that such operands can fill.
        cast_bytes_per_element: Memory traffic of casting one element of A to this dtype before the product, 0 where
            operands come as they are. [byte]
        cast_row_s: Added cost of that cast per row of A. [s]
        write_ratio: Cost of writing a byte of C, in bytes read.
        alignment_factor: Rate factor by role of a contiguous dimension (ROLES) and alignment class; shape [4, 8].
        slow_cases: Products that leave these kernels; None where nothing is known of such.
        start_growth: How start_s grows to what it is; None where every product has all of it.
        batch_kernels: Kernels that batches run; None where they run the menu.
    """

    tile_m: Array
    tile_n: Array
    split_k: Array
    tile_rate_fraction: Array
    fill_k: Array
    start_s: float
    split_start_s: float
    bandwidth_fraction: float
    feed_ratio: float
    overlap_power: float
    wave_give_back: float
    power_drop_fraction: float
    power_half_flops: float
    k_step: float
    hot_cache_speedup: float
    hot_cache_share: float
    cast_bytes_per_element: float
    cast_row_s: float
    write_ratio: float
    alignment_factor: Array
    slow_cases: SlowCases | None
    start_growth: StartGrowth | None = None
    batch_kernels: BatchKernels | None = None
    power_run_steepness: float = 0.0


def read_parameters(raw: Mapping[str, Any]) -> GemmParameters:
    """Unfold one dtype's section of a record.

    Raises:
        CalibrationError: a key is missing.
    """
    try:
        column = {name: np.array([tile[name] for tile in raw["tiles"]], float) for name in ("m", "n", "rate", "fill_k")}
        factors = raw["alignment_factor"]
        return GemmParameters(
            tile_m=column["m"],
            tile_n=column["n"],
            split_k=np.array(raw["splits"], dtype=float),
            tile_rate_fraction=column["rate"],
            fill_k=column["fill_k"],
            alignment_factor=np.array(
                [[factors[role][str(width)] for width in ALIGNMENT_CLASSES_BYTES] for role in ROLES]
            ),
            slow_cases=read_slow_cases(raw.get("slow_cases")),
            start_growth=StartGrowth(**raw["start_growth"]) if "start_growth" in raw else None,
            batch_kernels=read_batch_kernels(raw),
            power_run_steepness=float(raw.get("power_run_steepness", 0.0)),
            **{name: float(raw[name]) for name in _SCALARS},
        )
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"gemm calibration lacks {error}") from error


def read_batched_parameters(raw: Mapping[str, Any]) -> GemmParameters | None:
    """Unfold what a section knows of batches, for which libraries have other kernels; None where it knows nothing.

    Raises:
        CalibrationError: a key is missing.
    """
    return read_parameters({**raw, **raw["batched"]}) if "batched" in raw else None
