"""Fit the GEMM record of a user's device to the GEMMs of a store.

With few rows, five folds of whole (n, k) shapes are each predicted by a fit on the others, and the record is fitted on
all rows. With many rows, one fifth of the shapes is held out. The held-out half of the suite ``random`` is never
fitted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import CalibrationError
from shapewright.hardware.architectures import COMMON_GEMM_TILES
from shapewright.lowering.operations.gemm import contiguous_dims
from shapewright.measure.fit.gemm_section import (
    FIT_ROWS,
    Entries,
    FitParameters,
    alignment_entries,
    device_rates,
    factor_table,
    fit,
    percentage_errors,
    predict_rows,
)
from shapewright.measure.fit.shared import (
    Array,
    choose_form,
    describe_form,
    folds_of_groups,
    interval_of,
    mean_error,
    predict_in_turn,
    split_by_shape,
)
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.alignment import ROLES, alignment_bytes
from shapewright.pricing.gemm.parameters import ALIGNMENT_FROM
from shapewright.pricing.gemm.section import FALLBACK_DTYPES

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.hardware.device import Device
    from shapewright.pricing.gemm.kernels import DeviceRates

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
# Twice as many rows are worth measuring if they would bring the error below this share of it.
_USEFUL_RATIO = 0.95
_ROOFLINE, _TILED = "roofline with fitted rates", "tiles and waves"
# The roofline as a special case of the formula: tiles of one element, none of which is ever partly empty, no waves, no
# limit of their operands. [row, column]
_ROOFLINE_TILE = (1, 1)
_ROOFLINE_CONSTANTS = {
    "split_start_s": 0.0,
    "feed_ratio": 1e6,
    "wave_give_back": 0.999,
    "power_drop_fraction": 0.0,
    "power_half_flops": 1e12,
    "fill_k": 0.0,
    "k_step": 1,
}


Factors = dict[str, dict[str, float]]


def fit_gemm_sections(
    table: pd.DataFrame, device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]:
    """Return sections, intervals and reports by dtype, and remarks for the user.

    Args:
        table: GEMMs of one device, from ``gemm_table``.

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
        remarks.append(f"gemm {dtype}: {_describe_choice(found[2])}")
    if not sections:
        raise CalibrationError(
            f"the store has too few GEMMs of {device.name} to fit ({', '.join(remarks) or 'none'}); measure more "
            "with 'shapewright bench alignment'"
        )
    return sections, intervals, reports, remarks


class Form(NamedTuple):
    """A form of the GEMM formula: what is free in a fit.

    Attributes:
        name: Its name in reports.
        parameters: Free parameters.
        factors: Alignment table if it is not free.
        alignment: Origin of the alignment factors, in words.
        donor: Device whose alignment factors they are; empty for none.
    """

    name: str
    parameters: FitParameters
    factors: Factors | None
    alignment: str
    donor: str = ""

    def fit(self, rows: pd.DataFrame, rates: DeviceRates) -> dict[str, Any]:
        """Return the section fitted to some rows."""
        section = self.parameters.section(fit(rows, self.parameters, rates, "NT", self.factors), self.factors)
        return section | ({ALIGNMENT_FROM: self.donor} if self.donor else {})


