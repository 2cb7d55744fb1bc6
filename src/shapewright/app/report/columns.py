"""Text tables: columns with the way their cells follow from a row, and what a narrow terminal shows of them.

On a narrow terminal columns are dropped by rank and named below the table. Those of rank 0 stay: what identifies a row,
its result, and the 90 % interval of the result, which is shown in the column before it where there is little room.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from shapewright.app.report.flags import with_flags
from shapewright.core.records import dataclass
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
_INTERVAL = "90 % interval"
JOINED = " (90 %)"
"""End of the name of a column that holds values and their intervals."""
_ENDS = re.compile(r"(\S+)( \S+)? to (\S+)( \S+)?")
_LEAST_WRAPPED = 10
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
        """Width of the longest line."""
        return max(len(line) for text in (self.name, *self.cells) for line in text.split("\n"))

    def lines(self) -> list[str]:
        """Heading and cells, padded to the width of the column."""
        return [self.pad(text) for text in (self.name, *self.cells)]

    def pad(self, line: str) -> str:
        """A line of a cell, padded to the width of the column."""
        return f"{line:{'<' if self.is_text else '>'}{self.num_characters}}"


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

    Where those of rank 0 alone are too wide, intervals are joined to the column before them, then the widest text is
    wrapped.

    >>> wide = columns_of([("gpt2", "1 ms", "it is slow")], [Column("name"), Column("time"), Column("why", rank=1)])
    >>> [column.name for column in fit(wide, 80)], [column.name for column in fit(wide, 12)]
    (['name', 'time', 'why'], ['name', 'time'])
    """
    if _total([column for column in columns if column.rank <= 2 and any(column.cells)]) > num_characters:
        columns = [replace(column, cells=column.short_cells or column.cells) for column in columns]
    if _total(_fixed(columns)) > num_characters:
        columns = _join_intervals(columns)
    too_much = _total(_fixed(columns)) - num_characters
    if too_much > 0:
        texts = [column for column in _fixed(columns) if column.is_text]
        widest = max(texts, key=lambda column: column.num_characters, default=None)
        columns = [_wrap(each, each.num_characters - too_much) if each is widest else each for each in columns]
    kept = _fixed(columns)
    for column in sorted(columns, key=lambda column: column.rank):
        if column.rank and any(column.cells) and _total([*kept, column]) <= num_characters:
            kept.append(column)
    return [column for column in columns if column in kept]


def _fixed(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that are never dropped, without those that are empty in every row."""
    return [column for column in columns if column.rank == 0 and (any(column.cells) or not column.cells)]


def _join_intervals(columns: Sequence[Column]) -> list[Column]:
    """Write each interval behind the value that it is of: ``24.3 s (19.9-41.5)``."""
    joined: list[Column] = []
    for column in columns:
        if joined and column.rank == 0 and column.name.startswith(_INTERVAL):
            value = joined.pop()
            cells = tuple(map(_with_interval, value.cells, column.cells))
            joined.append(replace(value, name=f"{value.name.rstrip()}{JOINED}", cells=cells))
        else:
            joined.append(column)
    return joined


def _with_interval(value: str, interval: str) -> str:
    """Join a value and its interval, each unit once.

    >>> _with_interval("24.3 s", "19.9 s to 41.5 s"), _with_interval("716 ms", "588 ms to 1.23 s")
    ('24.3 s (19.9-41.5)', '716 ms (588 ms-1.23 s)')
    """
    found = _ENDS.fullmatch(interval)
    if found is None:
        return value
    low, low_unit, high, high_unit = (part or "" for part in found.groups())
    if low_unit == high_unit:
        low_unit, high_unit = "", "" if value.endswith(high_unit) else high_unit
    return f"{value} ({low}{low_unit}-{high}{high_unit})"


def _wrap(column: Column, width: int) -> Column:
    """Break the texts of a column behind commas and plus signs."""
    cells = []
    for cell in column.cells:
        parts = re.sub(r"(?<![,+]) ", "\N{NO-BREAK SPACE}", cell)
        lines = textwrap.wrap(parts, max(width, _LEAST_WRAPPED), break_long_words=False, break_on_hyphens=False)
        cells.append("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "))
    return replace(column, cells=tuple(cells))


def spread(points: Sequence[T], most: int) -> list[T]:
    """At most some of the points, evenly spread, both ends among them.

    >>> spread([1, 2, 3, 4, 5], 3)
    [1, 3, 5]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def print_columns(columns: Sequence[Column], console: Console) -> None:
    """Print a table: a dim heading, then its rows."""
    if not columns:
        return
    for index, row in enumerate(zip(*((column.name, *column.cells) for column in columns), strict=True)):
        for parts in zip_longest(*(text.split("\n") for text in row), fillvalue=""):
            line = _GAP.join(column.pad(part) for column, part in zip(columns, parts, strict=True)).rstrip()
            console.print(line, style="dim" if index == 0 else None, soft_wrap=True)


def print_table(columns: Sequence[Column], console: Console) -> None:
    """Print the columns of a table that fit the width of the console, and name the others."""
    shown = fit(columns, console.width)
    print_columns(shown, console)
    names = {column.name for column in shown}
    left_out = [each.name.strip() for each in columns if each.rank and each.name not in names and any(each.cells)]
    if left_out:
        words = ", ".join(dict.fromkeys(name for name in left_out if name))
        console.print(f"not shown at {console.width} columns: {words}", style="dim", soft_wrap=True)


def print_facts(facts: dict[str, str], console: Console) -> None:
    """Print names and values in one row, or one per line where the row is too wide."""
    row = [Column(name, cells=(value,), is_text=True) for name, value in facts.items()]
    if _total(row) <= console.width:
        print_columns(row, console)
        return
    print_fact_lines(facts, console)


def print_fact_lines(facts: dict[str, str], console: Console) -> None:
    """Print names and values, one per line."""
    margin = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:<{margin}}{_GAP}{value}", soft_wrap=True)


def print_notes(lines: Iterable[str], console: Console) -> None:
    """Print notes, one per line, with flags in place of fields."""
    for line in lines:
        console.print(f"note: {with_flags(line)}", style="yellow", soft_wrap=True)


def _total(columns: Sequence[Column]) -> int:
    return sum(column.num_characters for column in columns) + len(_GAP) * (len(columns) - 1)
