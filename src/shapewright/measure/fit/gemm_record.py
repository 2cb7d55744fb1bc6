"""Fit the GEMM record of a user's device to the GEMMs of a store.

With few rows, five folds of whole (n, k) shapes are each predicted by a fit on the others, and the record is fitted on
all rows. With many rows, one fifth of the shapes is held out. The held-out half of the suite ``random`` is never
fitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.hardware.architectures import COMMON_GEMM_TILES
from shapewright.lowering.operations.gemm import contiguous_dims
from shapewright.measure.fit.gemm_section import (
    FitParameters,
    alignment_entries,
    device_rates,
    factor_table,
    fit,
    percentage_errors,
    predict_rows,
)
from shapewright.measure.fit.shared import Array, folds_of_groups, interval_of, split_by_shape
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.alignment import ROLES, alignment_bytes
from shapewright.pricing.gemm.parameters import ALIGNMENT_FROM
from shapewright.pricing.gemm.section import FALLBACK_DTYPES

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.hardware import Device

# From this many rows on, a fifth of the shapes is held out once; below, each fifth is held out in turn.
MANY_ROWS = 1500
NUM_FOLDS = 5
# From this many rows on, the held-out half of the random shapes alone gives the held-out errors.
ENOUGH_HELD_OUT = 100
# Misaligned rows that a fit of the alignment factors needs; with fewer a sibling's factors are used.
_ENOUGH_MISALIGNED = 24
# Below this alignment kernels differ on every architecture. [byte]
_POOR_ALIGNMENT_BYTES = 16
# Tiles of an unknown architecture: those of vendor libraries, and smaller ones for the registers of a CPU.
_SMALL_TILES = ((8, 16), (16, 16), (16, 32), (32, 32), (48, 16))
# A CPU's kernels pack their operands, so alignment hardly matters.
_PACKED_STARTS = (0.95, 0.96, 0.97, 0.98, 0.99, 0.99)
FEWEST_ROWS = 8


def fit_gemm_sections(
    table: pd.DataFrame, device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
    """Return sections, intervals and reports by dtype, and remarks for the user.

    Args:
        table: GEMMs of one device, from ``measured_rows.gemm_table``.
        device: The device.

    Raises:
        CalibrationError: no dtype has FEWEST_ROWS rows.
    """
    sections: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    reports: dict[str, Any] = {}
    remarks: list[str] = []
    for dtype, rows in table.groupby("dtype"):
        num_fitted = int((~rows.is_held_out).sum())
        if num_fitted < FEWEST_ROWS:
            remarks.append(f"{dtype} is not fitted: it has {num_fitted} GEMMs, and {FEWEST_ROWS} are needed")
            continue
        found = _fit_dtype(rows.reset_index(drop=True), device, str(dtype))
        sections[str(dtype)], intervals[str(dtype)], reports[str(dtype)] = found
    if not sections:
        raise CalibrationError(
            f"the store has too few GEMMs of {device.name} to fit ({', '.join(remarks) or 'none'}); measure more "
            "with 'shapewright bench alignment'"
        )
    return sections, intervals, reports, remarks


def _fit_dtype(rows: pd.DataFrame, device: Device, dtype: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    rates = device_rates(device, dtype, hot=True)
    parameters, factors, origin, donor = _fit_parameters(rows, device, dtype, has_cache=bool(rates.l2_bytes))
    held_out, rows = rows[rows.is_held_out.to_numpy(bool)], rows[~rows.is_held_out.to_numpy(bool)]
    if len(held_out) >= ENOUGH_HELD_OUT:
        train, measured = rows, held_out.latency_s.to_numpy()
        x = fit(train, parameters, rates, "NT", factors)
        predicted = predict_rows(held_out, parameters.section(x, factors), rates, "NT")
        split = "the held-out half of the random shapes"
    elif len(rows) >= MANY_ROWS:
        train, held = split_by_shape(rows)
        x = fit(train, parameters, rates, "NT", factors)
        predicted, measured = predict_rows(held, parameters.section(x, factors), rates, "NT"), held.latency_s.to_numpy()
        split = "a fifth of whole (n, k) shapes held out"
    else:
        train, measured = rows, rows.latency_s.to_numpy()
        x = fit(rows, parameters, rates, "NT", factors)
        predicted = _predict_left_out(rows, parameters, rates, factors, x)
        split = f"{NUM_FOLDS} folds of whole (n, k) shapes, each predicted by a fit on the others; fitted on all"
    section = parameters.section(x, factors) | ({ALIGNMENT_FROM: donor} if donor else {})
    return (
        section,
        interval_of(predicted, measured),
        {
            "rows": len(rows) + len(held_out),
            "rows_fitted": len(train),
            "split": split,
            "layouts": {str(name): int(count) for name, count in rows.layout.value_counts().items()},
            "libraries": sorted(set(rows.library)),
            "alignment": origin,
            "held_out": percentage_errors(predicted, measured),
            "fitted": percentage_errors(predict_rows(train, section, rates, "NT"), train.latency_s.to_numpy()),
        },
    )


def _predict_left_out(rows: pd.DataFrame, parameters: FitParameters, rates: Any, factors: Any, start: Array) -> Array:
    """Predict rows with fits that did not see their (n, k). [s]"""
    folds = folds_of_groups(list(zip(rows.n, rows.k, strict=True)), NUM_FOLDS)
    predicted = np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        held = folds == fold
        if not held.any():
            continue
        others = rows[~held]
        # Start from the prior: a start that was fitted to the held-out rows would leak them.
        x = fit(others, parameters, rates, "NT", factors) if len(others) else start
        predicted[held] = predict_rows(rows[held], parameters.section(x, factors), rates, "NT")
    return predicted


def _fit_parameters(
    rows: pd.DataFrame, device: Device, dtype: str, *, has_cache: bool
) -> tuple[FitParameters, dict[str, dict[str, float]] | None, str, str]:
    """Return free parameters, the alignment table if it is not free, its origin in words, and the device it is from."""
    known = device.architecture_facts
    tiles = known.gemm_tiles or (*COMMON_GEMM_TILES, *_SMALL_TILES)
    hot = has_cache and not rows.is_cold.to_numpy(bool).all()
    if _num_misaligned(rows, dtype) >= _ENOUGH_MISALIGNED or not known.gemm_tiles:
        starts = known.alignment_factors_guess if known.gemm_tiles else _PACKED_STARTS
        # Batched GEMMs have factors of their own if there are enough rows of them.
        roles = ROLES if (rows.batch > 1).sum() >= _ENOUGH_MISALIGNED else ROLES[:2]
        parameters = FitParameters(tiles, hot=hot, alignment=alignment_entries(starts, roles))
        return parameters, None, "fitted to these rows", ""
    table, origin, donor = _borrowed_table(device, dtype)
    return FitParameters(tiles, hot=hot, alignment=()), table, origin, donor


def _num_misaligned(rows: pd.DataFrame, dtype: str) -> int:
    """Count rows with a contiguous dimension that is not aligned to 16 bytes."""
    from shapewright.core.dtypes import get_dtype

    poor = np.zeros(len(rows), dtype=bool)
    for layout in rows.layout.unique():
        here = (rows.layout == layout).to_numpy()
        for letter in set(contiguous_dims(str(layout))):
            aligned = alignment_bytes(rows[letter].to_numpy(), get_dtype(dtype).bits)
            poor |= here & (aligned < _POOR_ALIGNMENT_BYTES)
    return int(poor.sum())


def _borrowed_table(device: Device, dtype: str) -> tuple[dict[str, dict[str, float]], str, str]:
    """Return alignment factors of the device's current record, their origin in words, and the device they are from."""
    record = load_record("gemm", device)
    sections = record.parameters["dtypes"]
    for name in (dtype, *FALLBACK_DTYPES[dtype]):
        if name in sections and "alignment_factor" in sections[name]:
            donor = sections[name].get(ALIGNMENT_FROM, "" if record.transfer == "exact" else record.device)
            return dict(sections[name]["alignment_factor"]), f"taken from {record.source}", donor
    return factor_table({}), "unknown: no alignment is penalized", ""
