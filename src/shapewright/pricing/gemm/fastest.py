"""Search for the fastest kernel of each shape without timing every kernel.

Legend: rows of an array are splits or tiles, its last axis is shapes.

In the formula of gemm.kernels only the compute time depends on a kernel's tile; traffic and added costs depend on its
split. The joined time grows with the compute time, so the best tile of a split is the one with the least compute time,
and powers are taken once per split instead of once per kernel. The remaining work per kernel is

    waves(tiles s / SMs) max((k_part + fill) a, k_part e)      a, e: seconds per element of k of a tile, by arithmetic
                                                               and by operand feed; the same for all splits

a dozen operations, which NumPy runs one at a time over a block of shapes. gemm.compiled runs them in one loop where
Numba is installed and there are many shapes. All variants agree to AGREEMENT (tests/property/test_pricing_fastest.py).
Blocks of shapes are spread over threads, since compiled code releases Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.ranges import read_integer
from shapewright.pricing.gemm.kernels import count_k, feed_s_per_element, join_s, macs_per_s_per_sm, other_times_s

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.pricing.gemm.kernels import DeviceRates
    from shapewright.pricing.gemm.parameters import GemmParameters
    from shapewright.pricing.gemm.shapes import Gemms

    PerGemm = Float[np.ndarray, "gemms"]
    GemmIndex = Int[np.ndarray, "gemms"]
    PerTile = Float[np.ndarray, "tiles gemms"]
    PerSplit = Float[np.ndarray, "splits gemms"]
    AnyShape = Float[np.ndarray, "..."]

# Fewest blocks for which starting a thread pays.
_FEWEST_BLOCKS_PER_THREAD = 8


def count_threads() -> int:
    """Number of threads to use: OMP_NUM_THREADS, as numeric libraries read it, otherwise the cores of this process."""
    asked = read_integer(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
    if asked is not None and asked > 0:
        return asked
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_over_threads(work: Callable[[int], None], blocks: Sequence[int], *, num_threads: int) -> None:
    """Call ``work`` once for each block, in any order; an error is raised after all threads have stopped.

    Args:
        work: Processes one block, and touches no data of another.
        num_threads: Upper bound of threads; fewer are used for few blocks.
    """
    num_threads = min(num_threads, len(blocks) // _FEWEST_BLOCKS_PER_THREAD)
    if num_threads < 2:
        for block in blocks:
            work(block)
        return

    def run_share(first: int) -> None:
        for block in blocks[first::num_threads]:
            work(block)

    # Imported here because few commands need it and importing takes 4 ms.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run_share, range(num_threads)))


AGREEMENT = 1e-9
"""Largest relative difference between the variants that find the fastest kernel."""
# Up to this many numbers all splits of all tiles are computed in one array: NumPy's call overhead exceeds the work.
_NUMBERS_AT_ONCE = 30_000
# Factor just below 1 on tiles over SMs, so that full waves are not rounded up to one more.
_BELOW = 1.0 - 1e-12


class Fastest(NamedTuple):
    """Fastest kernels by index; arrays of shape [shapes].

    Attributes:
        tile: Index of the tile.
        split: Index of the split.
        time_s: Whole time. [s]
        compute_s: Arithmetic and operand feed over all waves. [s]
        memory_s: Traffic over bandwidth. [s]
    """

    tile: GemmIndex
    split: GemmIndex
    time_s: PerGemm
    compute_s: PerGemm
    memory_s: PerGemm


class _Terms(NamedTuple):
    """Terms of the compute time. Waves are ``tiles_per_slot`` times the split.

    Attributes:
        tiles_per_slot: Tiles of an unsplit GEMM over SMs, times _BELOW. [tiles, shapes]
        tile_s: Arithmetic of one element of k of a tile. [s], [tiles, shapes]
        feed_s: Operand feed of the same. [s], [tiles, shapes]
        fill_k: Prologue and epilogue. [element], [tiles, 1]
        k_part: Contraction of one part. [element], [splits, shapes]
    """

    tiles_per_slot: PerTile
    tile_s: PerTile
    feed_s: PerTile
    fill_k: AnyShape
    k_part: PerSplit


def find_fastest(gemms: Gemms, align_factor: PerGemm, parameters: GemmParameters, rates: DeviceRates) -> Fastest:
    """Find the fastest kernel of each shape and its time.

    Args:
        align_factor: Rate factor of the alignment class.
        parameters: Candidate kernels and constants of the record.
        rates: The device's rates for this dtype.
    """
    terms = _terms(gemms, align_factor, parameters, rates)
    compute_s = _least_of(terms, parameters)
    memory_s, added_s = other_times_s(gemms, parameters.split_k[:, None], parameters, rates)
    total_s = join_s(compute_s, memory_s, parameters.overlap_power) + added_s
    split = total_s.argmin(axis=0)
    own = split, np.arange(len(gemms.m))
    chosen = terms._replace(k_part=terms.k_part[own][None])
    tile = _compute_s(chosen, parameters.split_k[split], parameters).argmin(axis=0)
    return Fastest(tile, split, total_s[own], compute_s[own], memory_s[own])


def fastest_s(
    gemms: Gemms,
    align_factor: PerGemm,
    parameters: GemmParameters,
    rates: DeviceRates,
    *,
    compiled: bool = False,
) -> PerGemm:
    """Time of the fastest kernel of each shape, without selecting it. [s], shape [shapes]

    Args:
        align_factor: Rate factor of the alignment class.
        parameters: Candidate kernels and constants of the record.
        rates: The device's rates for this dtype.
        compiled: Use Numba, which must be installed.
    """
    least = _compiled_least_compute_s if compiled else _least_compute_s
    compute_s = least(gemms, align_factor, parameters, rates)
    memory_s, added_s = other_times_s(gemms, parameters.split_k[:, None], parameters, rates)
    total_s: PerGemm = (join_s(compute_s, memory_s, parameters.overlap_power) + added_s).min(axis=0)
    return total_s


@cache
def has_compiler() -> bool:
    """Whether Numba is installed and supports this NumPy; imports it if so."""
    try:
        import_module("shapewright.pricing.gemm.compiled")
    except ImportError:
        return False
    return True


def _compiled_least_compute_s(
    gemms: Gemms, align_factor: PerGemm, parameters: GemmParameters, rates: DeviceRates
) -> PerSplit:
    from shapewright.pricing.gemm.compiled import fill_least

    p = parameters
    m, n, k, batch = gemms.sizes
    k_part = count_k(k, p.split_k[:, None], p)
    element_s = feed_s_per_element(p, rates)
    least_s = np.empty(k_part.shape)
    fill_least(
        np.stack([m, n]),
        batch * (_BELOW / rates.num_sms),
        1.0 / macs_per_s_per_sm(gemms, align_factor, p, rates),
        k_part,
        np.stack([p.tile_m, p.tile_n, p.tile_m * p.tile_n / p.tile_rate_fraction, p.fill_k]),
        p.split_k,
        (element_s, rates.stored_b_share * element_s),
        p.wave_give_back,
        least_s,
    )
    return least_s


def _least_compute_s(gemms: Gemms, align_factor: PerGemm, parameters: GemmParameters, rates: DeviceRates) -> PerSplit:
    """Compute time of the best tile of every split. [s], [splits, shapes]"""
    return _least_of(_terms(gemms, align_factor, parameters, rates), parameters)


def _terms(gemms: Gemms, align_factor: PerGemm, parameters: GemmParameters, rates: DeviceRates) -> _Terms:
    p = parameters
    m, n, k, batch = gemms.sizes
    tile_m, tile_n = p.tile_m[:, None], p.tile_n[:, None]
    slots = batch * (_BELOW / rates.num_sms)
    macs_per_s = macs_per_s_per_sm(gemms, align_factor, p, rates)
    element_s = feed_s_per_element(p, rates)
    return _Terms(
        tiles_per_slot=np.ceil(m / tile_m) * (np.ceil(n / tile_n) * slots),
        tile_s=(p.tile_m * p.tile_n / p.tile_rate_fraction)[:, None] / macs_per_s,
        feed_s=np.minimum(tile_m, m) * element_s + np.minimum(tile_n, n) * (rates.stored_b_share * element_s),
        fill_k=p.fill_k[:, None],
        k_part=count_k(k, p.split_k[:, None], p),
    )


def _least_of(terms: _Terms, parameters: GemmParameters) -> PerSplit:
    """Compute time of the best tile of every split. [s], [splits, shapes]"""
    num_splits, num_shapes = terms.k_part.shape
    if num_splits * terms.tile_s.size <= _NUMBERS_AT_ONCE:
        every = terms._replace(k_part=terms.k_part[:, None])
        every_s: PerSplit = _compute_s(every, parameters.split_k[:, None, None], parameters).min(axis=1)
        return every_s
    least_s = np.empty((num_splits, num_shapes))
    for split, split_k in enumerate(parameters.split_k.tolist()):
        own = terms._replace(k_part=terms.k_part[split])
        _compute_s(own, split_k, parameters).min(axis=0, out=least_s[split])
    return least_s


def _compute_s(terms: _Terms, split_k: AnyShape | float, parameters: GemmParameters) -> AnyShape:
    """Compute time of every tile at given splits. [s]"""
    busy_s: AnyShape = (terms.k_part + terms.fill_k) * terms.tile_s
    np.maximum(busy_s, terms.k_part * terms.feed_s, out=busy_s)
    waves = terms.tiles_per_slot * split_k
    full_waves = np.ceil(waves)
    np.maximum(waves, 1.0, out=waves)
    waves *= parameters.wave_give_back
    full_waves *= 1.0 - parameters.wave_give_back
    waves += full_waves
    busy_s *= waves
    return busy_s
