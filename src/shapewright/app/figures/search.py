"""Charts of a shape search: time per token and speed-up against the number of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Mark, Points, XYChart
from shapewright.app.report.optimize.search_text import describe_changes
from shapewright.core.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.optimize.search import Candidate, SearchResult

_MICRO = 1e-6


def time_per_token_chart(result: SearchResult) -> XYChart:
    """Time per token against parameters: baseline, listed shapes and the Pareto front."""
    groups: dict[str, Sequence[Candidate]] = {
        "listed shapes": result.candidates,
        "Pareto front": result.front,
        "baseline": (result.baseline,),
    }
    base = result.baseline.prediction
    return XYChart(
        title="Time per token against parameters",
        x_label="parameters (billions)",
        y_label="device time per token (us)",
        series=[
            Points(
                name,
                [shape.prediction.parameters.total / GIGA for shape in shapes],
                [1.0 / shape.prediction.tokens_per_s_per_device / _MICRO for shape in shapes],
                [
                    (f"rank {shape.rank}: " if shape.rank else "") + (describe_changes(shape) or "baseline")
                    for shape in shapes
                ],
            )
            for name, shapes in groups.items()
        ],
        alt="Faster shapes lie below the baseline; the Pareto front is the lower right edge.",
        marks=[Mark("y", 1.0 / base.tokens_per_s_per_device / _MICRO, "baseline")],
    )


def speedup_chart(result: SearchResult) -> XYChart:
    """Speed-up against parameters: the Pareto front and the baseline, each point with a label."""
    labels = [
        f"{describe_changes(shape)}: {shape.speedup.factor:.3f}x ({shape.speedup.low:.3f} to {shape.speedup.high:.3f})"
        for shape in result.front
    ]
    baseline = result.baseline.prediction.parameters.total
    return XYChart(
        title="Pareto front",
        x_label="parameters [B]",
        y_label="speed-up",
        series=[
            Points(
                "shape",
                [shape.prediction.parameters.total / GIGA for shape in result.front],
                [shape.speedup.factor for shape in result.front],
                labels=labels,
            ),
            Points("this shape", [baseline / GIGA], [1.0], labels=["baseline: 1.000x"], color="#d55e00"),
        ],
        alt="Pareto-optimal shapes in speed, parameters, KV cache and memory, by parameters and speed-up.",
    )
