"""Batches of products that fill a device: the one kernel that a library takes, by alignment and length of contraction.

For single products the fastest kernel of a menu is a fair guess. For batches libraries decide by few rules, which the
attention products of every head width from 1 to 1366 show: the alignment of the rows and the length of the contraction
choose a kernel, and of its tiles the narrowest that holds the columns, else the widest. For tile bm x w:

    columns = floor(n/w) + (edge + (1 - edge) rest/w if a rest is left)     a partly filled tile stores and loads less
    waves   = soft(batch ceil(m/bm) columns / SMs)                          as in perf.kernels
    tile_s  = (k + fill) bm w / (rate per SM * rate of w * rate of the alignment)
    traffic = max[k (m + n), k (m ceil(n/w) + n ceil(m/bm)) / feed] + write ratio * m n    caches feed tiles
    time    = start + [(waves tile_s)^p + (traffic / bandwidth)^p]^(1/p)

Each kernel has its own numbers, which a record holds in ``kernels`` of a section's ``batched``. Products that none of
them takes, or that are too few tiles for ``kernels_least_waves``, are priced by the menu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.perf.alignment import LAST_CLASS, WIDTH_MASK, classes_of_widths
from shapewright.perf.kernels import join_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.batch_menu import BatchKernels
    from shapewright.perf.gemm_menu import GemmParameters
    from shapewright.perf.kernels import DeviceRates
    from shapewright.perf.products import Products

    Array = NDArray[np.float64]


class BatchTimes(NamedTuple):
    """What kernels for batches take, for the products that they run; the rest of each array means nothing.

    Attributes:
        is_run: Which products they run. [products]
        time_s: Whole time, start included. [s]
        compute_s: Arithmetic over all waves. [s]
        memory_s: Traffic over bandwidth. [s]
        tile_m: Rows of the tile. [element]
        tile_n: Columns of the tile. [element]
        num_tiles: Tiles of the whole batch.
        num_waves: Passes over the device.
    """

    is_run: NDArray[np.bool_]
    time_s: Array
    compute_s: Array
    memory_s: Array
    tile_m: Array
    tile_n: Array
    num_tiles: Array
    num_waves: Array


def time_batches(
    products: Products, parameters: GemmParameters, rates: DeviceRates, *, aligned: bool = False
) -> BatchTimes:
    """Time the batches that kernels of their own run.

    Args:
        products: Their sizes and contiguous dimensions.
        parameters: Holder of the kernels; its start, power and wave tails are theirs too.
        rates: The device's rates.
        aligned: Time them as if every dimension were aligned.
    """
    known = parameters.batch_kernels
    assert known is not None
    m, n, k, batch = products.sizes
    worst, is_contracted = _worst_alignment(products, rates.element_bits, aligned=aligned)
    kernel = _choose_kernels(known, products, worst, is_contracted)
    place = np.maximum(kernel, 0)

    chosen = np.minimum((n[:, None] > known.widths[place]).sum(axis=1), known.last_width[place])
    width = known.widths[place, chosen]
    tile_m = known.tile_m[place]
    whole = np.floor(n / width)
    rest = (n - whole * width) / width
    edge = known.edge_share[place]
    columns = whole + np.where(rest > 0.0, edge + (1.0 - edge) * rest, 0.0)
    rows = batch * np.ceil(m / tile_m)
    waves = rows * columns / rates.num_sms
    full_waves = np.ceil(waves)
    busy_waves = full_waves - parameters.wave_give_back * (full_waves - np.maximum(waves, 1.0))

    flops = products.flops
    sustained = 1.0 - parameters.power_drop_fraction * flops / (flops + parameters.power_half_flops)
    rate = known.rates[place, chosen] * known.alignment_rates[place, worst] * sustained
    step = known.k_step[place]
    steps_k = np.ceil(k / step) * step + known.fill_k[place]
    compute_s = busy_waves * steps_k * tile_m * width / (rates.flops_per_s_per_sm / 2.0 * rate)

    stored_n = rates.stored_b_share * n
    fed = (m * np.ceil(n / width) + stored_n * np.ceil(m / tile_m)) / known.feed_ratio[place]
    elements = batch * k * np.maximum(m + stored_n, fed) + known.write_ratio[place] * (batch * m * n)
    memory_s = elements * (rates.element_bytes / rates.bandwidth_bytes_per_s) / known.bandwidth_fraction[place]

    num_tiles = rows * np.ceil(n / width)
    return BatchTimes(
        is_run=(kernel >= 0) & (num_tiles >= known.least_waves * rates.num_sms),
        time_s=parameters.start_s + join_s(compute_s, memory_s, known.overlap_power[place]),
        compute_s=compute_s,
        memory_s=memory_s,
        tile_m=tile_m,
        tile_n=width,
        num_tiles=num_tiles,
        num_waves=np.ceil(num_tiles / rates.num_sms),
    )


def _choose_kernels(
    known: BatchKernels, products: Products, worst: NDArray[np.int64], is_contracted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Place of the first kernel that takes each product; -1 where none does."""
    m, n, k, batch = products.sizes
    kernel = np.full(len(m), -1)
    takes = known.takes[:, is_contracted.astype(np.intp), worst] & (batch > 1.0)
    for index in range(len(known.tile_m) - 1, -1, -1):
        inside = (k >= known.first_k[index]) & (k <= known.last_k[index]) & (m >= known.tile_m[index])
        inside &= (n >= known.first_n[index]) & (n <= known.last_n[index])
        kernel = np.where(takes[index] & inside, index, kernel)
    return kernel


def _worst_alignment(
    products: Products, element_bits: int, *, aligned: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Alignment class of the least aligned contiguous dimension, and whether that is the contraction."""
    class_of_width, num_products = classes_of_widths(element_bits), len(products.m)
    classes = {"k": np.full(num_products, LAST_CLASS), "free": np.full(num_products, LAST_CLASS)}
    for letter, is_contiguous in ({} if aligned else products.letters).items():
        size = products.size_of(letter).astype(np.int64)
        found = np.where(is_contiguous, class_of_width[size & WIDTH_MASK], LAST_CLASS)
        role = "k" if letter == "k" else "free"
        classes[role] = np.minimum(classes[role], found)
    return np.minimum(classes["k"], classes["free"]), classes["k"] <= classes["free"]
