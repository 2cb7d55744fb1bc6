"""Plans as text, as a page with the pipeline timeline, and as a Chrome trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.figures.plan import pass_words, pipeline_chart, plan_front_chart, plan_steps_chart, simulate
from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.page import Figure, Section, Words, render_page, table_of
from shapewright.core.units import format_bytes, format_count, format_percent, format_seconds
from shapewright.lowering import num_microbatches
from shapewright.optimize.plan import BUBBLE, COST_RESOLUTION, OBJECTIVES, describe_choice
from shapewright.optimize.plan.notes import describe_plan
from shapewright.optimize.plan.timeline import SIMULATED_SCHEDULES
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from shapewright.optimize.plan import Breakdown, Plan, PlanResult

_PLAN_COLUMNS = (
    Column("rank"),
    Column("plan", is_text=True),
    Column("step"),
    Column("90 % interval", rank=3),
    Column("tokens/s", rank=2),
    Column("MFU"),
    Column("HFU", rank=6),
    Column("memory", rank=1),
    Column("communication", rank=4),
    Column("bubble", rank=4),
    Column("USD/1M tokens", rank=2),
    Column("loses by", rank=2, is_text=True),
)
_FRONT_COLUMNS = (Column("plan", is_text=True), Column("GPUs"), Column("step"), Column("memory"))
_PARTS_COLUMNS = (
    Column("part", is_text=True),
    Column("rank 1"),
    Column("share"),
    Column("hidden", rank=1),
    Column("rank 2"),
)
_FRONT_SHOWN = 8
# Sums of the same terms in another order differ by less. [fraction of a step]
_SAME_STEP_FRACTION = 1e-9


def print_plan(result: PlanResult, console: Console) -> None:
    """Print a whole result."""
    console.print(describe_job(result), style="bold", soft_wrap=True)
    if result.plans:
        console.print()
        print_table(plan_columns(result), console)
        console.print()
        console.print("Step time of rank 1 by part", style="bold")
        print_table(part_columns(result), console)
        for line in describe_losses(result):
            console.print(line, soft_wrap=True)
        console.print()
        shown = min(len(result.front), _FRONT_SHOWN)
        title = f"Pareto front over step, memory and GPUs, {shown} of {len(result.front)}"
        console.print(title, style="bold", soft_wrap=True)
        print_table(front_columns(result), console)
        console.print()
    console.print(describe_space(result), style="dim", soft_wrap=True)
    print_notes((*result.notes, *warnings_of(result)), console)


def warnings_of(result: PlanResult) -> tuple[str, ...]:
    """Warnings of the prediction of the best plan."""
    return result.plans[0].prediction.warnings if result.plans else ()


def describe_job(result: PlanResult) -> str:
    """One line: model, devices, batch, objective."""
    config, workload, request = result.config, result.workload, result.request
    name = config.title
    software = result.plans[0].prediction.software if result.plans else TUNED
    stack = "" if software == TUNED else f", software of {software}"
    return (
        f"{name} on {request.num_devices} x {result.device.title}: global batch {workload.global_batch_size}, "
        f"s={workload.seq_len}, {workload.dtype}, {workload.attention} attention{stack}; "
        f"objective {request.objective}: {OBJECTIVES[request.objective]}"
    )


def describe_space(result: PlanResult) -> str:
    """Number of plans, in one line."""
    tally = result.tally
    refused = sum(tally.refused.values())
    parts = [
        f"{tally.num_plans:,} plans in {format_seconds(result.elapsed_s)}",
        f"{tally.num_fitting:,} fit and were priced",
        *([f"{refused:,} splits do not divide the model"] if refused else []),
    ]
    return ("" if result.is_complete else "interrupted, best so far: ") + "; ".join(parts)


def plan_columns(result: PlanResult) -> list[Column]:
    """Plans, one row each, as the columns of a table."""
    return columns_of((_row(plan, result) for plan in result.plans), _PLAN_COLUMNS)


def _row(plan: Plan, result: PlanResult) -> list[str]:
    prediction = plan.prediction
    recomputes = plan.workload.recompute != "none"
    return [
        str(plan.rank),
        describe_plan(plan),
        format_seconds(plan.expected_step_s),
        f"{format_seconds(prediction.step_time_low_s)} to {format_seconds(prediction.step_time_high_s)}",
        format_count(prediction.tokens_per_step / plan.expected_step_s),
        format_percent(prediction.mfu),
        format_percent(prediction.hfu) if recomputes else "",
        format_bytes(plan.total_bytes) + (" (tight)" if plan.is_tight else ""),
        format_percent(sum(plan.breakdown.exposed.values()) / prediction.step_time_s),
        format_percent(plan.breakdown.parts.get(BUBBLE, 0.0) / prediction.step_time_s),
        f"{plan.usd_per_million_tokens:.4g}" if plan.usd_per_million_tokens is not None else "",
        _loss_words(plan, result),
    ]


def _takes_as_long(plan: Plan) -> bool:
    """Whether a plan's step differs from that of the best plan only by rounding."""
    return plan.loss is not None and abs(plan.loss.slower_by_s) <= _SAME_STEP_FRACTION * plan.prediction.step_time_s


