"""Charts of shapes: those of a search by time and size, and the loss of a design against time."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import PALETTE, Line, Mark, Points, XYChart
from shapewright.app.report.outputs.check import describe_net
from shapewright.app.report.outputs.search import describe_changes
from shapewright.core.units import GIGA, format_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.app.report.outputs.design import DesignOutput
    from shapewright.app.report.outputs.search import CandidateOutput, SearchOutput
    from shapewright.optimize.design.result import FrontRun

_FRONTIER_COLOR = "#7f7f7f"
_SIZE_COLORS = tuple(color for color in PALETTE if color != _FRONTIER_COLOR)


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
            format_count(size),
            [_rounded(one.hours) for one in points],
            [one.loss_nats for one in points],
            color=color,
        )
        for color, (size, points) in zip(cycle(_SIZE_COLORS), sorted(by_size.items()), strict=False)
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
            color=_FRONTIER_COLOR,
        ),
        Points(
            "this design",
            [_rounded(best.run.hours.mean)],
            [own.loss_nats + best.loss_difference_nats.mean],
            [f"{format_count(best.run.train_tokens)} tokens"],
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
    """Speed-up of the Pareto front over the loss difference, or over parameters where losses are not known."""
    labels = [f"{describe_changes(shape)}: {_gain_words(shape)}" for shape in found.pareto]
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


def _gain_words(shape: CandidateOutput) -> str:
    """Speed-up per step and to the same loss, each with its interval."""
    speed = f"{shape.speedup:.3f}x ({shape.speedup_low:.3f} to {shape.speedup_high:.3f})"
    if shape.effect.is_free:
        return f"{speed}, free"
    net = describe_net(shape.effect)
    return f"{speed}, {net} to the same loss" if net else speed
