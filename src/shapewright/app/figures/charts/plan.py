"""Charts of a training plan: step times by part, and the Pareto front of memory and step time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.figures.chart import BarChart, BarPart, Points, XYChart
from shapewright.app.report.optimize.plan_text import describe_plan
from shapewright.core.units import GIB, format_seconds

if TYPE_CHECKING:
    from shapewright.optimize.plan import PlanResult

_MAX_PLANS = 8


def plan_steps_chart(result: PlanResult) -> BarChart:
    """Step times of the best plans, stacked by part."""
    plans = result.plans[:_MAX_PLANS]
    names = list(dict.fromkeys(name for plan in plans for name in plan.breakdown.parts))
    parts = [BarPart(name, [plan.breakdown.parts.get(name, 0.0) for plan in plans]) for name in names]
    return BarChart(
        title="Where the steps go",
        value_label="seconds",
        categories=[f"{plan.rank}: {describe_plan(plan)}" for plan in plans],
        parts=parts,
        alt=f"Steps of {len(plans)} plans by part; the first takes {format_seconds(plans[0].prediction.step_time_s)}.",
    )


def plan_front_chart(result: PlanResult) -> XYChart:
    """Step time against memory of the plans on the Pareto front."""
    by_devices: dict[int, list[Any]] = {}
    for point in result.front:
        by_devices.setdefault(point.choice.num_devices, []).append(point)
    return XYChart(
        title="Memory against time",
        x_label="memory of a device, GiB",
        y_label="step, s",
        series=[
            Points(f"{count} GPUs", [round(p.total_bytes / GIB, 2) for p in points], [p.step_s for p in points])
            for count, points in sorted(by_devices.items())
        ],
        alt=f"{len(result.front)} plans, each of which needs less memory or less time than every other.",
        y_log=True,
    )