def _loss_words(plan: Plan, result: PlanResult) -> str:
    if plan.loss is None:
        return ""
    if _takes_as_long(plan):
        return "equally fast"
    best, objective = result.plans[0], result.request.objective
    if objective == "memory":
        return f"{format_bytes(plan.total_bytes - best.total_bytes)} more memory"
    if objective == "cost" and plan.layout.num_devices != best.layout.num_devices:
        return _cost_words(plan, best)
    return f"{format_seconds(plan.loss.slower_by_s)}, {plan.loss.part}"


def _cost_words(plan: Plan, best: Plan) -> str:
    """Additional cost of a plan on another number of devices."""
    more_fraction = plan.device_s_per_million_tokens / best.device_s_per_million_tokens - 1.0
    return "time, at equal cost" if more_fraction < COST_RESOLUTION else f"{format_percent(more_fraction)} more cost"


def part_columns(result: PlanResult) -> list[Column]:
    """Parts of the step of the best plan and of the runner-up."""
    best = result.plans[0]
    following = result.plans[1].breakdown.parts if len(result.plans) > 1 else {}
    names = sorted({**best.breakdown.parts, **best.breakdown.hidden, **following}, key=_by_share(best.breakdown))
    rows = []
    for name in names:
        part_s = best.breakdown.parts.get(name, 0.0)
        rows.append(
            [
                name,
                _seconds(part_s),
                format_percent(part_s / best.prediction.step_time_s),
                _seconds(best.breakdown.hidden.get(name, 0.0)),
                _seconds(following.get(name, 0.0)),
            ]
        )
    return columns_of(rows, _PARTS_COLUMNS)


def _by_share(breakdown: Breakdown) -> Any:
    parts: Mapping[str, float] = breakdown.parts
    return lambda name: -parts.get(name, 0.0)


def _seconds(time_s: float) -> str:
    return format_seconds(time_s) if time_s > 0.0 else "-"


def describe_losses(result: PlanResult) -> list[str]:
    """Difference of the runner-up to the best plan, in one sentence."""
    if len(result.plans) < 2:
        return []
    plan = result.plans[1]
    loss = plan.loss
    assert loss is not None
    if result.request.objective == "memory":
        more = plan.total_bytes - result.plans[0].total_bytes
        return [f"rank 2 ({describe_plan(plan)}) needs {format_bytes(more)} more memory"]
    if _takes_as_long(plan):
        return [f"rank 2 ({describe_plan(plan)}) is equally fast"]
    if result.request.objective == "cost" and plan.layout.num_devices != result.plans[0].layout.num_devices:
        devices = f"rank 2 ({describe_plan(plan)}) runs on {plan.layout.num_devices} devices"
        return [f"{devices} and loses by {_cost_words(plan, result.plans[0])}"]
    lost_elsewhere_s = loss.slower_by_s + loss.gained_s - loss.lost_s
    # Differences below 1 % of the loss are not mentioned.
    also = f" and {format_seconds(lost_elsewhere_s)} elsewhere" if lost_elsewhere_s > 0.01 * loss.lost_s else ""
    gained = f", and gains {format_seconds(loss.gained_s)}" if loss.gained_s > 0.01 * loss.lost_s else ""
    return [
        f"rank 2 ({describe_plan(plan)}) is {format_seconds(loss.slower_by_s)} slower: it loses "
        f"{format_seconds(loss.lost_s)} in {loss.part}{also}{gained}"
    ]


def front_columns(result: PlanResult) -> list[Column]:
    """The Pareto front, thinned out to a few rows."""
    points = result.front
    if len(points) > _FRONT_SHOWN:
        step = (len(points) - 1) / (_FRONT_SHOWN - 1)
        points = tuple(points[round(step * index)] for index in range(_FRONT_SHOWN))
    rows = [
        [
            describe_choice(point.choice),
            f"{point.choice.num_devices}",
            format_seconds(point.step_s),
            format_bytes(point.total_bytes),
        ]
        for point in points
    ]
    return columns_of(rows, _FRONT_COLUMNS)


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
