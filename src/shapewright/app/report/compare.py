"""Devices side by side as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.predict import describe, name_utilization
from shapewright.core.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.prediction.compare import Comparison

# Bounds below this share of the step are omitted from the table; the JSON has all.
_SHOWN_FROM_FRACTION = 0.01

_COLUMNS = (
    Column("device", is_text=True),
    Column("format", rank=5, is_text=True),
    Column("step"),
    Column("90 % interval", rank=4),
    Column("tokens/s"),
    Column("speed"),
    Column("MFU", rank=1),
    Column("memory", rank=1),
    Column("tokens/$", rank=2),
    Column("tokens/J", rank=2),
    Column("bound by", rank=3, is_text=True),
)


def print_comparison(found: Comparison, console: Console) -> None:
    """Print a table of the devices that run the job, then the others with the reason."""
    job = job_words(found)
    if job:
        console.print(job, style="bold", soft_wrap=True)
        print_table(comparison_columns(found), console)
    for line in refusal_lines(found):
        console.print(line, style="bold red", soft_wrap=True)
    print_notes(found.notes, console)


def refusal_lines(found: Comparison) -> list[str]:
    """Devices that cannot run the job, those with the same reason in one line."""
    names: dict[str, list[str]] = {}
    for row in found.rows:
        if row.prediction is None:
            of_each = row.problem.removeprefix(row.device.name)
            names.setdefault(of_each, []).append(row.device.name)
    lines = []
    for reason, devices in names.items():
        begins_with_device = reason.startswith(" ")
        subject = "" if not begins_with_device else devices[0] if len(devices) == 1 else "each"
        lines.append(f"{', '.join(devices)}: cannot run the job: {subject}{reason}")
    return lines


def job_words(found: Comparison) -> str:
    """The job in one line; empty where no device runs it."""
    for row in found.rows:
        if row.prediction is not None:
            return describe(row.prediction).replace(f" on {row.device.title}", "", 1)
    return ""


def comparison_columns(found: Comparison) -> list[Column]:
    """Devices that run the job, one row each, as the columns of a table."""
    rows = []
    utilization = "MFU"
    for row in found.rows:
        prediction = row.prediction
        if prediction is None:
            continue
        utilization = name_utilization(prediction.workload.phase)
        low, high = prediction.step_time_low_s, prediction.step_time_high_s
        bounds = sorted(row.bound_fractions.items(), key=lambda entry: -entry[1])
        rows.append(
            [
                row.device.name,
                prediction.workload.dtype,
                format_seconds(prediction.step_time_s),
                f"{format_seconds(low)} to {format_seconds(high)}",
                f"{row.tokens_per_s or 0:,.0f}",
                f"{found.speed_fraction(row) or 0:.2f}x",
                format_percent(prediction.mbu if utilization == "MBU" else prediction.mfu),
                format_bytes(prediction.memory.total_bytes)
                + f" of {format_bytes(row.device.memory_bytes)}"
                + ("" if row.fits else ", does not fit"),
                "" if row.tokens_per_usd is None else format_count(row.tokens_per_usd),
                "" if row.tokens_per_joule is None else f"{row.tokens_per_joule:.3g}",
                ", ".join(
                    f"{bound} {format_percent(fraction)}"
                    for bound, fraction in bounds
                    if fraction >= _SHOWN_FROM_FRACTION
                ),
            ]
        )
    headings = [replace(each, name=utilization) if each.name == "MFU" else each for each in _COLUMNS]
    return columns_of(rows, headings)
