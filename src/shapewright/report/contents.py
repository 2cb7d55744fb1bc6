"""What a store holds, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.report.columns import columns_of, print_table
from shapewright.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.store.contents import Contents, Group

# Heading, how soon it leaves a narrow terminal, whether it is words.
_NAMES = (
    ("suite", 0, True),
    ("device", 0, True),
    ("kind", 0, True),
    ("dtype", 0, True),
    ("rows", 0, False),
    ("failed", 1, False),
    ("median from", 1, False),
    ("to", 1, False),
    ("GFLOP from", 3, False),
    ("to", 3, False),
    ("last measured", 2, True),
    ("library", 4, True),
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
