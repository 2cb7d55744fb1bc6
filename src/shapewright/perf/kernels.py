"""The GEMM model: what each kernel of a menu would take, from tiles, waves, arithmetic, operand feed and traffic.

Legend: rows of an array are shapes, columns are kernels of the menu. For one kernel with tile bm x bn, split s:

    tiles   = batch ceil(m/bm) ceil(n/bn) s
    waves   = soft(tiles / slots)                                    last wave partly empty, see below
    tile_s  = (k/s + fill) bm bn / (rate per SM * efficiency * alignment factor)
    feed_s  = (bm + bn) k/s element bytes / (feed ratio * bandwidth / SMs)
    time    = start + [(waves max(tile_s, feed_s))^p + (traffic / bandwidth)^p]^(1/p) + split cost + cast of A

``soft`` is ceil(tiles/slots), less a fitted share of what the last wave leaves empty: persistent and stream-k kernels
give part of it back. p says how well arithmetic and traffic overlap. ``rate`` falls under power as the work grows.
Every number in GemmParameters comes from a calibration record and is a fraction, a count of elements or seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.dtypes import get_dtype
from shapewright.errors import CalibrationError
from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES, LAST_CLASS, WIDTH_MASK, classes_of_widths
from shapewright.perf.batch_menu import BatchKernels, read_batch_kernels
from shapewright.perf.slow_cases import SlowCases, read_slow_cases

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.alignment import Letters

    Array = NDArray[np.float64]

# Roles of a contiguous dimension, in the order of GemmParameters.alignment_factor: of one product, and of a batch, for
# which libraries take other kernels (on A100 an odd contracted one costs a batch much less).
ROLES = ("contracted", "free", "contracted_batched", "free_batched")

_CLASS_BYTES = np.array(ALIGNMENT_CLASSES_BYTES, dtype=float)

# Bytes that a split contraction's partial sum takes: every library accumulates in fp32.
_ACCUMULATOR_BYTES = 4.0

# How sharply the cached share falls once a working set outgrows the cache; a smooth stand-in for a step.
_RESIDENCY_STEEPNESS = 3.0


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
class DeviceRates:
    """The few numbers of a data sheet that pricing needs, for one dtype.

    Attributes:
        flops_per_s_per_sm: Dense rate of one SM. [flop/s]
        bandwidth_bytes_per_s: Memory bandwidth. [byte/s]
        num_sms: Slots for tiles.
        element_bytes: Width of an element. [byte]
        l2_bytes: Last-level cache that operands may still lie in from a previous run, 0 for a cold cache. A model's
            step finds it cold; a benchmark that repeats one shape finds it hot. [byte]
        stored_b_share: Bytes of B in memory over what they are once widened for the matrix units.
        feed_scale: Factor on a borrowed feed ratio, 1 for a device's own.
    """

    flops_per_s_per_sm: float
    bandwidth_bytes_per_s: float
    num_sms: float
    element_bytes: float
    l2_bytes: float = 0.0
    stored_b_share: float = 1.0
    feed_scale: float = 1.0


class Kernels(NamedTuple):
    """Kernels of a menu, one number of each per kernel; arrays that broadcast against shapes."""

    tile_m: Array
    tile_n: Array
    rate_fraction: Array
    fill_k: Array
    split_k: Array


class KernelTimes(NamedTuple):
    """Times of kernels; arrays of the shape that kernels and products broadcast to.

    Attributes:
        compute_s: Arithmetic and operand feed over all waves.
        memory_s: Traffic over bandwidth.
        added_s: What comes before and after: start, cast, reduction of a split.
        num_tiles: Tiles, batch and split included.
        num_waves: Passes over the device.
    """

    compute_s: Array
    memory_s: Array
    added_s: Array
    num_tiles: Array
    num_waves: Array


def estimate_kernels(
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    align_factor: Array,
    kernels: Kernels,
    parameters: GemmParameters,
    rates: DeviceRates,
) -> KernelTimes:
    """Time given kernels on given shapes: the formula of this file, term by term.

    The fastest kernel of each shape is found by perf.fastest, which does not time each of them; this says what its
    answer consists of, and is what its answer must agree with.

    Args:
        m: Rows of C. [element]
        n: Columns of C.
        k: Contraction.
        batch: Independent products.
        align_factor: Rate factor of the alignment class.
        kernels: Which kernels: one for each shape, or shaped so that every kernel meets every shape.
        parameters: The constants of the menu.
        rates: The device's rates for this dtype.
    """
    p = parameters
    split_k = kernels.split_k
    num_tiles = (batch * np.ceil(m / kernels.tile_m) * np.ceil(n / kernels.tile_n)) * split_k
    # perf.tiling has these counts too; on floats its exact -(-x // y) takes eight times as long as a division and ceil.
    waves = num_tiles / rates.num_sms
    full_waves = np.ceil(waves)
    num_waves = full_waves - p.wave_give_back * (full_waves - np.maximum(waves, 1.0))
    k_part = count_k(k, split_k, p)

    outputs = batch * m * n
    macs_per_s = kernels.rate_fraction * macs_per_s_per_sm(2.0 * outputs * k, align_factor, p, rates)
    tile_s = (k_part + kernels.fill_k) * (kernels.tile_m * kernels.tile_n / macs_per_s)
    edges = np.minimum(kernels.tile_m, m) + rates.stored_b_share * np.minimum(kernels.tile_n, n)
    feed_s = k_part * (edges * feed_s_per_element(p, rates))
    compute_s = num_waves * np.maximum(tile_s, feed_s)
    return KernelTimes(compute_s, *other_times_s(m, n, k, batch, split_k, p, rates), num_tiles, full_waves)


def every_kernel(parameters: GemmParameters) -> Kernels:
    """The whole menu as columns; kernel is tile * number of splits + split. [kernels, 1]"""
    p = parameters
    tiles = (p.tile_m, p.tile_n, p.tile_rate_fraction, p.fill_k)
    columns = [np.repeat(column, len(p.split_k)) for column in tiles] + [np.tile(p.split_k, len(p.tile_m))]
    return Kernels(*(column[:, None] for column in columns))


def count_k(k: Array, split_k: Array, parameters: GemmParameters) -> Array:
    """Steps of the contraction loop of one part of a split, in elements of k. [element]"""
    part: Array = np.ceil(np.ceil(k / split_k) / parameters.k_step) * parameters.k_step
    return part


def macs_per_s_per_sm(flops: Array, align_factor: Array, parameters: GemmParameters, rates: DeviceRates) -> Array:
    """Multiplications and additions that a busy SM would sustain at its peak, less alignment and power. [mac/s]"""
    sustained = 1.0 - parameters.power_drop_fraction * flops / (flops + parameters.power_half_flops)
    return rates.flops_per_s_per_sm / 2.0 * align_factor * sustained


def feed_s_per_element(parameters: GemmParameters, rates: DeviceRates) -> float:
    """Time in which one SM draws one element. [s]"""
    feed_bytes_per_s = parameters.feed_ratio * rates.feed_scale * rates.bandwidth_bytes_per_s / rates.num_sms
    return rates.element_bytes / feed_bytes_per_s


def other_times_s(
    m: Array, n: Array, k: Array, batch: Array, split_k: Array, parameters: GemmParameters, rates: DeviceRates
) -> tuple[Array, Array]:
    """What a kernel's tile does not decide: traffic over bandwidth, and what comes before and after. [s]"""
    p = parameters
    outputs = batch * m * n
    traffic_bytes = (batch * k * (m + rates.stored_b_share * n) + p.write_ratio * outputs) * rates.element_bytes
    split_bytes = np.where(split_k > 1, 2.0 * _ACCUMULATOR_BYTES * split_k, 0.0) * outputs
    bandwidth = p.bandwidth_fraction * rates.bandwidth_bytes_per_s
    if rates.l2_bytes and p.hot_cache_speedup > 1.0:
        resident = 1.0 / (1.0 + (traffic_bytes / (p.hot_cache_share * rates.l2_bytes)) ** _RESIDENCY_STEEPNESS)
        traffic_bytes = traffic_bytes * (1.0 - resident * (1.0 - 1.0 / p.hot_cache_speedup))
    added_s = p.start_s + np.where(split_k > 1, p.split_start_s, 0.0)
    if p.cast_bytes_per_element or p.cast_row_s:
        added_s = added_s + batch * m * (k * p.cast_bytes_per_element / bandwidth + p.cast_row_s)
    return (traffic_bytes + split_bytes) / bandwidth, added_s


