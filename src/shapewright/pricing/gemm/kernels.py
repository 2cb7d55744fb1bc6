"""The GEMM model: time of each candidate kernel from tiles, waves, arithmetic, operand feed and memory traffic.

Legend: rows of an array are shapes, columns are kernels. For C[m,n] = A[m,k] B[k,n], repeated ``batch`` times, through
one kernel with tile bm x bn and contraction split s:

    tiles   = batch ceil(m/bm) ceil(n/bn) s
    waves   = ceil(tiles/SMs) - give_back (ceil(tiles/SMs) - max(tiles/SMs, 1))
    tile_s  = (ceil(k/s) + fill) bm bn / (MAC/s per SM * rate fraction * alignment factor)
    feed_s  = (bm + bn) ceil(k/s) element bytes / (feed ratio * bandwidth / SMs)
    time_s  = start + [(waves max(tile_s, feed_s))^p + (traffic / bandwidth)^p]^(1/p) + split cost + cast of A

``give_back`` is the fraction of an incomplete last wave that persistent and stream-k kernels recover. The exponent p is
the overlap of arithmetic and traffic (p = 1: none, p large: the longer one counts). The rate drops under power limits
as the work grows: the work of the GEMM or, where a record has it, of the run of GEMMs that it was timed in. All
constants come from a calibration record (gemm.parameters). Source: arXiv 2401.14489 (tile and wave quantization);
roofline: CACM 52(4), 2009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.records import dataclass
from shapewright.pricing.gemm.alignment import ALIGNMENT_CLASSES_BYTES, LAST_CLASS, ROLES, WIDTH_MASK, classes_of_widths

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device
    from shapewright.pricing.gemm.parameters import GemmParameters
    from shapewright.pricing.gemm.shapes import Gemms

    PerGemm = Float[np.ndarray, "gemms"]
    AnyShape = Float[np.ndarray, "..."]

_CLASS_BYTES = np.array(ALIGNMENT_CLASSES_BYTES, dtype=float)

# Bytes of a partial sum of a split contraction: every library accumulates in fp32.
_ACCUMULATOR_BYTES = 4.0

# Steepness of the fall of the cached share once a working set outgrows the cache; a smooth step.
_RESIDENCY_STEEPNESS = 3.0


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Data-sheet numbers that a GEMM price needs, for one dtype.

    Attributes:
        flops_per_s_per_sm: Dense rate of one SM. [flop/s]
        bandwidth_bytes_per_s: Memory bandwidth. [byte/s]
        num_sms: Number of SMs, each of which runs one tile at a time.
        element_bytes: Width of an element. [byte]
        l2_bytes: Last-level cache that may still hold operands from a previous run, 0 for a cold cache. A model's step
            finds it cold; a benchmark that repeats one shape finds it hot. [byte]
        stored_b_share: Bytes of B in memory over its bytes once widened for the matrix units.
        feed_scale: Factor on a borrowed feed ratio, 1 for a device's own.
    """

    flops_per_s_per_sm: float
    bandwidth_bytes_per_s: float
    num_sms: float
    element_bytes: float
    l2_bytes: float = 0.0
    stored_b_share: float = 1.0
    feed_scale: float = 1.0

    @property
    def element_bits(self) -> int:
        """Width of an element. [bit]"""
        return round(self.element_bytes * 8)


class Kernels(NamedTuple):
    """Candidate kernels, one entry of each field per kernel; arrays that broadcast against shapes."""

    tile_m: AnyShape
    tile_n: AnyShape
    rate_fraction: AnyShape
    fill_k: AnyShape
    split_k: AnyShape


class KernelTimes(NamedTuple):
    """Times of kernels; arrays of the shape that kernels and GEMMs broadcast to.

    Attributes:
        compute_s: Arithmetic and operand feed over all waves. [s]
        memory_s: Traffic over bandwidth. [s]
        added_s: Costs before and after: start, cast, reduction of a split. [s]
        num_tiles: Tiles, including batch and split.
        num_waves: Waves over the device.
    """

    compute_s: AnyShape
    memory_s: AnyShape
    added_s: AnyShape
    num_tiles: AnyShape
    num_waves: AnyShape


def estimate_kernels(
    gemms: Gemms, align_factor: PerGemm, kernels: Kernels, parameters: GemmParameters, rates: DeviceRates
) -> KernelTimes:
    """Time given kernels on given shapes: the formula of this module, term by term.

    gemm.fastest finds the fastest kernel without timing each one, and must agree with this reference.

    Args:
        align_factor: Rate factor of the alignment class.
        kernels: One kernel for each shape, or arrays shaped so that every kernel meets every shape.
        rates: The device's rates for this dtype.
    """
    p = parameters
    m, n, k, batch = gemms.sizes
    split_k = kernels.split_k
    num_tiles = (batch * np.ceil(m / kernels.tile_m) * np.ceil(n / kernels.tile_n)) * split_k
    # gemm.tiling has these counts too, but on floats its exact -(-x // y) takes eight times as long as a division and
    # ceil.
    waves = num_tiles / rates.num_sms
    full_waves = np.ceil(waves)
    num_waves = full_waves - p.wave_give_back * (full_waves - np.maximum(waves, 1.0))
    k_part = count_k(k, split_k, p)

    macs_per_s = kernels.rate_fraction * macs_per_s_per_sm(gemms, align_factor, p, rates)
    tile_s = (k_part + kernels.fill_k) * (kernels.tile_m * kernels.tile_n / macs_per_s)
    edges = np.minimum(kernels.tile_m, m) + rates.stored_b_share * np.minimum(kernels.tile_n, n)
    feed_s = k_part * (edges * feed_s_per_element(p, rates))
    compute_s = num_waves * np.maximum(tile_s, feed_s)
    return KernelTimes(compute_s, *other_times_s(gemms, split_k, p, rates), num_tiles, full_waves)


