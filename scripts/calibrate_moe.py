"""Fit the expert-layer records of src/shapewright/perf/data/moe from measured blocks.

Usage: python scripts/calibrate_moe.py --data DIR [--device h100-sxm-80gb] [--kernel cutlass]

DIR holds moe.parquet (columns in docs/decisions/0007-moe.md). Run calibrate_gemm.py and calibrate_pointwise.py before:
alignment factors and the pointwise parts of a block come from their records. Every fifth expert layout (experts, top k,
hidden, inner; in this order) is never fitted; errors and intervals are of rows that the fit behind them did not see,
fold by fold. Kernels that were timed on fewer than three layouts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from calibration import DEVICES, SAME_CHIP, SOURCE, argument_parser, read_record, write_record
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shapewright.accuracy.moe import block_of
from shapewright.fit.gemm import PRIOR_WEIGHT, device_rates, judge, predict_rows, round_section, transform, untransform
from shapewright.fit.logs import HELD_OUT_FOLD, NUM_FOLDS, interval_of
from shapewright.hardware import Device, load_device
from shapewright.perf.calibration import load_record
from shapewright.perf.expert_kernels import expert_kernel_family
from shapewright.perf.pointwise import price_pointwise

Array = NDArray[np.float64]

LAYOUT = ["num_experts", "topk", "hidden_size", "inter_size"]
FEWEST_LAYOUTS = 3
FIT_ROWS = 1500
FIT_SCALE = 0.15
MOST_EVALUATIONS = 30
# 1 adds arithmetic and traffic up; above 32 the joined time is their maximum to within 2 %.
LARGEST_OVERLAP_POWER = 32.0
# No last-level cache is further ahead of its memory; above, the fit only knows that a cached block costs its start.
LARGEST_CACHE_SPEEDUP = 16.0

# Tiles that grouped kernels come in. Source: the search spaces of vllm's and sglang's tuning scripts for fused_moe
# (16 to 256 rows, 32 to 256 columns) and the tile names of FlashInfer's CUTLASS and TensorRT-LLM kernels.
TILE_ROWS = {"blackwell": (8, 16, 32, 64, 128, 256)}
COMMON_TILE_ROWS = (16, 32, 64, 128)
TILE_COLUMNS = (64, 128, 256)
NARROW = ("fp8", "fp4")
# Whose kernels stand for an unnamed library: today's vllm.
DEFAULT_LIBRARY = "vllm"

DTYPES = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}


class Form:
    """Free parameters of one fit: name, start, transform."""

    SCALARS = (
        ("start_s", 1e-5, "log"),
        ("bandwidth_fraction", 0.85, "logit"),
        ("feed_ratio", 3.0, "log"),
        ("overlap_power", 4.0, "log"),
        ("wave_give_back", 0.3, "logit"),
        ("power_drop_fraction", 0.12, "logit"),
        ("power_half_flops", 1e12, "log"),
        ("fill_k", 200.0, "log"),
        ("write_ratio", 1.0, "log"),
        ("idle_row_share", 0.7, "log"),
    )
    # What the first expert takes of the start, and how many more take half of the rest.
    GROWTH = (("first_share", 0.5, "logit"), ("half_count", 8.0, "log"))
    HOT = (("hot_cache_speedup", 3.0, "log"), ("hot_cache_share", 0.3, "log"))
    CAST = (("cast_bytes_per_element", 4.0, "log"), ("cast_row_s", 1e-9, "log"))
    # Rates of a tile: one of its rows times one of its columns.
    ROW_STARTS = (("8", 0.2), ("16", 0.3), ("32", 0.45), ("64", 0.6), ("128", 0.7), ("256", 0.75))
    COLUMN_STARTS = (("64", 0.7), ("128", 0.9))

    def __init__(self, architecture: str, dtype: str, kernel: str) -> None:
        # CUTLASS sets each expert up as a problem of its own.
        self.start_grows = expert_kernel_family(kernel) == "cutlass"
        self.rows = TILE_ROWS.get(architecture, COMMON_TILE_ROWS)
        self.entries = [(f"rows:{rows}", start, "logit") for rows, start in self.ROW_STARTS if int(rows) in self.rows]
        self.entries += [(f"columns:{columns}", start, "logit") for columns, start in self.COLUMN_STARTS]
        self.entries += self.SCALARS
        self.entries += self.GROWTH if self.start_grows else ()
        self.entries += self.HOT
        self.entries += self.CAST if dtype in NARROW else ()

    def start(self) -> Array:
        """Starting point, which is also the prior."""
        return transform(self.entries)

    def section(self, x: Array, factors: dict[str, Any]) -> dict[str, Any]:
        """The record's section of a vector of the fit."""
        v = untransform(x, self.entries)
        return {
            "tiles": [
                {"m": m, "n": n, "rate": v[f"rows:{m}"] * v.get(f"columns:{n}", 1.0), "fill_k": v["fill_k"]}
                for m in self.rows
                for n in TILE_COLUMNS
            ],
            "splits": [1],
            **{name: v[name] for name, _, _ in self.SCALARS if name not in ("fill_k", "overlap_power")},
            "split_start_s": 0.0,
            "overlap_power": min(max(v["overlap_power"], 1.0), LARGEST_OVERLAP_POWER),
            "k_step": 32,
            "hot_cache_speedup": min(v["hot_cache_speedup"], LARGEST_CACHE_SPEEDUP),
            "hot_cache_share": v["hot_cache_share"],
            "cast_bytes_per_element": v.get("cast_bytes_per_element", 0.0),
            "cast_row_s": v.get("cast_row_s", 0.0),
            "alignment_factor": factors,
            **({"start_growth": self._growth(v)} if self.start_grows else {}),
        }

    def _growth(self, v: dict[str, float]) -> dict[str, Any]:
        return {**{name: v[name] for name, _, _ in self.GROWTH}, "counts_groups": True}


