"""The roofline of a step: its operations by FLOPs per byte and achieved rate, under the device's two ceilings."""

from __future__ import annotations

from math import ceil, floor, log2
from typing import TYPE_CHECKING

from shapewright.operations import Collective
from shapewright.report.charts import Line, Points, XYChart
from shapewright.report.prediction_json import operation_to_json
from shapewright.units import GIGA, TERA, format_percent, format_rate

if TYPE_CHECKING:
    from shapewright.predict import Prediction

CEILING = "peak and memory"
"""Name of the line that no operation can be above."""

# Operations beyond so many are those of the least time.
_MOST_POINTS = 60


def step_roofline_chart(prediction: Prediction) -> XYChart:
    """Operations that compute, the costliest of them, in a chart of two logarithmic axes."""
    device = prediction.device
    peak = device.peak_flops_per_s(prediction.workload.dtype)
    bandwidth = device.memory_bandwidth_bytes_per_s
    entries = sorted(prediction.operations, key=lambda entry: -entry.total_time_s)
    points: dict[str, list[tuple[float, float, str]]] = {}
    for entry in entries[:_MOST_POINTS]:
        facts = operation_to_json(entry)
        if not facts["flops"] or not facts["bytes"] or not facts["time_s"] or isinstance(entry.operation, Collective):
            continue
        intensity, rate = facts["flops"] / facts["bytes"], facts["flops"] / facts["time_s"]
        words = (
            f"{facts['name']} ({facts['pass']}): {format_rate(rate)}, {intensity:.3g} FLOPs per byte, "
            f"{format_percent(entry.total_time_s / prediction.step_time_s)} of the step"
        )
        points.setdefault(facts["kind"].replace("_", " "), []).append((intensity, rate / TERA, words))
    known = [row[0] for rows in points.values() for row in rows]
    ridge = peak / bandwidth
    # Ends on ticks of the axis, whose labels then are whole numbers.
    low, high = 2.0 ** floor(log2(min([*known, ridge]) / 2.0)), 2.0 ** ceil(log2(max([*known, ridge])))
    ceiling = Line(CEILING, [low, ridge, high], [low * bandwidth / TERA, peak / TERA, peak / TERA])
    return XYChart(
        title="Roofline",
        x_label="FLOPs per byte",
        y_label="TFLOP/s",
        series=[
            ceiling,
            *(
                Points(name, [row[0] for row in rows], [row[1] for row in rows], labels=[row[2] for row in rows])
                for name, rows in points.items()
            ),
        ],
        alt="Operations by arithmetic intensity and achieved rate under the device's peak and memory bandwidth.",
        x_log=True,
        y_log=True,
    )


def describe_ceiling(prediction: Prediction) -> str:
    """Both ceilings, and where they meet."""
    device = prediction.device
    peak, bandwidth = device.peak_flops_per_s(prediction.workload.dtype), device.memory_bandwidth_bytes_per_s
    return f"{format_rate(peak)} above {peak / bandwidth:.3g} FLOPs per byte, {bandwidth / GIGA:,.0f} GB/s below"
