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
from shapewright.perf.kernels import DeviceRates
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

# Devices of the same multiprocessor behind other memories, and the kernels that are fitted to both together: those that
# look tiles up by device, so that each saw but some tuned shapes (docs/decisions/0007-moe.md).
SIBLINGS = ("h100-sxm-80gb", "h200-sxm-141gb")
SHARED = (("vllm 0.24.0", "bf16"),)

# Whose alignment factors stand for those of experts on every device: the one whose odd sizes were measured. What other
# multiprocessors make of them holds for products of the vendor's library (docs/decisions/0003-gemm-calibration.md).
ALIGNED_LIKE = "a100-sxm-80gb"

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


class Part(NamedTuple):
    """What a fit knows of one device: measured rows, free parameters, sheet, alignment."""

    rows: Rows
    form: Form
    rates: DeviceRates
    factors: dict[str, Any]

    def section(self, x: Array) -> dict[str, Any]:
        """The record's section of a vector of the fit."""
        section: dict[str, Any] = round_section(self.form.section(x, self.factors))
        return section

    def residuals(self, x: Array) -> Array:
        """Log(predicted / measured) of all rows."""
        section, target = self.form.section(x, self.factors), np.log(self.rows.measured)
        logs = np.log(predict_blocks(self.rows, section, self.rates)) - target
        # The menu prices training, and shapes tuned elsewhere: where few here are, it follows all rows a little.
        if self.form.rule is None or np.mean(self.rows.step == TUNED) >= FEW_TUNED:
            return np.asarray(logs)
        as_tuned = np.log(predict_blocks(self.rows, section, self.rates, as_tuned=True)) - target
        return np.concatenate([logs, LEANING * as_tuned])


def fit(parts: Sequence[Part]) -> list[Array]:
    """Least squares of log(predicted / measured), outliers damped, pulled weakly to the start.

    Args:
        parts: One device, or siblings, which share all but what is the memory's (expert_form.Form.is_memorys).

    Returns:
        Parameters of each part.
    """
    form = parts[0].form
    is_own = form.is_memorys & (len(parts) > 1)
    num_shared, num_own = int((~is_own).sum()), int(is_own.sum())
    samples = []
    for part in parts:
        chosen = np.random.default_rng(0).permutation(len(part.rows.measured))[:FIT_ROWS]
        samples.append(part._replace(rows=part.rows.take(chosen)))
    prior = np.concatenate([form.start()[~is_own], *[form.start()[is_own]] * len(parts)])

    def split(x: Array) -> list[Array]:
        found = []
        for number, part in enumerate(parts):
            one = np.empty(len(is_own))
            first = num_shared + number * num_own
            one[~is_own], one[is_own] = x[:num_shared], x[first : first + num_own]
            # As many bytes a second reach a multiprocessor, whatever its share of the memory.
            faster = part.rates.bandwidth_bytes_per_s / parts[0].rates.bandwidth_bytes_per_s
            found.append(one - np.log(faster) * form.is_feed)
        return found

    def residuals(x: Array) -> Array:
        errors = [part.residuals(one) for part, one in zip(samples, split(x), strict=True)]
        return np.concatenate([*errors, PRIOR_WEIGHT * FIT_SCALE * (x - prior)])

    return split(
        least_squares(residuals, prior, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=MOST_EVALUATIONS, diff_step=1e-3).x
    )


class Fitted(NamedTuple):
    """What came of one kernel of one library."""

    section: dict[str, Any]
    interval: dict[str, Any]
    report: dict[str, Any]


def fit_kernel(parts: Sequence[Part], number: int) -> Fitted:
    """Fit once without each fold; the one without HELD_OUT_FOLD is shipped, all of them make errors and interval.

    Args:
        parts: One device, or siblings that are fitted together.
        number: Which of them is asked.
    """
    part = parts[number]
    rows, unseen, shipped = part.rows, np.full(len(part.rows.measured), np.nan), None
    for fold in range(NUM_FOLDS):
        is_fold = rows.fold == fold
        if fold != HELD_OUT_FOLD and not is_fold.any():
            continue
        seen = [one._replace(rows=one.rows.take(one.rows.fold != fold)) for one in parts]
        section = part.section(fit(seen)[number])
        unseen[is_fold] = predict_blocks(rows.take(is_fold), section, part.rates)
        shipped = section if fold == HELD_OUT_FOLD else shipped
    assert shipped is not None
    held = rows.fold == HELD_OUT_FOLD
    report = {
        "rows": len(rows.measured),
        "rows_fitted": min(int((~held).sum()), FIT_ROWS),
        "held_out": judge(unseen, rows.measured),
        "held_out_of_the_record": judge(unseen[held], rows.measured[held]),
        "fitted": judge(predict_blocks(rows.take(~held), shipped, part.rates), rows.measured[~held]),
    }
    return Fitted(shipped, interval_of(unseen, rows.measured), report)


def read_part(table: pd.DataFrame, name: str, word: str, library: str, kernel: str) -> Part:
    """What a fit knows of one kernel on one device, from the whole table."""
    device, dtype = load_device(name), DTYPES[word]
    factors = load_record("gemm", load_device(ALIGNED_LIKE)).parameters["dtypes"]["bf16"]["alignment_factor"]
    is_own = (table.device == DEVICES[name]) & (table.dtype == word)
    measured = table[is_own & (table.library == library) & (table.kernel == kernel)]
    if len(measured[LAYOUT].drop_duplicates()) < FEWEST_LAYOUTS:
        measured = measured.assign(fold=folds_of(measured.moe_tp_size, measured.moe_ep_size))
    form = Form(device.architecture, dtype, library, kernel)
    rows = read_rows(measured, device, dtype, read_rule(form.section(form.start(), factors)))
    return Part(rows, form, device_rates(device, dtype, hot=True), factors)


def fit_device(table: pd.DataFrame, name: str, kernels: Sequence[str] = ()) -> dict[str, Any]:
    """The record of a device, from the whole table.

    Args:
        table: Measured blocks.
        name: The device.
        kernels: Words of which a kernel's name must hold one to be fitted; what the record says of others stays.
    """
    device = load_device(name)
    own = table[table.device == DEVICES[name]]
    known = read_record("moe", name) if kernels else {}
    parameters: dict[str, Any] = known.get("parameters", {"dtypes": {}, "libraries": {}})
    intervals: dict[str, Any] = known.get("interval", {"dtypes": {}, "libraries": {}})
    reports: dict[str, Any] = known.get("provenance", {}).get("reports", {})
    defaults: dict[str, str] = known.get("provenance", {}).get("defaults", {})
    # Larger groups later, so that the default is the newest vllm's most used kernel.
    groups = sorted(own.groupby(["dtype", "library", "kernel"]), key=lambda group: len(group[1]))
    for (word, library, kernel), _ in groups:
        if kernels and not any(each in kernel for each in kernels):
            continue
        dtype = DTYPES[word]
        # A triton kernel's tuned shapes are a device's own: what siblings run tuned, they see together.
        is_shared = name in SIBLINGS and (library, dtype) in SHARED
        devices = SIBLINGS if is_shared else (name,)
        parts = [read_part(table, each, word, library, kernel) for each in devices]
        fitted = fit_kernel(parts, devices.index(name))
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
