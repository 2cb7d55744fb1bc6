"""Fit the pointwise record of a user's device to a store: start and share of bandwidth of each measured kind.

Unmeasured kinds keep the package's ratio to a residual addition, which streams; the record states which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.measure.fit.shared import Array, error_summary, fit_log_times, folds_of_groups, interval_of
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.pointwise import CACHE_EDGE_POWER, GATED_READ_RATIO

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.store.record import Row

# A constant of a record: its field, and its kind; an empty kind for those of the device.
Constant = tuple[str, str]
START_BOUNDS_S = (1e-6, 2e-5)
FRACTION_BOUNDS = (0.05, 0.98)
_START_S, _FRACTION = 3e-6, 0.5


def predict_pointwise(
    free: Mapping[Constant, float],
    kinds: Any,
    num_bytes: Array,
    num_kernels: Array | float,
    device: Device,
) -> Array:
    """Predict the time of each operation from the free parameters. [s]

    Args:
        free: ``start_s`` [s] and ``bandwidth_fraction`` of each kind, ``l2_reach_fraction`` and ``l2_speedup``.
        kinds: Kind of each operation. [rows]
        num_bytes: Bytes that each moves. [byte]
        num_kernels: Kernels that each runs.
    """
    names = sorted(set(kinds))
    start = np.select([kinds == kind for kind in names], [free["start_s", kind] for kind in names])
    fraction = np.select([kinds == kind for kind in names], [free["bandwidth_fraction", kind] for kind in names])
    bandwidth_bytes_per_s = device.memory_bandwidth_bytes_per_s
    reach_bytes = max(float(device.l2_bytes or 0.0) * free["l2_reach_fraction", ""], 1.0)
    resident = 1.0 / (1.0 + np.minimum(num_bytes / reach_bytes, 1e6) ** CACHE_EDGE_POWER)
    traffic_s = num_bytes / (bandwidth_bytes_per_s * fraction) * (1.0 - resident * (1.0 - 1.0 / free["l2_speedup", ""]))
    found: Array = np.maximum(num_kernels * start + traffic_s, num_bytes / bandwidth_bytes_per_s)
    return found


def fit_pointwise(
    kinds: Any,
    num_bytes: Array,
    num_kernels: Array,
    measured: Array,
    device: Device,
    *,
    start_bounds_s: tuple[float, float] = START_BOUNDS_S,
    fraction_bounds: tuple[float, float] = FRACTION_BOUNDS,
    pull: float = 0.0,
) -> dict[Constant, float]:
    """Fit start and bandwidth fraction of every kind, and the cache, to measured times.

    Args:
        kinds: Kind of each row. [rows]
        num_bytes: Bytes that each moves. [byte]
        num_kernels: Kernels that each runs.
        measured: Times. [s]
        start_bounds_s: Range of the starts. [s]
        pull: See ``fit_log_times``.
    """
    names = sorted(set(kinds))
    bounds = {("l2_reach_fraction", ""): (0.2, 2.0), ("l2_speedup", ""): (1.0, 4.0)}
    bounds |= {("start_s", kind): start_bounds_s for kind in names}
    bounds |= {("bandwidth_fraction", kind): fraction_bounds for kind in names}
    start = {("l2_reach_fraction", ""): 0.8, ("l2_speedup", ""): 1.3}
    start |= {("start_s", kind): _START_S for kind in names}
    start |= {("bandwidth_fraction", kind): _FRACTION for kind in names}
    return fit_log_times(
        lambda free: predict_pointwise(free, kinds, num_bytes, num_kernels, device), measured, start, bounds, pull=pull
    )[0]


FEWEST_ROWS = 6
NUM_FOLDS = 5
# Kinds that run several kernels by nature; other kinds are used only if they run one.
_CHAINS = ("cross_entropy",)
# Wide enough for CPUs: their calls start in a tenth of a GPU's launch, and random numbers take a hundred times longer.
_START_BOUNDS_S = (1e-8, 1e-4)
_FRACTION_BOUNDS = (2e-4, 0.999)
# Prior weight: two sizes of a kind must suffice to determine both constants.
_PULL = 0.05
# Interval of operations that are priced by the traffic of GEMMs, before it is widened for kinds that were not measured.
# 168 rows of one Xeon, by traffic alone: 5 % take less than 0.47, 5 % more than 16 times as long, all of these dropout.
_ASSUMED_LOW, _ASSUMED_HIGH = 0.3, 6.0


def fit_pointwise_record(
    rows: Sequence[Row], device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """Return parameters, interval and report of a record; None if there are too few rows.

    Args:
        rows: Valid rows of one device.
    """
    used = [row for row in rows if row.kind == "pointwise" and (_kernels(row) == 1 or _kind(row) in _CHAINS)]
    if len(used) < FEWEST_ROWS:
        return None
    kinds = np.array([_kind(row) for row in used])
    num_bytes = np.array([row.num_bytes for row in used])
    num_kernels = np.array([float(_kernels(row)) for row in used])
    measured = np.array([row.median_s or 0.0 for row in used])
    free = _fit(kinds, num_bytes, num_kernels, measured, device)
    folds = folds_of_groups(list(num_bytes), NUM_FOLDS)
    held_out = np.full(len(used), np.nan)
    for fold in range(NUM_FOLDS):
        held = folds == fold
        # A kind that only the held-out rows have cannot be predicted.
        held &= np.isin(kinds, list(set(kinds[~held])))
        if held.any():
            others = ~(folds == fold)
            partial = _fit(kinds[others], num_bytes[others], num_kernels[others], measured[others], device)
            held_out[held] = predict_pointwise(partial, kinds[held], num_bytes[held], num_kernels[held], device)
    known = ~np.isnan(held_out)
    predicted = predict_pointwise(free, kinds, num_bytes, num_kernels, device)
    judged, truth = (held_out[known], measured[known]) if known.sum() >= FEWEST_ROWS else (predicted, measured)
    report: dict[str, Any] = {
        "rows": len(used),
        "split": f"{NUM_FOLDS} folds of whole sizes, each predicted by a fit on the others; fitted on all",
        "held_out": error_summary(held_out[known], measured[known]) if known.any() else None,
        "fitted": error_summary(predicted, measured),
    }
    return _parameters(free, device), interval_of(judged, truth), report


def assume_pointwise_record(
    gemm_sections: Mapping[str, Mapping[str, Any]], device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return parameters, interval and report for a device without a data sheet on which only GEMMs were measured.

    Residual additions are taken to move bytes as fast as the GEMMs do; the other kinds follow by the package's ratios.

    Args:
        gemm_sections: Fitted GEMM sections by format; the slowest traffic of them counts.
    """
    section = min(gemm_sections.values(), key=lambda each: float(each["bandwidth_fraction"]))
    free: dict[Constant, float] = {
        ("bandwidth_fraction", "residual"): float(section["bandwidth_fraction"]),
        ("start_s", "residual"): float(section["start_s"]),
        ("l2_reach_fraction", ""): 1.0,
        ("l2_speedup", ""): 1.0,
    }
    parameters = _parameters(free, device)
    parameters["kinds"]["residual"] |= {"in_table": False, "source": "traffic of the measured GEMMs"}
    interval = {"edges_s": [], "low": [_ASSUMED_LOW], "high": [_ASSUMED_HIGH]}
    return parameters, interval, {"rows": 0, "split": "not measured", "held_out": None}


