"""A search as one self-contained page: the front as a figure, the shapes as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.report.charts import Mark, Points, XYChart
from shapewright.report.page import Figure, Section, Words, render_page, table_of
from shapewright.report.prediction_text import describe
from shapewright.report.search_text import (
    QUALITY_NOTE,
    candidate_columns,
    candidates_heading,
    describe_changes,
    describe_horizon,
    describe_letters,
    describe_measures,
    describe_portability,
    describe_space,
    device_columns,
)
from shapewright.units import GIGA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.search import Candidate, SearchResult

_MICRO = 1e-6


def search_page(result: SearchResult) -> str:
    """Write a result as one HTML document."""
    config = result.baseline.config
    title = f"Shapes of the size of {config.title}"
    return render_page(title, search_sections(result), subtitle=describe(result.baseline.prediction))


def search_sections(result: SearchResult) -> list[Section]:
    """The page, top to bottom."""
    sections: list[Section] = [Words("In short", _verdict(result))]
    if result.candidates:
        sections.append(Figure(front_chart(result), "Down and to the right is better: less time for more parameters."))
        sections.append(table_of(candidates_heading(result), candidate_columns(result.candidates)))
        if result.best_on:
            sections.append(table_of("On each device", device_columns(result)))
        sections.append(
            table_of(
                "Pareto front over time, parameters, KV bytes per token and memory", candidate_columns(result.front)
            )
        )
        sections.append(Words("Best by number of changed fields", _best_words(result)))
    sections.append(
        Words(
            "What to know",
            [
                *([describe_letters([*result.candidates, *result.front])] if result.candidates else []),
                describe_space(result),
                QUALITY_NOTE,
                *result.notes,
            ],
        )
    )
    return sections


def front_chart(result: SearchResult) -> XYChart:
    """Time per token against parameters: baseline, listed shapes and the Pareto front."""
    groups: dict[str, Sequence[Candidate]] = {
        "listed shapes": result.candidates,
        "Pareto front": result.front,
        "baseline": (result.baseline,),
    }
    base = result.baseline.prediction
    return XYChart(
        title="Time per token against parameters",
        x_label="parameters (billions)",
        y_label="device time per token (us)",
        series=[
            Points(
                name,
                [shape.prediction.parameters.total / GIGA for shape in shapes],
                [1.0 / shape.prediction.tokens_per_s_per_device / _MICRO for shape in shapes],
                [
                    (f"rank {shape.rank}: " if shape.rank else "") + (describe_changes(shape) or "baseline")
                    for shape in shapes
                ],
            )
            for name, shapes in groups.items()
        ],
        alt="Faster shapes lie below the baseline; the Pareto front is the lower right edge.",
        marks=[Mark("y", 1.0 / base.tokens_per_s_per_device / _MICRO, "baseline")],
    )


def _verdict(result: SearchResult) -> list[str]:
    if not result.candidates:
        return ["No shape inside the limits is predicted to be faster."]
    first = result.candidates[0]
    interval = f"90 % interval {first.speedup.low:.3f} to {first.speedup.high:.3f}"
    words = (
        f"Rank 1 runs {first.speedup.factor:.3f} times as fast as the baseline ({interval}), "
        f"{first.equal_size_speedup:.3f} times at equal size: {describe_changes(first)}."
    )
    return [words, *describe_portability(result), *(line for line in describe_horizon(result) if line)]


def _best_words(result: SearchResult) -> list[str]:
    words = []
    for number, candidate in result.best_by_num_changes().items():
        gains = "; ".join(
            f"{gain.module} saves {100.0 * gain.saved_fraction:.1f} % ({gain.reason})"
            for gain in candidate.gains[:3]
            if gain.saved_fraction > 0.0
        )
        moved = describe_measures(candidate)
        head = f"{number} ({', '.join(candidate.changed_fields)}): rank {candidate.rank}"
        parts = [f"{head}, {candidate.speedup.factor:.3f}x, {describe_changes(candidate)}", gains]
        words.append(". ".join([*filter(None, parts), *([f"Moves {moved}"] if moved else [])]))
    return words
