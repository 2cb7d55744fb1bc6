"""What physics says of the kernels that it did not choose: the next best tiles of each product, and how near they come.

A library's heuristics and the formulas disagree where several kernels take nearly the same time, so what stands behind
the best one tells a learner where a correction is to be expected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.fit.logs import Array
from shapewright.perf.gemm import ROWS_PER_BLOCK
from shapewright.perf.kernels import alignment_factor, estimate_kernels, every_kernel, join_s

if TYPE_CHECKING:
    from shapewright.perf.gemm_menu import GemmParameters
    from shapewright.perf.kernels import DeviceRates
    from shapewright.perf.products import Products

# Tiles behind the best one that a learner sees.
NUM_RUNNERS_UP = 3


def runner_up_columns(products: Products, parameters: GemmParameters, rates: DeviceRates) -> Array:
    """Describe the next best tiles of single products, each with its best split of k.

    Args:
        products: Their sizes and contiguous dimensions.
        parameters: The menu.
        rates: The device's rates for this dtype.

    Returns:
        Shape [products, 5 * NUM_RUNNERS_UP + 1]. Of each tile its rows, columns and split, ln(its time / the best
        time), and what its last wave holds as a share of a wave; then ln(best time without a split / best time).
    """
    blocks = [slice(start, start + ROWS_PER_BLOCK) for start in range(0, len(products.m), ROWS_PER_BLOCK)]
    return np.concatenate([_block(products.rows(part), parameters, rates) for part in blocks])


def _block(products: Products, parameters: GemmParameters, rates: DeviceRates) -> Array:
    p, num_products = parameters, len(products.m)
    factor, _ = alignment_factor(products, rates.element_bits, p)
    times = estimate_kernels(products, factor, every_kernel(p), p, rates)
    by_tile = (len(p.tile_m), len(p.split_k), num_products)
    time_s = (join_s(times.compute_s, times.memory_s, p.overlap_power) + times.added_s).reshape(by_tile)
    last_wave = (times.num_tiles / rates.num_sms % 1.0).reshape(by_tile)
    best_s, tile_s, split = time_s.min(axis=(0, 1)), time_s.min(axis=1), time_s.argmin(axis=1)
    product, order = np.arange(num_products), tile_s.argsort(axis=0)
    columns = []
    for tile in order[1 : 1 + NUM_RUNNERS_UP]:
        own_split = split[tile, product]
        columns += [p.tile_m[tile], p.tile_n[tile], p.split_k[own_split], np.log(tile_s[tile, product] / best_s)]
        columns.append(last_wave[tile, own_split, product])
    return np.stack([*columns, np.log(time_s[:, 0].min(axis=0) / best_s)], axis=1)
