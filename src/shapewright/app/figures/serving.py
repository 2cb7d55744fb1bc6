"""Chart of a serving plan: throughput per GPU against tokens per second per user."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Line, Mark, Points, XYChart
from shapewright.app.report.outputs.serving import MODES, instances_words
from shapewright.core.units import format_seconds

if TYPE_CHECKING:
    from shapewright.optimize.serving import OperatingPoint, ServingPlan


def serving_chart(found: ServingPlan) -> XYChart:
    """Pareto fronts of tokens/s per GPU over tokens/s per user, by serving mode and number format."""
    series: list[Line | Points] = []
    for one in found.formats:
        for mode in MODES if one is found.formats[0] else (None,):
            front = found.front(mode, one.name)
            if not front:
                continue
            label = f"{one.name}, {mode}" if mode else one.name
            series.append(_line(label, front, dashed=mode is None))
    for mode in MODES:
        best = found.best(mode)
        if best is not None:
            series.append(
                Points(
                    f"best {mode}",
                    [best.tokens_per_s_per_user],
                    [best.tokens_per_s_per_device],
                    [f"{instances_words(best)}, {best.num_sequences} sequences"],
                )
            )
    limit_s = found.request.tpot_limit_s
    marks = (Mark("x", 1.0 / limit_s, f"{format_seconds(limit_s)} a token"),) if limit_s else ()
    return XYChart(
        title="What devices give against what a user sees",
        x_label="tokens/s of a user",
        y_label="tokens/s of a GPU",
        series=series,
        marks=marks,
        alt="Tokens per second of a GPU fall as tokens per second of a user rise, for each mode and format",
        y_from_zero=True,
    )


def _line(label: str, front: Sequence[OperatingPoint], *, dashed: bool) -> Line:
    ordered = sorted(front, key=lambda point: point.tokens_per_s_per_user)
    return Line(
        label,
        [round(point.tokens_per_s_per_user, 1) for point in ordered],
        [point.tokens_per_s_per_device for point in ordered],
        dashed=dashed,
    )
