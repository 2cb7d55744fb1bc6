"""A pointwise record of one's own: start and share of bandwidth for the kinds that a store has.

Kinds that it lacks keep the package's proportion to a residual addition, which streams; the record says which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.fit.logs import Array, error_summary, interval_of
from shapewright.fit.measured_rows import folds_of_groups
from shapewright.fit.pointwise import fit_pointwise, predict_pointwise
from shapewright.perf.calibration import load_record
from shapewright.perf.pointwise import GATED_READ_RATIO

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.store.record import Row

FEWEST_ROWS = 6
NUM_FOLDS = 5
# Kinds that are chains of kernels by nature; others of several kernels are not what their kind is in one.
_CHAINS = ("cross_entropy",)
# Any device: a CPU calls in a tenth of the time of a GPU's launch, and draws random numbers a hundred times slower.
_START_BOUNDS_S = (1e-8, 1e-4)
_FRACTION_BOUNDS = (2e-4, 0.999)
# Residual of a constant a factor of e off its start, beside those of rows: two sizes of a kind tell both constants.
_PULL = 0.05


def fit_pointwise_record(
    rows: Sequence[Row], device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """Parameters, interval and report of a record; None where there are too few rows.

    Args:
        rows: Good rows of one device.
        device: The device.
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
    unseen = np.full(len(used), np.nan)
    for fold in range(NUM_FOLDS):
        held = folds == fold
        # A kind that only these rows have cannot be left out.
        held &= np.isin(kinds, list(set(kinds[~held])))
        if held.any():
            others = ~(folds == fold)
            partial = _fit(kinds[others], num_bytes[others], num_kernels[others], measured[others], device)
            unseen[held] = _predict(partial, kinds[held], num_bytes[held], num_kernels[held], device)
    known = ~np.isnan(unseen)
    predicted = _predict(free, kinds, num_bytes, num_kernels, device)
    judged, truth = (unseen[known], measured[known]) if known.sum() >= FEWEST_ROWS else (predicted, measured)
    report: dict[str, Any] = {
        "rows": len(used),
        "split": f"{NUM_FOLDS} folds of whole sizes, each predicted by a fit on the others; fitted on all",
        "held_out": error_summary(unseen[known], measured[known]) if known.any() else None,
        "fitted": error_summary(predicted, measured),
    }
    return _parameters(free, device), interval_of(judged, truth), report


def _kernels(row: Row) -> int:
    return int(row.sizes.get("num_kernels", 1))


def _kind(row: Row) -> str:
    """Kind in the record; gated activations are one of their own."""
    kind = str(row.sizes["operation"])
    gated = float(row.sizes["read_bytes"]) > GATED_READ_RATIO * float(row.sizes["written_bytes"])
    return f"gated_{kind}" if kind == "activation" and gated else kind


def _fit(kinds: Any, num_bytes: Array, num_kernels: Array, measured: Array, device: Device) -> dict[str, float]:
    return fit_pointwise(
        kinds,
        num_bytes,
        measured,
        device.memory_bandwidth_bytes_per_s,
        float(device.l2_bytes or 0.0),
        start_bounds_s=_START_BOUNDS_S,
        fraction_bounds=_FRACTION_BOUNDS,
        pull=_PULL,
        num_kernels=num_kernels,
    )


def _predict(free: Mapping[str, float], kinds: Any, num_bytes: Array, num_kernels: Array, device: Device) -> Array:
    return predict_pointwise(
        free,
        kinds,
        num_bytes,
        device.memory_bandwidth_bytes_per_s,
        float(device.l2_bytes or 0.0),
        num_kernels=num_kernels,
    )


def _parameters(free: Mapping[str, float], device: Device) -> dict[str, Any]:
    """The record's parameters: fitted kinds, and for the others the package's proportion."""
    package = load_record("pointwise", device)
    table: Mapping[str, Mapping[str, Any]] = package.parameters["kinds"]
    own = {name.removeprefix("fraction_") for name in free if name.startswith("fraction_")}
    found: dict[str, Any] = {
        kind: {
            "bandwidth_fraction": free[f"fraction_{kind}"],
            "start_s": free[f"start_{kind}"],
            "in_table": True,
            "source": "fitted to the store",
        }
        for kind in sorted(own)
    }
    for measured, other in (("norm", "layernorm"), ("layernorm", "norm")):
        if measured in found and other not in found:  # the bench measures LayerNorm, and calls it a norm
            found[other] = {**found[measured], "source": f"as {measured}"}
    # Residual additions stream; without one the middle of what was measured stands for them.
    scale = _middle(found, "bandwidth_fraction", own) / _middle(table, "bandwidth_fraction", own)
    start = _middle(found, "start_s", own) / _middle(table, "start_s", own)
    for kind, entry in table.items():
        if kind not in found:
            found[kind] = {
                "bandwidth_fraction": min(float(entry["bandwidth_fraction"]) * scale, 1.0),
                "start_s": float(entry["start_s"]) * start,
                "in_table": False,
                "source": f"not measured: proportion to the measured kinds as in {package.id}",
            }
    return {"kinds": found, "l2_reach_fraction": free["l2_reach_fraction"], "l2_speedup": free["l2_speedup"]}


def _middle(table: Mapping[str, Mapping[str, Any]], name: str, kinds: set[str]) -> float:
    """Value of a residual addition, or the geometric mean of the kinds that were measured and are in the table."""
    if "residual" in kinds and "residual" in table:
        return float(table["residual"][name])
    values = [float(table[kind][name]) for kind in kinds if kind in table]
    return float(np.exp(np.mean(np.log(values)))) if values else 1.0
