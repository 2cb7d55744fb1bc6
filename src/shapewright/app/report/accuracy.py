"""Prediction errors on measured tables, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_table
from shapewright.core.units import format_percent

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.measure.accuracy.evaluate import Accuracy, Evaluation

# covered: interval coverage; roofline: mean error of the roofline bound; regret: slowdown of the shape predicted to be
# best over the best measured one of its size.
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
# Errors of losses; differences between models of one size, and share of them in the right order.
_LOSSES = (Column("nats"), Column("difference"), Column("in order"))
_KEYS = ("table", "device", "dtype", "library")
# Reasons for skipped rows that are listed per table; the others are counted.
_MOST_REASONS = 20


def print_accuracy(evaluation: Evaluation, console: Console, *, regret: bool = False) -> None:
    """Print the table and its remarks."""
    extra = separating_words(evaluation)
    losses = any(row.mean_error_nats is not None for row in evaluation.rows)
    headings = (
        *_WORDS,
        *(_EXTRA_WORDS[key] for key in extra),
        *_FIGURES,
        *(_LOSSES if losses else ()),
        *(_REGRETS if regret else ()),
    )
    cells = (
        _cells(row, extra) + (_loss_cells(row) if losses else []) + (_regret_cells(row) if regret else [])
        for row in evaluation.rows
    )
    print_table(columns_of(cells, headings), console)
    for line in remark_lines(evaluation):
        console.print(line, soft_wrap=True)


def remark_lines(evaluation: Evaluation) -> list[str]:
    """Notes, skipped rows with their reasons, and files that could not be evaluated."""
    lines = [f"note: {note}" for note in evaluation.notes]
    for table, reasons in evaluation.skipped.items():
        listed = list(reasons.items())
        lines += [f"{table}: skipped {count:,} {_rows(count)}: {reason}" for reason, count in listed[:_MOST_REASONS]]
        rest = listed[_MOST_REASONS:]
        if rest:
            total = sum(count for _, count in rest)
            lines.append(f"{table}: skipped {total:,} rows for {len(rest)} other reasons, such as: {rest[0][0]}")
    lines += [f"{table}: not evaluated: {reason}" for table, reason in evaluation.unreadable.items()]
    return lines


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def separating_words(evaluation: Evaluation) -> tuple[str, ...]:
    """Fields that separate rows: part and decade where used, and file where a table comes from several."""
    separating = [key for key in ("part", "decade") if any(getattr(row, key) != "all" for row in evaluation.rows)]
    files = {(row.table, row.file) for row in evaluation.rows}
    return (*separating, *(["file"] if len(files) > len({table for table, _ in files}) else []))


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
        "" if row.roofline_mape is None else format_percent(row.roofline_mape),
    ]


def _loss_cells(row: Accuracy) -> list[str]:
    """Errors in nats and the share of pairs in order."""
    nats = ["" if value is None else f"{value:.4f}" for value in (row.mean_error_nats, row.difference_error_nats)]
    return [*nats, "" if row.order_fraction is None else format_percent(row.order_fraction)]


def _regret_cells(row: Accuracy) -> list[str]:
    """Number of sizes with several shapes, and the ranking regret."""
    if row.regret_median is None or row.regret_p90 is None:
        return ["", "", ""]
    return [f"{row.regret_groups:,}", format_percent(row.regret_median), format_percent(row.regret_p90)]
