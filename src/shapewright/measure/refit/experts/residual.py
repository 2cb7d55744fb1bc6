"""Learn the residual tables of the expert records.

The physics are the committed records; the data folder holds moe.parquet. Tables are learned from every expert layout.
Errors come from others next to them that did not see the fifth of whole layouts that the second set of parameters did
not see either; intervals, and whether a kernel gets a table, from layouts left out in turn among the rest. Two minutes
in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.tables.moe import block_of, unlisted_s
from shapewright.measure.fit.shared import HELD_OUT_FOLD, Array, error_summary, interval_of, mean_error, predict_in_turn
from shapewright.measure.refit.experts.physics import DTYPES, LAYOUT, read_table
from shapewright.measure.refit.record_files import DEVICES, command, fit_trees, read_record, record_path, save_record
from shapewright.pricing.calibration.records import CalibrationRecord, load_record
from shapewright.pricing.calibration.residual import (
    AXES,
    LEFT_OUT_PREFIX,
    LOG_STEP,
    TABLE_PREFIX,
    ResidualTable,
    log_correction,
    section_name,
)
from shapewright.pricing.experts.price import estimate_grouped_gemm_s
from shapewright.pricing.experts.tiles import TUNED, read_rule, tuned_shapes
from shapewright.pricing.pointwise import price_pointwise

# A kernel gets a table if its error on layouts left out in turn is below that of its physics times this.
WORTHWHILE_RATIO = 0.95
# Limit of the correction factor: blocks of which the GEMMs are a small part determine it poorly.
MOST_FACTOR = 3.0
MOST_ROWS = 8000
TREES: dict[str, Any] = {
    "objective": "huber",
    "alpha": 0.1,
    "n_estimators": 300,
    "learning_rate": 0.05,
    "colsample_bytree": 0.8,
}
# Features of the trees. With nine to twelve layouts the hidden width identifies one: where that overfits, which
# left-out layouts show by kernel, the trees get rows, experts and inner width only, and are smaller.
FEATURE_SETS: dict[str, dict[str, Any]] = {
    "all sizes": {"num_leaves": 31, "min_child_samples": 15},
    "without hidden": {"num_leaves": 16, "min_child_samples": 60},
}
# Shares of the correction to apply: where little generalizes from layout to layout, a part of it is better.
SHARES = (1.0, 0.6)
KNOTS = {
    "rows": 2.0 ** np.arange(15),
    "experts": 2.0 ** np.arange(10),
    "inner": 2.0 ** np.arange(5, 15),
    "hidden": np.array([2048.0, 4096.0, 6144.0, 8192.0]),
}


class Blocks(NamedTuple):
    """Measured blocks of one kernel; arrays over rows.

    Attributes:
        sizes: Sizes of AXES, by column.
        layer: Layer of the table: the kernel's step.
        gemms_s: Predicted time of both GEMMs. [s]
        rest_s: Predicted time of the rest of a block. [s]
        measured: Time of the block. [s]
        fold: Fold of the layout.
    """

    sizes: Array
    layer: NDArray[np.intp]
    gemms_s: Array
    rest_s: Array
    measured: Array
    fold: NDArray[np.int64]

    def take(self, index: Any) -> Blocks:
        """Return the rows of an index or of a mask."""
        return Blocks(*(column[index] for column in self))

    def features(self, feature_set: str) -> Array:
        """Return the features of each block."""
        return features_of(np.log2(self.sizes), self.layer, feature_set)

    @property
    def target(self) -> Array:
        """Logarithm of the factor on the GEMM times that reproduces the measurement."""
        factor = (self.measured - self.rest_s) / self.gemms_s
        return np.log(np.clip(factor, 1.0 / MOST_FACTOR, MOST_FACTOR))

    def predict(self, logs: Array) -> Array:
        """Return the time of each block with corrected GEMM times. [s]"""
        corrected_s: Array = self.gemms_s * np.exp(logs) + self.rest_s
        return corrected_s


def features_of(places: Array, layer: NDArray[np.intp], feature_set: str) -> Array:
    """Return sizes and sums of their logarithms (work, weights, rows); shape [rows, features]."""
    rows, experts, inner, hidden = places.T
    columns = [rows, experts, inner, rows + experts, layer.astype(float)]
    if feature_set == "all sizes":
        weights = experts + inner + hidden
        columns += [hidden, weights, weights + rows, rows + experts + inner, rows + experts + hidden]
    return np.stack(columns, axis=1)


def read_blocks(table: pd.DataFrame, device: Device, dtype: str, record: CalibrationRecord, key: str) -> Blocks:
    """Price measured blocks of one kernel by physics."""
    sizes = {name: table[name].to_numpy(float) for name in (*LAYOUT, "num_tokens", "moe_tp_size", "moe_ep_size")}
    library = key.partition("/")[0]
    block = block_of(sizes, table.distribution.to_numpy(str), dtype, library)
    pointwise = load_record("pointwise", device)
    gemms_s = sum(
        np.asarray(estimate_grouped_gemm_s(gemm, device, record, hot_cache=True, library=key)) for gemm in block.gemms
    )
    rest_s = sum(np.asarray(price_pointwise(each, device, pointwise).time_s) for each in block.pointwise)
    rest_s = rest_s + unlisted_s(block, device, dtype, key, record)
    first = block.gemms[0]
    active = np.minimum(first.groups, first.m)
    places = np.stack([first.m / active, active, block.gemms[1].k, first.k], axis=1)
    rule, step = read_rule(record.parameters["libraries"][key][dtype]), np.full(len(table), TUNED)
    if rule is not None:
        tuned = tuned_shapes(rule.library, dtype, device.name)
        step = rule.choose(first.tokens, first.experts, first.inner, tuned)
    measured = table.latency_s.to_numpy()
    return Blocks(places, step - TUNED, np.asarray(gemms_s), rest_s, measured, table.fold.to_numpy())


def fit_blocks(blocks: Blocks, feature_set: str) -> Any:
    """Fit the trees; the weight of a block is the share of its GEMMs."""
    chosen = np.random.default_rng(0).permutation(len(blocks.measured))[:MOST_ROWS]
    some = blocks.take(chosen)
    weight = some.gemms_s / (some.gemms_s + some.rest_s)
    return fit_trees(some.features(feature_set), some.target, {**TREES, **FEATURE_SETS[feature_set]}, weight)


def predict_left_out(blocks: Blocks, feature_set: str) -> Array:
    """Return the correction of each block by trees that saw no row of its layout."""

    def correct_fold(others: Any, left: Any) -> Array:
        if not others.any():
            return np.zeros(len(left))
        trees = fit_blocks(blocks.take(others), feature_set)
        found: Array = trees.predict(blocks.take(left).features(feature_set))
        return found

    return predict_in_turn(blocks.fold, correct_fold)


def tabulate(trees: Any, feature_set: str, share: float, layers: NDArray[np.intp], num_layers: int) -> ResidualTable:
    """Return a share of the corrections at the knots; layers without learned rows are zero."""
    axes = np.meshgrid(*KNOTS.values(), indexing="ij")
    places = np.log2(np.stack([axis.reshape(-1) for axis in axes], axis=1))
    steps = np.zeros((num_layers, *axes[0].shape), dtype=np.int8)
    for layer in np.unique(layers):
        logs = share * trees.predict(features_of(places, np.full(len(places), layer), feature_set))
        steps[layer] = np.clip(np.rint(logs / LOG_STEP), -127, 127).reshape(axes[0].shape)
    return ResidualTable(knots_log2=tuple(np.log2(knots) for knots in KNOTS.values()), log_steps=steps)


def learn_device(table: pd.DataFrame, name: str) -> None:
    """Learn the tables of one record and write them next to it."""
    device, path = load_device(name), record_path("moe", name)
    record = load_record("moe", device.with_pricing(physics_only=True))
    table = table[table.device == DEVICES[name]]
    content = read_record("moe", name)
    names = {f"{row.library}/{row.kernel}" for row in table[["library", "kernel"]].drop_duplicates().itertuples()}
    tables: dict[str, Any] = {}
    used, reports = {}, {}
    intervals = deepcopy(content["interval"])
    for (table_dtype, library, kernel), rows in table.groupby(["dtype", "library", "kernel"]):
        dtype, key = DTYPES[table_dtype], f"{library}/{kernel}"
        if dtype not in record.parameters["libraries"].get(key, {}) or key not in names:
            continue
        blocks = read_blocks(rows, device, dtype, record.without_own_shapes, key)
        held = blocks.fold == HELD_OUT_FOLD
        train, judged = blocks.take(~held), blocks.take(held)
        logs = {feature_set: predict_left_out(train, feature_set) for feature_set in FEATURE_SETS}
        tried = {
            (feature_set, share): train.predict(share * logs[feature_set])
            for feature_set in FEATURE_SETS
            for share in SHARES
        }
        feature_set, share = min(tried, key=lambda each: mean_error(tried[each], train.measured))
        left_out_s = tried[feature_set, share]
        report: dict[str, Any] = {
            "left_out": error_summary(left_out_s, train.measured),
            "left_out_physics": error_summary(train.predict(0.0 * train.measured), train.measured),
        }
        errors = [report[each]["mean_absolute_error"] for each in ("left_out", "left_out_physics")]
        section = section_name(dtype, key)
        if errors[0] > WORTHWHILE_RATIO * errors[1]:
            print(
                name, section, f"gets no table: error of physics {errors[1]:.3f}, with it {errors[0]:.3f}", flush=True
            )
            continue
        num_layers = 1 + len(record.parameters["libraries"][key][dtype].get("untuned", {}).get("steps", ()))
        learned = tabulate(fit_blocks(train, feature_set), feature_set, share, train.layer, num_layers)
        held_out_logs, _ = log_correction(learned, *judged.sizes.T, layer=judged.layer)
        report["held_out"] = error_summary(judged.predict(held_out_logs), judged.measured)
        report["held_out_physics"] = error_summary(judged.predict(0.0 * held_out_logs), judged.measured)
        every_block = read_blocks(rows, device, dtype, record, key)
        trees = fit_blocks(every_block, feature_set)
        shipped = tabulate(trees, feature_set, share, every_block.layer, num_layers).log_steps
        tables[TABLE_PREFIX + section], used[section], reports[section] = shipped, section, report
        tables[LEFT_OUT_PREFIX + section] = learned.log_steps.astype(np.int16) - shipped
        # Intervals are indexed by the time of one GEMM, of which a block has two.
        intervals["libraries"][key][dtype] = interval_of(left_out_s / 2.0, train.measured / 2.0)
        if content["provenance"]["defaults"].get(dtype) == f"{dtype}, {key}":
            used[dtype], intervals["dtypes"][dtype] = section, intervals["libraries"][key][dtype]
        print(
            name,
            section,
            feature_set,
            share,
            {each: found["mean_absolute_error"] for each, found in report.items()},
            flush=True,
        )
        report["trees_see"], report["share"] = feature_set, share
    content["residual"] = {
        "file": f"{name}.npz",
        "tables": used,
        "interval": intervals,
        "reports": reports,
        "command": command("moe-residual", f"--device {name}"),
    }
    knots: dict[str, Any] = {axis: KNOTS[axis].astype(np.int32) for axis in AXES["moe"]}
    np.savez_compressed(path.with_suffix(".npz"), **knots, **tables)
    save_record("moe", name, content, digits=4)
    print(name, f"{path.with_suffix('.npz').stat().st_size / 1e3:.0f} kB", flush=True)


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Learn the residual tables of every expert record, or of some devices."""
    table = read_table(data)
    for name in devices or DEVICES:
        learn_device(table, name)
