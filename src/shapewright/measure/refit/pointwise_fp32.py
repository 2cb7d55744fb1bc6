"""Fit the records of fp32 pointwise operations (kind ``pointwise-fp32``) from pointwise_fp32.parquet.

Columns: device, operation, rows, columns, latency_s; events around one call, so that every row contains the launch. The
start of a kernel cannot be told from its launch: it is that of the 16-bit record, at the device's clock. Layer norm and
softmax read a row again that outgrows the registers of its block, so each width of rows is a kind. A fifth of the sizes
is held out; devices left out in turn give the intervals of borrowed records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.tables.pointwise import bytes_of, kind_names, with_launch
from shapewright.measure.fit.pointwise_record import Constant, predict_pointwise
from shapewright.measure.fit.shared import (
    HELD_OUT_FOLD,
    Array,
    crossed_coverage,
    error_summary,
    fit_log_times,
    fold_of_rows,
    interval_of,
)
from shapewright.measure.refit.gemm.fp32 import MEASURED, SAME_BOARD, SOURCE, tells_about_kernels, without_launch
from shapewright.measure.refit.intervals.interval_files import write_groups
from shapewright.measure.refit.intervals.left_out import transfer_groups
from shapewright.measure.refit.record_files import command, write_record
from shapewright.pricing.calibration.records import FP32_POINTWISE, load_record
from shapewright.pricing.calibration.transfer import fixed_cost_scale
from shapewright.pricing.pointwise import price_pointwise

TABLE = "pointwise_fp32.parquet"
FIT_ROWS = 6000
_LAUNCH_BOUNDS_S = (1e-6, 2e-4)
# A fraction above 1 would be traffic that the last-level cache keeps; the fit has a cache of its own.
_FRACTION_BOUNDS = (0.05, 0.98)
_FEWEST_ROWS = 5
_USUAL_SPREAD = (0.9, 1.3)
# Kinds of models, and the kernel that runs them; for row-wise ones of the most usual width.
MODEL_KINDS = {
    "residual": "add",
    "bias": "add",
    "activation": "gelu",
    "layernorm": "layer_norm to 2048",
    "softmax": "softmax to 2048",
}


def read_rows(folder: Path, alias: str) -> pd.DataFrame:
    """Read the rows of one device, with ``kind``, ``num_bytes`` and ``held_out``."""
    rows = pd.read_parquet(folder / TABLE)
    rows = rows[rows.device == alias].reset_index(drop=True)
    height, width = rows["rows"].to_numpy(float), rows["columns"].to_numpy(float)
    names = rows.operation.to_numpy(str)
    kinds = kind_names(names, width)
    counts = pd.Series(kinds).map(pd.Series(kinds).value_counts()).to_numpy()
    rows = rows.assign(kind=kinds, num_bytes=bytes_of(names, height * width))
    return rows.assign(held_out=fold_of_rows(rows["rows"], rows["columns"]) == HELD_OUT_FOLD)[counts >= _FEWEST_ROWS]


def kernel_start_of(device: Device) -> float:
    """Return the start of a kernel on a device: that of a residual addition in 16 bits, at its clock. [s]"""
    package = load_record("pointwise", device)
    return float(package.parameters["kinds"]["residual"]["start_s"]) * fixed_cost_scale(device, package)


def fit_device(rows: pd.DataFrame, device: Device) -> dict[Constant, float]:
    """Fit launch and bandwidth fraction of every kind, the cache, and the hidden share of the launch."""
    sample = rows.sample(min(FIT_ROWS, len(rows)), random_state=1)
    kinds = sorted(set(sample.kind))
    bounds: dict[Constant, tuple[float, float]] = {
        ("l2_reach_fraction", ""): (0.2, 4.0),
        ("l2_speedup", ""): (1.01, 8.0),
        ("hidden_s", ""): (1e-6, 2.5e-5),
    }
    start: dict[Constant, float] = {("l2_reach_fraction", ""): 0.8, ("l2_speedup", ""): 2.0, ("hidden_s", ""): 8e-6}
    for kind in kinds:
        shortest = float(sample.latency_s[sample.kind == kind].min())
        bounds |= {("launch_s", kind): _LAUNCH_BOUNDS_S, ("bandwidth_fraction", kind): _FRACTION_BOUNDS}
        start |= {("launch_s", kind): shortest, ("bandwidth_fraction", kind): 0.7}
    measured = sample.latency_s.to_numpy()
    return fit_log_times(lambda free: predict(free, sample, device)[0], measured, start, bounds, pull=0.01)[0]


def predict(free: Mapping[Constant, float], rows: pd.DataFrame, device: Device) -> tuple[Array, Array]:
    """Predict rows with their launch, and the kernels alone. [s]"""
    kinds = rows.kind.to_numpy(str)
    names = sorted(set(kinds))
    constants: dict[Constant, float] = {**free, **{("start_s", kind): kernel_start_of(device) for kind in names}}
    kernel_s = predict_pointwise(constants, kinds, rows.num_bytes.to_numpy(), 1.0, device)
    launch_s = np.select([kinds == kind for kind in names], [free["launch_s", kind] for kind in names])
    return with_launch(kernel_s, launch_s, free["hidden_s", ""]), kernel_s


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Fit every record, or those of some devices."""
    for name, alias in MEASURED.items():
        device, rows = load_device(name), read_rows(data, alias)
        if not len(rows) or (devices and name not in devices):
            continue
        free = fit_device(rows[~rows.held_out], device)
        kinds = sorted({kind for constant, kind in free if constant == "launch_s"})
        held = rows[rows.held_out & rows.kind.isin(kinds)]
        (predicted, kernel_s), measured = predict(free, held, device), held.latency_s.to_numpy()
        tells = tells_about_kernels(kernel_s, predicted)
        bare_s = (measured - predicted + kernel_s)[tells]
        interval = interval_of(kernel_s[tells], bare_s)
        ratios = (measured / predicted)[~tells]
        spread = [float(end) for end in np.quantile(ratios, (0.05, 0.95))] if len(ratios) else list(_USUAL_SPREAD)
        report = {
            "launch_s": {kind: free["launch_s", kind] for kind in kinds},
            "hidden_s": free["hidden_s", ""],
            "launch_spread": spread,
            "held_out": error_summary(predicted, measured),
            "held_out_kernels": error_summary(kernel_s[tells], bare_s),
            "covered_kernels": crossed_coverage(kernel_s[tells], bare_s, (held["rows"][tells], held["columns"][tells])),
        }
        print(name, json.dumps({key: value for key, value in report.items() if key != "launch_s"}), flush=True)
        start_s = kernel_start_of(device)
        table: dict[str, Any] = {
            kind: {"bandwidth_fraction": free["bandwidth_fraction", kind], "start_s": start_s, "in_table": True}
            for kind in kinds
        }
        table |= {kind: table[kernel] for kind, kernel in MODEL_KINDS.items() if kernel in table}
        write_record(
            FP32_POINTWISE,
            name,
            {
                "devices": [name, *SAME_BOARD.get(name, ())],
                "architecture": device.architecture,
                "parameters": {
                    "kinds": {**table, "other": table["add"]},
                    "l2_reach_fraction": free["l2_reach_fraction", ""],
                    "l2_speedup": free["l2_speedup", ""],
                },
                "interval": interval,
                "provenance": {
                    "source": SOURCE,
                    "command": command("pointwise-fp32"),
                    "split": "a fifth of (rows, columns) held out",
                    "rows": len(rows),
                    "report": report,
                },
            },
        )


