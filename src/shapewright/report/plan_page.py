"""A plan as pictures: the pipeline's timeline, where the steps go, the Pareto front; and a Chrome trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.lowering import num_microbatches
from shapewright.plan import BUBBLE
from shapewright.plan.timeline import SIMULATED_SCHEDULES
from shapewright.report.charts import BarChart, BarPart, Points, XYChart
from shapewright.report.page import Figure, Section, Words, render_page, table_of
from shapewright.report.pipeline_chart import pass_words, pipeline_chart, simulate
from shapewright.report.plan_text import (
    describe_job,
    describe_losses,
    describe_plan,
    describe_space,
    front_columns,
    plan_columns,
    warnings_of,
)
from shapewright.units import GIB, format_seconds

if TYPE_CHECKING:
    from shapewright.plan import Plan, PlanResult

_MICROSECONDS = 1e6
_SHOWN_PLANS = 8


def render_plan(result: PlanResult) -> str:
    """Write a result as one HTML page."""
    best = result.plans[0]
    sections: list[Section] = [
        table_of("Plans", plan_columns(result)),
        Words("Why the next one loses", describe_losses(result) or ["There is no next one."]),
        Figure(steps_chart(result), "Parts of a step add up to it; of communication, what computation does not hide."),
    ]
    if best.layout.pipeline_parallel > 1 and best.layout.pipeline_schedule in SIMULATED_SCHEDULES:
        chart, shown, passes = pipeline_chart(best.prediction, f"Pipeline of rank {best.rank}: {describe_plan(best)}")
        simulated_s = max(each.end_s for each in simulate(best.prediction, passes))
        sections.append(
            Figure(
                chart,
                f"The schedule of rank 1, simulated with the predicted times of its passes: {shown} of {passes} "
                f"micro-batches are drawn. All of them take {format_seconds(simulated_s)}; the prediction adds what "
                f"follows the last pass, and takes stages as equally long: "
                f"{format_seconds(best.prediction.step_time_s)}.",
                chart_height_px=max(240, 26 * best.layout.pipeline_parallel + 140),
            )
        )
    sections += [
        Figure(front_chart(result), "No other plan needs less time and less memory."),
        table_of("Pareto front", front_columns(result)),
        Words("Notes", [describe_space(result), *result.notes, *warnings_of(result)]),
    ]
    return render_page("Plan", sections, subtitle=describe_job(result))


def steps_chart(result: PlanResult) -> BarChart:
    """Steps of the plans, stacked from their parts."""
    plans = result.plans[:_SHOWN_PLANS]
    names = list(dict.fromkeys(name for plan in plans for name in plan.breakdown.parts))
    parts = [BarPart(name, [plan.breakdown.parts.get(name, 0.0) for plan in plans]) for name in names]
    return BarChart(
        title="Where the steps go",
        value_label="seconds",
        categories=[f"{plan.rank}: {describe_plan(plan)}" for plan in plans],
        parts=parts,
        alt=f"Steps of {len(plans)} plans by part; the first takes {format_seconds(plans[0].prediction.step_time_s)}.",
    )


def front_chart(result: PlanResult) -> XYChart:
    """Step time over memory of the plans on the front."""
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


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """The pipeline's step in the trace event format, which chrome://tracing and Perfetto open.

    One process a stage; complete events with microseconds from the start of the step; then what follows the last pass.

    Source: Trace Event Format, Google (2016), "Complete events" and "Metadata events".
    """
    passes = num_microbatches(plan.workload, plan.layout)
    chunks = plan.layout.virtual_pipeline
    simulated = simulate(plan.prediction, passes)
    events: list[dict[str, Any]] = [
        {"name": name, "ph": "M", "pid": stage, "tid": 0, "args": arguments}
        for stage in range(plan.layout.pipeline_parallel)
        for name, arguments in (
            ("process_name", {"name": f"stage {stage}"}),
            ("process_sort_index", {"sort_index": stage}),
            ("thread_name", {"name": "passes"}),
        )
    ]
    events += [
        {
            "name": pass_words(each, chunks),
            "cat": each.kind,
            "ph": "X",
            "pid": each.stage,
            "tid": 0,
            "ts": each.start_s * _MICROSECONDS,
            "dur": (each.end_s - each.start_s) * _MICROSECONDS,
            "args": {"microbatch": each.microbatch, "chunk": each.chunk},
        }
        for each in simulated
    ]
    end_s = max(each.end_s for each in simulated)
    step_s = sum(entry.total_time_s for entry in plan.prediction.operations if entry.operation.pass_name == "step")
    events += [
        {
            "name": "optimizer step",
            "cat": "step",
            "ph": "X",
            "pid": stage,
            "tid": 0,
            "ts": end_s * _MICROSECONDS,
            "dur": step_s * _MICROSECONDS,
        }
        for stage in range(plan.layout.pipeline_parallel)
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": describe_plan(plan),
            "predicted_step_s": plan.prediction.step_time_s,
            "simulated_step_s": end_s + step_s,
            BUBBLE.replace(" ", "_") + "_s": plan.prediction.bubble_time_s,
        },
    }
