"""Charts of a shape search: time per token and speed-up against the number of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Mark, Points, XYChart
from shapewright.app.report.outputs.search import describe_changes, describe_gain
from shapewright.core.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.app.report.outputs.search import CandidateOutput, SearchOutput

_MICRO = 1e-6


def time_per_token_chart(found: SearchOutput) -> XYChart:
    """Time per token against parameters: baseline, listed shapes and the Pareto front."""
    groups: dict[str, Sequence[CandidateOutput]] = {
        "listed shapes": found.candidates,
        "Pareto front": found.pareto,
        "baseline": (found.baseline,),
    }
    return XYChart(
        title="Time per token against parameters",
        x_label="parameters (billions)",
        y_label="device time per token (us)",
        series=[
            Points(
                name,
                [shape.parameters / GIGA for shape in shapes],
                [1.0 / shape.tokens_per_s_per_device / _MICRO for shape in shapes],
                [
                    (f"rank {shape.rank}: " if shape.rank else "") + (describe_changes(shape) or "baseline")
                    for shape in shapes
                ],
            )
            for name, shapes in groups.items()
        ],
        alt="Faster shapes lie below the baseline; the Pareto front is the lower right edge.",
        marks=[Mark("y", 1.0 / found.baseline.tokens_per_s_per_device / _MICRO, "baseline")],
    )


def speedup_chart(found: SearchOutput) -> XYChart:
    """Speed-up of the Pareto front: to the same loss over the loss difference, or over parameters without losses."""
    labels = [
        f"{describe_changes(shape)}: {describe_gain(shape)} ({shape.speedup_low:.3f} to {shape.speedup_high:.3f})"
        for shape in found.pareto
    ]
    by_loss = found.baseline.effect.loss_difference_nats is not None
    across = [
        (shape.effect.loss_difference_nats or 0.0) if by_loss else shape.parameters / GIGA
        for shape in (*found.pareto, found.baseline)
    ]
    return XYChart(
        title="Pareto front",
        x_label="loss above this shape's [nats]" if by_loss else "parameters [B]",
        y_label="speed-up",
        series=[
            Points("shape", across[:-1], [shape.speedup for shape in found.pareto], labels=labels),
            Points("this shape", across[-1:], [1.0], labels=["baseline: 1.000x"], color="#d55e00"),
        ],
        alt="Pareto-optimal shapes: faster ones are further up, "
        + ("those of lower loss further left." if by_loss else "larger ones further right."),
    )
