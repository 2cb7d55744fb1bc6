"""Constants of the GEMM model for one device and dtype, as a calibration record holds them.

Every number is a fraction, a count of elements, or seconds. gemm.kernels and gemm.batched use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.pricing.gemm.alignment import ALIGNMENT_CLASSES_BYTES, ROLES
from shapewright.pricing.gemm.slow_cases import SlowCases, read_slow_cases

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    PerGemm = Float[np.ndarray, "gemms"]
    PerTile = Float[np.ndarray, "tiles"]
    PerSplit = Float[np.ndarray, "splits"]
    PerKernel = Float[np.ndarray, "kernels"]

ALIGNMENT_FROM = "alignment_from"
"""Key of a section whose alignment factors were measured on another device: the name of that device."""

SCALARS = (
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
"""Keys of a section that hold one number."""


# Overlap exponent from which the joined time is the larger of arithmetic and traffic.
_LARGEST_POWER = 32.0


@dataclass(frozen=True, kw_only=True)
class BatchKernel:
    """One kernel for batched GEMMs, and the GEMMs that it accepts.

    Attributes:
        role: ``contracted`` or ``free``: role of the least aligned contiguous dimension; empty for either.
        alignments_bytes: Accepted alignments of that dimension. [byte]
        first_k: Shortest accepted contraction. [element]
        last_k: Longest accepted contraction. [element]
        first_n: Fewest accepted columns. [element]
        last_n: Most accepted columns. [element]
        tile_m: Rows of its tiles. [element]
        widths: Columns of its tiles, ascending. [element]
        rates: Rate of a busy SM with each width, as a fraction of its peak.
        alignment_rates: Factor on the rates by alignment in bytes, where it is not 1.
        edge_share: Cost of a one-column tile, as a fraction of a full one.
        k_step: Granularity of the contraction loop. [element]
        fill_k: Prologue and epilogue of a tile, in elements of k that would take as long. [element]
        bandwidth_fraction: Achieved fraction of memory bandwidth.
        write_ratio: Cost of writing a byte of C, in bytes read.
        feed_ratio: Rate at which caches feed operands to tiles, over that of memory; infinite where they never limit.
        overlap_power: The exponent p; 1 where arithmetic waits for traffic.
    """

    role: str = ""
    alignments_bytes: tuple[int, ...]
    first_k: float = 0.0
    last_k: float = np.inf
    first_n: float = 0.0
    last_n: float = np.inf
    tile_m: float
    widths: tuple[float, ...]
    rates: tuple[float, ...]
    alignment_rates: Mapping[str, float] = field(default_factory=dict)
    edge_share: float
    k_step: float
    fill_k: float
    bandwidth_fraction: float
    write_ratio: float
    feed_ratio: float = np.inf
    overlap_power: float


class BatchKernels(NamedTuple):
    """Batch kernels of a section in order of preference; arrays with one entry per kernel.

    Attributes:
        takes: Accepted alignment classes, by whether the contraction is the least aligned dimension. [kernels, 2,
            classes]
        first_k: Shortest contractions. [element]
        last_k: Longest contractions. [element]
        first_n: Fewest columns. [element]
        last_n: Most columns. [element]
        tile_m: Rows of tiles. [element]
        widths: Columns of tiles, ascending, padded with infinity. [element], [kernels, widths]
        last_width: Index of the widest.
        rates: Rates with each width. [kernels, widths]
        alignment_rates: Factors on the rates. [kernels, classes]
        edge_share: As in BatchKernel, like the following fields.
        k_step: Granularity of the contraction. [element]
        fill_k: Prologue and epilogue. [element]
        bandwidth_fraction: Fraction of memory bandwidth.
        write_ratio: Cost of a written byte in bytes read.
        feed_ratio: Rate of caches over that of memory.
        overlap_power: The exponent p.
        least_waves: Waves below which a batch is too small for these kernels.
    """

    takes: Bool[np.ndarray, "kernels 2 classes"]
    first_k: PerKernel
    last_k: PerKernel
    first_n: PerKernel
    last_n: PerKernel
    tile_m: PerKernel
    widths: Float[np.ndarray, "kernels widths"]
    last_width: Int[np.ndarray, " kernels"]
    rates: Float[np.ndarray, "kernels widths"]
    alignment_rates: Float[np.ndarray, "kernels classes"]
    edge_share: PerKernel
    k_step: PerKernel
    fill_k: PerKernel
    bandwidth_fraction: PerKernel
    write_ratio: PerKernel
    feed_ratio: PerKernel
    overlap_power: PerKernel
    least_waves: float


def read_batch_kernels(raw: Mapping[str, Any]) -> BatchKernels | None:
    """Read ``kernels`` of a section's batches; None where it has none.

    Raises:
        CalibrationError: a name is unknown or missing.
    """
    if "kernels" not in raw:
        return None

    def read(kernel: Mapping[str, Any]) -> BatchKernel:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in kernel.items()
        }
        return BatchKernel(**values)

    try:
        return join_kernels([read(kernel) for kernel in raw["kernels"]], float(raw["kernels_least_waves"]))
    except (KeyError, TypeError) as error:
        known = ", ".join(field.name for field in fields(BatchKernel))
        raise CalibrationError(f"kernels of a gemm record's batches: {error}; known keys are {known}") from error


def join_kernels(kernels: Sequence[BatchKernel], least_waves: float) -> BatchKernels:
    """Stack batch kernels into arrays."""
    roles = [("", "free"), ("", "contracted")]  # by whether the contraction is the least aligned
    classes = [np.isin(ALIGNMENT_CLASSES_BYTES, kernel.alignments_bytes) for kernel in kernels]
    most = max(len(kernel.widths) for kernel in kernels)

    def padded(values: Sequence[float], filling: float) -> list[float]:
        return [*values, *[filling] * (most - len(values))]

    names = ("first_k", "last_k", "first_n", "last_n", "tile_m", "edge_share", "k_step", "fill_k")
    more = ("bandwidth_fraction", "write_ratio", "feed_ratio")
    return BatchKernels(
        takes=np.array(
            [[taken & (kernel.role in role) for role in roles] for kernel, taken in zip(kernels, classes, strict=True)]
        ),
        widths=np.array([padded(kernel.widths, np.inf) for kernel in kernels]),
        last_width=np.array([len(kernel.widths) - 1 for kernel in kernels]),
        rates=np.array([padded(kernel.rates, 1.0) for kernel in kernels]),
        alignment_rates=np.array(
            [[kernel.alignment_rates.get(str(width), 1.0) for width in ALIGNMENT_CLASSES_BYTES] for kernel in kernels]
        ),
        overlap_power=np.array([min(kernel.overlap_power, _LARGEST_POWER) for kernel in kernels]),
        least_waves=least_waves,
        **{name: np.array([float(getattr(kernel, name)) for kernel in kernels]) for name in (*names, *more)},
    )


@dataclass(frozen=True, kw_only=True)
class StartGrowth:
    """Growth of the fixed cost of a grouped kernel with its rows or groups.

    Sorting rows and setting up groups is work, so a small GEMM incurs only part of the fixed cost.

    Attributes:
        first_share: Fraction of the whole fixed cost that the first row, or group, takes.
        half_count: Number of further ones that take half of the rest.
        counts_groups: Whether groups are counted (CUTLASS sets each up as a problem of its own) instead of rows.
    """

    first_share: float
    half_count: float
    counts_groups: bool

    def missing_share(self, m: PerGemm, batch: PerGemm) -> PerGemm:
        """Fraction of the whole fixed cost that GEMMs of m rows in each of ``batch`` groups do not incur."""
        further = (batch if self.counts_groups else m * batch) - 1.0
        share: PerGemm = (1.0 - self.first_share) * self.half_count / (self.half_count + np.maximum(further, 0.0))
        return share


@dataclass(frozen=True, kw_only=True, eq=False)
class GemmParameters:
    """Constants of one device and dtype. The candidate kernels are every tile with every split.

    Attributes:
        tile_m: Rows of each tile. [element]
        tile_n: Columns of each tile. [element]
        split_k: Parts of the contraction, for each split.
        tile_rate_fraction: Rate of a busy SM running this tile, as a fraction of its peak.
        fill_k: Prologue and epilogue of a tile, in elements of k that would take as long. [element]
        start_s: Fixed cost of a kernel. [s]
        split_start_s: Added cost of the reduction after a split contraction. [s]
        bandwidth_fraction: Achieved fraction of memory bandwidth.
        feed_ratio: Largest load rate of one SM, in units of its share of memory bandwidth.
        overlap_power: The exponent p.
        wave_give_back: Fraction of an incomplete last wave that the kernel recovers, 0 to 1.
        power_drop_fraction: Fraction of the rate lost to power limits on endless work.
        power_half_flops: Work at which half of that is lost. [flop]
        power_run_steepness: Steepness of that loss over the work of a run of GEMMs; 0 where none was fitted, and a GEMM
            without a known run counts by its own work.
        k_step: Granularity of the contraction loop. [element]
        hot_cache_speedup: Rate of the last-level cache over that of memory, for operands left there by a previous run.
        hot_cache_share: Fraction of the cache that such operands can fill.
        cast_bytes_per_element: Memory traffic of casting one element of A to this dtype before the GEMM, 0 where
            operands need no cast. [byte]
        cast_row_s: Added cost of that cast per row of A. [s]
        write_ratio: Cost of writing a byte of C, in bytes read.
        alignment_factor: Rate factor by role of a contiguous dimension (ROLES) and alignment class; shape [4, 8].
        slow_cases: Sizes that libraries run on slow kernels; None where the record has none.
        start_growth: Growth of start_s with rows or groups; None where every GEMM incurs all of it.
        batch_kernels: Kernels that run batched GEMMs; None where batches use the candidate kernels.
    """

    tile_m: PerTile
    tile_n: PerTile
    split_k: PerSplit
    tile_rate_fraction: PerTile
    fill_k: PerTile
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
    alignment_factor: Float[np.ndarray, "4 8"]
    slow_cases: SlowCases | None
    start_growth: StartGrowth | None = None
    batch_kernels: BatchKernels | None = None
    power_run_steepness: float = 0.0


def read_parameters(raw: Mapping[str, Any]) -> GemmParameters:
    """Read the section of one dtype.

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
            **{name: float(raw[name]) for name in SCALARS},
        )
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"gemm calibration lacks {error}") from error


def read_batched_parameters(raw: Mapping[str, Any]) -> GemmParameters | None:
    """Read a section's constants for batches, for which libraries have other kernels; None where it has none.

    Raises:
        CalibrationError: a key is missing.
    """
    return read_parameters({**raw, **raw["batched"]}) if "batched" in raw else None
