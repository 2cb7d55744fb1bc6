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
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.dtypes import get_dtype
from shapewright.errors import CalibrationError
from shapewright.operations.gemm import contiguous_dims
from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES, alignment_bytes, alignment_class

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device

    Array = NDArray[np.float64]

# Roles of a contiguous dimension, in the order of GemmParameters.alignment_factor: of one product, and of a batch, for
# which libraries take other kernels (on A100 an odd contracted one costs a batch much less).
ROLES = ("contracted", "free", "contracted_batched", "free_batched")

# Bytes that a split contraction's partial sum takes: every library accumulates in fp32.
_ACCUMULATOR_BYTES = 4.0

# How sharply the cached share falls once a working set outgrows the cache; a smooth stand-in for a step.
_RESIDENCY_STEEPNESS = 3.0


@dataclass(frozen=True, kw_only=True, eq=False)
class GemmParameters:
    """What a record knows of one device and dtype, ready for arithmetic; arrays run over the kernels of the menu.

    Attributes:
        tile_m: Rows of the tile. [element]
        tile_n: Columns of the tile. [element]
        split_k: Parts of the contraction.
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


def read_parameters(raw: Mapping[str, Any]) -> GemmParameters:
    """Unfold one dtype's section of a record: every tile with every split it allows.

    Raises:
        CalibrationError: a key is missing.
    """
    try:
        kernels = [(tile, split) for tile in raw["tiles"] for split in raw["splits"]]
        column = {
            name: np.array([tile[name] for tile, _ in kernels], dtype=float) for name in ("m", "n", "rate", "fill_k")
        }
        factors = raw["alignment_factor"]
        return GemmParameters(
            tile_m=column["m"],
            tile_n=column["n"],
            split_k=np.array([split for _, split in kernels], dtype=float),
            tile_rate_fraction=column["rate"],
            fill_k=column["fill_k"],
            alignment_factor=np.array(
                [[factors[role][str(width)] for width in ALIGNMENT_CLASSES_BYTES] for role in ROLES]
            ),
            **{name: float(raw[name]) for name in _SCALARS},
        )
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"gemm calibration lacks {error}") from error


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


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelTimes:
    """Times of every kernel of the menu for a block of shapes; each array is [shapes, kernels]."""

    total_s: Array
    compute_s: Array
    memory_s: Array
    num_tiles: Array
    num_waves: Array


def estimate_kernels(
    m: Array, n: Array, k: Array, batch: Array, align_factor: Array, parameters: GemmParameters, rates: DeviceRates
) -> KernelTimes:
    """Time every kernel of the menu on a block of shapes.

    Args:
        m: Rows of C. [element], shape [shapes, 1], as are n, k and batch.
        n: Columns of C.
        k: Contraction.
        batch: Independent products.
        align_factor: Rate factor of the alignment class.
        parameters: The menu and its constants.
        rates: The device's rates for this dtype.

    Returns:
        Times in seconds. [shapes, kernels]
    """
    p = parameters
    num_tiles = batch * np.ceil(m / p.tile_m) * np.ceil(n / p.tile_n) * p.split_k
    # perf.tiling has these counts too; on floats its exact -(-x // y) takes eight times as long as a division and ceil.
    full_waves = np.ceil(num_tiles / rates.num_sms)
    num_waves = full_waves - p.wave_give_back * (full_waves - np.maximum(num_tiles / rates.num_sms, 1.0))
    k_part = np.ceil(np.ceil(k / p.split_k) / p.k_step) * p.k_step

    flops = 2.0 * m * n * k * batch
    sustained = 1.0 - p.power_drop_fraction * flops / (flops + p.power_half_flops)
    macs_per_s = rates.flops_per_s_per_sm / 2.0 * p.tile_rate_fraction * align_factor * sustained
    tile_s = (k_part + p.fill_k) * p.tile_m * p.tile_n / macs_per_s
    feed_s = (
        (np.minimum(p.tile_m, m) + rates.stored_b_share * np.minimum(p.tile_n, n))
        * k_part
        * rates.element_bytes
        / (p.feed_ratio * rates.feed_scale * rates.bandwidth_bytes_per_s / rates.num_sms)
    )
    compute_s = num_waves * np.maximum(tile_s, feed_s)

    traffic_bytes = batch * (m * k + rates.stored_b_share * k * n + p.write_ratio * m * n) * rates.element_bytes
    split_bytes = np.where(p.split_k > 1, 2.0 * p.split_k * batch * m * n * _ACCUMULATOR_BYTES, 0.0)
    bandwidth = p.bandwidth_fraction * rates.bandwidth_bytes_per_s
    if rates.l2_bytes and p.hot_cache_speedup > 1.0:
        resident = 1.0 / (1.0 + (traffic_bytes / (p.hot_cache_share * rates.l2_bytes)) ** _RESIDENCY_STEEPNESS)
        traffic_bytes = traffic_bytes * (1.0 - resident * (1.0 - 1.0 / p.hot_cache_speedup))
    memory_s = (traffic_bytes + split_bytes) / bandwidth
    worst = np.maximum(compute_s, memory_s)
    joined = worst * ((compute_s / worst) ** p.overlap_power + (memory_s / worst) ** p.overlap_power) ** (
        1.0 / p.overlap_power
    )
    cast_s = batch * m * (k * p.cast_bytes_per_element / bandwidth + p.cast_row_s)
    total_s = p.start_s + cast_s + joined + np.where(p.split_k > 1, p.split_start_s, 0.0)
    return KernelTimes(
        total_s=total_s, compute_s=compute_s, memory_s=memory_s, num_tiles=num_tiles, num_waves=full_waves
    )


def alignment_factor(
    m: Array,
    n: Array,
    k: Array,
    layout: str,
    element_bits: int,
    parameters: GemmParameters,
    batched: NDArray[np.bool_] | bool = False,
) -> tuple[Array, Array]:
    """Rate factor that the contiguous dimensions allow, and the smallest alignment among them.

    Args:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        layout: How A and B lie in memory.
        element_bits: Width of an element. [bit]
        parameters: Holder of the factor table.
        batched: Whether each is a batch of products.

    Returns:
        The factor, in (0, 1], and the alignment. [byte]
    """
    dims = {"m": m, "n": n, "k": k}
    factor, smallest = np.ones(m.shape), np.full(m.shape, float(ALIGNMENT_CLASSES_BYTES[-1]))
    for letter in set(contiguous_dims(layout)):
        align = alignment_bytes(dims[letter], element_bits)
        role = ROLES.index("contracted" if letter == "k" else "free") + len(ROLES) // 2 * np.asarray(batched)
        factor = np.minimum(
            factor,
            parameters.alignment_factor[role, alignment_class(align)],
        )
        smallest = np.minimum(smallest, align)
    return factor, smallest


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


def borrowed_feed_scale(device: Device, lender: Device) -> float:
    """Factor on the lender's feed ratio, so that no SM draws fewer bytes a clock than the lender's does.

    A feed ratio counts in shares of memory bandwidth. That is how it carries over to a device with faster memory, whose
    caches are faster too; a device with slower memory keeps the path from cache to SM.
    """
    clocks = [chip.boost_clock_hz for chip in (device, lender)]
    shares = [chip.memory_bandwidth_bytes_per_s / (chip.num_sms or 1) for chip in (device, lender)]
    if clocks[0] is None or clocks[1] is None:
        return 1.0
    return max(1.0, (shares[1] / clocks[1]) / (shares[0] / clocks[0]))
