"""Fit the expert-layer (MoE) records from measured blocks.

The data folder holds moe.parquet (columns in docs/decisions/0007-moe.md). Alignment factors and the pointwise parts of
a block come from the GEMM and pointwise records. The parameters are fitted to every expert layout (experts, top k,
hidden, inner); errors and intervals are of rows that the fit behind them did not see, every fifth layout (in this
order) left out in turn. The fit without the first of these fifths is kept too, to price its layouts as new ones. For
kernels timed on fewer than three layouts, whole shardings are left out instead.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.tables.moe import block_of
from shapewright.measure.fit.gemm_section import PRIOR_WEIGHT, device_rates, percentage_errors, predict_rows
from shapewright.measure.fit.shared import HELD_OUT_FOLD, NUM_FOLDS, fold_of_rows, interval_of, round_numbers
from shapewright.measure.refit.experts.fit_parameters import FitParameters
from shapewright.measure.refit.record_files import DEVICES, SAME_CHIP, SOURCE, command, read_record, write_record
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.tiles import TUNED, TileRule, read_rule, tuned_shapes
from shapewright.pricing.gemm.kernels import DeviceRates
from shapewright.pricing.pointwise import price_pointwise

Array = NDArray[np.float64]

LAYOUT = ["num_experts", "topk", "hidden_size", "inter_size"]
FEWEST_LAYOUTS = 3
FIT_ROWS = 1500
FIT_SCALE = 0.15
MOST_EVALUATIONS = 30
# Share of tuned rows below which the kernels of tuned shapes are fitted to all rows too, and the weight of that.
FEW_TUNED, ALL_ROWS_WEIGHT = 0.1, 0.05
# Library whose kernels price unnamed libraries: the current vllm.
DEFAULT_LIBRARY = "vllm"

# Devices with the same multiprocessor and different memory, and the kernels that are fitted to both together: those
# that look tiles up by device, so that each device has only some tuned shapes (docs/decisions/0007-moe.md).
SIBLINGS = ("h100-sxm-80gb", "h200-sxm-141gb")
SHARED = (("vllm 0.24.0", "bf16"),)

# Device whose alignment factors are used for experts on every device: the one with measured odd sizes. How they scale
# to other multiprocessors is known for GEMMs of the vendor's library only (docs/decisions/0003-gemm-calibration.md).
ALIGNED_LIKE = "a100-sxm-80gb"

DTYPES = {"bf16": "bf16", "fp8": "fp8", "nvfp4": "fp4"}


class Rows(NamedTuple):
    """Measured blocks with everything that a fit needs; arrays over rows.

    Attributes:
        gemms: m, n, k, batch of gate_up and of down.
        pointwise_s: Predicted time of the pointwise operations of the device's own rows. [s]
        idle_s: Time of clearing and reading the rows of other devices' experts at full bandwidth. [s]
        lone_bytes: Rows that are the only one of their token. [byte]
        step: Index of the kernel of a tile rule that runs each row.
        measured: Time of the block. [s]
        fold: Fold of the layout.
    """

    gemms: tuple[pd.DataFrame, pd.DataFrame]
    pointwise_s: Array
    idle_s: Array
    lone_bytes: Array
    step: NDArray[np.intp]
    measured: Array
    fold: NDArray[np.int64]

    def take(self, index: Any) -> Rows:
        """Return the rows of an index or of a mask."""
        first, second = (gemm.loc[index].reset_index(drop=True) for gemm in self.gemms)
        return Rows((first, second), *(column[index] for column in self[1:]))


def read_table(folder: Path) -> pd.DataFrame:
    """Read the measured table, with a fold per layout: by turns instead of at random, since layouts are few."""
    table = pd.read_parquet(folder / "moe.parquet")
    layouts = table[LAYOUT].drop_duplicates().sort_values(LAYOUT, ignore_index=True)
    return table.merge(layouts.assign(fold=layouts.index % NUM_FOLDS), on=LAYOUT)


def read_rows(table: pd.DataFrame, device: Device, dtype: str, rule: TileRule | None) -> Rows:
    """Lower measured blocks to GEMMs and predicted pointwise times, as the evaluation does."""
    sizes = {name: table[name].to_numpy(float) for name in (*LAYOUT, "num_tokens", "moe_tp_size", "moe_ep_size")}
    block = block_of(sizes, table.distribution.to_numpy(str), dtype, str(table.library.iloc[0]))
    record = load_record("pointwise", device)

    def seconds(operations: Any) -> Array:
        return np.asarray(sum(price_pointwise(operation, device, record).time_s for operation in operations))

    own = seconds(block.pointwise)
    idle = block.idle_bytes / device.memory_bandwidth_bytes_per_s
    gemms = tuple(
        pd.DataFrame({"m": p.m / np.minimum(p.groups, p.m), "n": p.n, "k": p.k, "batch": np.minimum(p.groups, p.m)})
        for p in block.gemms
    )
    step = np.full(len(table), TUNED)
    if rule is not None:
        first = block.gemms[0]
        tuned = tuned_shapes(rule.library, dtype, device.name)
        step = rule.choose(first.tokens, first.experts, first.inner, tuned)
    return Rows(gemms, own, idle, block.lone_bytes, step, table.latency_s.to_numpy(), table.fold.to_numpy())


def predict_blocks(rows: Rows, section: dict[str, Any], rates: Any, *, as_tuned: bool = False) -> Array:
    """Predict the time of each block with a section, or as if all shapes were tuned. [s]"""
    gemms_s = np.empty(len(rows.measured))
    steps = np.full_like(rows.step, TUNED) if as_tuned else rows.step
    for step in np.unique(steps):
        here = steps == step
        own = section if step == TUNED else {**section, **section["untuned"]["steps"][step]}
        parts = [gemm.loc[here] for gemm in rows.gemms]
        gemms_s[here] = sum(predict_rows(part, own, rates, "NT") for part in parts)
    unlisted_s = section["idle_row_share"] * rows.idle_s + section.get("lone_row_s_per_byte", 0.0) * rows.lone_bytes
    return np.asarray(gemms_s + rows.pointwise_s + unlisted_s)


class Part(NamedTuple):
    """One device's share of a fit: measured rows, free parameters, data-sheet rates, alignment factors."""

    rows: Rows
    parameters: FitParameters
    rates: DeviceRates
    factors: dict[str, Any]

    def section(self, x: Array) -> dict[str, Any]:
        """Return the section of the record for a fitted vector."""
        section: dict[str, Any] = round_numbers(self.parameters.section(x, self.factors), 6)
        return section

    def residuals(self, x: Array) -> Array:
        """Return log(predicted / measured) of all rows."""
        section, target = self.parameters.section(x, self.factors), np.log(self.rows.measured)
        logs = np.log(predict_blocks(self.rows, section, self.rates)) - target
        # Kernels of tuned shapes price training and shapes tuned elsewhere: with few tuned rows, they are fitted to all
        # rows with a small weight.
        if self.parameters.rule is None or np.mean(self.rows.step == TUNED) >= FEW_TUNED:
            return np.asarray(logs)
        as_tuned = np.log(predict_blocks(self.rows, section, self.rates, as_tuned=True)) - target
        return np.concatenate([logs, ALL_ROWS_WEIGHT * as_tuned])


