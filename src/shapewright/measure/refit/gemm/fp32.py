"""Fit the records of fp32 GEMMs (kind ``gemm-fp32``) from gemm_fp32.parquet.

Columns: device, operation (linear, bmm), batch, m, n, k, latency_s; events around one call, so that every row contains
the launch. Its cost is fitted with the kernels, one number per device and operation, and is stored as the collector's,
not as a part of the kernel. A fifth of the whole (n, k) shapes is held out. Devices with layer shapes only start from
A100's kernels. A forest learns the residual.
Intervals are those of held-out rows. Devices left out in turn, priced by
their donors, give the intervals of borrowed records. Three minutes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shapewright.hardware.architectures import COMMON_GEMM_TILES
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.fit.gemm_section import (
    FIT_ROWS,
    PRIOR_WEIGHT,
    FitParameters,
    alignment_entries,
    blocks_of,
    device_rates,
    fit_vector,
    percentage_errors,
    price_blocks,
    transform,
)
from shapewright.measure.fit.shared import Array, crossed_coverage, interval_of, split_by_shape
from shapewright.measure.refit.gemm.trees import learn_forest
from shapewright.measure.refit.intervals.interval_files import write_groups
from shapewright.measure.refit.intervals.left_out import transfer_groups
from shapewright.measure.refit.intervals.residual_intervals import Groups
from shapewright.measure.refit.record_files import command, record_path, write_record
from shapewright.pricing.calibration.forest import FOREST, SIZES, ResidualForest, forest_correction, save_forests
from shapewright.pricing.calibration.records import FP32_GEMM, load_record
from shapewright.pricing.gemm.price import price_gemm

TABLE = "gemm_fp32.parquet"
SOURCE = "sitar-lab/NeuSight @6945927, MIT"
# Measured devices and their names in the table; those after the first start from its kernels if they have few rows.
MEASURED = {
    "a100-pcie-40gb": "a100_pcie_40gb",
    "a100-pcie-80gb": "a100_pcie_80gb",
    "h100-sxm-80gb": "h100_sxm",
    "mi100": "mi100",
    "p100-pcie-16gb": "p100_pcie",
    "p4": "p4",
    "t4": "t4",
    "v100-pcie-16gb": "v100_pcie",
}
SAME_BOARD = {"v100-pcie-16gb": ("v100-pcie-32gb",)}
OPERATIONS = {"linear": "NT", "bmm": "NN"}
_FEW_ROWS = 4000
# Their constants stay near those of the first, since other devices borrow them. [rows of the fit scale]
_STARTED_PRIOR_WEIGHT = 2.0
# Granularity of the contraction loop of kernels on ordinary cores. [element] Source: CUTLASS's default for simt_sgemm.
_K_STEP = 8
_START_FACTORS = (0.8, 0.8, 0.85, 0.9, 0.95, 0.97)
# Share of a row's time that the kernel must take to tell about kernels.
_KERNEL_SHARE = 0.6
# A launch spreads as rows do whose kernel takes less than this share of it; else as usual. Fewest such rows.
_SMALL_SHARE, _FEWEST_SMALL, _USUAL_SPREAD = 0.5, 30, (0.9, 1.4)
# Least share of a row taken as kernel time after the launch is subtracted: in what forests learn, and in errors.
_LEAST_SHARE, _LEAST_JUDGED_SHARE = 0.15, 0.1


class Fitted(NamedTuple):
    """Kernels of one operation on one device.

    Attributes:
        x: Vector of the fit: the free parameters, then the logarithm of the launch cost.
        section: Section of a record.
        launch_s: Launch cost in every row. [s]
    """

    x: Array
    section: dict[str, Any]
    launch_s: float


def read_rows(folder: Path, alias: str) -> pd.DataFrame:
    """Read the rows of one device."""
    rows = pd.read_parquet(folder / TABLE)
    return rows[rows.device == alias].drop(columns=["device", "dtype", "bias"]).reset_index(drop=True)


def tells_about_kernels(kernel_s: Array, timed_s: Array) -> NDArray[np.bool_]:
    """Return which rows tell how far off kernels are: those whose launch is predicted to be the smaller part.

    By the measured time instead, kernels that take twice as long as predicted would not count.

    Args:
        kernel_s: Predicted times of the kernels. [s]
        timed_s: Predicted times with their launch. [s]

    >>> tells_about_kernels(np.array([1e-3, 1e-5]), np.array([1.02e-3, 3e-5])).tolist()
    [True, False]
    """
    tells: NDArray[np.bool_] = kernel_s > _KERNEL_SHARE * timed_s
    return tells


def without_launch(timed_s: Array, launch_s: Array) -> Array:
    """Return the kernels' part of measured times, a tenth of them at least. [s]"""
    return np.maximum(timed_s - launch_s, _LEAST_JUDGED_SHARE * timed_s)


