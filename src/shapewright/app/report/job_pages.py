"""Pages and figures of memory, mfu and compare."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.devices import comparison_chart, worth_charts
from shapewright.app.figures.step import memory_chart
from shapewright.app.report.compare import comparison_columns, job_words, refusal_lines
from shapewright.app.report.memory import REMEDIES_TITLE, offload_words, remedy_columns, stage_columns
from shapewright.app.report.mfu import (
    convention_columns,
    peak_columns,
    reachable_columns,
    reachable_words,
    utilization_facts,
    waterfall_columns,
)
from shapewright.app.report.page import Figure, Section, Table, Words, table_of
from shapewright.app.report.review import waterfall_figure
from shapewright.core.units import format_bytes, format_percent

if TYPE_CHECKING:
    from shapewright.prediction.capacity import Capacity
    from shapewright.prediction.compare import Comparison
    from shapewright.prediction.utilization import Utilization


def memory_figure(capacity: Capacity) -> Figure:
    """Components of each stage against the device."""
    chart = memory_chart(capacity)
    return Figure(chart, caption=chart.alt, chart_height_px=150 + 24 * len(capacity.stages))


def memory_sections(capacity: Capacity) -> list[Section]:
    """Sections of the page of memory."""
    parts = capacity.busiest.components | {"total": capacity.busiest.total_bytes}
    rows = [
        (name.replace("_", " "), format_bytes(amount), format_percent(amount / capacity.device.memory_bytes))
        for name, amount in parts.items()
        if amount
    ]
    sections: list[Section] = [
        memory_figure(capacity),
        Table("Components of the fullest stage", ("component", "memory", "of device"), rows, words=("component",)),
    ]
    if len(capacity.stages) > 1:
        sections.append(table_of("Stages", stage_columns(capacity)))
    if capacity.fit_options:
        sections.append(table_of(REMEDIES_TITLE[0].upper() + REMEDIES_TITLE[1:], remedy_columns(capacity)))
    decode = capacity.workload.phase == "decode"
    facts = [
        f"largest micro_batch_size: {capacity.largest_micro_batch_size or 'none fits'}",
        f"largest {'context_len' if decode else 'seq_len'}: {capacity.largest_seq_len or 'none fits'}",
    ]
    return [*sections, Words("Limits and notes", [*facts, *offload_words(capacity), *capacity.notes])]


def comparison_sections(found: Comparison) -> list[Section]:
    """Sections of the page of compare."""
    charts = [comparison_chart(found), *worth_charts(found)]
    figures = [Figure(chart, caption=chart.alt, chart_height_px=110 + 32 * len(chart.categories)) for chart in charts]
    sections: list[Section] = [figures[0], table_of("Devices", comparison_columns(found)), *figures[1:]]
    job = job_words(found)
    if job:
        sections.insert(0, Words("The job", [job]))
    problems = refusal_lines(found)
    if problems or found.notes:
        sections.append(Words("Notes", [*problems, *found.notes]))
    return sections


def utilization_sections(found: Utilization) -> list[Section]:
    """Sections of the page of mfu."""
    facts = Table(
        "Utilization", ("what", "measured"), tuple(utilization_facts(found).items()), words=("what", "measured")
    )
    sections: list[Section] = [
        facts,
        table_of("By FLOP convention", convention_columns(found)),
        table_of("By peak", peak_columns(found)),
    ]
    if found.waterfall:
        sections.append(waterfall_figure(found))
        named = [column for column in waterfall_columns(found) if column.name]  # the figure has its own bars
        sections.append(table_of("From peak to measured", named))
        sections.append(table_of("What is reachable", reachable_columns(found), note=reachable_words(found)))
    if found.notes:
        sections.append(Words("Notes", list(found.notes)))
    return sections
