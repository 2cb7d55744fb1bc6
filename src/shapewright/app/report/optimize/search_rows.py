"""Shapes of a search as rows of a table, and their changes, gains and losses in words."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of
from shapewright.app.report.outputs.effect import describe_loss
from shapewright.app.report.outputs.search import FIELD_LETTERS, describe_changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.app.report.outputs.search import CandidateOutput

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
