"""Page of a search: the Pareto front as a figure, the shapes as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.search import time_per_token_chart
from shapewright.app.report.optimize.search_text import (
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
from shapewright.app.report.page import Figure, Section, Words, render_page, table_of
from shapewright.app.report.predict import describe

if TYPE_CHECKING:
    from shapewright.optimize.search import SearchResult


def search_page(result: SearchResult) -> str:
    """Render a result as one HTML document."""
    config = result.baseline.config
    title = f"Shapes of the size of {config.title}"
    return render_page(title, search_sections(result), subtitle=describe(result.baseline.prediction))


def search_sections(result: SearchResult) -> list[Section]:
    """Sections of the page."""
    sections: list[Section] = [Words("Summary", _verdict(result))]
    if result.candidates:
        caption = "Down and to the right is better: less time for more parameters."
        sections.append(Figure(time_per_token_chart(result), caption))
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
            "Notes",
            [
                *([describe_letters([*result.candidates, *result.front])] if result.candidates else []),
                describe_space(result),
                QUALITY_NOTE,
                *result.notes,
            ],
        )
    )
    return sections


def _verdict(result: SearchResult) -> list[str]:
    if not result.candidates:
        return ["No shape within the limits is predicted to be faster."]
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
