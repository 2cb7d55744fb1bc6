"""Devices side by side: a table and JSON."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from shapewright.report.columns import Column, columns_of, print_notes, print_table
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.report.prediction_text import describe, name_utilization
from shapewright.report.question_json import device_to_json
from shapewright.units import format_bytes, format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.compare import ComparedDevice, Comparison

# A bound below this share of the step is left out of the table; the JSON has them all.
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
    Column("waits for", rank=3, is_text=True),
)


def comparison_to_json(found: Comparison) -> dict[str, Any]:
    """Turn the comparison into plain values; units stand in the keys."""
    first = next((row.prediction for row in found.rows if row.prediction is not None), None)
    return {
        "schema_version": SCHEMA_VERSION,
        "config": None if first is None else asdict(first.config),
        "software": None if first is None else first.software,
        "layout": None if first is None else {**asdict(first.layout), "num_devices": first.layout.num_devices},
        "devices": [_row_to_json(found, row) for row in found.rows],
        "notes": list(found.notes),
    }


def _row_to_json(found: Comparison, row: ComparedDevice) -> dict[str, Any]:
    """One device; what it has not is null."""
    prediction = row.prediction
    facts: dict[str, Any] = {
        **device_to_json(row.device),
        "runs": prediction is not None,
        "problem": row.problem,
        "fits": row.fits,
        "capacity_bytes": row.device.memory_bytes,
        "usd_per_hour": row.usd_per_hour,
        "tdp_watts": row.device.tdp_watts,
        "tokens_per_s": row.tokens_per_s,
        "speed_fraction": found.speed_fraction(row),
        "tokens_per_usd": row.tokens_per_usd,
        "tokens_per_joule": row.tokens_per_joule,
        "bound_by": row.bound_by or None,
        "bound_fractions": row.bound_fractions,
    }
    names = ("step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s_per_device", "mfu", "hfu", "mbu")
    facts |= {name: None if prediction is None else getattr(prediction, name) for name in names}
    facts["total_bytes"] = None if prediction is None else prediction.memory.total_bytes
    facts["workload"] = None if prediction is None else asdict(prediction.workload)
    return facts


def print_comparison(found: Comparison, console: Console) -> None:
    """Print the devices that run the job as a table, then those that do not, with the reason."""
    job = job_words(found)
    if job:
        console.print(job, style="bold", soft_wrap=True)
        print_table(comparison_columns(found), console)
    for line in refusal_lines(found):
        console.print(line, style="bold red", soft_wrap=True)
    print_notes(found.notes, console)


def refusal_lines(found: Comparison) -> list[str]:
    """Devices that do not run the job and why, those with the same reason in one line."""
    names: dict[str, list[str]] = {}
    for row in found.rows:
        if row.prediction is None:
            of_each = row.problem.removeprefix(row.device.name)
            names.setdefault(of_each, []).append(row.device.name)
    lines = []
    for reason, devices in names.items():
        begins_with_device = reason.startswith(" ")
        subject = "" if not begins_with_device else devices[0] if len(devices) == 1 else "each"
        lines.append(f"{', '.join(devices)}: cannot run it: {subject}{reason}")
    return lines


def job_words(found: Comparison) -> str:
    """The job that all devices run, in one line; empty where none runs it."""
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
