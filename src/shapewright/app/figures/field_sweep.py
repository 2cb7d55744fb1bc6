"""Chart of a field sweep: time or throughput over the values of one field, by alignment class.

Its interval is that of the comparison with the current value: errors that both shapes share, such as the speed of the
device's kernels, cancel, so that it says whether a difference between two values is real.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.app.figures.chart import Band, Line, Mark, Points, XYChart
from shapewright.core.units import TERA, format_rate, format_seconds
from shapewright.prediction.speedup import compare_times

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shapewright.app.figures.sweep_values import FieldSweep, SweepPoint
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.speedup import Speedup

METRICS = {"step": "step, ms", "rate": "model TFLOP/s per device", "tokens": "tokens/s per device"}
"""Quantities that the chart can show, with their axis labels."""

BAND = "90 % interval of the difference"
_MAX_MARKS = 24
# The interval is drawn only where operands load in full 16-byte vectors: it would jump between alignment classes.
_FULL_LOAD_BYTES = 16
# Colours of alignment classes, best first; values without a class are drawn like the best one.
_CLASS_COLORS = {128: "#0072b2", 64: "#56b4e9", 32: "#009e73", 16: "#b8a800", 8: "#e69f00", 4: "#d55e00", 2: "#cc79a7"}


class MeasuredStep(NamedTuple):
    """A measured step at one value of the swept field.

    Attributes:
        point: Point of the sweep with the same shape.
        time_s: Measured step time. [s]
        library: Software that ran the step, with versions.
    """

    point: SweepPoint
    time_s: float
    library: str


def field_sweep_chart(
    sweep: FieldSweep, metric: str, pairs: Mapping[int, Speedup], measured: Sequence[MeasuredStep] = ()
) -> XYChart:
    """Draw a sweep with its 90 % interval against the current value, alignment classes, local maxima and wave ends.

    Args:
        sweep: Predictions over the values of a field.
        metric: A key of METRICS.
        pairs: Speed-up of each value over the current one.
        measured: Measured steps of the same shapes.
    """
    classes = sorted({point.alignment_bytes or 0 for point in sweep.points}, reverse=True)
    best = [point for point in sweep.points if (point.alignment_bytes or 0) == classes[0]]
    banded = [point for point in sweep.points if (point.alignment_bytes or 0) >= min(classes[0], _FULL_LOAD_BYTES)]
    best_name = f"aligned to {classes[0]} B" if classes[0] else "predicted"
    series: list[Line | Points | Band] = [
        Band(
            BAND,
            [point.value for point in banded],
            [_metric_value(point.prediction, metric, factor=_slow(pairs.get(point.value))) for point in banded],
            [_metric_value(point.prediction, metric, factor=_fast(pairs.get(point.value))) for point in banded],
            color="#0072b2",
        ),
        Line(
            best_name,
            [point.value for point in best],
            [_metric_value(point.prediction, metric) for point in best],
            color="#0072b2",
        ),
    ]
    for alignment in classes[1:]:
        chosen = [point for point in sweep.points if (point.alignment_bytes or 0) == alignment]
        name = f"aligned to {alignment} B" if alignment else "not aligned"
        color = _CLASS_COLORS.get(alignment, "#7f7f7f")
        rates = [_metric_value(point.prediction, metric) for point in chosen]
        series.append(Line(name, [point.value for point in chosen], rates, color=color))
    by_value = {point.value: point for point in sweep.points}
    maxima = [by_value[value] for value in sweep.local_maxima]
    series.append(_points("local maxima", maxima, metric, color="#7f7f7f"))
    current = [point for point in sweep.points if point.value == sweep.current]
    series.append(_points("this shape", current, metric, color="#333333"))
    if measured:
        series.append(
            Points(
                "measured",
                [each.point.value for each in measured],
                [_metric_value(each.point.prediction, metric, measured_s=each.time_s) for each in measured],
                [
                    f"{sweep.field}={each.point.value:,}: step of {format_seconds(each.time_s)} measured with "
                    f"{each.library}"
                    for each in measured
                ],
                color="#333333",
            )
        )
    ends = sweep.wave_ends if len(sweep.wave_ends) <= _MAX_MARKS else ()
    field = sweep.field.replace("_", " ")
    return XYChart(
        title="Throughput by field",
        x_label=field,
        y_label=METRICS[metric],
        series=series,
        marks=[Mark("x", value) for value in ends],
        alt=f"{METRICS[metric]} over {field} from {sweep.points[0].value} to {sweep.points[-1].value}; local maxima "
        f"at {', '.join(map(str, sweep.local_maxima[:4])) or 'no value'}.",
    )


def point_labels(chart: XYChart, texts: Mapping[int, str]) -> Mapping[str, Sequence[str]]:
    """Text of every point of a chart of a sweep, by series; ``texts`` are those of the values."""
    return {
        part.name: part.labels if isinstance(part, Points) and part.labels else [texts[int(x)] for x in part.x]
        for part in chart.series
        if not isinstance(part, Band)
    }


def pair_with_current(sweep: FieldSweep) -> dict[int, Speedup]:
    """Speed-up of each value over the current one, per token; empty where the current value cannot run."""
    current = next((point for point in sweep.points if point.value == sweep.current), None)
    if current is None:
        return {}
    return {point.value: compare_times(current.prediction, point.prediction) for point in sweep.points}


def certainty_words(fraction: float) -> str:
    """A probability, without the false precision of 100 %."""
    return ">99 %" if fraction > 0.99 else f"{100.0 * fraction:.0f} %"


def _slow(pair: Speedup | None) -> float:
    return 1.0 if pair is None else pair.factor / pair.low


def _fast(pair: Speedup | None) -> float:
    return 1.0 if pair is None else pair.factor / pair.high


def describe_point(sweep: FieldSweep, point: SweepPoint, pair: Speedup | None = None) -> str:
    """Value, rate, step time, alignment, waves and comparison with the current value of one point, in one line."""
    prediction = point.prediction
    parts = [
        f"{sweep.field}={point.value:,}: {format_rate(prediction.model_flops_per_s)}",
        f"step {format_seconds(prediction.step_time_s)}",
        f"{prediction.tokens_per_s_per_device:,.0f} tokens/s",
    ]
    if point.alignment_bytes is not None:
        parts.append(f"aligned to {point.alignment_bytes} B")
    if point.num_waves is not None:
        parts.append(f"{sweep.wave_gemm} in {point.num_waves} waves")
    if pair is not None and point.value != sweep.current:
        faster = pair.factor > 1.0
        chance = pair.probability_faster if faster else 1.0 - pair.probability_faster
        parts.append(
            f"{'faster' if faster else 'slower'} per token than {sweep.current:,}, {certainty_words(chance)} certain"
        )
    return ", ".join(parts)


def _points(name: str, points: Sequence[SweepPoint], metric: str, *, color: str) -> Points:
    return Points(
        name,
        [point.value for point in points],
        [_metric_value(point.prediction, metric) for point in points],
        color=color,
    )


def _metric_value(prediction: Prediction, metric: str, *, factor: float = 1.0, measured_s: float = 0.0) -> float:
    """Metric of a predicted step whose time is multiplied by a factor, or of a measured step time."""
    predicted_s = prediction.step_time_s
    drawn_s = measured_s or factor * predicted_s
    if metric == "step":
        return 1e3 * drawn_s
    rate = prediction.model_flops_per_s / TERA if metric == "rate" else prediction.tokens_per_s_per_device
    return rate * predicted_s / drawn_s
