"""Page of a plan: tables, step times by part, pipeline timeline, Pareto front; and its Chrome trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.figures.charts.pipeline import pass_words, pipeline_chart, simulate
from shapewright.app.figures.charts.plan import plan_front_chart, plan_steps_chart
from shapewright.app.report.optimize.plan_text import (
    describe_job,
    describe_losses,
    describe_plan,
    describe_space,
    front_columns,
    plan_columns,
    warnings_of,
)
from shapewright.app.report.page import Figure, Section, Words, render_page, table_of
from shapewright.core.units import format_seconds
from shapewright.lowering import num_microbatches
from shapewright.optimize.plan import BUBBLE
from shapewright.optimize.plan.timeline import SIMULATED_SCHEDULES

if TYPE_CHECKING:
    from shapewright.optimize.plan import Plan, PlanResult

_MICROSECONDS = 1e6


def render_plan(result: PlanResult) -> str:
    """Render a result as one HTML page."""
    best = result.plans[0]
    sections: list[Section] = [
        table_of("Plans", plan_columns(result)),
        Words("Runner-up", describe_losses(result) or ["No runner-up."]),
        Figure(plan_steps_chart(result), "Parts add up to the step time; only exposed communication is counted."),
    ]
    if best.layout.pipeline_parallel > 1 and best.layout.pipeline_schedule in SIMULATED_SCHEDULES:
        chart, shown, passes = pipeline_chart(best.prediction, f"Pipeline of rank {best.rank}: {describe_plan(best)}")
        simulated_s = max(each.end_s for each in simulate(best.prediction, passes))
        sections.append(
            Figure(
                chart,
                f"The schedule of rank 1, simulated with the predicted times of its passes: {shown} of {passes} "
                f"micro-batches are drawn. All passes take {format_seconds(simulated_s)}; the prediction, with "
                f"the optimizer step and equal stages, is {format_seconds(best.prediction.step_time_s)}.",
                chart_height_px=max(240, 26 * best.layout.pipeline_parallel + 140),
            )
        )
    sections += [
        Figure(plan_front_chart(result), "No other plan needs both less time and less memory."),
        table_of("Pareto front", front_columns(result)),
        Words("Notes", [describe_space(result), *result.notes, *warnings_of(result)]),
    ]
    return render_page("Plan", sections, subtitle=describe_job(result))


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """Convert the step of a pipeline to the trace event format of chrome://tracing and Perfetto.

    One process per stage, with complete events in microseconds from the start of the step; the optimizer step is last.

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
