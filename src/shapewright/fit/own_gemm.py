"""A GEMM record of one's own: the package's model fitted to the products of a store.

Few rows are split five ways by whole (n, k), each fifth predicted by a fit on the others, and the record is fitted on
all; of many rows one fifth is never fitted at all. The judging half of the suite ``random`` never is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.fit.gemm import (
    ALIGNMENT_STARTS,
    COMMON_TILES,
    NVIDIA_ALIGNMENT_STARTS,
    TILES,
    Form,
    alignment_entries,
    device_rates,
    factor_table,
    fit,
    judge,
    predict_rows,
)
from shapewright.fit.logs import Array, interval_of
from shapewright.fit.measured_rows import folds_of_groups
from shapewright.fit.split import split_by_shape
from shapewright.operations.gemm import contiguous_dims
from shapewright.perf.alignment import alignment_bytes
from shapewright.perf.calibration import load_record
from shapewright.perf.gemm_job import DTYPE_KIN
from shapewright.perf.gemm_menu import ALIGNMENT_FROM, ROLES

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.hardware import Device

# From this many rows on a fifth of the shapes is held out once; below it every shape is, in turn.
MANY_ROWS = 1500
NUM_FOLDS = 5
# From this many rows on the judging half of random shapes says alone what unseen shapes are off.
ENOUGH_JUDGED = 100
# Rows of poor alignment that a fit of its factors needs; with fewer a sibling's are taken.
_ENOUGH_MISALIGNED = 24
# Below this alignment kernels differ on every architecture. [byte]
_POOR_ALIGNMENT_BYTES = 16
# Tiles of a device without a family: those of vendors' libraries, and smaller ones for registers of a CPU.
_SMALL_TILES = ((8, 16), (16, 16), (16, 32), (32, 32), (48, 16))
# A CPU's kernels pack their operands: alignment hardly counts.
_PACKED_STARTS = (0.95, 0.96, 0.97, 0.98, 0.99, 0.99)
FEWEST_ROWS = 8


def fit_gemm_sections(
    table: pd.DataFrame, device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
    """Sections, intervals and reports by dtype, and what the reader must know.

    Args:
        table: Products of one device, as measured_rows.gemm_table makes them.
        device: The device.

    Raises:
        CalibrationError: no dtype has FEWEST_ROWS rows.
    """
    sections: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    reports: dict[str, Any] = {}
    remarks: list[str] = []
    for dtype, rows in table.groupby("dtype"):
        num_fitted = int((~rows.is_judged).sum())
        if num_fitted < FEWEST_ROWS:
            remarks.append(f"{num_fitted} products in {dtype} are too few to fit, {FEWEST_ROWS} are needed")
            continue
        found = _fit_dtype(rows.reset_index(drop=True), device, str(dtype))
        sections[str(dtype)], intervals[str(dtype)], reports[str(dtype)] = found
    if not sections:
        raise CalibrationError(
            f"the store has too few products of {device.name} to fit ({', '.join(remarks) or 'none'}); measure more "
            "with 'shapewright bench alignment'"
        )
    return sections, intervals, reports, remarks


def _fit_dtype(rows: pd.DataFrame, device: Device, dtype: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    rates = device_rates(device, dtype, hot=True)
    form, factors, origin, lender = _form(rows, device, dtype, has_cache=bool(rates.l2_bytes))
    judged, rows = rows[rows.is_judged.to_numpy(bool)], rows[~rows.is_judged.to_numpy(bool)]
    if len(judged) >= ENOUGH_JUDGED:
        train, measured = rows, judged.latency_s.to_numpy()
        x = fit(train, form, rates, "NT", factors)
        unseen = predict_rows(judged, form.section(x, factors), rates, "NT")
        split = "the half of the random shapes that is for judging"
    elif len(rows) >= MANY_ROWS:
        train, held = split_by_shape(rows)
        x = fit(train, form, rates, "NT", factors)
        unseen, measured = predict_rows(held, form.section(x, factors), rates, "NT"), held.latency_s.to_numpy()
        split = "a fifth of whole (n, k) shapes held out"
    else:
        train, measured = rows, rows.latency_s.to_numpy()
        x = fit(rows, form, rates, "NT", factors)
        unseen = _unseen(rows, form, rates, factors, x)
        split = f"{NUM_FOLDS} folds of whole (n, k) shapes, each predicted by a fit on the others; fitted on all"
    section = form.section(x, factors) | ({ALIGNMENT_FROM: lender} if lender else {})
    return (
        section,
        interval_of(unseen, measured),
        {
            "rows": len(rows) + len(judged),
            "rows_fitted": len(train),
            "split": split,
            "layouts": {str(name): int(count) for name, count in rows.layout.value_counts().items()},
            "libraries": sorted(set(rows.library)),
            "alignment": origin,
            "held_out": judge(unseen, measured),
            "fitted": judge(predict_rows(train, section, rates, "NT"), train.latency_s.to_numpy()),
        },
    )


def _unseen(rows: pd.DataFrame, form: Form, rates: Any, factors: Any, start: Array) -> Array:
    """Times of rows from fits that did not see their (n, k). [s]"""
    folds = folds_of_groups(list(zip(rows.n, rows.k, strict=True)), NUM_FOLDS)
    predicted = np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        held = folds == fold
        if not held.any():
            continue
        others = rows[~held]
        # From the form's own start: one that saw the held-out rows would carry them over.
        x = fit(others, form, rates, "NT", factors) if len(others) else start
        predicted[held] = predict_rows(rows[held], form.section(x, factors), rates, "NT")
    return predicted


def _form(
    rows: pd.DataFrame, device: Device, dtype: str, *, has_cache: bool
) -> tuple[Form, dict[str, dict[str, float]] | None, str, str]:
    """Free parameters, the alignment table where it is not free, where that comes from, and from what device."""
    tiles = TILES.get(device.architecture, (*COMMON_TILES, *_SMALL_TILES))
    hot = has_cache and not rows.is_cold.to_numpy(bool).all()
    if _num_misaligned(rows, dtype) >= _ENOUGH_MISALIGNED or device.architecture not in TILES:
        starts = ALIGNMENT_STARTS.get(device.architecture, NVIDIA_ALIGNMENT_STARTS)
        starts = starts if device.architecture in TILES else _PACKED_STARTS
        # Batches have factors of their own where there are enough of them; otherwise they are taken as single products.
        roles = ROLES if (rows.batch > 1).sum() >= _ENOUGH_MISALIGNED else ROLES[:2]
        form = Form(tiles, hot=hot, alignment=alignment_entries(starts, roles))
        return form, None, "fitted to these rows", ""
    table, origin, lender = _borrowed_table(device, dtype)
    return Form(tiles, hot=hot, alignment=()), table, origin, lender


def _num_misaligned(rows: pd.DataFrame, dtype: str) -> int:
    """Rows with a contiguous dimension that is not a multiple of 16 bytes."""
    from shapewright.dtypes import get_dtype

    poor = np.zeros(len(rows), dtype=bool)
    for layout in rows.layout.unique():
        here = (rows.layout == layout).to_numpy()
        for letter in set(contiguous_dims(str(layout))):
            aligned = alignment_bytes(rows[letter].to_numpy(), get_dtype(dtype).bits)
            poor |= here & (aligned < _POOR_ALIGNMENT_BYTES)
    return int(poor.sum())


def _borrowed_table(device: Device, dtype: str) -> tuple[dict[str, dict[str, float]], str, str]:
    """Alignment factors of the record that the device had before, or none; in words, and of what other device."""
    record = load_record("gemm", device)
    sections = record.parameters["dtypes"]
    for name in (dtype, *DTYPE_KIN[dtype]):
        if name in sections and "alignment_factor" in sections[name]:
            lender = sections[name].get(ALIGNMENT_FROM, "" if record.transfer == "exact" else record.device)
            return dict(sections[name]["alignment_factor"]), f"taken from {record.label}", lender
    return factor_table({}), "none known: no alignment costs anything", ""
