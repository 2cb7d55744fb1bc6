"""Charts of training plans (step times by part, Pareto front, pipeline timeline), of serving plans and of traffic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import BarChart, BarPart, Line, Mark, Points, Span, Timeline, XYChart
from shapewright.core.errors import LayoutError
from shapewright.core.texts import with_fields
from shapewright.core.units import GIB, format_seconds
from shapewright.lowering.counts import num_microbatches
from shapewright.optimize.plan.timeline import SIMULATED_SCHEDULES, Pass, pass_times, simulate_pipeline

if TYPE_CHECKING:
    from shapewright.app.report.outputs.plan import FrontPointOutput, PlansOutput
    from shapewright.app.report.outputs.serving import OperatingPointOutput, ServePlanOutput
    from shapewright.app.report.outputs.traffic import TrafficOutput
    from shapewright.prediction.predict import Prediction

_MAX_PLANS = 8


def plan_steps_chart(output: PlansOutput) -> BarChart:
    """Step times of the best plans, stacked by part."""
    plans = output.plans[:_MAX_PLANS]
    names = list(dict.fromkeys(name for plan in plans for name in plan.breakdown_s))
    parts = []
    for name in names:
        times_s = [plan.breakdown_s.get(name, 0.0) for plan in plans]
        parts.append(BarPart(name, times_s, texts=[format_seconds(time_s) if time_s else "" for time_s in times_s]))
    return BarChart(
        title="Where the steps go",
        value_label="seconds",
        categories=[f"{plan.rank}: {plan.plan}" for plan in plans],
        parts=parts,
        alt=f"Steps of {len(plans)} plans by part; the first takes {format_seconds(plans[0].step_time_s)}.",
    )


def plan_front_chart(output: PlansOutput) -> XYChart:
    """Step time against memory of the plans on the Pareto front."""
    by_devices: dict[int, list[FrontPointOutput]] = {}
    for point in output.pareto:
        by_devices.setdefault(point.layout.num_devices, []).append(point)
    return XYChart(
        title="Memory against time",
        x_label="memory of a device, GiB",
        y_label="step, s",
        series=[
            Points(f"{count} GPUs", [round(p.total_bytes / GIB, 2) for p in points], [p.step_time_s for p in points])
            for count, points in sorted(by_devices.items())
        ],
        alt=f"{len(output.pareto)} plans, each of which needs less memory or less time than every other.",
        y_log=True,
    )


# Charts with more passes are not legible.
_MAX_SPANS = 1200
# One micro-batch per stage can need more passes than that; this is the hard limit.
_MAX_SIMULATED = 32_768
_MAX_CHUNK_COLORS = 4


def pipeline_chart(prediction: Prediction, title: str = "Pipeline") -> tuple[Timeline, int, int]:
    """Draw the first micro-batches of a step.

    Args:
        prediction: A training step with at least two pipeline stages.

    Returns:
        The chart, the number of micro-batches shown, and their number in the step.

    Raises:
        LayoutError: the step has no pipeline or no backward pass, or too many passes to draw.
    """
    workload, layout = prediction.workload, prediction.layout
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    if stages < 2 or not workload.is_training:
        raise LayoutError(
            f"no pipeline to draw: pipeline_parallel={stages}, phase={workload.phase}",
            advice=with_fields("use {pipeline_parallel} of 2 or more in training"),
        )
    passes = num_microbatches(workload, layout)
    per_microbatch = stages * chunks * (3 if layout.pipeline_schedule == "zero-bubble" else 2)
    most = max(_MAX_SPANS // per_microbatch, 1)
    shown = min(passes, max(most // stages * stages, stages))
    if shown * per_microbatch > _MAX_SIMULATED:
        raise LayoutError(
            f"{stages} stages of {chunks} chunks are too many to draw: {shown * per_microbatch:,} passes, the limit is "
            f"{_MAX_SIMULATED:,}",
            advice=with_fields("use a smaller {pipeline_parallel}"),
        )
    spans = [
        Span(each.stage, each.start_s, each.end_s, _kind_words(each, chunks), pass_words(each, chunks))
        for each in simulate(prediction, shown)
    ]
    busy_s = sum(span.end - span.start for span in spans)
    idle = 1.0 - busy_s / (stages * max(span.end for span in spans))
    chart = Timeline(
        title=title,
        x_label="seconds",
        rows=[f"stage {stage}" for stage in range(stages)],
        spans=spans,
        alt=f"{shown} micro-batches pass {stages} stages; stages are idle {100.0 * idle:.1f} % of the time shown.",
    )
    return chart, shown, passes


def simulate(prediction: Prediction, passes: int) -> list[Pass]:
    """Simulate the first micro-batches of a step with predicted pass times.

    Raises:
        LayoutError: the schedule cannot be simulated.
    """
    if prediction.layout.pipeline_schedule not in SIMULATED_SCHEDULES:
        raise LayoutError(
            f"pipeline_schedule={prediction.layout.pipeline_schedule!r} is priced by a formula and not simulated; "
            f"choose one of {', '.join(SIMULATED_SCHEDULES)} to draw it",
            field="pipeline_schedule",
        )
    return simulate_pipeline(prediction.layout, passes, pass_times(prediction))


def pass_words(each: Pass, chunks: int) -> str:
    """Short name of a pass, as ``F3`` or ``B3.1``."""
    letter = {"forward": "F", "backward": "B"}.get(each.kind, "W")
    return f"{letter}{each.microbatch}" + (f".{each.chunk}" if chunks > 1 else "")


def _kind_words(each: Pass, chunks: int) -> str:
    return each.kind if chunks == 1 or chunks > _MAX_CHUNK_COLORS else f"{each.kind}, chunk {each.chunk}"


def serving_chart(output: ServePlanOutput) -> XYChart:
    """Pareto fronts of tokens/s per GPU over tokens/s per user, by number format."""
    first, *others = (one.name for one in output.formats)
    series: list[Line | Points] = []
    for name in (first, *others):
        if front := output.front_by_format[name]:
            series.append(_line(name, front, dashed=name != first))
    for label, point in (("recommended", output.recommended), ("most tokens/s", output.best)):
        if point is not None:
            series.append(
                Points(
                    label,
                    [point.tokens_per_s_per_user],
                    [point.tokens_per_s_per_device],
                    [f"{point.instances}, {point.num_sequences} sequences"],
                )
            )
    limit_s = output.request.tpot_limit_s
    marks = (Mark("x", 1.0 / limit_s, f"{format_seconds(limit_s)} a token"),) if limit_s else ()
    return XYChart(
        title="Throughput of a GPU against speed for a user",
        x_label="tokens/s of a user",
        y_label="tokens/s of a GPU",
        series=series,
        marks=marks,
        alt="Tokens per second of a GPU fall as tokens per second of a user rise, for each format",
        y_from_zero=True,
    )


def _line(label: str, front: Sequence[OperatingPointOutput], *, dashed: bool) -> Line:
    ordered = sorted(front, key=lambda point: point.tokens_per_s_per_user)
    return Line(
        label,
        [round(point.tokens_per_s_per_user, 1) for point in ordered],
        [point.tokens_per_s_per_device for point in ordered],
        dashed=dashed,
    )


def latency_chart(output: TrafficOutput) -> XYChart:
    """90 % quantile of the time to first token over the rate of arrival, server by server."""
    series = []
    for place, server in enumerate(output.servers):
        runs = [run for run in output.runs if run.server == place and run.ttft_p90_s is not None]
        if runs:
            name = f"{place + 1}: {server.instances}, {server.device}"
            points = sorted((run.arrivals_per_s, run.ttft_p90_s or 0.0) for run in runs)
            series.append(Points(name, [rate for rate, _ in points], [time_s for _, time_s in points]))
    return XYChart(
        title="Time to first token over load",
        x_label="requests per second",
        y_label="time to first token, p90, s",
        series=series,
        alt=f"90 % quantile of the time to first token of {len(output.runs)} simulations on {len(series)} servers.",
        y_log=True,
    )