def join_s(compute_s: Array, memory_s: Array, overlap_power: float) -> Array:
    """Time of arithmetic and traffic that overlap: (compute^p + traffic^p)^(1/p). [s]"""
    worst = np.maximum(compute_s, memory_s)
    shared = (np.minimum(compute_s, memory_s) / worst) ** overlap_power
    joined: Array = worst * (1.0 + shared) ** (1.0 / overlap_power)
    return joined


def alignment_factor(
    m: Array,
    n: Array,
    k: Array,
    letters: Letters,
    element_bits: int,
    parameters: GemmParameters,
    batched: NDArray[np.bool_] | bool = False,
) -> tuple[Array, Array]:
    """Rate factor that the contiguous dimensions allow, and the smallest alignment among them.

    Args:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        letters: Contiguous dimensions, see contiguous_letters.
        element_bits: Width of an element. [bit]
        parameters: Holder of the factor table.
        batched: Whether each is a batch of products.

    Returns:
        The factor, in (0, 1], and the alignment. [byte]
    """
    dims = {"m": m, "n": n, "k": k}
    class_of_width = classes_of_widths(element_bits)
    factor, smallest = None, None
    for letter, is_contiguous in letters.items():
        role = ROLES.index("contracted" if letter == "k" else "free") + len(ROLES) // 2 * np.asarray(batched)
        found = class_of_width[dims[letter].astype(np.int64) & WIDTH_MASK]
        own = parameters.alignment_factor[role, found]
        if is_contiguous is not True:
            own, found = np.where(is_contiguous, own, 1.0), np.where(is_contiguous, found, LAST_CLASS)
        factor = own if factor is None else np.minimum(factor, own)
        smallest = found if smallest is None else np.minimum(smallest, found)
    assert factor is not None
    assert smallest is not None
    return factor, _CLASS_BYTES[smallest]


def rates_of(device: Device, dtype: str) -> DeviceRates:
    """Take the data sheet's numbers that a GEMM price needs, for a cold cache.

    Raises:
        UnknownRateError: the device has no rate for this dtype.
    """
    num_sms = float(device.num_sms or 1)
    return DeviceRates(
        flops_per_s_per_sm=device.peak_flops_per_s(dtype) / num_sms,
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=num_sms,
        element_bytes=get_dtype(dtype).num_bytes,
    )
