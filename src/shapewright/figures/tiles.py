"""Tiles and waves of one product: how its output matrix is cut up, and which part of it runs when.

Tiles are taken row by row, matrix by matrix. Libraries walk them in other orders too, for the cache's sake; how many
waves there are, and how empty the last one is, does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import WorkloadError
from shapewright.operations import Gemm
from shapewright.perf.price import GemmPrice
from shapewright.perf.tiling import count_tiles, count_waves

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.predict import Prediction


@dataclass(frozen=True, kw_only=True)
class TileGrid:
    """The tiles of one product on one device.

    Attributes:
        m: Rows of the output. [element]
        n: Columns of the output. [element]
        tile_m: Rows of a tile. [element]
        tile_n: Columns of a tile. [element]
        num_rows: Tiles below each other.
        num_columns: Tiles beside each other.
        num_copies: Matrices of tiles: the batch, times the parts that the contraction is cut into.
        num_slots: Tiles that run at once, one on each SM.
        num_tiles: All of them.
        num_waves: Passes over the device.
        num_last: Tiles of the last wave.
        last_row_fraction: Share of the lowest tiles' rows that is output.
        last_column_fraction: Share of the rightmost tiles' columns that is output.
        tile_efficiency: Share of the computed area that is output.
        wave_efficiency: Share of the slots of all waves that hold a tile.
    """

    m: int
    n: int
    tile_m: int
    tile_n: int
    num_rows: int
    num_columns: int
    num_copies: int
    num_slots: int
    num_tiles: int
    num_waves: int
    num_last: int
    last_row_fraction: float
    last_column_fraction: float
    tile_efficiency: float
    wave_efficiency: float


def find_product(prediction: Prediction, name: str, pass_name: str = "") -> PricedOperation:
    """The product of a step by name and pass; its first pass where none is given.

    Raises:
        WorkloadError: the step has no such product, or its tiles are not modelled.
    """
    products = [entry for entry in prediction.operations if isinstance(entry.operation, Gemm)]
    chosen = [
        entry for entry in products if entry.operation.name == name and pass_name in ("", entry.operation.pass_name)
    ]
    if not chosen:
        known = ", ".join(dict.fromkeys(entry.operation.name for entry in products))
        raise WorkloadError(f"no product {name[:100]!r} in this step; it has {known}")
    return chosen[0]


def lay_tiles(prediction: Prediction, entry: PricedOperation) -> TileGrid:
    """Lay out the tiles of one product.

    Args:
        prediction: The step, whose device counts.
        entry: One of its products.

    Raises:
        WorkloadError: the tiles of this device are not modelled.
    """
    operation, price, num_slots = entry.operation, entry.price, prediction.device.num_sms
    if not (isinstance(operation, Gemm) and isinstance(price, GemmPrice) and price.tile_m and num_slots):
        raise WorkloadError(
            f"tiles of {operation.name} on {prediction.device.name} are not modelled: it is priced by roofline alone; "
            f"choose a device with SMs"
        )
    m, n, tile_m, tile_n = int(operation.m), int(operation.n), int(price.tile_m), int(price.tile_n)
    num_rows, num_columns = -(-m // tile_m), -(-n // tile_n)
    num_copies = int(operation.batch) * int(price.split_k)
    num_tiles = int(count_tiles(m, n, tile_m, tile_n, num_copies))
    num_waves = int(count_waves(num_tiles, num_slots))
    return TileGrid(
        m=m,
        n=n,
        tile_m=tile_m,
        tile_n=tile_n,
        num_rows=num_rows,
        num_columns=num_columns,
        num_copies=num_copies,
        num_slots=num_slots,
        num_tiles=num_tiles,
        num_waves=num_waves,
        num_last=num_tiles - (num_waves - 1) * num_slots,
        last_row_fraction=(m - (num_rows - 1) * tile_m) / tile_m,
        last_column_fraction=(n - (num_columns - 1) * tile_n) / tile_n,
        tile_efficiency=float(price.tile_efficiency),
        wave_efficiency=float(price.wave_efficiency),
    )
