"""Baseline and one shape of a search by operation, sorted by saved time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_table
from shapewright.app.report.optimize.search_rows import describe_measures
from shapewright.app.report.outputs.predict import OperationOutput, operation_output
from shapewright.app.report.outputs.search import candidate_output, describe_changes, describe_gain
from shapewright.core.units import TERA, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.optimize.search import Candidate, SearchResult
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.predict import Prediction

_COLUMNS = (
    Column("operation", is_text=True),
    Column("pass", rank=3, is_text=True),
    Column("baseline", rank=2, is_text=True),
    Column("shape", rank=2, is_text=True),
    Column("before"),
    Column("after"),
    Column("share saved"),
    Column("TFLOP/s", rank=1, is_text=True),
    Column("aligned to", rank=4, is_text=True),
    Column("tiles full", rank=5, is_text=True),
    Column("waves full", rank=6, is_text=True),
)


def print_side_by_side(result: SearchResult, candidate: Candidate, console: Console) -> None:
    """Print baseline and one shape, operation by operation.

    Args:
        result: The search, with the baseline.
        candidate: The shape.
        console: Console to print on.
    """
    shown = candidate_output(candidate)
    console.print(f"rank {shown.rank}: {describe_changes(shown)}; {describe_gain(shown)}", style="bold")
    columns = columns_of(_rows(result.baseline.prediction, candidate.prediction), _COLUMNS)
    print_table(columns, console)
    moved = describe_measures(shown)
    if moved:
        console.print(f"moves {moved}", style="dim", soft_wrap=True)


def _rows(baseline: Prediction, candidate: Prediction) -> list[list[str]]:
    """Operations by saved time, largest first, for equal numbers of tokens."""
    work = baseline.tokens_per_step / candidate.tokens_per_step
    old, new = (
        {(entry.operation.name, entry.operation.pass_name): entry for entry in prediction.busiest_operations}
        for prediction in (baseline, candidate)
    )
    rows = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        before_s = before.total_time_s if before else 0.0
        after_s = work * after.total_time_s if after else 0.0
        saved = (before_s - after_s) / baseline.step_time_s
        rows.append((saved, [*key, *_cells(before, after, before_s, after_s, saved)]))
    return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]


def _cells(
    before: PricedOperation | None, after: PricedOperation | None, before_s: float, after_s: float, saved: float
) -> list[str]:
    outputs = [operation_output(entry) if entry else None for entry in (before, after)]
    return [
        *("-" if output is None else output.shape for output in outputs),
        format_seconds(before_s),
        format_seconds(after_s),
        f"{100.0 * saved:+.2f} %",
        _pair(outputs, lambda one: f"{one.flops / one.time_s / TERA:.0f}" if one.flops else ""),
        _pair(outputs, lambda one: str(one.alignment or "")),
        _pair(outputs, lambda one: _percent(one.tile_efficiency)),
        _pair(outputs, lambda one: _percent(one.wave_efficiency)),
    ]


def _pair(outputs: Sequence[OperationOutput | None], describe: Callable[[OperationOutput], str]) -> str:
    """One text for both sides where they agree, else ``before -> after``."""
    before, after = ("" if output is None else describe(output) for output in outputs)
    if not before and not after:
        return ""
    return before if before == after else f"{before or '-'} -> {after or '-'}"


def _percent(fraction: float | None) -> str:
    return f"{100.0 * fraction:.0f} %" if fraction is not None else ""
