"""Serving plans as sections of a page: the Pareto picture, tables, and the formulas behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.report.charts import Line, Mark, Points, XYChart
from shapewright.report.page import Figure, Section, Words, table_of
from shapewright.report.serving_text import (
    MODES,
    best_rows,
    capacity_columns,
    describe_serving,
    format_columns,
    instances_words,
    no_plan_words,
    point_columns,
)
from shapewright.units import format_seconds

if TYPE_CHECKING:
    from shapewright.serving import OperatingPoint, ServingPlan

ASSUMPTIONS = (
    "Every time is that of the same prediction as 'shapewright predict' with --phase prefill or decode.",
    "The batch is always full and lengths are all alike: a closed loop. Decode passes are priced at the middle of the "
    "answer, windows at what they see on the mean over it, passes that prefill at the mean over those of a prompt.",
    "Aggregated: a share f of the passes also prefills, f = B n / (O - 1) for B sequences, n prefill passes a prompt "
    "and O tokens of an answer; a mean pass takes (1 - f) T_decode + f T_mixed. At most 80 % of the capacity to "
    "prefill is used.",
    "The wait for the first token is that of one server with random arrivals and a fixed service time, "
    "rho S / (2 (1 - rho)).",
    "Disaggregated: the cache of a prompt travels between the instances; that is counted in the time to first token.",
    "Pipelines keep every stage busy with a batch of its own; so have replicas of the attention (DP).",
    "Sequences hold whole blocks of cache for prompt and answer from their start; nothing is evicted, and no prompt "
    "shares a prefix with another.",
    "Speculation: E = (1 - a^(g+1)) / (1 - a) tokens a pass; the verifying pass is priced, the draft is g times its "
    "share of a decode step.",
    "Not in it: uneven lengths and arrivals in bursts, uneven expert load, tokenising, sampling and a host that falls "
    "behind.",
)
"""What the numbers of a plan rest on, one line each."""


def serving_chart(found: ServingPlan) -> XYChart:
    """Pareto fronts: tokens/s of a GPU over tokens/s of a user, by mode, and by format in the wanted mode."""
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


def serving_sections(found: ServingPlan) -> list[Section]:
    """Everything that a plan says."""
    best = [point for mode in MODES if (point := found.best(mode)) is not None]
    sections: list[Section] = []
    if best:
        columns = point_columns(best, found.request.usd_per_hour)
        columns[0] = type(columns[0])("mode", tuple(row[0] for row in best_rows(found)), is_text=True)
        sections.append(table_of("The best that keeps the limits", columns))
    else:
        sections.append(Words("No plan", (no_plan_words(found),)))
    sections.append(Figure(serving_chart(found), "Up and to the right is better; a point costs what its batch costs."))
    if len(found.formats) > 1:
        note = "Other formats change what the model answers; that is not judged here."
        sections.append(table_of("Formats, each at its best", format_columns(found), note=note))
    for mode in MODES:
        front = found.front(mode)
        if front:
            sections.append(
                table_of(f"{mode.capitalize()}: the front", point_columns(front, found.request.usd_per_hour))
            )
    sections.append(table_of(f"What one instance holds, {found.formats[0].name}", capacity_columns(found)))
    sections.append(Words("What this rests on", (*ASSUMPTIONS, *(f"Note: {line}" for line in found.notes))))
    return sections


def serving_title(found: ServingPlan) -> str:
    """Heading of the page."""
    return f"Serving {found.config.title}"


def serving_subtitle(found: ServingPlan) -> str:
    """Line under the heading."""
    return describe_serving(found)


def _line(label: str, front: Sequence[OperatingPoint], *, dashed: bool) -> Line:
    ordered = sorted(front, key=lambda point: point.tokens_per_s_per_user)
    return Line(
        label,
        [round(point.tokens_per_s_per_user, 1) for point in ordered],
        [point.tokens_per_s_per_device for point in ordered],
        dashed=dashed,
    )
