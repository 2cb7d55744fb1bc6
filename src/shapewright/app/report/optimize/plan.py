"""Plans as text, as a page with the pipeline timeline, and as a Chrome trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.report.columns import Column, columns_of, print_notes, print_table, spread
from shapewright.core.units import format_bytes, format_number_of, format_percent, format_seconds
from shapewright.lowering.counts import num_microbatches
from shapewright.optimize.plan.findings import COST_RESOLUTION
from shapewright.optimize.plan.notes import describe_plan
from shapewright.optimize.plan.request import OBJECTIVES
from shapewright.optimize.plan.result import BUBBLE
from shapewright.optimize.plan.timeline import SIMULATED_SCHEDULES
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.plan import PlanOutput, PlansOutput
    from shapewright.optimize.plan.result import Plan
    from shapewright.prediction.predict import Prediction


def _expected_words(plan: PlanOutput) -> str:
    """Step with slow devices; empty where none are included."""
    return format_seconds(plan.expected_step_time_s) if plan.expected_step_time_s != plan.step_time_s else ""


_PLAN_COLUMNS = (
    Column("rank", "{rank}"),
    Column("plan", "{plan}", is_text=True),
    Column("step", "{step_time_s}"),
    Column("90 % interval", "{step_time_low_s} to {step_time_high_s}"),
    Column("expected", _expected_words, rank=1),
    Column("tokens/s", "{tokens_per_s:count}", rank=2),
    Column("MFU", "{mfu}", rank=2),
    Column("HFU", lambda plan: format_percent(plan.hfu) if plan.recompute != "none" else "", rank=6),
    Column("memory", lambda plan: format_bytes(plan.total_bytes) + (" (tight)" if plan.tight else ""), rank=2),
    Column("communication", lambda plan: format_percent(plan.exposed_communication_s / plan.step_time_s), rank=4),
    Column("bubble", lambda plan: format_percent(plan.breakdown_s.get(BUBBLE, 0.0) / plan.step_time_s), rank=4),
    Column("USD/1M tokens", "{usd_per_million_tokens:.4g}", rank=2),
)
_FRONT_COLUMNS = (
    Column("plan", "{plan}", is_text=True),
    Column("GPUs", "{layout.num_devices}"),
    Column("step", "{step_time_s}"),
    Column("memory", "{total_bytes}"),
)
_FRONT_SHOWN = 8
# Sums of the same terms in another order differ by less. [fraction of a step]
_SAME_STEP_FRACTION = 1e-9


def print_plan(output: PlansOutput, console: Console) -> None:
    """Print all tables of a result."""
    console.print(describe_plan_job(output), style="bold", soft_wrap=True)
    if output.plans:
        console.print()
        print_table(plan_columns(output), console)
        console.print()
        console.print("Step time of rank 1 by part", style="bold")
        print_table(part_columns(output), console)
        for line in describe_losses(output):
            console.print(line, soft_wrap=True)
        console.print()
        shown = min(len(output.pareto), _FRONT_SHOWN)
        title = f"Pareto front over step, memory and GPUs, {shown} of {len(output.pareto)}"
        console.print(title, style="bold", soft_wrap=True)
        print_table(front_columns(output), console)
        console.print()
    console.print(describe_space(output), style="dim", soft_wrap=True)
    print_notes((*output.notes, *warnings_of(output)), console)


def warnings_of(output: PlansOutput) -> list[str]:
    """Warnings of the prediction of the best plan."""
    return output.plans[0].warnings if output.plans else []


def describe_plan_job(output: PlansOutput) -> str:
    """One line: model, devices, batch, objective."""
    workload, request = output.workload, output.request
    software = output.plans[0].software if output.plans else TUNED
    stack = "" if software == TUNED else f", software of {software}"
    tuned = "" if workload.get("finetune", "full") == "full" else f", {workload['finetune']}"
    return (
        f"{output.config.title} on {request.num_devices} x {output.device.title}: global batch "
        f"{workload['global_batch_size']}, s={workload['seq_len']}, {workload['dtype']}, {workload['attention']} "
        f"attention{tuned}{stack}; objective {request.objective}: {OBJECTIVES[request.objective]}"
    )


def describe_space(output: PlansOutput) -> str:
    """Number of plans, in one line."""
    space = output.space
    refused = sum(space.refused.values())
    parts = [
        f"{format_number_of(space.num_plans, 'plan')} in {format_seconds(output.elapsed_s)}",
        f"{space.priced:,} fit and were priced",
        *([f"{refused:,} splits do not divide the model"] if refused else []),
    ]
    return ("" if output.is_complete else "interrupted, best so far: ") + "; ".join(parts)


def plan_columns(output: PlansOutput) -> list[Column]:
    """Plans, one row each, as the columns of a table."""
    lost = Column("loses by", lambda plan: _loss_words(plan, output), rank=2, is_text=True)
    return columns_of(output.plans, (*_PLAN_COLUMNS, lost))


def _takes_as_long(plan: PlanOutput) -> bool:
    """Whether a plan's step differs from that of the best plan only by rounding."""
    return plan.loss is not None and abs(plan.loss.slower_by_s) <= _SAME_STEP_FRACTION * plan.step_time_s


def _loss_words(plan: PlanOutput, output: PlansOutput) -> str:
    if plan.loss is None:
        return ""
    if _takes_as_long(plan):
        return "equally fast"
    best, objective = output.plans[0], output.request.objective
    if objective == "memory":
        return f"{format_bytes(plan.total_bytes - best.total_bytes)} more memory"
    if objective == "cost" and plan.layout.num_devices != best.layout.num_devices:
        return _cost_words(plan, best)
    return f"{format_seconds(plan.loss.slower_by_s)}, {plan.loss.part}"