def every_kernel(parameters: GemmParameters) -> Kernels:
    """All candidate kernels as columns; kernel index is tile * number of splits + split. [kernels, 1]"""
    p = parameters
    tiles = (p.tile_m, p.tile_n, p.tile_rate_fraction, p.fill_k)
    columns = [np.repeat(column, len(p.split_k)) for column in tiles] + [np.tile(p.split_k, len(p.tile_m))]
    return Kernels(*(column[:, None] for column in columns))


def count_k(k: PerGemm, split_k: AnyShape, parameters: GemmParameters) -> AnyShape:
    """Length of the contraction loop of one part of a split. [element]"""
    part: AnyShape = np.ceil(np.ceil(k / split_k) / parameters.k_step) * parameters.k_step
    return part


def macs_per_s_per_sm(gemms: Gemms, align_factor: PerGemm, parameters: GemmParameters, rates: DeviceRates) -> PerGemm:
    """Multiply-adds per second of a busy SM at its peak, reduced by alignment and power. [mac/s]"""
    sustained = 1.0 - parameters.power_drop_fraction * _share_of_power_drop(gemms, parameters)
    return rates.flops_per_s_per_sm / 2.0 * align_factor * sustained


def _share_of_power_drop(gemms: Gemms, parameters: GemmParameters) -> PerGemm | float:
    """Fraction of the power loss that applies, 0 to 1, by the work of the run of GEMMs, or by the GEMM's own."""
    half, steepness = parameters.power_half_flops, parameters.power_run_steepness
    if gemms.run_flops is not None:
        # Records without fitted runs lose clock as gradually as for a single GEMM.
        share: PerGemm = 1.0 / (1.0 + (half / gemms.run_flops) ** (steepness or 1.0))
        return share
    # A run of unknown length is taken as endless.
    return 1.0 if steepness else gemms.flops / (gemms.flops + half)


def feed_s_per_element(parameters: GemmParameters, rates: DeviceRates) -> float:
    """Time in which one SM loads one element. [s]"""
    feed_bytes_per_s = parameters.feed_ratio * rates.feed_scale * rates.bandwidth_bytes_per_s / rates.num_sms
    return rates.element_bytes / feed_bytes_per_s


def other_times_s(
    gemms: Gemms, split_k: AnyShape, parameters: GemmParameters, rates: DeviceRates
) -> tuple[AnyShape, AnyShape]:
    """Traffic over bandwidth, and costs before and after: the terms that do not depend on the tile. [s]"""
    p = parameters
    m, n, k, batch = gemms.sizes
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


def join_s(compute_s: AnyShape, memory_s: AnyShape, overlap_power: float | AnyShape) -> AnyShape:
    """Time of overlapping arithmetic and traffic: (compute^p + traffic^p)^(1/p). [s]"""
    worst = np.maximum(compute_s, memory_s)
    shared = (np.minimum(compute_s, memory_s) / worst) ** overlap_power
    joined: AnyShape = worst * (1.0 + shared) ** (1.0 / overlap_power)
    return joined


def alignment_factor(gemms: Gemms, element_bits: int, parameters: GemmParameters) -> tuple[PerGemm, PerGemm]:
    """Rate factor of the contiguous dimensions, and the smallest alignment among them.

    Args:
        element_bits: Width of an element. [bit]
        parameters: Constants of the record, with the factor table.

    Returns:
        The factor, in (0, 1], and the alignment. [byte]
    """
    first_role = len(ROLES) // 2 * (gemms.batch > 1.0)
    class_of_width = classes_of_widths(element_bits)
    factor, smallest = None, None
    for letter, is_contiguous in gemms.letters.items():
        role = ROLES.index("contracted" if letter == "k" else "free") + first_role
        found = class_of_width[gemms.size_of(letter).astype(np.int64) & WIDTH_MASK]
        own = parameters.alignment_factor[role, found]
        if is_contiguous is not True:
            own, found = np.where(is_contiguous, own, 1.0), np.where(is_contiguous, found, LAST_CLASS)
        factor = own if factor is None else np.minimum(factor, own)
        smallest = found if smallest is None else np.minimum(smallest, found)
    assert factor is not None
    assert smallest is not None
    return factor, _CLASS_BYTES[smallest]


def rates_of(device: Device, dtype: str) -> DeviceRates:
    """Take the numbers that a GEMM price needs from the data sheet, for a cold cache.

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