class Rows(NamedTuple):
    """Measured blocks with all that a fit needs of them; arrays over rows.

    Attributes:
        products: m, n, k, batch of gate_up and of down.
        pointwise_s: Listed pointwise operations of the rows that are this device's own. [s]
        idle_s: Clearing and reading the rows of other devices' experts at full bandwidth. [s]
        measured: Time of the block. [s]
        fold: Fold of the layout.
    """

    products: tuple[pd.DataFrame, pd.DataFrame]
    pointwise_s: Array
    idle_s: Array
    measured: Array
    fold: NDArray[np.int64]

    def take(self, index: Any) -> Rows:
        """Rows of an index or of a mask."""
        first, second = (product.loc[index].reset_index(drop=True) for product in self.products)
        return Rows(
            (first, second), self.pointwise_s[index], self.idle_s[index], self.measured[index], self.fold[index]
        )


def read_table(folder: Path) -> pd.DataFrame:
    """The measured table with a fold for each layout: with so few of them, in turn and not by chance."""
    table = pd.read_parquet(folder / "moe.parquet")
    layouts = table[LAYOUT].drop_duplicates().sort_values(LAYOUT, ignore_index=True)
    return table.merge(layouts.assign(fold=layouts.index % NUM_FOLDS), on=LAYOUT)


def read_rows(table: pd.DataFrame, device: Device, dtype: str) -> Rows:
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
    return Rows(products, own, idle, table.latency_s.to_numpy(), table.fold.to_numpy())


def predict_blocks(rows: Rows, section: dict[str, Any], rates: Any) -> Array:
    """Time of each block with a section. [s]"""
    products_s = sum(predict_rows(product, section, rates, "NT") for product in rows.products)
    return np.asarray(products_s + rows.pointwise_s + section["idle_row_share"] * rows.idle_s)


def fit(rows: Rows, form: Form, rates: Any, factors: dict[str, Any]) -> Array:
    """Least squares of log(predicted / measured), outliers damped, pulled weakly to the start."""
    chosen = np.random.default_rng(0).permutation(len(rows.measured))[:FIT_ROWS]
    sample, prior = rows.take(chosen), form.start()
    target = np.log(sample.measured)

    def residuals(x: Array) -> Array:
        predicted = predict_blocks(sample, form.section(x, factors), rates)
        return np.concatenate([np.log(predicted) - target, PRIOR_WEIGHT * FIT_SCALE * (x - prior)])

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
    for (word, library, kernel), blocks in groups:
        is_asked = not kernels or any(word in kernel for word in kernels)
        if len(blocks[LAYOUT].drop_duplicates()) < FEWEST_LAYOUTS or not is_asked:
            continue
        dtype = DTYPES[word]
        form = Form(device.architecture, dtype, kernel)
        fitted = fit_kernel(read_rows(blocks, device, dtype), form, device_rates(device, dtype, hot=True), factors)
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