def fit(parts: Sequence[Part]) -> list[Array]:
    """Fit by least squares of log(predicted / measured), with damped outliers and a weak prior at the start.

    Args:
        parts: One device, or siblings, which share all but the memory parameters.

    Returns:
        Parameters of each part.
    """
    parameters = parts[0].parameters
    is_own = parameters.is_memory_parameter & (len(parts) > 1)
    num_shared, num_own = int((~is_own).sum()), int(is_own.sum())
    samples = []
    for part in parts:
        chosen = np.random.default_rng(0).permutation(len(part.rows.measured))[:FIT_ROWS]
        samples.append(part._replace(rows=part.rows.take(chosen)))
    prior = np.concatenate([parameters.start()[~is_own], *[parameters.start()[is_own]] * len(parts)])

    def split(x: Array) -> list[Array]:
        found = []
        for number, part in enumerate(parts):
            one = np.empty(len(is_own))
            first = num_shared + number * num_own
            one[~is_own], one[is_own] = x[:num_shared], x[first : first + num_own]
            # The same bytes per second reach a multiprocessor, whatever its share of the memory bandwidth.
            faster = part.rates.bandwidth_bytes_per_s / parts[0].rates.bandwidth_bytes_per_s
            found.append(one - np.log(faster) * parameters.is_feed)
        return found

    def residuals(x: Array) -> Array:
        errors = [part.residuals(one) for part, one in zip(samples, split(x), strict=True)]
        return np.concatenate([*errors, PRIOR_WEIGHT * FIT_SCALE * (x - prior)])

    return split(
        least_squares(residuals, prior, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=MOST_EVALUATIONS, diff_step=1e-3).x
    )


class Fitted(NamedTuple):
    """Result of one kernel of one library.

    Attributes:
        section: Section of the record, fitted to all layouts.
        section_of_seen: The same without the layouts of HELD_OUT_FOLD.
    """

    section: dict[str, Any]
    section_of_seen: dict[str, Any]
    interval: dict[str, Any]
    report: dict[str, Any]


