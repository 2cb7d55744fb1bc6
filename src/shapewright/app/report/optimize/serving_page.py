"""Page of a serving plan: Pareto fronts, tables, and assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.charts.serving import serving_chart
from shapewright.app.report.optimize.serving_text import (
    best_rows,
    capacity_columns,
    describe_serving,
    format_columns,
    no_plan_words,
    point_columns,
)
from shapewright.app.report.outputs.serving import MODES
from shapewright.app.report.page import Figure, Section, Words, table_of

if TYPE_CHECKING:
    from shapewright.optimize.serving import ServingPlan

ASSUMPTIONS = (
    "Times are those of 'shapewright predict' with --phase prefill or decode.",
    "Closed loop: the batch is always full and all lengths are equal. Decode passes are priced at the middle of the "
    "answer, windows at their mean length over it, prefill passes at the mean over those of a prompt.",
    "Aggregated: a share f of the passes also prefills, f = B n / (O - 1) for B sequences, n prefill passes per prompt "
    "and O output tokens; a mean pass takes (1 - f) T_decode + f T_mixed. The prefill capacity is used up to 80 %.",
    "Queueing before the first token follows M/D/1, one server with random arrivals and a fixed service time: "
    "rho S / (2 (1 - rho)).",
    "Disaggregated: the KV cache of a prompt is sent between instances; the time to first token includes that.",
    "Every pipeline stage, and every replica of the attention (DP), works on a batch of its own.",
    "Sequences allocate the cache blocks of prompt and answer at their start; nothing is evicted, and prompts share no "
    "prefix.",
    "Speculation: E = (1 - a^(g+1)) / (1 - a) tokens per pass; the verifying pass is priced, the draft costs g times "
    "its share of a decode step.",
    "Not modelled: varying lengths, bursts of arrivals, uneven expert load, tokenization, sampling, a slow host.",
)
"""Assumptions of a serving plan, one line each."""


def serving_sections(found: ServingPlan) -> list[Section]:
    """Sections of the page."""
    best = [point for mode in MODES if (point := found.best(mode)) is not None]
    sections: list[Section] = []
    if best:
        columns = point_columns(best, found.request.usd_per_hour)
        columns[0] = type(columns[0])("mode", tuple(row[0] for row in best_rows(found)), is_text=True)
        sections.append(table_of("Best within the limits", columns))
    else:
        sections.append(Words("No plan", (no_plan_words(found),)))
    sections.append(Figure(serving_chart(found), "Up and to the right is better."))
    if len(found.formats) > 1:
        note = "Other formats change the outputs of the model, which is not evaluated here."
        sections.append(table_of("Best point of each format", format_columns(found), note=note))
    for mode in MODES:
        front = found.front(mode)
        if front:
            sections.append(
                table_of(f"{mode.capitalize()}: the front", point_columns(front, found.request.usd_per_hour))
            )
    sections.append(table_of(f"Capacity of one instance, {found.formats[0].name}", capacity_columns(found)))
    sections.append(Words("Assumptions", (*ASSUMPTIONS, *(f"Note: {line}" for line in found.notes))))
    return sections


def serving_title(found: ServingPlan) -> str:
    """Heading of the page."""
    return f"Serving {found.config.title}"


def serving_subtitle(found: ServingPlan) -> str:
    """Line under the heading."""
    return describe_serving(found)