def _cost_words(plan: PlanOutput, best: PlanOutput) -> str:
    """Additional cost of a plan on another number of devices."""
    more_fraction = plan.device_s_per_million_tokens / best.device_s_per_million_tokens - 1.0
    return "time, at equal cost" if more_fraction < COST_RESOLUTION else f"{format_percent(more_fraction)} more cost"


def part_columns(output: PlansOutput) -> list[Column]:
    """Parts of the step of the best plan and of the runner-up."""
    best = output.plans[0]
    own, hidden = best.breakdown_s, best.hidden_communication_s
    following = output.plans[1].breakdown_s if len(output.plans) > 1 else {}
    headings = (
        Column("part", lambda name: name, is_text=True),
        Column("rank 1", lambda name: _seconds(own.get(name, 0.0))),
        Column("share", lambda name: format_percent(own.get(name, 0.0) / best.step_time_s)),
        Column("hidden", lambda name: _seconds(hidden.get(name, 0.0)), rank=1),
        Column("rank 2", lambda name: _seconds(following.get(name, 0.0))),
    )
    names = {**own, **hidden, **following}
    return columns_of(sorted(names, key=lambda name: -own.get(name, 0.0)), headings)


def _seconds(time_s: float) -> str:
    return format_seconds(time_s) if time_s > 0.0 else "-"


def describe_losses(output: PlansOutput) -> list[str]:
    """Difference of the runner-up to the best plan, in one sentence."""
    if len(output.plans) < 2:
        return []
    best, plan = output.plans[:2]
    loss = plan.loss
    assert loss is not None
    if output.request.objective == "memory":
        more = plan.total_bytes - best.total_bytes
        return [f"rank 2 ({plan.plan}) needs {format_bytes(more)} more memory"]
    if _takes_as_long(plan):
        return [f"rank 2 ({plan.plan}) is equally fast"]
    if output.request.objective == "cost" and plan.layout.num_devices != best.layout.num_devices:
        devices = f"rank 2 ({plan.plan}) runs on {plan.layout.num_devices} devices"
        return [f"{devices} and loses by {_cost_words(plan, best)}"]
    lost_elsewhere_s = loss.slower_by_s + loss.gained_s - loss.lost_s
    # Differences below 1 % of the loss are not mentioned.
    also = f" and {format_seconds(lost_elsewhere_s)} elsewhere" if lost_elsewhere_s > 0.01 * loss.lost_s else ""
    gained = f", and gains {format_seconds(loss.gained_s)}" if loss.gained_s > 0.01 * loss.lost_s else ""
    return [
        f"rank 2 ({plan.plan}) is {format_seconds(loss.slower_by_s)} slower: it loses "
        f"{format_seconds(loss.lost_s)} in {loss.part}{also}{gained}"
    ]


def front_columns(output: PlansOutput) -> list[Column]:
    """The Pareto front, thinned out to a few rows."""
    return columns_of(spread(output.pareto, _FRONT_SHOWN), _FRONT_COLUMNS)


_MICROSECONDS = 1e6


def render_plan(output: PlansOutput, best: Prediction) -> str:
    """Render a result as one HTML page.

    Args:
        best: The predicted step of rank 1, whose pipeline is drawn.
    """
    from shapewright.app.figures.plan import pipeline_chart, plan_front_chart, plan_steps_chart, simulate
    from shapewright.app.report.page import Figure, Section, Words, render_page, table_of

    plan = output.plans[0]
    layout = best.layout
    sections: list[Section] = [
        table_of("Plans", plan_columns(output)),
        Words("Runner-up", describe_losses(output) or ["No runner-up."]),
        Figure(plan_steps_chart(output), "Parts add up to the step time; only exposed communication is counted."),
    ]
    if layout.pipeline_parallel > 1 and layout.pipeline_schedule in SIMULATED_SCHEDULES:
        chart, shown, passes = pipeline_chart(best, f"Pipeline of rank {plan.rank}: {plan.plan}")
        simulated_s = max(each.end_s for each in simulate(best, passes))
        sections.append(
            Figure(
                chart,
                f"The schedule of rank 1, simulated with the predicted times of its passes: {shown} of {passes} "
                f"micro-batches are drawn. All passes take {format_seconds(simulated_s)}; the prediction, with "
                f"the optimizer step and equal stages, is {format_seconds(best.step_time_s)}.",
                chart_height_px=max(240, 26 * layout.pipeline_parallel + 140),
            )
        )
    sections += [
        Figure(plan_front_chart(output), "No other plan needs both less time and less memory."),
        table_of("Pareto front", front_columns(output)),
        Words("Notes", [describe_space(output), *output.notes, *warnings_of(output)]),
    ]
    return render_page("Plan", sections, subtitle=describe_plan_job(output))


def chrome_trace(plan: Plan) -> dict[str, Any]:
    """Convert the step of a pipeline to the trace event format of chrome://tracing and Perfetto.

    One process per stage, with complete events in microseconds from the start of the step; the optimizer step is last.

    Source: Trace Event Format, Google (2016), "Complete events" and "Metadata events".
    """
    from shapewright.app.figures.plan import pass_words, simulate

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
    busiest = plan.prediction.busiest_operations
    step_s = sum(entry.total_time_s for entry in busiest if entry.operation.pass_name == "step")
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
