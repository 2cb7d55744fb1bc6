"""Inner loop of gemm.fastest, compiled by Numba (the ``fast`` extra).

Imported only for many shapes at once: importing Numba takes as long as pricing half a million shapes without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from jaxtyping import Float

    PerGemm = Float[np.ndarray, "gemms"]
    PerSplit = Float[np.ndarray, "splits gemms"]


def _fill_least(
    sizes: Float[np.ndarray, "2 gemms"],
    slots: PerGemm,
    mac_s: PerGemm,
    k_part: PerSplit,
    tiles: Float[np.ndarray, "4 tiles"],
    split_k: Float[np.ndarray, " splits"],
    feed_s: tuple[float, float],
    give_back: float,
    least_s: PerSplit,
) -> None:
    """Write the least compute time of every split; the inner loops over shapes are vectorized.

    Args:
        sizes: Rows and columns of C. [element], [2, shapes]
        slots: Batch over SMs, times a factor just below 1. [shapes]
        mac_s: One multiply-add of a busy SM at its peak. [s], [shapes]
        k_part: Contraction of one part. [element], [splits, shapes]
        tiles: Rows, columns, area over rate fraction and fill of each tile. [4, tiles]
        split_k: Parts of each split. [splits]
        feed_s: Operand feed of one element of A and of B. [s]
        give_back: Fraction of an incomplete last wave that kernels recover.
        least_s: Output. [s], [splits, shapes]
    """
    m, n = sizes[0], sizes[1]
    num_shapes = len(m)
    tiles_per_slot, tile_s, edge_s = np.empty(num_shapes), np.empty(num_shapes), np.empty(num_shapes)
    least_s[:] = np.inf
    for tile in range(tiles.shape[1]):
        tile_m, tile_n, macs, fill_k = tiles[0, tile], tiles[1, tile], tiles[2, tile], tiles[3, tile]
        for i in range(num_shapes):
            tiles_per_slot[i] = math.ceil(m[i] / tile_m) * (math.ceil(n[i] / tile_n) * slots[i])
            tile_s[i] = macs * mac_s[i]
            edge_s[i] = min(tile_m, m[i]) * feed_s[0] + min(tile_n, n[i]) * feed_s[1]
        for split in range(len(split_k)):
            parts = split_k[split]
            for i in range(num_shapes):
                part = k_part[split, i]
                waves = tiles_per_slot[i] * parts
                num_waves = math.ceil(waves) * (1.0 - give_back) + max(waves, 1.0) * give_back
                compute_s = max((part + fill_k) * tile_s[i], part * edge_s[i]) * num_waves
                least_s[split, i] = min(least_s[split, i], compute_s)


def _compile() -> Callable[..., None]:
    """Compile on the first call, and cache the result on disk where a folder is writable."""
    try:
        found: Callable[..., None] = njit(cache=True, nogil=True, error_model="numpy")(_fill_least)
    except RuntimeError:  # no writable folder: Numba raises when decorating
        found = njit(nogil=True, error_model="numpy")(_fill_least)
    return found


fill_least = _compile()