def fit_kernel(parts: Sequence[Part], number: int) -> Fitted:
    """Fit to all layouts, which is kept, and once without each fold, which give errors and interval.

    Args:
        parts: One device, or siblings that are fitted together.
        number: Index of the part whose result is returned.
    """
    part = parts[number]
    rows, held_out, of_seen = part.rows, np.full(len(part.rows.measured), np.nan), None
    shipped = part.section(fit(parts)[number])
    for fold in range(NUM_FOLDS):
        is_fold = rows.fold == fold
        if fold != HELD_OUT_FOLD and not is_fold.any():
            continue
        seen = [one._replace(rows=one.rows.take(one.rows.fold != fold)) for one in parts]
        section = part.section(fit(seen)[number])
        held_out[is_fold] = predict_blocks(rows.take(is_fold), section, part.rates)
        of_seen = section if fold == HELD_OUT_FOLD else of_seen
    assert of_seen is not None
    held = rows.fold == HELD_OUT_FOLD
    report = {
        "rows": len(rows.measured),
        "rows_fitted": min(len(rows.measured), FIT_ROWS),
        "held_out": percentage_errors(held_out, rows.measured),
        "held_out_of_the_record": percentage_errors(held_out[held], rows.measured[held]),
        "fitted": percentage_errors(predict_blocks(rows, shipped, part.rates), rows.measured),
    }
    return Fitted(shipped, of_seen, interval_of(held_out, rows.measured), report)


def read_part(table: pd.DataFrame, name: str, table_dtype: str, library: str, kernel: str) -> Part:
    """Select the rows of one kernel on one device."""
    device, dtype = load_device(name), DTYPES[table_dtype]
    factors = load_record("gemm", load_device(ALIGNED_LIKE)).parameters["dtypes"]["bf16"]["alignment_factor"]
    is_own = (table.device == DEVICES[name]) & (table.dtype == table_dtype)
    measured = table[is_own & (table.library == library) & (table.kernel == kernel)]
    if len(measured[LAYOUT].drop_duplicates()) < FEWEST_LAYOUTS:
        measured = measured.assign(fold=fold_of_rows(measured.moe_tp_size, measured.moe_ep_size))
    parameters = FitParameters(device.architecture, dtype, library, kernel)
    rows = read_rows(measured, device, dtype, read_rule(parameters.section(parameters.start(), factors)))
    return Part(rows, parameters, device_rates(device, dtype, hot=True), factors)


def fit_device(table: pd.DataFrame, name: str, kernels: Sequence[str] = ()) -> dict[str, Any]:
    """Return the record of a device.

    Args:
        kernels: Only kernels with one of these words in their name are fitted; the others keep their sections.
    """
    device = load_device(name)
    own = table[table.device == DEVICES[name]]
    known = read_record("moe", name) if kernels else {}
    parameters, of_seen = (
        known.get(name, {"dtypes": {}, "libraries": {}}) for name in ("parameters", "parameters_without_own_shapes")
    )
    intervals: dict[str, Any] = known.get("interval", {"dtypes": {}, "libraries": {}})
    reports: dict[str, Any] = known.get("provenance", {}).get("reports", {})
    defaults: dict[str, str] = known.get("provenance", {}).get("defaults", {})
    # Larger groups last, so that the default is the most used kernel of the newest vllm.
    groups = sorted(own.groupby(["dtype", "library", "kernel"]), key=lambda group: len(group[1]))
    for (table_dtype, library, kernel), _ in groups:
        if kernels and not any(each in kernel for each in kernels):
            continue
        dtype = DTYPES[table_dtype]
        # The tuned shapes of triton kernels differ by device: siblings are fitted together to see more of them.
        is_shared = name in SIBLINGS and (library, dtype) in SHARED
        devices = SIBLINGS if is_shared else (name,)
        parts = [read_part(table, each, table_dtype, library, kernel) for each in devices]
        fitted = fit_kernel(parts, devices.index(name))
        key = f"{library}/{kernel}"
        parameters["libraries"].setdefault(key, {})[dtype] = fitted.section
        of_seen["libraries"].setdefault(key, {})[dtype] = fitted.section_of_seen
        intervals["libraries"].setdefault(key, {})[dtype] = fitted.interval
        reports[f"{dtype}, {key}"] = fitted.report
        if defaults.get(dtype) == f"{dtype}, {key}" or (library.startswith(DEFAULT_LIBRARY) and not kernels):
            parameters["dtypes"][dtype], intervals["dtypes"][dtype] = fitted.section, fitted.interval
            of_seen["dtypes"][dtype] = fitted.section_of_seen
            defaults[dtype] = f"{dtype}, {key}"
        print(name, dtype, key, json.dumps(fitted.report), flush=True)
    return {
        "devices": [name, *SAME_CHIP.get(name, ())],
        "architecture": device.architecture,
        "parameters": parameters,
        "parameters_without_own_shapes": of_seen,
        "interval": intervals,
        "provenance": {
            "command": command("moe", f"--device {name}", *(f"--kernel {table_dtype}" for table_dtype in kernels)),
            "source": f"moe.parquet ({SOURCE})",
            "split": "parameters: all layouts (experts, top k, hidden, inner); parameters_without_own_shapes: without "
            "a fifth of them; reports: each fifth left out in turn",
            "defaults": defaults,
            "reports": reports,
        },
    }


def refit(data: Path, devices: Sequence[str] = (), kernels: Sequence[str] = ()) -> None:
    """Fit every expert record, or those of some devices, or sections of kernels with certain words in their names."""
    table = read_table(data)
    for name in devices or DEVICES:
        write_record("moe", name, fit_device(table, name, kernels))