def fit_kernels(rows: pd.DataFrame, device: Device, operation: str, start: Array | None = None) -> Fitted:
    """Fit kernels and launch cost of one operation to its rows, from the constants of another device if given."""
    splits = {} if operation == "linear" else {"splits": (1,)}
    parameters = FitParameters(
        COMMON_GEMM_TILES,
        hot=False,
        alignment=alignment_entries(_START_FACTORS),
        **splits,  # type: ignore[arg-type]
    )
    first = transform([*parameters.entries, ("launch_s", 0.9 * float(rows.latency_s.min()), "log")])
    if start is not None:
        first[:-1] = start[:-1]
    weight = PRIOR_WEIGHT if start is None else _STARTED_PRIOR_WEIGHT
    sample = rows.sample(min(len(rows), FIT_ROWS), random_state=0)
    blocks, rates = blocks_of(sample, OPERATIONS[operation]), device_rates(device, "fp32", hot=False)

    def section(x: Array) -> dict[str, Any]:
        return {**parameters.section(x[:-1], None), "k_step": _K_STEP}

    def predicted(x: Array) -> Array:
        return np.asarray(price_blocks(blocks, section(x), rates) + np.exp(x[-1]))

    found, _ = fit_vector(predicted, sample.latency_s.to_numpy(), first, weight=weight, most_evaluations=40)
    return Fitted(found, section(found), float(np.exp(found[-1])))


def predict_kernels(rows: pd.DataFrame, fitted: dict[str, Fitted], device: Device) -> tuple[Array, Array]:
    """Return formula times and launch costs of rows. [s]"""
    rates = device_rates(device, "fp32", hot=False)
    physics, launch = np.empty(len(rows)), np.empty(len(rows))
    for operation, layout in OPERATIONS.items():
        here = (rows.operation == operation).to_numpy()
        launch[here] = fitted[operation].launch_s
        for is_batch in (False, True):
            own = here & ((rows.batch > 1).to_numpy() == is_batch)
            if own.any():
                kernels = fitted["bmm" if is_batch else "linear"].section
                physics[own] = price_blocks(blocks_of(rows[own], layout), kernels, rates)
    return physics, launch


def record_section(fitted: dict[str, Fitted]) -> dict[str, Any]:
    """Return the section of a record: kernels of single GEMMs, and what differs for batches."""
    single, batched = fitted["linear"].section, fitted["bmm"].section
    return {**single, "batched": {name: value for name, value in batched.items() if single[name] != value}}


class Learned(NamedTuple):
    """Kernels of one device with their residual.

    Attributes:
        fitted: Kernels and launch cost by operation.
        forest: The residual, learned from every given row.
        intervals: Intervals of formula prices (``physics``) and of corrected ones (``learned``).
        report: Errors on held-out shapes.
    """

    fitted: dict[str, Fitted]
    forest: ResidualForest
    intervals: dict[str, Any]
    report: dict[str, Any]


def learn_device(rows: pd.DataFrame, device: Device, starts: Mapping[str, Array]) -> Learned:
    """Fit kernels and forest of a device; errors and intervals are those of a fifth of the shapes, held out.

    Args:
        starts: Vectors of the first fitted device by operation, from which devices with few rows start.
    """
    train, held = split_by_shape(rows)
    few = len(rows) < _FEW_ROWS
    fitted = {
        operation: fit_kernels(
            train[train.operation == operation], device, operation, starts.get(operation) if few else None
        )
        for operation in OPERATIONS
    }
    forest = _forest_of(train, fitted, device)
    physics, launch = predict_kernels(held, fitted, device)
    m, n, k, batch = (held[letter].to_numpy(float) for letter in SIZES)
    learned = physics * np.exp(forest_correction(forest, m, n, k, batch, physics)[0])
    measured = held.latency_s.to_numpy()
    tells = tells_about_kernels(learned, learned + launch)
    kernel_s = without_launch(measured, launch)
    intervals = {
        name: interval_of(predicted[tells], kernel_s[tells])
        for name, predicted in (("physics", physics), ("learned", learned))
    }
    report: dict[str, Any] = {
        "source": SOURCE,
        "rows_fitted": sum(min(int((train.operation == operation).sum()), FIT_ROWS) for operation in OPERATIONS),
        "collector_launch_s": {operation: one.launch_s for operation, one in fitted.items()},
        "collector_launch_spread": {},
        "held_out": percentage_errors(learned + launch, measured),
        "held_out_physics": percentage_errors(physics + launch, measured),
        "held_out_kernels": percentage_errors(learned[tells], kernel_s[tells]),
        "covered_kernels": crossed_coverage(learned[tells], kernel_s[tells], (n[tells], k[tells])),
    }
    for operation in OPERATIONS:
        one = (held.operation == operation).to_numpy()
        report[f"held_out_{operation}"] = percentage_errors((learned + launch)[one], measured[one])
        small = one & (learned < _SMALL_SHARE * launch)
        ratios = (measured - learned)[small] / launch[small]
        known = small.sum() >= _FEWEST_SMALL
        ends = [float(np.quantile(ratios, end)) for end in (0.05, 0.95)] if known else list(_USUAL_SPREAD)
        report["collector_launch_spread"][operation] = ends
    # What ships is learned from the held-out shapes too: a library's choices differ from shape to shape.
    return Learned(fitted, _forest_of(rows, fitted, device), intervals, report)


