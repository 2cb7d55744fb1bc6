"""Text tables: on a narrow terminal columns are dropped by rank instead of wrapped, and named below the table.

An interval has rank 1: of the columns that can be dropped it goes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapewright.app.report.flags import with_flags

if TYPE_CHECKING:
    from rich.console import Console

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Heading.
        cells: One text per row; empty before columns_of fills it.
        rank: Order in which columns of a table that is too wide are dropped: highest first, 0 never.
        is_text: Whether the column is left-aligned, as text is, or right-aligned, as numbers are.
        short_cells: Shorter texts, for tables that are too wide with the columns of rank 0 to 2; empty for none.
    """

    name: str
    cells: tuple[str, ...] = ()
    rank: int = 0
    is_text: bool = False
    short_cells: tuple[str, ...] = ()

    @property
    def num_characters(self) -> int:
        """Width of the longest text."""
        return max(map(len, (self.name, *self.cells)))

    def lines(self) -> list[str]:
        """Heading and cells, padded to the width of the column."""
        place = "<" if self.is_text else ">"
        return [f"{text:{place}{self.num_characters}}" for text in (self.name, *self.cells)]


def columns_of(rows: Iterable[Sequence[str]], headings: Sequence[Column]) -> list[Column]:
    """Fill columns with rows.

    Args:
        rows: Texts, row by row.
        headings: Columns without cells.
    """
    cells = list(zip(*rows, strict=True)) or [()] * len(headings)
    return [replace(column, cells=tuple(texts)) for column, texts in zip(headings, cells, strict=True)]


def fit(columns: Sequence[Column], num_characters: int) -> list[Column]:
    """Keep the columns of rank 0, and the others by rank, lowest first, as long as they fit ``num_characters``.

    >>> wide = [Column("name", ("gpt2",)), Column("time", ("1 ms",)), Column("why", ("it is slow",), rank=1)]
    >>> [column.name for column in fit(wide, 80)], [column.name for column in fit(wide, 12)]
    (['name', 'time', 'why'], ['name', 'time'])
    """
    if _total([column for column in columns if column.rank <= 2 and any(column.cells)]) > num_characters:
        columns = [replace(column, cells=column.short_cells or column.cells) for column in columns]
    kept = [column for column in columns if column.rank == 0]
    for column in sorted(columns, key=lambda column: column.rank):
        if column.rank and any(column.cells) and _total([*kept, column]) <= num_characters:
            kept.append(column)
    return [column for column in columns if column in kept]


def print_columns(columns: Sequence[Column], console: Console) -> None:
    """Print a table: a dim heading, then its rows, each on one line."""
    if not columns:
        return
    lines = [_GAP.join(parts).rstrip() for parts in zip(*(column.lines() for column in columns), strict=True)]
    for index, line in enumerate(lines):
        console.print(line, style="dim" if index == 0 else None, soft_wrap=True)


def print_table(columns: Sequence[Column], console: Console) -> None:
    """Print the columns of a table that fit the width of the console, and name the others."""
    shown = fit(columns, console.width)
    print_columns(shown, console)
    names = {column.name for column in shown}
    left_out = [column.name.strip() for column in columns if column.name not in names and any(column.cells)]
    if left_out:
        words = ", ".join(dict.fromkeys(name for name in left_out if name))
        console.print(f"not shown at {console.width} columns: {words}", style="dim", soft_wrap=True)


def print_facts(facts: dict[str, str], console: Console) -> None:
    """Print names and values in one row, or one per line where the row is too wide."""
    row = [Column(name, (value,), is_text=True) for name, value in facts.items()]
    if _total(row) <= console.width:
        print_columns(row, console)
        return
    margin = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:<{margin}}{_GAP}{value}", soft_wrap=True)


def print_notes(lines: Iterable[str], console: Console) -> None:
    """Print notes, one per line, with flags in place of fields."""
    for line in lines:
        console.print(f"note: {with_flags(line)}", style="yellow", soft_wrap=True)


def _total(columns: Sequence[Column]) -> int:
    return sum(column.num_characters for column in columns) + len(_GAP) * (len(columns) - 1)
