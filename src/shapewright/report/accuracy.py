"""Accuracy as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.report.columns import Column, columns_of, print_table
from shapewright.units import format_percent

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.accuracy import Accuracy, Judgement

# Covered is the share inside the 90 % interval,
# roofline the mean error of that bound, regret how much slower than the measured best of its size the shape is that
# predictions choose: median, and p90.
_WORDS = (
    Column("table", is_text=True),
    Column("device", is_text=True),
    Column("dtype", is_text=True),
    Column("library", rank=2, is_text=True),
)
_EXTRA_WORDS = {
    "part": Column("part", rank=1, is_text=True),
    "decade": Column("measured time", is_text=True),
    "file": Column("file", is_text=True),
}
_FIGURES = (
    Column("rows"),
    Column("mean error"),
    Column("median", rank=2),
    Column("p90", rank=2),
    Column("bias (ln)", rank=1),
    Column("Kendall tau"),
    Column("covered", rank=1),
    Column("roofline", rank=1),
)
_REGRETS = (Column("sizes"), Column("regret"), Column("regret p90"))
_KEYS = ("table", "device", "dtype", "library")
_FIGURE_KEYS = (
    "rows",
    "mape",
    "median_ape",
    "p90_ape",
    "bias",
    "kendall_tau",
    "coverage_90",
    "roofline_mape",
)
_MORE_KEYS = ("interval_width", "file")
_REGRET_KEYS = ("regret_groups", "regret_median", "regret_p90")
# Where JSON says it as --by does.
_JSON_KEYS = {"decade": "size"}
# Reasons for leaving rows out that are listed for each table; the rest is counted.
_MOST_REASONS = 20


def accuracy_to_json(judgement: Judgement, *, regret: bool = False) -> list[dict[str, Any]]:
    """One object for each row of the table: what every row has, then part and decade where they are told apart."""
    told_apart = tuple(key for key in _extra_words(judgement) if key != "file")
    keys = (*_KEYS, *_FIGURE_KEYS, *_MORE_KEYS, *told_apart, *(_REGRET_KEYS if regret else ()))
    return [{_JSON_KEYS.get(key, key): facts[key] for key in keys} for facts in map(asdict, judgement.rows)]


def print_accuracy(judgement: Judgement, console: Console, *, regret: bool = False) -> None:
    """Print the table, then what is to be known of it."""
    extra = _extra_words(judgement)
    headings = (*_WORDS, *(_EXTRA_WORDS[key] for key in extra), *_FIGURES, *(_REGRETS if regret else ()))
    cells = (_cells(row, extra) + (_regret_cells(row) if regret else []) for row in judgement.rows)
    print_table(columns_of(cells, headings), console)
    for line in remark_lines(judgement):
        console.print(line, soft_wrap=True)


def remark_lines(judgement: Judgement) -> list[str]:
    """Notes, rows left out with their reasons, and files that could not be judged."""
    lines = [f"note: {note}" for note in judgement.notes]
    for table, reasons in judgement.skipped.items():
        listed = list(reasons.items())
        lines += [f"{table}: skipped {count:,} {_rows(count)}: {reason}" for reason, count in listed[:_MOST_REASONS]]
        rest = listed[_MOST_REASONS:]
        if rest:
            total = sum(count for _, count in rest)
            lines.append(f"{table}: skipped {total:,} rows for {len(rest)} other reasons, such as: {rest[0][0]}")
    lines += [f"{table}: not judged: {reason}" for table, reason in judgement.unreadable.items()]
    return lines


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _extra_words(judgement: Judgement) -> tuple[str, ...]:
    """Part and decade, where any row has one, and the file, where one table comes from several."""
    told_apart = [key for key in ("part", "decade") if any(getattr(row, key) != "all" for row in judgement.rows)]
    files = {(row.table, row.file) for row in judgement.rows}
    return (*told_apart, *(["file"] if len(files) > len({table for table, _ in files}) else []))


def _cells(row: Accuracy, extra: tuple[str, ...]) -> list[str]:
    words = [getattr(row, key) for key in (*_KEYS, *extra)]
    tau = "" if row.kendall_tau is None else f"{row.kendall_tau:.3f}"
    return [
        *words,
        f"{row.rows:,}",
        format_percent(row.mape),
        format_percent(row.median_ape),
        format_percent(row.p90_ape),
        f"{row.bias:+.3f}",
        tau,
        format_percent(row.coverage_90),
        format_percent(row.roofline_mape),
    ]


def _regret_cells(row: Accuracy) -> list[str]:
    """Groups of alternatives, and how much slower than the best the chosen one is."""
    if row.regret_median is None or row.regret_p90 is None:
        return ["", "", ""]
    return [f"{row.regret_groups:,}", format_percent(row.regret_median), format_percent(row.regret_p90)]
