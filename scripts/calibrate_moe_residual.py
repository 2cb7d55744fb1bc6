"""Learn what the physics of the expert records leaves over, and store it as tables beside them.

    python scripts/calibrate_moe_residual.py --data DIR [--device h100-sxm-80gb]

Run calibrate_moe.py before: its records are the physics. DIR holds moe.parquet. The same fifth of whole expert layouts
stays unseen and judges; intervals, and whether a kernel gets a table at all, come from layouts left out in turn among
the rest. Needs the ``fit`` extra; half a minute a device.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from calibrate_moe import DTYPES, LAYOUT, read_table
from calibration import DEVICES, argument_parser, read_record, record_path, save_record
from numpy.typing import NDArray

from shapewright.accuracy.moe import block_of, unlisted_s
from shapewright.fit.logs import HELD_OUT_FOLD, NUM_FOLDS, Array, error_summary, interval_of, tidy
from shapewright.fit.trees import fit_trees
from shapewright.hardware import Device, load_device
from shapewright.perf.calibration import CalibrationRecord, load_record
from shapewright.perf.expert_tiles import TUNED, read_rule, tuned_shapes
from shapewright.perf.experts import estimate_grouped_gemm_s
from shapewright.perf.pointwise import price_pointwise
from shapewright.perf.residual import AXES, LOG_STEP, ResidualTable, log_correction, section_name

# A kernel gets a table if that errs less than this share of its physics on layouts left out in turn.
WORTHWHILE_RATIO = 0.95
# Blocks of which products are but a part say little of them: no more than this factor is learned from one.
MOST_FACTOR = 3.0
MOST_ROWS = 8000
TREES: dict[str, Any] = {
    "objective": "huber",
    "alpha": 0.1,
    "n_estimators": 300,
    "learning_rate": 0.05,
    "colsample_bytree": 0.8,
}
# What trees may see. With nine to twelve layouts the hidden width names one of them: where that misleads, which layouts
# left out say kernel by kernel, trees see rows, experts and inner width alone, and are smaller.
VIEWS: dict[str, dict[str, Any]] = {
    "all sizes": {"num_leaves": 31, "min_child_samples": 15},
    "without hidden": {"num_leaves": 16, "min_child_samples": 60},
}
# Shares of what trees say that may be taken: of little that carries over from layout to layout, part of it is more.
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
        products_s: Both products by physics. [s]
        rest_s: What else a block takes. [s]
        measured: Time of the block. [s]
        fold: Fold of the layout.
    """

    sizes: Array
    layer: NDArray[np.intp]
    products_s: Array
    rest_s: Array
    measured: Array
    fold: NDArray[np.int64]

    def take(self, index: Any) -> Blocks:
        """Some of the rows."""
        return Blocks(*(column[index] for column in self))

    def features(self, view: str) -> Array:
        """What the trees see, as it can be seen at a knot too."""
        return features_of(np.log2(self.sizes), self.layer, view)

    @property
    def target(self) -> Array:
        """Ln of what would make physics right."""
        factor = (self.measured - self.rest_s) / self.products_s
        return np.log(np.clip(factor, 1.0 / MOST_FACTOR, MOST_FACTOR))

    def predict(self, logs: Array) -> Array:
        """Time of each block with corrections of its products. [s]"""
        corrected_s: Array = self.products_s * np.exp(logs) + self.rest_s
        return corrected_s


def features_of(places: Array, layer: NDArray[np.intp], view: str) -> Array:
    """Sizes and the sums of their logarithms that work, weights and rows are; shape [rows, features]."""
    rows, experts, inner, hidden = places.T
    columns = [rows, experts, inner, rows + experts, layer.astype(float)]
    if view == "all sizes":
        weights = experts + inner + hidden
        columns += [hidden, weights, weights + rows, rows + experts + inner, rows + experts + hidden]
    return np.stack(columns, axis=1)


def read_blocks(table: pd.DataFrame, device: Device, dtype: str, record: CalibrationRecord, key: str) -> Blocks:
    """Price measured blocks of one kernel by physics."""
    sizes = {name: table[name].to_numpy(float) for name in (*LAYOUT, "num_tokens", "moe_tp_size", "moe_ep_size")}
    library = key.partition("/")[0]
    block = block_of(sizes, table.distribution.to_numpy(str), dtype, library)
    pointwise = load_record("pointwise", device)
    products_s = sum(
        np.asarray(estimate_grouped_gemm_s(product, device, record, hot_cache=True, library=key))
        for product in block.products
    )
    rest_s = sum(np.asarray(price_pointwise(each, device, pointwise).time_s) for each in block.pointwise)
    rest_s = rest_s + unlisted_s(block, device, dtype, key, record)
    first = block.products[0]
    active = np.minimum(first.groups, first.m)
    places = np.stack([first.m / active, active, block.products[1].k, first.k], axis=1)
    rule, step = read_rule(record.parameters["libraries"][key][dtype]), np.full(len(table), TUNED)
    if rule is not None:
        tuned = tuned_shapes(rule.library, dtype, device.name)
        step = rule.choose(first.tokens, first.experts, first.inner, tuned)
    measured = table.latency_s.to_numpy()
    return Blocks(places, step - TUNED, np.asarray(products_s), rest_s, measured, table.fold.to_numpy())


