"""Tiles and waves of one GEMM: how its output matrix is tiled, and which tiles run in which wave.

Tiles are numbered row by row. Libraries also use other orders for better cache reuse; the number of waves and the
occupancy of the last one do not depend on the order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.records import dataclass
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.gemm.tiling import count_tiles, count_waves
from shapewright.pricing.price import GemmPrice

if TYPE_CHECKING:
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.predict import Prediction


@dataclass(frozen=True, kw_only=True)
class TileGrid:
    """The tiles of one GEMM on one device.

    Attributes:
        m: Rows of the output. [element]
        n: Columns of the output. [element]
        tile_m: Rows of a tile. [element]
        tile_n: Columns of a tile. [element]
        num_rows: Rows of the tile grid.
        num_columns: Columns of the tile grid.
        num_copies: Number of tile grids: batch size times split-k factor.
        num_slots: Tiles that run concurrently, one per SM.
        num_tiles: Total number of tiles.
        num_waves: Number of waves.
        num_last: Tiles in the last wave.
        last_row_fraction: Fraction of the rows of the last tile row that lies inside the output.
        last_column_fraction: Fraction of the columns of the last tile column that lies inside the output.
        tile_efficiency: Output elements over computed elements.
        wave_efficiency: Tiles over slots of all waves.
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


def find_gemm(prediction: Prediction, name: str, pass_name: str = "") -> PricedOperation:
    """Find a GEMM of a step by name and pass; without a pass, the first one of that name.

    Raises:
        WorkloadError: the step has no such GEMM.
    """
    gemms = [entry for entry in prediction.operations if isinstance(entry.operation, Gemm)]
    chosen = [entry for entry in gemms if entry.operation.name == name and pass_name in ("", entry.operation.pass_name)]
    if not chosen:
        known = ", ".join(dict.fromkeys(entry.operation.name for entry in gemms))
        raise WorkloadError(f"no GEMM {name[:100]!r} in this step; choose one of {known}")
    return chosen[0]


def lay_out_tiles(prediction: Prediction, entry: PricedOperation) -> TileGrid:
    """Compute the tile grid and waves of one GEMM.

    Args:
        prediction: The step; tiles run on its device.
        entry: One of its GEMMs.

    Raises:
        WorkloadError: tiles are not modelled for the device.
    """
    operation, price, num_slots = entry.operation, entry.price, prediction.device.num_sms
    if not (isinstance(operation, Gemm) and isinstance(price, GemmPrice) and price.tile_m and num_slots):
        raise WorkloadError(
            f"tiles of {operation.name} on {prediction.device.name} are not modelled: the GEMM is priced by the "
            f"roofline only; choose a device with SMs"
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
