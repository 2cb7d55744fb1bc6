"""A baseline and one shape of a search, operation by operation: where the time that it saves comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.report.columns import Column, columns_of, print_table
from shapewright.report.prediction_json import operation_to_json
from shapewright.report.search_text import describe_changes, describe_measures
from shapewright.units import TERA, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.adding_up import PricedOperation
    from shapewright.predict import Prediction
    from shapewright.search import Candidate, SearchResult

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
        result: Where the baseline is.
        candidate: The shape.
        console: Where to.
    """
    console.print(
        f"rank {candidate.rank}: {describe_changes(candidate)}; {candidate.speedup.factor:.3f}x", style="bold"
    )
    columns = columns_of(_rows(result.baseline.prediction, candidate.prediction), _COLUMNS)
    print_table(columns, console)
    moved = describe_measures(candidate)
    if moved:
        console.print(f"moves {moved}", style="dim", soft_wrap=True)


def _rows(baseline: Prediction, candidate: Prediction) -> list[list[str]]:
    """Operations by what they save, the most first; times per baseline's worth of tokens."""
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
    facts = [operation_to_json(entry) if entry else {} for entry in (before, after)]
    return [
        facts[0].get("shape", "-"),
        facts[1].get("shape", "-"),
        format_seconds(before_s),
        format_seconds(after_s),
        f"{100.0 * saved:+.2f} %",
        _pair(facts, lambda fact: f"{fact['flops'] / fact['time_s'] / TERA:.0f}" if fact.get("flops") else ""),
        _pair(facts, lambda fact: str(fact.get("alignment") or "")),
        _pair(facts, lambda fact: _percent(fact.get("tile_efficiency"))),
        _pair(facts, lambda fact: _percent(fact.get("wave_efficiency"))),
    ]


def _pair(facts: list[dict[str, Any]], words: Any) -> str:
    before, after = (words(fact) if fact else "" for fact in facts)
    if not before and not after:
        return ""
    return before if before == after else f"{before or '-'} -> {after or '-'}"


def _percent(fraction: float | None) -> str:
    return f"{100.0 * fraction:.0f} %" if fraction is not None else ""
