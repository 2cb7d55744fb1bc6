"""Shapes of a search: rows of a table, changes in words, and one shape against the baseline by operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.report.columns import JOINED, Column, columns_of, fill, print_table
from shapewright.app.report.outputs.check import describe_loss
from shapewright.app.report.outputs.predict import OperationOutput, operation_output
from shapewright.app.report.outputs.search import (
    FIELD_LETTERS,
    CandidateOutput,
    ExplainedShapeOutput,
    OperationPair,
    candidate_output,
    changes_by_letter,
    describe_changes,
    describe_gain,
)
from shapewright.core.units import TERA
from shapewright.prediction.composition.stages import index_operations

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from shapewright.optimize.search.result import Candidate, SearchResult


_CANDIDATE_COLUMNS = (
    Column("rank", lambda shape: str(shape.rank or "-")),
    Column("changes", describe_changes, is_text=True),
    Column("lifetime", "{lifetime_gain:.3f}x ({lifetime_gain_low:.3f} to {lifetime_gain_high:.3f})"),
    Column("cheaper", "{chance_cheaper:.0p}", rank=1),
    Column("net", "{effect.net_speedup:.3f}x"),
    Column("90 % interval", "{effect.net_speedup_low:.3f} to {effect.net_speedup_high:.3f}"),
    Column("better", "{effect.chance_better:.0p}", rank=2),
    Column("loss (nats)", lambda shape: describe_loss(shape.effect), rank=2, is_text=True),
    Column("speed-up", "{speedup:.3f}x"),
    Column("90 % interval of speed", "{speedup_low:.3f} to {speedup_high:.3f}"),
    Column("faster", "{probability_faster:.0p}", rank=4),
    Column("at equal size", "{equal_size_speedup:.3f}x", rank=4),
    Column("tokens", "{effect.tokens_to_loss:count}", rank=4),
    Column("parameters", "{parameters:count} ({parameters_change:+.2p})", rank=3),
    Column("step", "{step_time_s}", rank=5),
    Column("memory", "{memory_bytes}", rank=6),
    Column("KV/token", "{kv_bytes_per_token:bytes}", rank=7),
)
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


def candidate_columns(candidates: Sequence[CandidateOutput], *, by_speed: bool = False) -> list[Column]:
    """Shapes, one row each, as the columns of a table; columns without an entry are left out.

    Args:
        by_speed: Whether they are in order of the speed-up at equal size, which is then always shown.
    """
    headings = [
        replace(column, rank=0) if by_speed and column.name == "at equal size" else column
        for column in _CANDIDATE_COLUMNS
    ]
    columns = columns_of(candidates, headings)
    new_values = tuple(
        ", ".join(f"{letter}={new}" for letter, (_, new) in changes_by_letter(candidate).items())
        for candidate in candidates
    )
    return [
        replace(column, short_cells=new_values) if column.name == "changes" else column
        for column in columns
        if any(column.cells) or not candidates
    ]


def describe_letters(candidates: Sequence[CandidateOutput], columns: Sequence[Column]) -> str:
    """Legend: fields of the symbols in the changes, and the meaning of the columns that are shown."""
    names = {column.name.removesuffix(JOINED) for column in columns}
    shown = {letter for candidate in candidates for letter in changes_by_letter(candidate)}
    letters = ", ".join(
        f"{letter} {name}" for name, letter in FIELD_LETTERS.items() if letter in shown and letter != name
    )
    meanings = {
        "lifetime": "dollars of the baseline to train and to serve over those of the shape",
        "cheaper": "probability that lifetime is above 1",
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


def _both(describe: Callable[[OperationOutput], str]) -> Callable[[OperationPair], str]:
    """One text for both sides where they agree, else ``before -> after``."""

    def words(pair: OperationPair) -> str:
        before, after = ("" if side is None else describe(side) for side in (pair.before, pair.after))
        return before if before == after else f"{before or '-'} -> {after or '-'}"

    return words


def _rate_words(one: OperationOutput) -> str:
    return f"{one.executed_flops / one.time_s / TERA:.0f}" if one.flops else ""


_PAIR_COLUMNS = (
    Column("operation", "{name}", is_text=True),
    Column("pass", "{pass_name}", rank=3, is_text=True),
    Column("baseline", lambda pair: fill("{before.shape}", pair) or "-", rank=2, is_text=True),
    Column("shape", lambda pair: fill("{after.shape}", pair) or "-", rank=2, is_text=True),
    Column("before", "{before_s}"),
    Column("after", "{after_s}"),
    Column("share saved", "{saved_fraction:+.2p}"),
    Column("TFLOP/s", _both(_rate_words), rank=1, is_text=True),
    Column("aligned to", _both(lambda one: str(one.alignment or "")), rank=4, is_text=True),
    Column("tiles full", _both(lambda one: fill("{tile_efficiency:.0p}", one)), rank=5, is_text=True),
    Column("waves full", _both(lambda one: fill("{wave_efficiency:.0p}", one)), rank=6, is_text=True),
)


def print_explained_shape(output: ExplainedShapeOutput, console: Console) -> None:
    """Print baseline and one shape, operation by operation."""
    shape = output.shape
    console.print(f"rank {shape.rank}: {describe_changes(shape)}; {describe_gain(shape)}", style="bold")
    print_table(columns_of(output.operations, _PAIR_COLUMNS), console)
    moved = describe_measures(shape)
    if moved:
        console.print(f"moves {moved}", style="dim", soft_wrap=True)


def explained_shape_output(result: SearchResult, candidate: Candidate) -> ExplainedShapeOutput:
    """One shape of a search against its baseline."""
    baseline, prediction = result.baseline.prediction, candidate.prediction
    work = baseline.tokens_per_step / prediction.tokens_per_step
    old, new = (index_operations(step.busiest_operations) for step in (baseline, prediction))
    pairs = []
    for key in {**old, **new}:
        before, after = old.get(key), new.get(key)
        before_s = before.total_time_s if before else 0.0
        after_s = work * after.total_time_s if after else 0.0
        pairs.append(
            OperationPair(
                name=key[0],
                pass_name=key[1],
                before=operation_output(before) if before else None,
                after=operation_output(after) if after else None,
                before_s=before_s,
                after_s=after_s,
                saved_fraction=(before_s - after_s) / baseline.step_time_s,
            )
        )
    pairs.sort(key=lambda pair: -pair.saved_fraction)
    return ExplainedShapeOutput(shape=candidate_output(candidate), operations=pairs)
