"""The GEMM model: what each kernel of a menu would take, from tiles, waves, arithmetic, operand feed and traffic.

Legend: rows of an array are shapes, columns are kernels of the menu. For one kernel with tile bm x bn, split s:

    tiles   = batch ceil(m/bm) ceil(n/bn) s
    waves   = soft(tiles / slots)                                    last wave partly empty, see below
    tile_s  = (k/s + fill) bm bn / (rate per SM * efficiency * alignment factor)
    feed_s  = (bm + bn) k/s element bytes / (feed ratio * bandwidth / SMs)
    time    = start + [(waves max(tile_s, feed_s))^p + (traffic / bandwidth)^p]^(1/p) + split cost + cast of A

``soft`` is ceil(tiles/slots), less a fitted share of what the last wave leaves empty: persistent and stream-k kernels
give part of it back. p says how well arithmetic and traffic overlap. ``rate`` falls under power as the work grows:
that of the product or, where a record says so, of the run of products that it was timed in.
The menu and its constants are a record's (perf.gemm_menu).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.dtypes import get_dtype
from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES, LAST_CLASS, WIDTH_MASK, classes_of_widths
from shapewright.perf.gemm_menu import ROLES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.gemm_menu import GemmParameters
    from shapewright.perf.products import Products

    Array = NDArray[np.float64]

_CLASS_BYTES = np.array(ALIGNMENT_CLASSES_BYTES, dtype=float)

# Bytes that a split contraction's partial sum takes: every library accumulates in fp32.
_ACCUMULATOR_BYTES = 4.0

# How sharply the cached share falls once a working set outgrows the cache; a smooth stand-in for a step.
_RESIDENCY_STEEPNESS = 3.0


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

    @property
    def element_bits(self) -> int:
        """Width of an element. [bit]"""
        return round(self.element_bytes * 8)


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
    products: Products, align_factor: Array, kernels: Kernels, parameters: GemmParameters, rates: DeviceRates
) -> KernelTimes:
    """Time given kernels on given shapes: the formula of this file, term by term.

    The fastest kernel of each shape is found by perf.fastest, which does not time each of them; this says what its
    answer consists of, and is what its answer must agree with.

    Args:
        products: Their sizes.
        align_factor: Rate factor of the alignment class.
        kernels: Which kernels: one for each shape, or shaped so that every kernel meets every shape.
        parameters: The constants of the menu.
        rates: The device's rates for this dtype.
    """
    p = parameters
    m, n, k, batch = products.sizes
    split_k = kernels.split_k
    num_tiles = (batch * np.ceil(m / kernels.tile_m) * np.ceil(n / kernels.tile_n)) * split_k
    # perf.tiling has these counts too; on floats its exact -(-x // y) takes eight times as long as a division and ceil.
    waves = num_tiles / rates.num_sms
    full_waves = np.ceil(waves)
    num_waves = full_waves - p.wave_give_back * (full_waves - np.maximum(waves, 1.0))
    k_part = count_k(k, split_k, p)

    macs_per_s = kernels.rate_fraction * macs_per_s_per_sm(products, align_factor, p, rates)
    tile_s = (k_part + kernels.fill_k) * (kernels.tile_m * kernels.tile_n / macs_per_s)
    edges = np.minimum(kernels.tile_m, m) + rates.stored_b_share * np.minimum(kernels.tile_n, n)
    feed_s = k_part * (edges * feed_s_per_element(p, rates))
    compute_s = num_waves * np.maximum(tile_s, feed_s)
    return KernelTimes(compute_s, *other_times_s(products, split_k, p, rates), num_tiles, full_waves)


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


def macs_per_s_per_sm(products: Products, align_factor: Array, parameters: GemmParameters, rates: DeviceRates) -> Array:
    """Multiplications and additions that a busy SM would sustain at its peak, less alignment and power. [mac/s]"""
    sustained = 1.0 - parameters.power_drop_fraction * _share_of_power_drop(products, parameters)
    return rates.flops_per_s_per_sm / 2.0 * align_factor * sustained


def _share_of_power_drop(products: Products, parameters: GemmParameters) -> Array | float:
    """How much of the loss under power products suffer, 0 to 1, by the work of their run, or by their own."""
    half, steepness = parameters.power_half_flops, parameters.power_run_steepness
    if products.run_flops is not None:
        # Where no run was fitted it loses its clock as gradually as a lone product does.
        share: Array = 1.0 / (1.0 + (half / products.run_flops) ** (steepness or 1.0))
        return share
    # A run of which nothing is known may be endless.
    return 1.0 if steepness else products.flops / (products.flops + half)


def feed_s_per_element(parameters: GemmParameters, rates: DeviceRates) -> float:
    """Time in which one SM draws one element. [s]"""
    feed_bytes_per_s = parameters.feed_ratio * rates.feed_scale * rates.bandwidth_bytes_per_s / rates.num_sms
    return rates.element_bytes / feed_bytes_per_s


def other_times_s(
    products: Products, split_k: Array, parameters: GemmParameters, rates: DeviceRates
) -> tuple[Array, Array]:
    """What a kernel's tile does not decide: traffic over bandwidth, and what comes before and after. [s]"""
    p = parameters
    m, n, k, batch = products.sizes
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


def join_s(compute_s: Array, memory_s: Array, overlap_power: float | Array) -> Array:
    """Time of arithmetic and traffic that overlap: (compute^p + traffic^p)^(1/p). [s]"""
    worst = np.maximum(compute_s, memory_s)
    shared = (np.minimum(compute_s, memory_s) / worst) ** overlap_power
    joined: Array = worst * (1.0 + shared) ** (1.0 / overlap_power)
    return joined


def alignment_factor(products: Products, element_bits: int, parameters: GemmParameters) -> tuple[Array, Array]:
    """Rate factor that the contiguous dimensions allow, and the smallest alignment among them.

    Args:
        products: Their sizes and contiguous dimensions.
        element_bits: Width of an element. [bit]
        parameters: Holder of the factor table.

    Returns:
        The factor, in (0, 1], and the alignment. [byte]
    """
    first_role = len(ROLES) // 2 * (products.batch > 1.0)
    class_of_width = classes_of_widths(element_bits)
    factor, smallest = None, None
    for letter, is_contiguous in products.letters.items():
        role = ROLES.index("contracted" if letter == "k" else "free") + first_role
        found = class_of_width[products.size_of(letter).astype(np.int64) & WIDTH_MASK]
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