def _kernels(row: Row) -> int:
    return int(row.sizes.get("num_kernels", 1))


def _kind(row: Row) -> str:
    """Return the kind in the record; gated activations and LayerNorm are kinds of their own."""
    kind = "layernorm" if row.is_layernorm else str(row.sizes["operation"])
    gated = float(row.sizes["read_bytes"]) > GATED_READ_RATIO * float(row.sizes["written_bytes"])
    return f"gated_{kind}" if kind == "activation" and gated else kind


def _fit(kinds: Any, num_bytes: Array, num_kernels: Array, measured: Array, device: Device) -> dict[Constant, float]:
    wide = {"start_bounds_s": _START_BOUNDS_S, "fraction_bounds": _FRACTION_BOUNDS}
    return fit_pointwise(kinds, num_bytes, num_kernels, measured, device, **wide, pull=_PULL)


def _parameters(free: Mapping[Constant, float], device: Device) -> dict[str, Any]:
    """Return the record's parameters: fitted kinds, and the others scaled from the package's record."""
    package = load_record("pointwise", device)
    table: Mapping[str, Mapping[str, Any]] = package.parameters["kinds"]
    own = {kind for name, kind in free if name == "bandwidth_fraction"}
    found: dict[str, Any] = {
        kind: {
            "bandwidth_fraction": free["bandwidth_fraction", kind],
            "start_s": free["start_s", kind],
            "in_table": True,
            "source": "fitted to the store",
        }
        for kind in sorted(own)
    }
    for measured, other in (("norm", "layernorm"), ("layernorm", "norm")):
        if measured in found and other not in found:
            found[other] = {**found[measured], "source": f"as {measured}"}
    # Residual additions stream; without them the mean of the measured kinds is the reference.
    scale = _middle(found, "bandwidth_fraction", own) / _middle(table, "bandwidth_fraction", own)
    start = _middle(found, "start_s", own) / _middle(table, "start_s", own)
    for kind in table:
        if kind not in found and "device" not in table[kind]:
            entry = table.get(f"{device.architecture}_{kind}", table[kind])
            found[kind] = {
                "bandwidth_fraction": min(float(entry["bandwidth_fraction"]) * scale, 1.0),
                "start_s": float(entry["start_s"]) * start,
                "in_table": False,
                "source": f"not measured: proportion to the measured kinds as in {package.id}",
            }
    return {"kinds": found, "l2_reach_fraction": free["l2_reach_fraction", ""], "l2_speedup": free["l2_speedup", ""]}


def _middle(table: Mapping[str, Mapping[str, Any]], name: str, kinds: set[str]) -> float:
    """Return the value of residual additions, or the geometric mean of the measured kinds that the table has."""
    if "residual" in kinds and "residual" in table:
        return float(table["residual"][name])
    values = [float(table[kind][name]) for kind in kinds if kind in table]
    return float(np.exp(np.mean(np.log(values)))) if values else 1.0
