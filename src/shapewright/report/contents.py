"""What a store holds, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.report.columns import Column, columns_of, print_table
from shapewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.store.contents import Contents, Group

_NAMES = (
    Column("suite", is_text=True),
    Column("device", is_text=True),
    Column("kind", is_text=True),
    Column("dtype", is_text=True),
    Column("rows"),
    Column("failed", rank=1),
    Column("median from", rank=1),
    Column("to", rank=1),
    Column("GFLOP from", rank=3),
    Column("to", rank=3),
    Column("last measured", rank=2, is_text=True),
    Column("library", rank=4, is_text=True),
)


def print_contents(contents: Contents, console: Console) -> None:
    """Print one line for each group, and one for the whole store."""
    if contents.groups:
        print_table(columns_of((_cells(group) for group in contents.groups), _NAMES), console)
    total = sum(contents.statuses.values())
    words = ", ".join(f"{number:,} {status}" for status, number in sorted(contents.statuses.items()))
    console.print(
        f"{contents.path}: {total:,} rows{f' ({words})' if words else ''} of {contents.num_runs} runs, "
        f"{format_bytes(contents.file_bytes)}, schema version {contents.schema_version}",
        soft_wrap=True,
    )


def _cells(group: Group) -> list[str]:
    return [
        group.suite,
        group.device,
        group.kind,
        group.dtype,
        f"{group.rows:,}",
        f"{group.failed:,}" if group.failed else "",
        "" if group.least_s is None else format_seconds(group.least_s),
        "" if group.most_s is None else format_seconds(group.most_s),
        f"{group.least_flops / 1e9:.3g}" if group.most_flops else "",
        f"{group.most_flops / 1e9:.3g}" if group.most_flops else "",
        group.last_utc[:16].replace("T", " "),
        group.library,
    ]
