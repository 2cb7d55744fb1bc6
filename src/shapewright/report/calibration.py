"""What a fit came to, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.report.columns import Column, columns_of, print_table
from shapewright.units import format_percent

if TYPE_CHECKING:
    from rich.console import Console

_NAMES = (
    Column("records", is_text=True),
    Column("part", is_text=True),
    Column("held-out rows"),
    Column("mean error"),
    Column("median", rank=1),
    Column("p90", rank=1),
    Column("bias", rank=1),
)


def print_calibration(
    device: str, path: str, errors: Sequence[Mapping[str, Any]], remarks: Sequence[str], console: Console
) -> None:
    """Print held-out errors, what the reader must know, and how to use the file."""
    print_table(columns_of((_cells(row) for row in errors), _NAMES), console)
    for remark in remarks:
        console.print(f"note: {remark}", soft_wrap=True)
    console.print(f"wrote {path}; use it with --device {device} --calibration {path}", soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        str(row["kind"]),
        str(row["part"]),
        f"{row['rows']:,}",
        format_percent(row["mape"]),
        format_percent(row["median_ape"]),
        format_percent(row["p90_ape"]),
        f"{row['bias']:+.3f}",
    ]
