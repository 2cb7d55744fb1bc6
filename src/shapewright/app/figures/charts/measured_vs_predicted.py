"""Scatter chart of measured against predicted times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.app.figures.chart import Line, Points, XYChart
from shapewright.app.figures.data.samples import Sample, price_samples
from shapewright.app.report.measure.measured import predict_rows_s
from shapewright.measure.store.record import OK

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.store.record import Row

# Ratio of the guide lines next to the diagonal.
_GUIDE_RATIO = 1.25
# Points beyond this number hide each other; every n-th one is drawn instead.
_MAX_POINTS = 500


class _Pair(NamedTuple):
    """A measured and a predicted time. [s]"""

    name: str
    measured_s: float
    predicted_s: float


def measured_vs_predicted_chart(samples: Sequence[Sample], device: Device, *, rows: Iterable[Row] = ()) -> XYChart:
    """Draw measured samples, layers and steps against their predictions.

    Args:
        samples: Samples; unmeasured ones are ignored.
        device: Device to predict for.
        rows: Rows of a store; successful layers and steps of the device are used.
    """
    pairs: dict[str, list[_Pair]] = {}
    for entry in price_samples([one for one in samples if one.measured_s], device):
        measured_s = float(entry.sample.measured_s or 1.0)
        kind = f"{entry.operation.kind}, {entry.operation.dtype}"
        pairs.setdefault(kind, []).append(_Pair(entry.sample.name, measured_s, float(entry.price.time_s)))
    wholes = [row for row in rows if row.kind in ("layer", "step") and row.status == OK and row.device == device.name]
    for row, time_s in zip(wholes, predict_rows_s([row.operation() for row in wholes], device), strict=True):
        if time_s is not None and row.median_s and not row.repetition:
            pairs.setdefault(f"{row.kind}, {row.dtype}", []).append(_Pair(row.name, row.median_s, time_s))
    series: list[Line | Points] = []
    for name, entries in sorted(pairs.items()):
        step = max(1, -(-len(entries) // _MAX_POINTS))
        shown = entries[::step]
        ratio = np.array([entry.predicted_s / entry.measured_s for entry in entries])
        error = f"{100.0 * float(np.mean(np.abs(ratio - 1.0))):.3g} % mean error over {len(entries):,}"
        series.append(
            Points(
                f"{name}: {error}",
                [1e6 * entry.measured_s for entry in shown],
                [1e6 * entry.predicted_s for entry in shown],
                [entry.name for entry in shown],
            )
        )
    times = [1e6 * entry.measured_s for entries in pairs.values() for entry in entries] or [1.0]
    ends = [min(times), max(times)]
    series.append(Line("equal", ends, ends, color="#7f7f7f"))
    for factor in (_GUIDE_RATIO, 1.0 / _GUIDE_RATIO):
        name = f"x {factor:.3g}"
        series.append(Line(name, ends, [end * factor for end in ends], dashed=True, color="#bbbbbb"))
    return XYChart(
        title=f"Measured and predicted, {device.title}",
        x_label="measured (us)",
        y_label="predicted (us)",
        series=series,
        alt=f"Predicted against measured times of {len(times):,} measurements on {device.title}",
        x_log=True,
        x_log_base=10,
        y_log=True,
    )
