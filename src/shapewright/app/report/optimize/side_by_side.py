"""Baseline and one shape of a search by operation, sorted by saved time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from shapewright.app.report.columns import Column, columns_of, fill, print_table
from shapewright.app.report.optimize.search_rows import describe_measures
from shapewright.app.report.outputs.predict import OperationOutput, operation_output
from shapewright.app.report.outputs.search import candidate_output, describe_changes, describe_gain
from shapewright.core.units import TERA

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.optimize.search import Candidate, SearchResult
    from shapewright.prediction.predict import Prediction


class _Pair(NamedTuple):
    """An operation before and after, and its time for equal work."""

    name: str
    pass_name: str
    before: OperationOutput | None
    after: OperationOutput | None
    before_s: float
    after_s: float
    saved: float


def _both(describe: Callable[[OperationOutput], str]) -> Callable[[_Pair], str]:
    """One text for both sides where they agree, else ``before -> after``."""

    def words(pair: _Pair) -> str:
        before, after = ("" if side is None else describe(side) for side in (pair.before, pair.after))
        return before if before == after else f"{before or '-'} -> {after or '-'}"

    return words


def _rate_words(one: OperationOutput) -> str:
    return f"{one.flops / one.time_s / TERA:.0f}" if one.flops else ""


_COLUMNS = (
    Column("operation", "{name}", is_text=True),
    Column("pass", "{pass_name}", rank=3, is_text=True),
    Column("baseline", lambda pair: fill("{before.shape}", pair) or "-", rank=2, is_text=True),
    Column("shape", lambda pair: fill("{after.shape}", pair) or "-", rank=2, is_text=True),
    Column("before", "{before_s}"),
    Column("after", "{after_s}"),
    Column("share saved", "{saved:+.2p}"),
    Column("TFLOP/s", _both(_rate_words), rank=1, is_text=True),
    Column("aligned to", _both(lambda one: str(one.alignment or "")), rank=4, is_text=True),
    Column("tiles full", _both(lambda one: fill("{tile_efficiency:.0p}", one)), rank=5, is_text=True),
    Column("waves full", _both(lambda one: fill("{wave_efficiency:.0p}", one)), rank=6, is_text=True),
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
    columns = columns_of(_pairs(result.baseline.prediction, candidate.prediction), _COLUMNS)
    print_table(columns, console)
    moved = describe_measures(shown)
    if moved:
        console.print(f"moves {moved}", style="dim", soft_wrap=True)


def _pairs(baseline: Prediction, candidate: Prediction) -> list[_Pair]:
    """Operations by saved time, largest first, for equal numbers of tokens."""
    work = baseline.tokens_per_step / candidate.tokens_per_step
    old, new = (
        {(entry.operation.name, entry.operation.pass_name): entry for entry in prediction.busiest_operations}
        for prediction in (baseline, candidate)
    )
    pairs = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        before_s = before.total_time_s if before else 0.0
        after_s = work * after.total_time_s if after else 0.0
        one, other = (operation_output(entry) if entry else None for entry in (before, after))
        saved = (before_s - after_s) / baseline.step_time_s
        pairs.append(_Pair(*key, one, other, before_s, after_s, saved))
    return sorted(pairs, key=lambda pair: -pair.saved)