def borrowed_rows(data: Path, name: str) -> pd.DataFrame:
    """Return a device's kernels priced without its own record, in columns ``predicted`` and ``measured``. [s]"""
    device, rows = load_device(name), read_rows(data, MEASURED[name])
    report = load_record(FP32_POINTWISE, device).provenance["report"]
    rows = rows[rows.kind.isin(report["launch_s"])]
    record = load_record(FP32_POINTWISE, device.with_pricing(uncalibrated=True))
    parts = []
    for kind, part in rows.groupby("kind"):
        written = part.num_bytes.to_numpy() / 2.0
        operation = Pointwise(name="x", dtype="fp32", operation=str(kind), read_bytes=written, written_bytes=written)
        predicted = np.asarray(price_pointwise(operation, device, record).time_s)
        timed_s = with_launch(predicted, report["launch_s"][kind], report["hidden_s"])
        measured = without_launch(part.latency_s.to_numpy(), timed_s - predicted)
        parts.append(part.assign(predicted=predicted, measured=measured)[tells_about_kernels(predicted, timed_s)])
    found = pd.concat(parts)
    errors = error_summary(found.predicted.to_numpy(), found.measured.to_numpy())
    print(f"{name} from {record.device} ({record.distance})", json.dumps(errors), flush=True)
    return found.assign(device=name, format="", format_family="")


def refit_intervals(data: Path) -> None:
    """Write the intervals of devices without a record, from measured devices priced by their donors."""
    names = [name for name, alias in MEASURED.items() if len(read_rows(data, alias))]
    groups = transfer_groups(
        FP32_POINTWISE, pd.concat([borrowed_rows(data, name) for name in names], ignore_index=True)
    )
    print(write_groups(FP32_POINTWISE, groups, {}, step="pointwise-fp32-intervals"), len(groups), "groups", flush=True)
