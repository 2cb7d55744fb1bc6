"""Chart of a design: loss against time, by size of the family's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Line, Mark, Points, XYChart
from shapewright.core.units import format_count

if TYPE_CHECKING:
    from shapewright.app.report.outputs.plan import DesignOutput
    from shapewright.optimize.design import FrontRun


def loss_against_time_chart(found: DesignOutput) -> XYChart:
    """Loss against hours: a curve for each size, the frontier, and the run of the answer."""
    by_size: dict[int, list[FrontRun]] = {}
    for point in found.front:
        by_size.setdefault(point.num_parameters, []).append(point)
    front = [point for point in found.front if point.is_on_front]
    best = found.designs[0]
    baseline = next(one for one in found.designs if one.is_baseline)
    own = min(
        (point for point in found.front if point.num_parameters == baseline.parameters),
        key=lambda point: abs(point.train_tokens - best.run.train_tokens),
    )
    series: list[Line | Points] = [
        Line(
            f"{format_count(size)} parameters",
            [_rounded(one.hours) for one in points],
            [one.loss_nats for one in points],
        )
        for size, points in sorted(by_size.items())
    ]
    series += [
        Points(
            "frontier",
            [_rounded(one.hours) for one in front],
            [one.loss_nats for one in front],
            [
                f"{format_count(one.num_parameters)}, {format_count(one.train_tokens)} tokens: "
                f"{one.loss_low_nats:.3f} to {one.loss_high_nats:.3f}"
                for one in front
            ],
            color="#7f7f7f",
        ),
        Points(
            "this design",
            [_rounded(best.run.hours.mean)],
            [own.loss_nats + best.loss_difference_nats.mean],
            [f"{format_count(best.run.train_tokens)} tokens, {best.run.hours.mean:,.0f} hours"],
            color="#333333",
        ),
    ]
    return XYChart(
        title="Loss against time",
        x_label="hours of the job",
        y_label="expected loss (nats)",
        series=series,
        alt="Each curve is one size of the family trained for longer and longer; the lowest of them is the frontier.",
        marks=[Mark("x", _rounded(best.run.hours.mean), "this design")],
        x_log=True,
        x_log_base=10,
    )


def _rounded(hours: float) -> float:
    """Return hours with three digits: the ends of a logarithmic axis are labelled with their values."""
    return float(f"{hours:.3g}")