def _forest_of(rows: pd.DataFrame, fitted: dict[str, Fitted], device: Device) -> ResidualForest:
    physics, launch = predict_kernels(rows, fitted, device)
    kernel_s = np.maximum(rows.latency_s - launch, _LEAST_SHARE * rows.latency_s).to_numpy()
    return learn_forest(rows, physics, kernel_s, np.clip(physics / (physics + launch), 0.02, 1.0))


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Fit every record, or those of some devices."""
    starts: dict[str, Array] = {}
    first = next(iter(MEASURED))
    for name, alias in MEASURED.items():
        if devices and name not in (first, *devices):
            continue
        device = load_device(name)
        found = learn_device(read_rows(data, alias), device, starts)
        starts = starts or {operation: one.x for operation, one in found.fitted.items()}
        print(name, json.dumps(found.report), flush=True)
        if devices and name not in devices:
            continue
        path = record_path(FP32_GEMM, name).with_suffix(".npz")
        path.parent.mkdir(parents=True, exist_ok=True)
        save_forests(path, {"fp32": found.forest})

        def part(values: Any) -> dict[str, Any]:
            return {"dtypes": {"fp32": values}, "libraries": {}}

        record = {
            "devices": [name, *SAME_BOARD.get(name, ())],
            "architecture": device.architecture,
            "parameters": part(record_section(found.fitted)),
            "interval": part(found.intervals["physics"]),
            "residual": {
                "file": path.name,
                "form": FOREST,
                "interval": part(found.intervals["learned"]),
                "command": command("gemm-fp32"),
            },
            "provenance": {
                "command": command("gemm-fp32"),
                "split": "a fifth of whole (n, k) shapes held out; the forest that ships is learned from all",
                "sections": {"fp32": found.report},
            },
        }
        write_record(FP32_GEMM, name, record, digits=6)


def borrowed_rows(data: Path, name: str) -> pd.DataFrame:
    """Return a device's kernels priced without its own record, in columns ``predicted`` and ``measured``. [s]"""
    device, rows = load_device(name), read_rows(data, MEASURED[name])
    launches = load_record(FP32_GEMM, device).provenance["sections"]["fp32"]["collector_launch_s"]
    record = load_record(FP32_GEMM, device.with_pricing(uncalibrated=True))
    predicted = np.empty(len(rows))
    for operation, layout in OPERATIONS.items():
        here = (rows.operation == operation).to_numpy()
        sizes: dict[str, Any] = {letter: rows.loc[here, letter].to_numpy(float) for letter in SIZES}
        predicted[here] = price_gemm(Gemm(name="gemm", dtype="fp32", layout=layout, **sizes), device, record).time_s
    launch_s = rows.operation.map(launches).to_numpy(float)
    found = rows.assign(
        device=name,
        predicted=predicted,
        measured=without_launch(rows.latency_s.to_numpy(), launch_s),
        format="",
        format_family="",
    )[tells_about_kernels(predicted, predicted + launch_s)]
    errors = percentage_errors(found.predicted.to_numpy(), found.measured.to_numpy())
    print(f"{name} from {record.device} ({record.distance})", json.dumps(errors), flush=True)
    return found


def refit_intervals(data: Path) -> None:
    """Write the intervals of devices without a record, from measured devices priced by their donors."""
    rows = pd.concat([borrowed_rows(data, name) for name in MEASURED], ignore_index=True)
    groups: Groups = transfer_groups(FP32_GEMM, rows)
    print(write_groups(FP32_GEMM, groups, {}, step="gemm-fp32-intervals"), len(groups), "groups", flush=True)
