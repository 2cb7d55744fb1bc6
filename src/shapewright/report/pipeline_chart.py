"""The timeline of a pipeline: which stage works on which micro-batch when, in each of the schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.errors import LayoutError
from shapewright.lowering import num_microbatches
from shapewright.plan.timeline import SIMULATED_SCHEDULES, Pass, pass_times, simulate_pipeline
from shapewright.report.charts import Span, Timeline

if TYPE_CHECKING:
    from shapewright.predict import Prediction

# A picture of more passes shows nothing.
_MOST_SPANS = 1200
# A picture of the fewest micro-batches that a schedule takes, one a stage, may need more; beyond this none is made.
_MOST_SIMULATED = 32_768
_MOST_CHUNKS_TOLD_APART = 4


def pipeline_chart(prediction: Prediction, title: str = "Pipeline") -> tuple[Timeline, int, int]:
    """Draw the beginning of a step.

    Args:
        prediction: A training step over two stages or more.
        title: Heading of the chart.

    Returns:
        The chart, the micro-batches it shows, and those that the step has.

    Raises:
        LayoutError: there is no pipeline, no backward pass, or there are too many passes to draw.
    """
    workload, layout = prediction.workload, prediction.layout
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline
    if stages < 2 or not workload.is_training:
        raise LayoutError(
            f"there is no pipeline to draw: pipeline_parallel={stages}, phase={workload.phase}; "
            f"use --pipeline-parallel 2 or more in training"
        )
    passes = num_microbatches(workload, layout)
    per_microbatch = stages * chunks * (3 if layout.pipeline_schedule == "zero-bubble" else 2)
    most = max(_MOST_SPANS // per_microbatch, 1)
    shown = min(passes, max(most // stages * stages, stages))
    if shown * per_microbatch > _MOST_SIMULATED:
        raise LayoutError(
            f"{stages} stages of {chunks} chunks are too many to draw: {shown * per_microbatch:,} passes, at most "
            f"{_MOST_SIMULATED:,} are; use a smaller --pipeline-parallel"
        )
    spans = [
        Span(each.stage, each.start_s, each.end_s, _kind_words(each, chunks), pass_words(each, chunks))
        for each in simulate(prediction, shown)
    ]
    busy_s = sum(span.end - span.start for span in spans)
    waiting = 1.0 - busy_s / (stages * max(span.end for span in spans))
    chart = Timeline(
        title=title,
        x_label="seconds",
        rows=[f"stage {stage}" for stage in range(stages)],
        spans=spans,
        alt=f"{shown} micro-batches pass {stages} stages; stages wait {100.0 * waiting:.1f} % of the time shown.",
    )
    return chart, shown, passes


def simulate(prediction: Prediction, passes: int) -> list[Pass]:
    """The first passes of a step, with the predicted times.

    Raises:
        LayoutError: the schedule is priced by a formula alone.
    """
    if prediction.layout.pipeline_schedule not in SIMULATED_SCHEDULES:
        raise LayoutError(
            f"pipeline_schedule={prediction.layout.pipeline_schedule!r} is priced by a formula and not simulated; "
            f"choose one of {', '.join(SIMULATED_SCHEDULES)} to draw it"
        )
    return simulate_pipeline(prediction.layout, passes, pass_times(prediction))


def pass_words(each: Pass, chunks: int) -> str:
    """Short name of a pass, as ``F3`` or ``B3.1``."""
    letter = {"forward": "F", "backward": "B"}.get(each.kind, "W")
    return f"{letter}{each.microbatch}" + (f".{each.chunk}" if chunks > 1 else "")


def _kind_words(each: Pass, chunks: int) -> str:
    return each.kind if chunks == 1 or chunks > _MOST_CHUNKS_TOLD_APART else f"{each.kind}, chunk {each.chunk}"
