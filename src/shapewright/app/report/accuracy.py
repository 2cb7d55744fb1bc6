"""Prediction errors on measured tables, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_table

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.measure.accuracy.evaluate import Evaluation

# covered: interval coverage; roofline: mean error of the roofline bound; regret: slowdown of the shape predicted to be
# best over the best measured one of its size.
_WORDS = (
    Column("table", "{table}", is_text=True),
    Column("device", "{device}", is_text=True),
    Column("dtype", "{dtype}", is_text=True),
    Column("library", "{library}", rank=2, is_text=True),
)
_EXTRA_WORDS = {
    "part": Column("part", "{part}", rank=1, is_text=True),
    "decade": Column("measured time", "{decade}", is_text=True),
    "file": Column("file", "{file}", is_text=True),
}
_FIGURES = (
    Column("rows", "{rows:,}"),
    Column("mean error", "{mape}"),
    Column("median", "{median_ape}", rank=2),
    Column("p90", "{p90_ape}", rank=2),
    Column("bias (ln)", "{bias:+.3f}", rank=1),
    Column("Kendall tau", "{kendall_tau:.3f}"),
    Column("covered", "{coverage_90:percent}", rank=1),
    Column("roofline", "{roofline_mape}", rank=1),
)
_REGRETS = (
    Column("sizes", lambda row: "" if row.regret_median is None else f"{row.regret_groups:,}"),
    Column("regret", "{regret_median:percent}"),
    Column("regret p90", "{regret_p90:percent}"),
)
# Errors of losses; differences between models of one size, and share of them in the right order.
_LOSSES = (
    Column("nats", "{mean_error_nats:.4f}"),
    Column("difference", "{difference_error_nats:.4f}"),
    Column("in order", "{order_fraction}"),
)
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
    print_table(columns_of(evaluation.rows, headings), console)
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
