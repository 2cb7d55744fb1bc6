"""Fit the expert-layer records of src/shapewright/perf/data/moe from measured blocks.

Usage: python scripts/calibrate_moe.py --data DIR [--device h100-sxm-80gb] [--kernel cutlass]

DIR holds moe.parquet (columns in docs/decisions/0007-moe.md). Run calibrate_gemm.py and calibrate_pointwise.py before:
alignment factors and the pointwise parts of a block come from their records. Every fifth expert layout (experts, top k,
hidden, inner; in this order) is never fitted; errors and intervals are of rows that the fit behind them did not see,
fold by fold. Of kernels that were timed on fewer than three layouts, whole shardings are left out instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from calibration import DEVICES, SAME_CHIP, SOURCE, argument_parser, read_record, write_record
from expert_form import Form
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shapewright.accuracy.moe import block_of
from shapewright.fit.gemm import PRIOR_WEIGHT, device_rates, judge, predict_rows, round_section
from shapewright.fit.logs import HELD_OUT_FOLD, NUM_FOLDS, folds_of, interval_of
from shapewright.hardware import Device, load_device
from shapewright.perf.calibration import load_record
from shapewright.perf.expert_tiles import TUNED, TileRule, read_rule, tuned_shapes
from shapewright.perf.pointwise import price_pointwise

Array = NDArray[np.float64]

LAYOUT = ["num_experts", "topk", "hidden_size", "inter_size"]
FEWEST_LAYOUTS = 3
FIT_ROWS = 1500
FIT_SCALE = 0.15
MOST_EVALUATIONS = 30
# Share of tuned rows below which the menu of tuned shapes is fitted to all rows too, and their weight then.
FEW_TUNED, LEANING = 0.1, 0.05
# Whose kernels stand for an unnamed library: today's vllm.
DEFAULT_LIBRARY = "vllm"

DTYPES = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}


class Rows(NamedTuple):
    """Measured blocks with all that a fit needs of them; arrays over rows.

    Attributes:
        products: m, n, k, batch of gate_up and of down.
        pointwise_s: Listed pointwise operations of the rows that are this device's own. [s]
        idle_s: Clearing and reading the rows of other devices' experts at full bandwidth. [s]
        lone_bytes: Rows that are the only one of their token. [byte]
        step: Which of a rule's kernels runs each (perf.expert_tiles).
        measured: Time of the block. [s]
        fold: Fold of the layout.
    """

    products: tuple[pd.DataFrame, pd.DataFrame]
    pointwise_s: Array
    idle_s: Array
    lone_bytes: Array
    step: NDArray[np.intp]
    measured: Array
    fold: NDArray[np.int64]

    def take(self, index: Any) -> Rows:
        """Rows of an index or of a mask."""
        first, second = (product.loc[index].reset_index(drop=True) for product in self.products)
        return Rows((first, second), *(column[index] for column in self[1:]))


def read_table(folder: Path) -> pd.DataFrame:
    """The measured table with a fold for each layout: with so few of them, in turn and not by chance."""
    table = pd.read_parquet(folder / "moe.parquet")
    layouts = table[LAYOUT].drop_duplicates().sort_values(LAYOUT, ignore_index=True)
    return table.merge(layouts.assign(fold=layouts.index % NUM_FOLDS), on=LAYOUT)


def read_rows(table: pd.DataFrame, device: Device, dtype: str, rule: TileRule | None) -> Rows:
    """Lower measured blocks to products and pointwise times, as judging does."""
    sizes = {name: table[name].to_numpy(float) for name in (*LAYOUT, "num_tokens", "moe_tp_size", "moe_ep_size")}
    block = block_of(sizes, table.distribution.to_numpy(str), dtype, str(table.library.iloc[0]))
    record = load_record("pointwise", device)

    def seconds(operations: Any) -> Array:
        return np.asarray(sum(price_pointwise(operation, device, record).time_s for operation in operations))

    own = seconds(block.pointwise)
    idle = block.idle_bytes / device.memory_bandwidth_bytes_per_s
    products = tuple(
        pd.DataFrame({"m": p.m / np.minimum(p.groups, p.m), "n": p.n, "k": p.k, "batch": np.minimum(p.groups, p.m)})
        for p in block.products
    )
    step = np.full(len(table), TUNED)
    if rule is not None:
        first = block.products[0]
        tuned = tuned_shapes(rule.library, dtype, device.name)
        step = rule.choose(first.tokens, first.experts, first.inner, tuned)
    return Rows(products, own, idle, block.lone_bytes, step, table.latency_s.to_numpy(), table.fold.to_numpy())


def predict_blocks(rows: Rows, section: dict[str, Any], rates: Any, *, as_tuned: bool = False) -> Array:
    """Time of each block with a section, or as if all shapes were tuned. [s]"""
    products_s = np.empty(len(rows.measured))
    steps = np.full_like(rows.step, TUNED) if as_tuned else rows.step
    for step in np.unique(steps):
        here = steps == step
        own = section if step == TUNED else {**section, **section["untuned"]["steps"][step]}
        parts = [product.loc[here] for product in rows.products]
        products_s[here] = sum(predict_rows(part, own, rates, "NT") for part in parts)
    unlisted_s = section["idle_row_share"] * rows.idle_s + section.get("lone_row_s_per_byte", 0.0) * rows.lone_bytes
    return np.asarray(products_s + rows.pointwise_s + unlisted_s)


def fit(rows: Rows, form: Form, rates: Any, factors: dict[str, Any]) -> Array:
    """Least squares of log(predicted / measured), outliers damped, pulled weakly to the start."""
    chosen = np.random.default_rng(0).permutation(len(rows.measured))[:FIT_ROWS]
    sample, prior = rows.take(chosen), form.start()
    target = np.log(sample.measured)
    # The menu prices training, and shapes that are tuned elsewhere: where few here are, it follows all rows a little.
    leans = form.rule is not None and np.mean(sample.step == TUNED) < FEW_TUNED

    def residuals(x: Array) -> Array:
        section = form.section(x, factors)
        parts = [np.log(predict_blocks(sample, section, rates)) - target, PRIOR_WEIGHT * FIT_SCALE * (x - prior)]
        if leans:
            parts.append(LEANING * (np.log(predict_blocks(sample, section, rates, as_tuned=True)) - target))
        return np.concatenate(parts)

    found: Array = least_squares(
        residuals, prior, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=MOST_EVALUATIONS, diff_step=1e-3
    ).x
    return found


class Fitted(NamedTuple):
    """What came of one kernel of one library."""

    section: dict[str, Any]
    interval: dict[str, Any]
    report: dict[str, Any]


def fit_kernel(rows: Rows, form: Form, rates: Any, factors: dict[str, Any]) -> Fitted:
    """Fit once without each fold; the one without HELD_OUT_FOLD is shipped, all of them make errors and interval."""
    unseen, shipped = np.full(len(rows.measured), np.nan), None
    for fold in range(NUM_FOLDS):
        is_fold = rows.fold == fold
        if fold != HELD_OUT_FOLD and not is_fold.any():
            continue
        section = round_section(form.section(fit(rows.take(~is_fold), form, rates, factors), factors))
        unseen[is_fold] = predict_blocks(rows.take(is_fold), section, rates)
        shipped = section if fold == HELD_OUT_FOLD else shipped
    assert shipped is not None
    held = rows.fold == HELD_OUT_FOLD
    report = {
        "rows": len(rows.measured),
        "rows_fitted": min(int((~held).sum()), FIT_ROWS),
        "held_out": judge(unseen, rows.measured),
        "held_out_of_the_record": judge(unseen[held], rows.measured[held]),
        "fitted": judge(predict_blocks(rows.take(~held), shipped, rates), rows.measured[~held]),
    }
    return Fitted(shipped, interval_of(unseen, rows.measured), report)


def fit_device(table: pd.DataFrame, name: str, kernels: Sequence[str] = ()) -> dict[str, Any]:
    """The record of a device, from the whole table.

    Args:
        table: Measured blocks.
        name: The device.
        kernels: Words of which a kernel's name must hold one to be fitted; what the record says of others stays.
    """
    device = load_device(name)
    factors = load_record("gemm", device).parameters["dtypes"]["bf16"]["alignment_factor"]
    table = table[table.device == DEVICES[name]]
    known = read_record("moe", name) if kernels else {}
    parameters: dict[str, Any] = known.get("parameters", {"dtypes": {}, "libraries": {}})
    intervals: dict[str, Any] = known.get("interval", {"dtypes": {}, "libraries": {}})
    reports: dict[str, Any] = known.get("provenance", {}).get("reports", {})
    defaults: dict[str, str] = known.get("provenance", {}).get("defaults", {})
    # Larger groups later, so that the default is the newest vllm's most used kernel.
    groups = sorted(table.groupby(["dtype", "library", "kernel"]), key=lambda group: len(group[1]))
    for (word, library, kernel), measured in groups:
        if kernels and not any(each in kernel for each in kernels):
            continue
        is_rare = len(measured[LAYOUT].drop_duplicates()) < FEWEST_LAYOUTS
        shardings = folds_of(measured.moe_tp_size, measured.moe_ep_size)
        blocks = measured.assign(fold=shardings) if is_rare else measured
        dtype = DTYPES[word]
        form = Form(device.architecture, dtype, library, kernel)
        rows = read_rows(blocks, device, dtype, read_rule(form.section(form.start(), factors)))
        fitted = fit_kernel(rows, form, device_rates(device, dtype, hot=True), factors)
        key = f"{library}/{kernel}"
        parameters["libraries"].setdefault(key, {})[dtype] = fitted.section
        intervals["libraries"].setdefault(key, {})[dtype] = fitted.interval
        reports[f"{dtype}, {key}"] = fitted.report
        if defaults.get(dtype) == f"{dtype}, {key}" or (library.startswith(DEFAULT_LIBRARY) and not kernels):
            parameters["dtypes"][dtype], intervals["dtypes"][dtype] = fitted.section, fitted.interval
            defaults[dtype] = f"{dtype}, {key}"
        print(name, dtype, key, json.dumps(fitted.report), flush=True)
    return {
        "devices": [name, *SAME_CHIP.get(name, ())],
        "architecture": device.architecture,
        "parameters": parameters,
        "interval": intervals,
        "provenance": {
            "command": f"python scripts/calibrate_moe.py --data DIR --device {name}"
            + "".join(f" --kernel {word}" for word in kernels),
            "source": f"moe.parquet ({SOURCE})",
            "split": "a fifth of whole layouts (experts, top k, hidden, inner) held out; reports: each fifth in turn",
            "defaults": defaults,
            "reports": reports,
        },
    }


def main() -> None:
    """Fit every record, or those of some devices."""
    parser = argument_parser(__doc__, DEVICES)
    parser.add_argument("--kernel", action="append", default=[], help="part of a kernel's name: fit such alone")
    given = parser.parse_args()
    table = read_table(given.data)
    for name in given.device or DEVICES:
        write_record("moe", name, fit_device(table, name, given.kernel))


if __name__ == "__main__":
    main()
