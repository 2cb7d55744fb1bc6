"""The fastest kernel of a menu for each shape, without timing every kernel by itself.

Legend: rows of an array are splits or tiles, its last axis is shapes.

Of the formula in perf.kernels only the compute time depends on a kernel's tile; traffic and what is added depend on
its split. The joined time rises with compute, so the best tile of a split is the one with the least compute time, and
powers are taken once per split instead of once per kernel. What is left per kernel is

    waves(tiles s / slots) max((k_part + fill) a, k_part e)      a, e: seconds per element of k of a tile, by arithmetic
                                                                 and by operand feed; the same for all splits

a dozen operations, of which NumPy does one at a time over a block of shapes. perf.compiled does them all at once where
Numba is installed and the shapes are many. All three agree to AGREEMENT (tests/property/test_perf_fastest.py).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.perf.kernels import count_k, feed_s_per_element, join_s, macs_per_s_per_sm, other_times_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.gemm_menu import GemmParameters
    from shapewright.perf.kernels import DeviceRates
    from shapewright.perf.products import Products

    Array = NDArray[np.float64]

AGREEMENT = 1e-9
"""Relative difference that the ways of finding the fastest kernel may have."""
# Up to this many numbers all splits of all tiles are computed in one array: NumPy's start costs more than the work.
_NUMBERS_AT_ONCE = 30_000
# A count of waves is tiles times this much less than one over the slots, so that a product of full waves is not rounded
# up to one more.
_BELOW = 1.0 - 1e-12


class Fastest(NamedTuple):
    """Fastest kernels, by their place in the menu; shape [shapes].

    Attributes:
        tile: Place of its tile.
        split: Place of its split.
        time_s: Whole time. [s]
        compute_s: Arithmetic and operand feed over all waves. [s]
        memory_s: Traffic over bandwidth. [s]
    """

    tile: NDArray[np.intp]
    split: NDArray[np.intp]
    time_s: Array
    compute_s: Array
    memory_s: Array


class _Terms(NamedTuple):
    """What decides compute times. Waves are a fraction of ``tiles_per_slot`` times the split.

    Attributes:
        tiles_per_slot: Tiles of an unsplit product over slots, a hair below. [tiles, shapes]
        tile_s: Arithmetic of one element of k of a tile. [s], [tiles, shapes]
        feed_s: Operand feed of the same. [s], [tiles, shapes]
        fill_k: Prologue and epilogue. [element], [tiles, 1]
        k_part: Contraction of one part. [element], [splits, shapes]
    """

    tiles_per_slot: Array
    tile_s: Array
    feed_s: Array
    fill_k: Array
    k_part: Array


def find_fastest(products: Products, align_factor: Array, parameters: GemmParameters, rates: DeviceRates) -> Fastest:
    """Find the fastest kernel of each shape and its time.

    Args:
        products: Their sizes.
        align_factor: Rate factor of the alignment class.
        parameters: The menu and its constants.
        rates: The device's rates for this dtype.
    """
    terms = _terms(products, align_factor, parameters, rates)
    compute_s = _least_of(terms, parameters)
    memory_s, added_s = other_times_s(products, parameters.split_k[:, None], parameters, rates)
    total_s = join_s(compute_s, memory_s, parameters.overlap_power) + added_s
    split = total_s.argmin(axis=0)
    own = split, np.arange(len(products.m))
    chosen = terms._replace(k_part=terms.k_part[own][None])
    tile = _compute_s(chosen, parameters.split_k[split], parameters).argmin(axis=0)
    return Fastest(tile, split, total_s[own], compute_s[own], memory_s[own])


def fastest_s(
    products: Products,
    align_factor: Array,
    parameters: GemmParameters,
    rates: DeviceRates,
    *,
    compiled: bool = False,
) -> Array:
    """Time of the fastest kernel of each shape, for those who need not know which it is. [s], shape [shapes]

    Args:
        products: Their sizes.
        align_factor: Rate factor of the alignment class.
        parameters: The menu and its constants.
        rates: The device's rates for this dtype.
        compiled: Use Numba, which must be installed.
    """
    least = _compiled_least_compute_s if compiled else _least_compute_s
    compute_s = least(products, align_factor, parameters, rates)
    memory_s, added_s = other_times_s(products, parameters.split_k[:, None], parameters, rates)
    total_s: Array = (join_s(compute_s, memory_s, parameters.overlap_power) + added_s).min(axis=0)
    return total_s


@cache
def has_compiler() -> bool:
    """Whether Numba is installed and goes with this NumPy; loads it if so."""
    try:
        import_module("shapewright.perf.compiled")
    except ImportError:
        return False
    return True


def _compiled_least_compute_s(
    products: Products, align_factor: Array, parameters: GemmParameters, rates: DeviceRates
) -> Array:
    from shapewright.perf.compiled import fill_least

    p = parameters
    m, n, k, batch = products.sizes
    k_part = count_k(k, p.split_k[:, None], p)
    element_s = feed_s_per_element(p, rates)
    least_s = np.empty(k_part.shape)
    fill_least(
        np.stack([m, n]),
        batch * (_BELOW / rates.num_sms),
        1.0 / macs_per_s_per_sm(products, align_factor, p, rates),
        k_part,
        np.stack([p.tile_m, p.tile_n, p.tile_m * p.tile_n / p.tile_rate_fraction, p.fill_k]),
        p.split_k,
        (element_s, rates.stored_b_share * element_s),
        p.wave_give_back,
        least_s,
    )
    return least_s


def _least_compute_s(products: Products, align_factor: Array, parameters: GemmParameters, rates: DeviceRates) -> Array:
    """Compute time of the best tile of every split. [s], [splits, shapes]"""
    return _least_of(_terms(products, align_factor, parameters, rates), parameters)


def _terms(products: Products, align_factor: Array, parameters: GemmParameters, rates: DeviceRates) -> _Terms:
    p = parameters
    m, n, k, batch = products.sizes
    tile_m, tile_n = p.tile_m[:, None], p.tile_n[:, None]
    slots = batch * (_BELOW / rates.num_sms)
    macs_per_s = macs_per_s_per_sm(products, align_factor, p, rates)
    element_s = feed_s_per_element(p, rates)
    return _Terms(
        tiles_per_slot=np.ceil(m / tile_m) * (np.ceil(n / tile_n) * slots),
        tile_s=(p.tile_m * p.tile_n / p.tile_rate_fraction)[:, None] / macs_per_s,
        feed_s=np.minimum(tile_m, m) * element_s + np.minimum(tile_n, n) * (rates.stored_b_share * element_s),
        fill_k=p.fill_k[:, None],
        k_part=count_k(k, p.split_k[:, None], p),
    )


def _least_of(terms: _Terms, parameters: GemmParameters) -> Array:
    """Compute time of the best tile of every split. [s], [splits, shapes]"""
    num_splits, num_shapes = terms.k_part.shape
    if num_splits * terms.tile_s.size <= _NUMBERS_AT_ONCE:
        every = terms._replace(k_part=terms.k_part[:, None])
        every_s: Array = _compute_s(every, parameters.split_k[:, None, None], parameters).min(axis=1)
        return every_s
    least_s = np.empty((num_splits, num_shapes))
    for split, split_k in enumerate(parameters.split_k.tolist()):
        own = terms._replace(k_part=terms.k_part[split])
        _compute_s(own, split_k, parameters).min(axis=0, out=least_s[split])
    return least_s


def _compute_s(terms: _Terms, split_k: Array | float, parameters: GemmParameters) -> Array:
    """Compute time of every tile at given splits. [s]"""
    busy_s = (terms.k_part + terms.fill_k) * terms.tile_s
    np.maximum(busy_s, terms.k_part * terms.feed_s, out=busy_s)
    waves = terms.tiles_per_slot * split_k
    full_waves = np.ceil(waves)
    np.maximum(waves, 1.0, out=waves)
    waves *= parameters.wave_give_back
    full_waves *= 1.0 - parameters.wave_give_back
    waves += full_waves
    busy_s *= waves
    return busy_s
