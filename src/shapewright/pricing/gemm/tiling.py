"""Tile and wave quantization: how an output matrix is cut into tiles and how tiles fill the device.

"Quantization" here is never about number formats. Every function takes scalars or arrays.
Source: arXiv 2401.14489, sections on tile and wave quantization; NVIDIA, Matrix Multiplication Background User's Guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric


def count_tiles(m: Count, n: Count, tile_m: Count, tile_n: Count, batch: Count = 1) -> Count:
    """Output tiles of ``batch`` GEMMs, partial tiles included.

    >>> count_tiles(2304, 1536, 128, 256), count_tiles(2304, 1537, 128, 256)
    (108, 126)
    """
    return batch * -(-m // tile_m) * -(-n // tile_n)


def count_waves(num_tiles: Count, slots: Count) -> Count:
    """Passes over the device needed to run every tile; ``slots`` tiles run at once.

    >>> count_waves(108, 108), count_waves(109, 108)
    (1, 2)
    """
    return -(-num_tiles // slots)


def tile_efficiency(m: Count, n: Count, tile_m: Count, tile_n: Count) -> Numeric:
    """Share of the computed tile area that is output, in (0, 1].

    >>> tile_efficiency(128, 256, 128, 256), tile_efficiency(128, 128, 128, 256)
    (1.0, 0.5)
    """
    covered = 1.0 * (-(-m // tile_m) * tile_m) * (-(-n // tile_n) * tile_n)
    return 1.0 * m * n / covered


def wave_efficiency(num_tiles: Numeric, num_waves: Numeric, slots: Numeric) -> Numeric:
    """Share of the slots of all waves that hold a tile, in (0, 1]; 1 exactly at full waves.

    >>> wave_efficiency(108, 1, 108), wave_efficiency(109, 2, 108) == 109 / 216
    (1.0, True)
    """
    return num_tiles / (num_waves * slots)