def fit_blocks(blocks: Blocks, view: str) -> Any:
    """Fit the trees; a block counts as far as its products are the block."""
    chosen = np.random.default_rng(0).permutation(len(blocks.measured))[:MOST_ROWS]
    some = blocks.take(chosen)
    weight = some.products_s / (some.products_s + some.rest_s)
    return fit_trees(some.features(view), some.target, {**TREES, **VIEWS[view]}, weight)


def predict_left_out(blocks: Blocks, view: str) -> Array:
    """Correction of each block by trees that saw no row of its layout."""
    out = np.zeros(len(blocks.measured))
    for fold in range(NUM_FOLDS):
        left = blocks.fold == fold
        if left.any() and not left.all():
            out[left] = fit_blocks(blocks.take(~left), view).predict(blocks.take(left).features(view))
    return out


def tabulate(trees: Any, view: str, share: float, layers: NDArray[np.intp], num_layers: int) -> ResidualTable:
    """A share of the corrections at the knots; layers that no row was learned of hold none."""
    axes = np.meshgrid(*KNOTS.values(), indexing="ij")
    places = np.log2(np.stack([axis.reshape(-1) for axis in axes], axis=1))
    steps = np.zeros((num_layers, *axes[0].shape), dtype=np.int8)
    for layer in np.unique(layers):
        logs = share * trees.predict(features_of(places, np.full(len(places), layer), view))
        steps[layer] = np.clip(np.rint(logs / LOG_STEP), -127, 127).reshape(axes[0].shape)
    return ResidualTable(knots_log2=tuple(np.log2(knots) for knots in KNOTS.values()), log_steps=steps)


def learn_device(table: pd.DataFrame, name: str) -> None:
    """Learn the tables of one record and write them beside it."""
    device, path = load_device(name), record_path("moe", name)
    record = load_record("moe", device, physics_only=True)
    table = table[table.device == DEVICES[name]]
    content = read_record("moe", name)
    names = {f"{row.library}/{row.kernel}" for row in table[["library", "kernel"]].drop_duplicates().itertuples()}
    tables: dict[str, Any] = {}
    used, reports = {}, {}
    intervals = deepcopy(content["interval"])
    for (word, library, kernel), rows in table.groupby(["dtype", "library", "kernel"]):
        dtype, key = DTYPES[word], f"{library}/{kernel}"
        if dtype not in record.parameters["libraries"].get(key, {}) or key not in names:
            continue
        blocks = read_blocks(rows, device, dtype, record, key)
        held = blocks.fold == HELD_OUT_FOLD
        train, judged = blocks.take(~held), blocks.take(held)
        logs = {view: predict_left_out(train, view) for view in VIEWS}
        tried = {(view, share): train.predict(share * logs[view]) for view in VIEWS for share in SHARES}
        view, share = min(tried, key=lambda each: float(np.abs(tried[each] / train.measured - 1.0).mean()))
        left_out_s = tried[view, share]
        report: dict[str, Any] = {
            "left_out": error_summary(left_out_s, train.measured),
            "left_out_physics": error_summary(train.predict(0.0 * train.measured), train.measured),
        }
        errors = [report[each]["mean_absolute_error"] for each in ("left_out", "left_out_physics")]
        section = section_name(dtype, key)
        if errors[0] > WORTHWHILE_RATIO * errors[1]:
            print(name, section, f"keeps its physics alone: {errors[1]:.3f}, learned {errors[0]:.3f}", flush=True)
            continue
        num_layers = 1 + len(record.parameters["libraries"][key][dtype].get("untuned", {}).get("steps", ()))
        learned = tabulate(fit_blocks(train, view), view, share, train.layer, num_layers)
        unseen_logs, _ = log_correction(learned, *judged.sizes.T, layer=judged.layer)
        report["held_out"] = error_summary(judged.predict(unseen_logs), judged.measured)
        report["held_out_physics"] = error_summary(judged.predict(0.0 * unseen_logs), judged.measured)
        tables[f"residual:{section}"], used[section], reports[section] = learned.log_steps, section, report
        # Intervals are chosen by the time of a product, of which a block has two.
        intervals["libraries"][key][dtype] = interval_of(left_out_s / 2.0, train.measured / 2.0)
        if content["provenance"]["defaults"].get(dtype) == f"{dtype}, {key}":
            used[dtype], intervals["dtypes"][dtype] = section, intervals["libraries"][key][dtype]
        print(
            name,
            section,
            view,
            share,
            {each: found["mean_absolute_error"] for each, found in report.items()},
            flush=True,
        )
        report["trees_see"], report["share"] = view, share
    content["residual"] = {
        "file": f"{name}.npz",
        "tables": used,
        "interval": intervals,
        "reports": reports,
        "command": f"python scripts/calibrate_moe_residual.py --data DIR --device {name}",
    }
    knots: dict[str, Any] = {axis: KNOTS[axis].astype(np.int32) for axis in AXES["moe"]}
    np.savez_compressed(path.with_suffix(".npz"), **knots, **tables)
    save_record("moe", name, tidy(content))
    print(name, f"{path.with_suffix('.npz').stat().st_size / 1e3:.0f} kB", flush=True)


def main() -> None:
    """Learn the tables of every record, or of some devices'."""
    given = argument_parser(__doc__, DEVICES).parse_args()
    table = read_table(given.data)
    for name in given.device or DEVICES:
        learn_device(table, name)


if __name__ == "__main__":
    main()
