"""Devices side by side: table and page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, fill, print_notes, print_table
from shapewright.app.report.predict import describe_job, with_utilization
from shapewright.core.units import format_percent
from shapewright.pricing.software import TUNED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from shapewright.app.report.outputs.compare import ComparedDeviceOutput, CompareOutput

# Bounds below this share of the step are omitted from the table; the JSON has all.
_SHOWN_FROM_FRACTION = 0.01

_COLUMNS = (
    Column("device", "{name}", is_text=True),
    Column("format", "{workload.dtype}", rank=5, is_text=True),
    Column("step", "{step_time_s}"),
    Column("90 % interval", "{step_time_low_s} to {step_time_high_s}"),
    Column("tokens/s", "{tokens_per_s:,.0f}"),
    Column("speed", "{speed_fraction:.2f}x"),
    Column("MFU", "{mfu}", rank=1),
    Column("memory", lambda row: fill("{total_bytes} of {capacity_bytes}", row) + _fit_words(row), rank=1),
    Column("tokens/$", "{tokens_per_usd:count}", rank=2),
    Column("tokens/J", "{tokens_per_joule:amount}", rank=2),
    Column("bound by", lambda row: _bound_words(row.bound_fractions), rank=3, is_text=True),
)


def _fit_words(row: ComparedDeviceOutput) -> str:
    return "" if row.fits else ", does not fit"


def _bound_words(fractions: Mapping[str, float]) -> str:
    ranked = sorted(fractions.items(), key=lambda entry: -entry[1])
    return ", ".join(f"{name} {format_percent(share)}" for name, share in ranked if share >= _SHOWN_FROM_FRACTION)


def print_comparison(output: CompareOutput, console: Console) -> None:
    """Print a table of the devices that run the job, then the others with the reason."""
    job = job_words(output)
    if job:
        console.print(job, style="bold", soft_wrap=True)
        print_table(comparison_columns(output), console)
    for line in refusal_lines(output):
        console.print(line, style="bold red", soft_wrap=True)
    print_notes(output.notes, console)


def refusal_lines(output: CompareOutput) -> list[str]:
    """Devices that cannot run the job, those with the same reason in one line."""
    names: dict[tuple[str, bool], list[str]] = {}
    for row in output.devices:
        if not row.runs:
            names.setdefault((row.problem_statement, row.problem_statement != row.problem), []).append(row.name)
    lines = []
    for (statement, is_about_device), devices in names.items():
        subject = f"{devices[0] if len(devices) == 1 else 'each'} " if is_about_device else ""
        lines.append(f"{', '.join(devices)}: cannot run the job: {subject}{statement}")
    return lines


def job_words(output: CompareOutput) -> str:
    """The job in one line; empty where no device runs it."""
    if output.config is None or output.workload is None or output.layout is None:
        return ""
    return describe_job(
        output.config,
        output.workload,
        output.layout.layout,
        num_parameters=output.parameters or 0,
        tokens_per_step=output.tokens_per_step or 0,
        software=output.software or TUNED,
    )


def comparison_columns(output: CompareOutput) -> list[Column]:
    """Devices that run the job, one row each, as the columns of a table."""
    phase = output.workload.phase if output.workload is not None else ""
    return columns_of((row for row in output.devices if row.runs), with_utilization(_COLUMNS, phase))


def comparison_page(output: CompareOutput) -> str:
    """Render a comparison as one HTML document."""
    from shapewright.app.figures.devices import comparison_chart, worth_charts
    from shapewright.app.report.page import Figure, Section, Words, render_page, table_of

    charts = [comparison_chart(output), *worth_charts(output)]
    figures = [Figure(chart, caption=chart.alt, chart_height_px=110 + 32 * len(chart.categories)) for chart in charts]
    sections: list[Section] = [figures[0], table_of("Devices", comparison_columns(output)), *figures[1:]]
    job = job_words(output)
    if job:
        sections.insert(0, Words("The job", [job]))
    problems = refusal_lines(output)
    if problems or output.notes:
        sections.append(Words("Notes", [*problems, *output.notes]))
    return render_page("The same job on several devices", sections)
