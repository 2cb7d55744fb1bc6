"""Pages and figures of one job: its memory, where its peak went, and the same job over devices."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from shapewright.report.capacity import REMEDIES_TITLE, offload_words, remedy_columns, stage_columns
from shapewright.report.charts import BarChart, BarPart
from shapewright.report.compare import comparison_columns, job_words, refusal_lines
from shapewright.report.design_review import memory_chart, waterfall_figure
from shapewright.report.page import Figure, Section, Table, Words, table_of
from shapewright.report.utilization import (
    convention_columns,
    peak_columns,
    reachable_columns,
    reachable_words,
    utilization_facts,
    waterfall_columns,
)
from shapewright.units import format_bytes, format_percent

if TYPE_CHECKING:
    from shapewright.capacity import Capacity
    from shapewright.compare import Comparison
    from shapewright.utilization import Utilization

_MILLISECOND_S = 1e-3


def memory_figure(capacity: Capacity) -> Figure:
    """Components of each stage against the device."""
    chart = memory_chart(capacity)
    return Figure(chart, caption=chart.alt, chart_height_px=150 + 24 * len(capacity.stages))


def memory_sections(capacity: Capacity) -> list[Section]:
    """Everything that memory says of a job."""
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
    if capacity.remedies:
        sections.append(table_of(REMEDIES_TITLE[0].upper() + REMEDIES_TITLE[1:], remedy_columns(capacity)))
    decode = capacity.workload.phase == "decode"
    facts = [
        f"largest micro_batch_size: {capacity.largest_micro_batch_size or 'none fits'}",
        f"largest {'context_len' if decode else 'seq_len'}: {capacity.largest_seq_len or 'none fits'}",
    ]
    return [*sections, Words("Beside that", [*facts, *offload_words(capacity), *capacity.notes])]


def comparison_chart(found: Comparison) -> BarChart:
    """Time of each device's step, by what it waits for."""
    rows = [row for row in found.rows if row.prediction is not None]
    bounds = [
        name for name in (rows[0].bound_fractions if rows else {}) if any(row.bound_fractions[name] for row in rows)
    ]
    fitting = [row for row in rows if row.fits]
    fastest = max(fitting or rows, key=lambda row: row.tokens_per_s or 0.0, default=None)
    return BarChart(
        title="The same job on each device",
        value_label="step (ms)",
        categories=[row.device.name + ("" if row.fits else " (does not fit)") for row in rows],
        parts=[
            BarPart(
                name,
                [
                    row.bound_fractions[name] * row.prediction.step_time_s / _MILLISECOND_S if row.prediction else 0.0
                    for row in rows
                ],
            )
            for name in bounds
        ],
        alt=f"{fastest.device.name} is fastest{' of those it fits on' if fitting else ''}."
        if fastest is not None
        else "No device runs the job.",
    )


def worth_charts(found: Comparison) -> list[BarChart]:
    """Tokens for a dollar and for a joule, where they are known of at least two devices."""
    charts = []
    for title, value_of in (
        ("Tokens for a dollar", attrgetter("tokens_per_usd")),
        ("Tokens for a joule, at board power", attrgetter("tokens_per_joule")),
    ):
        known = [(row, float(value_of(row))) for row in found.rows if value_of(row) is not None]
        if len(known) < 2:
            continue
        best = max((pair for pair in known if pair[0].fits), key=lambda pair: pair[1], default=None)
        charts.append(
            BarChart(
                title=title,
                value_label="tokens",
                categories=[row.device.name + ("" if row.fits else " (does not fit)") for row, _ in known],
                parts=[BarPart(title.lower(), [value for _, value in known])],
                alt=f"{best[0].device.name} has most of those it fits on." if best is not None else "It fits on none.",
            )
        )
    return charts


def comparison_sections(found: Comparison) -> list[Section]:
    """Everything that compare says."""
    charts = [comparison_chart(found), *worth_charts(found)]
    figures = [Figure(chart, caption=chart.alt, chart_height_px=110 + 32 * len(chart.categories)) for chart in charts]
    sections: list[Section] = [figures[0], table_of("Devices", comparison_columns(found)), *figures[1:]]
    job = job_words(found)
    if job:
        sections.insert(0, Words("The job", [job]))
    problems = refusal_lines(found)
    if problems or found.notes:
        sections.append(Words("What there is to say", [*problems, *found.notes]))
    return sections


def utilization_sections(found: Utilization) -> list[Section]:
    """Everything that mfu says."""
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
        named = [column for column in waterfall_columns(found) if column.name]  # the figure has the bars
        sections.append(table_of("From peak to measured", named))
        sections.append(table_of("What is reachable", reachable_columns(found), note=reachable_words(found)))
    if found.notes:
        sections.append(Words("What there is to say", list(found.notes)))
    return sections
