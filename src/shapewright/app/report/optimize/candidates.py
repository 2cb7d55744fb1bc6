"""Shapes of a search: rows of a table, changes in words, and one shape against the baseline by operation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shapewright.app.report.columns import Column, columns_of, fill, print_table
from shapewright.app.report.outputs.check import describe_loss
from shapewright.app.report.outputs.predict import OperationOutput, operation_output
from shapewright.app.report.outputs.search import FIELD_LETTERS, candidate_output, describe_changes, describe_gain
from shapewright.core.units import TERA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shapewright.app.report.outputs.search import CandidateOutput
    from shapewright.optimize.search import Candidate, SearchResult
    from shapewright.prediction.predict import Prediction


_CANDIDATE_COLUMNS = (
    Column("rank", lambda shape: str(shape.rank or "-")),
    Column("changes", describe_changes, is_text=True),
    Column("net", "{effect.net_speedup:.3f}x"),
    Column("90 % interval", "{effect.net_speedup_low:.3f} to {effect.net_speedup_high:.3f}", rank=1),
    Column("better", "{effect.chance_better:.0p}", rank=2),
    Column("loss (nats)", lambda shape: describe_loss(shape.effect), rank=2, is_text=True),
    Column("speed-up", "{speedup:.3f}x", rank=1),
    Column("90 % interval of speed", "{speedup_low:.3f} to {speedup_high:.3f}", rank=3),
    Column("faster", "{probability_faster:.0p}", rank=4),
    Column("at equal size", "{equal_size_speedup:.3f}x", rank=4),
    Column("tokens", "{effect.tokens_to_loss:count}", rank=4),
    Column("parameters", "{parameters:count} ({parameters_change:+.2p})", rank=3),
    Column("step", "{step_time_s}", rank=5),
    Column("memory", "{memory_bytes}", rank=6),
    Column("KV/token", "{kv_bytes_per_token:bytes}", rank=7),
)
# Symbols of fields, as in docs/notation.md.
_LOSS_WORDS = (
    "loss: above the baseline's after the same tokens, at equal size, with its 90 % interval; free: other heads of "
    "64 to 256 or a padded vocabulary, the same loss (docs/decisions/0006-search.md)"
)
_MEASURE_WORDS = {
    "aspect": "width per layer",
    "head_dim": "head width",
    "ffn_ratio": "MLP ratio",
    "kv_group": "heads per KV head",
}
_PERCENT_AT_EDGE = 5.0


def candidate_columns(candidates: Sequence[CandidateOutput]) -> list[Column]:
    """Shapes, one row each, as the columns of a table; columns without an entry are left out."""
    columns = columns_of(candidates, _CANDIDATE_COLUMNS)
    filled = [column for column in columns if any(column.cells) or not candidates]
    if "net" not in [column.name for column in filled]:
        # Without a law of loss the speed-up is the result, and its interval the one that counts.
        ranks = {"speed-up": 0, "90 % interval of speed": 1}
        filled = [replace(column, rank=ranks.get(column.name, column.rank)) for column in filled]
    return [
        replace(column, short_cells=tuple(re.sub(r" \S+ -> ", "=", cell) for cell in column.cells))
        if column.name == "changes"
        else column
        for column in filled
    ]


def describe_letters(candidates: Sequence[CandidateOutput], columns: Sequence[Column]) -> str:
    """Legend: fields of the symbols in the changes, and the meaning of the columns that are shown."""
    names = {column.name for column in columns}
    shown = {change.split(" ")[0] for candidate in candidates for change in describe_changes(candidate).split(", ")}
    letters = ", ".join(
        f"{letter} {name}" for name, letter in FIELD_LETTERS.items() if letter in shown and letter != name
    )
    meanings = {
        "net": "speed-up to the same loss",
        "better": "probability that net is above 1",
        "faster": "probability of being faster per step",
        "at equal size": "speed-up per active parameter",
    }
    words = [f"{name}: {meaning}" for name, meaning in meanings.items() if name in names]
    if "loss (nats)" in names:
        words.append(_LOSS_WORDS)
    return "; ".join([f"letters: {letters}", *words])


def describe_measures(candidate: CandidateOutput) -> str:
    """Changed measures of a shape, with their percentiles among public models."""
    parts = []
    for name, measure in candidate.measures.items():
        if abs(measure.factor - 1.0) < 1e-3:
            continue
        percentile = measure.percentile_of_presets
        rare = " (rare)" if not _PERCENT_AT_EDGE <= percentile <= 100.0 - _PERCENT_AT_EDGE else ""
        parts.append(
            f"{_MEASURE_WORDS[name]} {measure.value / measure.factor:.3g} -> {measure.value:.3g}, percentile "
            f"{percentile:.0f} of public models{rare}"
        )
    return "; ".join(parts)


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
