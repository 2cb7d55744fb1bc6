"""Learn the residual of an attention record's formulas with boosted trees, and tabulate it.

Features are a call and its predicted quantities; the target is ln(measured / physics) with damped outliers, for all
kernels of one library, phase and pair of element formats together. The trees are evaluated at the knots of a grid over
sequences, keys, key-value heads and heads per key-value head, so that pricing needs the tables only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.lowering.operations import Attention
from shapewright.measure.fit.shared import NUM_FOLDS, Array, fold_of_rows
from shapewright.measure.refit.attention.kernel_fit import layout_folds
from shapewright.measure.refit.record_files import fit_trees
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.attention.residual import LOG_STEP, AttentionResidual
from shapewright.pricing.calibration.residual import FADE_DOUBLINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.pricing.calibration.records import CalibrationRecord

# Chosen by head layouts left out in turn, seven tables of five devices (physics 7.5 %): absolute error and 200 trees
# 4.4 %, 400 trees 4.2 %, squared error 4.4 %, Huber's 4.1 %, as with 31 or 127 leaves; random splits 5.0 %.
TREES: dict[str, Any] = {
    "objective": "huber",
    "alpha": 0.1,
    "n_estimators": 500,
    "learning_rate": 0.04,
    "num_leaves": 63,
    "min_child_samples": 10,
    "colsample_bytree": 0.8,
}
# Knots of key-value heads and of query heads for each: public models lie on these or between two of them.
KV_HEAD_KNOTS = (1, 2, 4, 8, 16, 32, 64, 96)
GROUP_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
# Query heads of the largest models on one device; knots beyond are unmeasured.
MOST_HEADS = 128
_SIZES = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size")


@dataclass(frozen=True)
class Physics:
    """Prices rows of some kernels without the learned residual.

    Attributes:
        device: The device.
        record: Its record, without residual.
        dtype: Element format of the GEMMs.
        kv_dtype: Element format of the cache.
    """

    device: Device
    record: CalibrationRecord
    dtype: str
    kv_dtype: str

    def features(self, rows: pd.DataFrame, family: int) -> tuple[Array, Array]:
        """Return times of rows of one library and kernel [s], and their features; shape [rows, features]."""
        sizes = {name: rows[name].to_numpy() for name in _SIZES}
        operation = Attention(
            name="row",
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            writes_cache=True,
            v_head_dim=sizes["head_dim"],
            **sizes,
        )
        price = price_attention(
            operation,
            self.device,
            self.record,
            hot_cache=True,
            library=rows.library.iloc[0],
            kernel=rows.kernel.iloc[0],
        )
        batch, keys, heads, kv_heads = (
            np.log2(sizes[name].astype(float)) for name in ("batch_size", "kv_len", "num_heads", "num_kv_heads")
        )
        columns = [batch, keys, heads, kv_heads, batch + kv_heads, batch + heads, heads - kv_heads]
        columns += [batch + kv_heads + keys, batch + heads + 2.0 * keys]
        columns += [sizes["window_size"], sizes["head_dim"], np.full(len(rows), float(family))]
        time_s, compute_s, memory_s = (np.asarray(part) for part in (price.time_s, price.compute_s, price.memory_s))
        columns += [np.log(time_s), np.log(compute_s / np.maximum(memory_s, 1e-12))]
        return time_s, np.stack(columns, axis=1)


def features_of(rows: pd.DataFrame, physics: Physics) -> tuple[Array, Array]:
    """Return times [s] and features of rows of any kernels."""
    times, seen = np.empty(len(rows)), None
    families = sorted(rows.family.unique())
    for (_, _, family), index in rows.groupby(["library", "kernel", "family"]).indices.items():
        times[index], columns = physics.features(rows.iloc[index], families.index(family))
        seen = np.empty((len(rows), columns.shape[1])) if seen is None else seen
        seen[index] = columns
    assert seen is not None
    return times, seen


def predict_left_out(rows: pd.DataFrame, seen: Array, target: Array) -> Array:
    """Return the correction of each row by trees that saw no row of its head layout.

    If all layouts of a kernel fall into one fold, its batch sizes are left out instead, so that its own rows judge it.
    """
    folds, out = layout_folds(rows), np.zeros(len(rows))
    for index in rows.groupby(["family", "head_dim"]).indices.values():
        if len(set(folds[index])) == 1:
            folds[index] = fold_of_rows(rows.batch_size.to_numpy()[index])
    for fold in range(NUM_FOLDS):
        left = folds == fold
        if left.any() and not left.all():
            out[left] = fit_trees(seen[~left], target[~left], TREES).predict(seen[left])
    return out


def knots_of(rows: pd.DataFrame) -> dict[str, Array]:
    """Return the grid of the tables of one phase: every measured batch and length, and counts of heads."""
    measured = {name: np.sort(rows[name].unique()).astype(float) for name in ("batch_size", "kv_len")}
    heads = {"num_kv_heads": np.array(KV_HEAD_KNOTS, dtype=float), "group": np.array(GROUP_KNOTS, dtype=float)}
    return heads | measured


def tabulate(
    trees: Any, rows: pd.DataFrame, knots: Mapping[str, Array], physics: Physics, family: int
) -> AttentionResidual:
    """Return the corrections of one kernel at the knots, for each measured window.

    Axes of heads end with the first knot beyond all measured layouts. Batches larger than any measured with as many
    keys keep the value of the largest measured one.
    """
    import pandas as pd

    most = {"num_kv_heads": rows.num_kv_heads.max(), "group": (rows.num_heads / rows.num_kv_heads).max()}
    kept = {
        name: axis[: max(2, np.searchsorted(axis, most[name]) + 1)] if name in most else axis
        for name, axis in knots.items()
    }
    axes = np.meshgrid(*kept.values(), indexing="ij")
    cells = pd.DataFrame({name: axis.reshape(-1) for name, axis in zip(kept, axes, strict=True)})
    cells = cells.assign(
        num_heads=cells.num_kv_heads * cells.group,
        query_len=1.0 if rows.query_len.max() == 1 else cells.kv_len,
        head_dim=float(rows.head_dim.iloc[0]),
        library=rows.library.iloc[0],
        kernel=rows.kernel.iloc[0],
    )
    fits = [_work_of(cells, heads) <= _work_of(rows, heads).max() for heads in ("num_kv_heads", "num_heads")]
    is_measured = (fits[0] & fits[1]).to_numpy().reshape(axes[0].shape)
    tables = {}
    for window in sorted(int(size) for size in rows.window_size.unique()):
        logs = trees.predict(physics.features(cells.assign(window_size=float(window)), family)[1])
        steps = np.clip(np.rint(logs / LOG_STEP), -127, 127).astype(np.int8)
        table = steps.reshape(axes[0].shape)
        for place in range(1, table.shape[2]):
            table[:, :, place] = np.where(is_measured[:, :, place], table[:, :, place], table[:, :, place - 1])
        tables[window] = fade_past_most_heads(table, *list(kept.values())[:2])
    return AttentionResidual(
        knots_log2=tuple(np.log2(axis) for axis in kept.values()),
        windows=tuple(tables),
        log_steps=np.stack(list(tables.values())),
    )


def fade_past_most_heads(table: NDArray[np.int8], kv_heads: Array, groups: Array) -> NDArray[np.int8]:
    """Return the table with knots beyond MOST_HEADS fading from the widest group within, by doubling.

    Args:
        table: Corrections in steps; shape [kv_heads, groups, ...].
        kv_heads: Knots of key-value heads.
        groups: Knots of query heads per key-value head, rising from 1.
    """
    faded = table.copy()
    for row, num_kv_heads in enumerate(kv_heads):
        doublings = np.log2(num_kv_heads * groups / MOST_HEADS)
        within = int(np.flatnonzero(doublings <= 0.0).max())
        for column in range(within + 1, len(groups)):
            share = max(1.0 - doublings[column] / FADE_DOUBLINGS, 0.0)
            faded[row, column] = np.rint(share * table[row, within])
    return faded


def _work_of(rows: pd.DataFrame, heads: str) -> Any:
    """Return keys times sequences times heads: proportional to memory traffic or to work."""
    return rows.batch_size * rows.kv_len * rows[heads]
