"""Sweeps as a table: one row per combination."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.step.predict import name_utilization
from shapewright.core.units import format_bytes, format_count, format_percent, format_seconds
from shapewright.prediction.sweep import SWEPT_SIZES

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.sweep import Sweep, SweptStep

_COLUMNS = (
    Column("time"),
    Column("90 % interval", rank=3),
    Column("tokens/s/device"),
    Column("tokens/s/sequence", rank=2),
    Column("MFU", rank=1),
    Column("memory", rank=1),
    Column("", is_text=True),
)


def print_sweep(found: Sweep, console: Console) -> None:
    """Print one row per combination; rows that cannot run have the reason."""
    first = next(row.prediction for row in found.rows if row.prediction is not None)
    name = found.config.title
    console.print(
        f"{name} on {found.device.title}: {first.workload.phase}, {first.workload.dtype}", style="bold", soft_wrap=True
    )
    utilization = "MFU" if "phase" in found.axes else name_utilization(first.workload.phase)
    # Swept sizes change the number of parameters, which is shown too.
    sizes = [Column("parameters")] if set(SWEPT_SIZES) & set(found.axes) else []
    headings = [
        *(Column(field) for field in found.axes),
        *sizes,
        *(replace(each, name=utilization) if each.name == "MFU" else each for each in _COLUMNS),
    ]
    rows = [
        [*(str(row.values[field]) for field in found.axes), *_parameters(row)[: len(sizes)], *_cells(row, utilization)]
        for row in found.rows
    ]
    print_table(columns_of(rows, headings), console)
    print_notes(found.notes, console)


def _fits(prediction: Prediction) -> bool:
    return prediction.memory.total_bytes <= prediction.device.memory_bytes


def _parameters(row: SweptStep) -> list[str]:
    return ["" if row.prediction is None else format_count(row.prediction.parameters.total)]


def _cells(row: SweptStep, utilization: str) -> list[str]:
    prediction = row.prediction
    if prediction is None:
        return ["", "", "", "", "", "", row.problem]
    low, high = prediction.step_time_low_s, prediction.step_time_high_s
    per_sequence = prediction.workload.query_len / prediction.step_time_s
    return [
        format_seconds(prediction.step_time_s),
        f"{format_seconds(low)} to {format_seconds(high)}",
        f"{prediction.tokens_per_s_per_device:,.0f}",
        "" if prediction.workload.is_training else f"{per_sequence:,.1f}",
        format_percent(prediction.mbu if utilization == "MBU" else prediction.mfu),
        format_bytes(prediction.memory.total_bytes),
        "" if _fits(prediction) else "does not fit",
    ]
