"""What a GEMM record's physics leaves over, learned by boosted trees and written down as a table.

The trees see the shape and what physics says of it (tiles, waves, split, bounds), and learn ln(measured / physics) by
its absolute error, since two collections of one shape differ by 4 to 11 % with long tails. They are then evaluated at
every knot of the grid that was measured: pricing needs the table alone, no tree and no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.fit.logs import Array, fold_of
from shapewright.operations import Gemm
from shapewright.perf.gemm import price_gemm
from shapewright.perf.residual import LOG_STEP

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.price import GemmPrice

# Chosen by five-fold error over whole (n, k) shapes of six sections (docs/decisions/0003): 31 leaves 5.7 %, 63 leaves
# 5.4 %, 127 leaves 5.3 %, twice the trees 5.3 %; squared error instead of absolute 5.8 %.
TREES: dict[str, Any] = {
    "objective": "l1",
    "n_estimators": 300,
    "learning_rate": 0.05,
    "num_leaves": 127,
    "min_child_samples": 20,
    "subsample": 0.7,
    "subsample_freq": 1,
    "colsample_bytree": 0.6,
    "deterministic": True,
    "force_row_wise": True,
    "random_state": 0,
    "n_jobs": 1,
    "verbose": -1,
}
# Folds of the fitted shapes, whose left-out residuals make the interval.
NUM_INNER_FOLDS = 5


def price_physics(
    rows: pd.DataFrame,
    device: Device,
    record: CalibrationRecord,
    *,
    dtype: str,
    layout: str,
    hot_cache: bool,
    library: str,
) -> GemmPrice:
    """Price rows with m, n, k by a record without its residual."""
    dims = {letter: rows[letter].to_numpy() for letter in ("m", "n", "k")}
    operation = Gemm(name="row", dtype=dtype, layout=layout, **dims)
    return price_gemm(operation, device, record, hot_cache=hot_cache, library=library)


def features(rows: pd.DataFrame, price: GemmPrice) -> Array:
    """What the trees see of each row; shape [rows, features]."""
    m, n, k = (rows[letter].to_numpy(float) for letter in ("m", "n", "k"))
    log_m, log_n, log_k = np.log2(m), np.log2(n), np.log2(k)
    columns = [log_m, log_n, log_k, log_m + log_n, log_m + log_k, log_n + log_k, log_n - log_k, log_m + log_n + log_k]
    columns += [m % 128, n % 128, *(np.ceil(m / tile) * tile / m for tile in (64, 128, 256))]
    columns += [np.log(np.asarray(price.time_s)), np.log(np.asarray(price.compute_s) / np.asarray(price.memory_s))]
    columns += [price.tile_m, price.tile_n, price.split_k, np.log2(price.num_tiles), price.num_waves]
    columns += [price.tile_efficiency, price.wave_efficiency]
    return np.stack(columns, axis=1)


def fit_trees(seen: Array, target: Array) -> Any:
    """Fit the trees to ln(measured / physics)."""
    from lightgbm import LGBMRegressor

    return LGBMRegressor(**TREES).fit(seen, target)


def predict_left_out(rows: pd.DataFrame, seen: Array, target: Array) -> Array:
    """Prediction for each row by trees that saw no row of its (n, k) shape."""
    known = {shape: fold_of(*shape) % NUM_INNER_FOLDS for shape in set(zip(rows.n, rows.k, strict=True))}
    fold = np.array([known[shape] for shape in zip(rows.n, rows.k, strict=True)])
    out = np.zeros(len(rows))
    for number in range(NUM_INNER_FOLDS):
        left = fold == number
        if left.any():
            out[left] = fit_trees(seen[~left], target[~left]).predict(seen[left])
    return out


def to_log_steps(logs: Array) -> NDArray[np.int8]:
    """Corrections as a table stores them."""
    return np.clip(np.rint(logs / LOG_STEP), -127, 127).astype(np.int8)
