"""Text tables: columns with the way their cells follow from a row, and what a narrow terminal shows of them.

On a narrow terminal columns are dropped by rank instead of wrapped, and named below the table. An interval has rank 1:
of the columns that can be dropped it goes last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from shapewright.app.report.flags import with_flags
from shapewright.core.units import (
    format_amount,
    format_bytes,
    format_count,
    format_percent,
    format_rate,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

_GAP = "  "
_FIELD = re.compile(r"\{([\w.]+)(?::([^}]*))?\}")
# Formats by the ending of a field, which is its unit.
_BY_UNIT: tuple[tuple[tuple[str, ...], Callable[[float], str]], ...] = (
    (("flops_per_s", "flops_per_s_per_device"), format_rate),
    (("_per_s", "_per_user", "_per_device"), str),
    (("_s",), format_seconds),
    (("_bytes",), format_bytes),
    (("fraction", "mfu", "hfu", "mbu", "_ape", "mape"), format_percent),
)
_BY_NAME: dict[str, Callable[[float], str]] = {
    "amount": format_amount,
    "bytes": format_bytes,
    "count": format_count,
    "percent": format_percent,
}


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: Heading.
        cell: How a cell follows from a row: a text with fields of the row in braces, see fill, or a function; empty
            where rows are sequences of texts.
        rank: Order in which columns of a table that is too wide are dropped: highest first, 0 never.
        is_text: Whether the column is left-aligned, as text is, or right-aligned, as numbers are.
        cells: One text per row; empty before columns_of fills it.
        short_cells: Shorter texts, for tables that are too wide with the columns of rank 0 to 2; empty for none.
    """

    name: str
    cell: str | Callable[[Any], str] = ""
    rank: int = 0
    is_text: bool = False
    cells: tuple[str, ...] = ()
    short_cells: tuple[str, ...] = ()

    @property
    def num_characters(self) -> int:
        """Width of the longest text."""
        return max(map(len, (self.name, *self.cells)))

    def lines(self) -> list[str]:
        """Heading and cells, padded to the width of the column."""
        place = "<" if self.is_text else ">"
        return [f"{text:{place}{self.num_characters}}" for text in (self.name, *self.cells)]


def fill(template: str, row: object) -> str:
    """Text with the fields of a row in place of their names in braces; empty where one of them is None.

    A field is formatted by its ending, which is its unit, or by what follows a colon: a format of Python, ``amount``,
    ``bytes``, ``count``, ``percent``, or ``.0p`` for a percentage with a number of decimals.

    >>> from types import SimpleNamespace
    >>> row = SimpleNamespace(low_s=0.5, high_s=2.0, gain=0.123, energy=None)
    >>> fill("{low_s} to {high_s}", row), fill("{gain:.0p}", row), fill("{energy:.3g} kWh", row)
    ('500 ms to 2 s', '12 %', '')
    """
    start, fields = _split(template)
    texts = [start]
    for path, style, following in fields:
        value: Any = row
        for name in path:
            value = None if value is None else getattr(value, name)
        if value is None:
            return ""
        texts += _format(path[-1], value, style), following
    return "".join(texts)


@cache
def _split(template: str) -> tuple[str, tuple[tuple[list[str], str, str], ...]]:
    """Split a template of the code into its start, and each field's path, style and following text."""
    start, *rest = _FIELD.split(template)
    paths = [path.split(".") for path in rest[::3]]
    return start, tuple(zip(paths, (style or "" for style in rest[1::3]), rest[2::3], strict=True))


def _format(name: str, value: Any, style: str) -> str:
    if style in _BY_NAME:
        return _BY_NAME[style](value)
    if style.endswith("p"):
        return f"{100.0 * value:{style[:-1]}f} %"
    if style or isinstance(value, str):
        return format(value, style)
    return _form_of(name)(value)


@cache
def _form_of(name: str) -> Callable[[Any], str]:
    """Return the format of a field without a style, by the unit in its name."""
    return next((form for endings, form in _BY_UNIT if name.endswith(endings)), str)


def columns_of(rows: Iterable[Any], headings: Iterable[Column]) -> list[Column]:
    """Fill columns with rows.

    Args:
        rows: Objects whose fields the columns name, or sequences of texts.
        headings: Columns without cells.
    """
    listed = list(rows)
    return [
        replace(column, cells=tuple(_cell(column, place, row) for row in listed))
        for place, column in enumerate(headings)
    ]


def _cell(column: Column, place: int, row: Any) -> str:
    if not column.cell:
        return str(row[place])
    return fill(column.cell, row) if isinstance(column.cell, str) else column.cell(row)


def fit(columns: Sequence[Column], num_characters: int) -> list[Column]:
    """Keep the columns of rank 0, and the others by rank, lowest first, as long as they fit ``num_characters``.

    >>> wide = columns_of([("gpt2", "1 ms", "it is slow")], [Column("name"), Column("time"), Column("why", rank=1)])
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


def spread(points: Sequence[T], most: int) -> list[T]:
    """At most some of the points, evenly spread, both ends among them.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


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
    row = [Column(name, cells=(value,), is_text=True) for name, value in facts.items()]
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
