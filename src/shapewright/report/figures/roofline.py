"""Roofline: operations by arithmetic intensity and rate, under what memory and matrix units allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shapewright.operations import Attention
from shapewright.report.charts import Line, Points, XYChart
from shapewright.report.figures.samples import PricedSample, Sample, price_samples
from shapewright.units import TERA

if TYPE_CHECKING:
    from shapewright.hardware import Device

# More points hide each other; evenly taken ones stand for them.
_MOST_POINTS = 600


def roofline_chart(samples: Sequence[Sample], device: Device, dtype: str, *, uncalibrated: bool = False) -> XYChart:
    """Chart of operations under the roof of one format.

    Args:
        samples: Operations with arithmetic; others are left out.
        device: What to predict for.
        dtype: Format whose roof is drawn.
        uncalibrated: Predict as if nobody had measured the device.
    """
    chosen = [sample for sample in samples if float(sample.operation.flops) > 0.0 and sample.operation.dtype == dtype]
    step = max(1, -(-len(chosen) // _MOST_POINTS))
    priced = price_samples(chosen[::step], device, uncalibrated=uncalibrated)
    intensity = [_flops(entry) / float(entry.operation.num_bytes) for entry in priced]
    ridge = device.peak_flops_per_s(dtype) / device.memory_bandwidth_bytes_per_s
    least, most = min([*intensity, ridge]) / 2.0, max([*intensity, ridge]) * 2.0
    roof_x = sorted({*np.geomspace(least, most, 40).tolist(), ridge})
    peak = device.peak_flops_per_s(dtype) / TERA
    roof_y = [min(peak, value * device.memory_bandwidth_bytes_per_s / TERA) for value in roof_x]
    series: list[Line | Points] = [Line(f"roof, {dtype}", roof_x, roof_y, color="#7f7f7f")]
    labels = [_label(entry) for entry in priced]
    predicted = [_flops(entry) / float(entry.price.time_s) / TERA for entry in priced]
    series.append(Points("predicted", intensity, predicted, labels, color="#0072b2"))
    seen = [at for at, entry in enumerate(priced) if entry.sample.measured_s]
    if seen:
        rates = [_flops(priced[at]) / float(priced[at].sample.measured_s or 1.0) / TERA for at in seen]
        names = [labels[at] for at in seen]
        series.append(Points("measured", [intensity[at] for at in seen], rates, names, color="#d55e00"))
    return XYChart(
        title=f"Roofline, {dtype}, {device.title}",
        x_label="FLOP per byte",
        y_label="TFLOP/s",
        series=series,
        alt=f"{len(priced)} operations by arithmetic intensity under the {dtype} roof of {device.title}",
        x_log=True,
        y_log=True,
    )


def _flops(entry: PricedSample) -> float:
    """FLOPs that run: of attention those that the mask leaves."""
    operation = entry.operation
    return float(operation.executed_flops if isinstance(operation, Attention) else operation.flops)


def _label(entry: PricedSample) -> str:
    return entry.sample.name or entry.operation.name