def _fit_dtype(rows: pd.DataFrame, device: Device, dtype: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return section, interval and report of the form that errs least on shapes left out, or of one about as good."""
    rates = device_rates(device, dtype, hot=True)
    held_out, rest = rows[rows.is_held_out.to_numpy(bool)], rows[~rows.is_held_out.to_numpy(bool)]
    if len(held_out) >= ENOUGH_HELD_OUT:
        train, judged, split = rest, held_out, "the held-out half of the random shapes"
    elif len(rest) >= MANY_ROWS:
        train, judged = split_by_shape(rest)
        split = "a fifth of whole (n, k) shapes held out"
    else:
        train = judged = rest
        split = f"{NUM_FOLDS} folds of whole (n, k) shapes, each predicted by a fit on the others; fitted on all"
    measured = judged.latency_s.to_numpy()
    forms = {form.name: form for form in gemm_forms(rows, device, dtype, has_cache=bool(rates.l2_bytes))}
    predicted = {
        name: _predict_left_out(train, form, rates)
        if judged is train
        else predict_rows(judged, form.fit(train, rates), rates, "NT")
        for name, form in forms.items()
    }
    errors = {name: mean_error(times, measured) for name, times in predicted.items()}
    chosen = choose_form(errors)
    section = forms[chosen].fit(train, rates)
    return (
        section,
        interval_of(predicted[chosen], measured),
        {
            "rows": len(rows),
            "rows_fitted": min(len(train), FIT_ROWS),
            "split": split,
            "form": chosen,
            "forms": errors,
            "with_half_of_the_shapes": mean_error(_predict_left_out(train, forms[chosen], rates, 2), measured)
            if judged is train
            else None,
            "layouts": {str(name): int(count) for name, count in rest.layout.value_counts().items()},
            "libraries": sorted(set(rest.library)),
            "alignment": forms[chosen].alignment,
            "held_out": percentage_errors(predicted[chosen], measured),
            "fitted": percentage_errors(predict_rows(train, section, rates, "NT"), train.latency_s.to_numpy()),
        },
    )


def _describe_choice(report: dict[str, Any]) -> str:
    """Describe the chosen form, the reason, and what more rows would allow."""
    chosen, half = report["form"], report["with_half_of_the_shapes"]
    error = report["forms"][chosen]
    words = describe_form(chosen, report["forms"], "shapes")
    if half is None:
        return words
    # The error falls as a power of the number of shapes: half of them, and four fifths of them, were fitted.
    exponent = math.log(max(half / error, 1.0)) / math.log((1.0 - 1.0 / NUM_FOLDS) / 0.5)
    doubled = error * 2.0**-exponent
    if doubled > _USEFUL_RATIO * error:
        return f"{words}; more shapes of these suites would hardly help"
    return f"{words}; twice as many shapes would bring about {doubled:.1%}"


def _predict_left_out(rows: pd.DataFrame, form: Form, rates: DeviceRates, num_folds: int = NUM_FOLDS) -> Array:
    """Predict rows with fits that did not see their (n, k). [s]"""

    def predict(seen: Any, held: Any) -> Array:
        fitted = rows[seen] if seen.any() else rows  # with a single shape, its own rows are all there is
        return predict_rows(rows[held], form.fit(fitted, rates), rates, "NT")

    return predict_in_turn(folds_of_groups(list(zip(rows.n, rows.k, strict=True)), num_folds), predict)


def gemm_forms(rows: pd.DataFrame, device: Device, dtype: str, *, has_cache: bool) -> list[Form]:
    """Nested forms, the preferred one first: a roofline with fitted rates, and one with tiles and waves.

    A GPU has tiles and alignment even where few rows show them: it keeps both unless the roofline errs less, and
    alignment in either form. Elsewhere the roofline is preferred.

    Args:
        rows: GEMMs of one format, from ``gemm_table``.
        has_cache: Whether rows may have found their operands in the cache.
    """
    known = device.architecture_facts
    tiles = known.gemm_tiles or (*COMMON_GEMM_TILES, *_SMALL_TILES)
    hot = has_cache and not rows.is_cold.to_numpy(bool).all()
    # Batched GEMMs have factors of their own if there are enough rows of them.
    roles = ROLES if (rows.batch > 1).sum() >= _ENOUGH_MISALIGNED else ROLES[:2]
    fitted, origin, donor = "fitted to these rows", "", ""
    factors: Factors | None = None
    entries: Entries = ()
    if not known.gemm_tiles:
        entries = alignment_entries(_PACKED_STARTS, roles)
    elif _num_misaligned(rows, dtype) >= _ENOUGH_MISALIGNED:
        entries = alignment_entries(known.alignment_factors_guess, roles)
    else:
        factors, origin, donor = _borrowed_table(device, dtype)
    tiled = Form(_TILED, FitParameters(tiles, hot=hot, alignment=entries), factors, origin or fitted, donor)
    if not known.gemm_tiles:
        entries, factors, fitted = (), factor_table({}), "none: no alignment is penalized"
    free = FitParameters([_ROOFLINE_TILE], hot=hot, alignment=entries, splits=(1,), known=_ROOFLINE_CONSTANTS)
    roofline = Form(_ROOFLINE, free, factors, origin or fitted, donor)
    return [tiled, roofline] if known.gemm_tiles else [roofline, tiled]


def _num_misaligned(rows: pd.DataFrame, dtype: str) -> int:
    """Count rows with a contiguous dimension that is not aligned to 16 bytes."""
    poor = np.zeros(len(rows), dtype=bool)
    for layout in rows.layout.unique():
        here = (rows.layout == layout).to_numpy()
        for letter in set(contiguous_dims(str(layout))):
            aligned = alignment_bytes(rows[letter].to_numpy(), get_dtype(dtype).bits)
            poor |= here & (aligned < _POOR_ALIGNMENT_BYTES)
    return int(poor.sum())


def _borrowed_table(device: Device, dtype: str) -> tuple[Factors, str, str]:
    """Return alignment factors of the device's current record, their origin in words, and the device they are from."""
    record = load_record("gemm", device)
    sections = record.parameters["dtypes"]
    for name in (dtype, *FALLBACK_DTYPES[dtype]):
        if name in sections and "alignment_factor" in sections[name]:
            donor = sections[name].get(ALIGNMENT_FROM, "" if record.transfer == "exact" else record.device)
            return dict(sections[name]["alignment_factor"]), f"taken from {record.source}", donor
    return factor_table({}), "unknown: no alignment is penalized", ""
