"""Page of a search: the Pareto front as a figure, the shapes as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.search import time_per_token_chart
from shapewright.app.report.optimize.search_rows import candidate_columns, describe_letters, describe_measures
from shapewright.app.report.optimize.search_text import (
    best_by_num_changes,
    candidates_heading,
    describe_horizon,
    describe_portability,
    describe_space,
    device_columns,
    front_heading,
)
from shapewright.app.report.outputs.search import describe_changes, describe_gain
from shapewright.app.report.page import Figure, Section, Words, render_page, table_of
from shapewright.app.report.predict import describe

if TYPE_CHECKING:
    from shapewright.app.report.outputs.search import SearchOutput


def search_page(found: SearchOutput) -> str:
    """Render a result as one HTML document."""
    sections: list[Section] = [Words("Summary", _summary(found))]
    if found.candidates:
        caption = "Down and to the right is better: less time for more parameters."
        sections.append(Figure(time_per_token_chart(found), caption))
        sections.append(table_of(candidates_heading(found), candidate_columns(found.candidates)))
        if found.devices:
            sections.append(table_of("On each device", device_columns(found)))
        sections.append(table_of(front_heading(found), candidate_columns(found.pareto)))
        sections.append(Words("Best by number of changed fields", _best_words(found)))
    listed = [*found.candidates, *found.pareto]
    legend = [describe_letters(listed, candidate_columns(listed))] if found.candidates else []
    sections.append(Words("Notes", [*legend, describe_space(found), *found.notes]))
    title = f"Shapes of the size of {found.step.config.title}"
    return render_page(title, sections, subtitle=describe(found.step))


def _summary(found: SearchOutput) -> list[str]:
    verdict = [] if found.verdict is None else [f"Verdict: {found.verdict.text}."]
    if not found.candidates:
        return [*verdict, "No shape within the limits is predicted to be better."]
    first = found.candidates[0]
    words = (
        f"Rank 1 runs {first.speedup:.3f} times as fast as the baseline (90 % interval {first.speedup_low:.3f} to "
        f"{first.speedup_high:.3f}), {first.equal_size_speedup:.3f} times at equal size: {describe_changes(first)}."
    )
    return [*verdict, words, *describe_portability(found), *(line for line in describe_horizon(found) if line)]


def _best_words(found: SearchOutput) -> list[str]:
    words = []
    for number, candidate in best_by_num_changes(found).items():
        gains = "; ".join(
            f"{gain.module} saves {100.0 * gain.saved_fraction:.1f} % ({gain.reason})"
            for gain in candidate.gains[:3]
            if gain.saved_fraction > 0.0
        )
        moved = describe_measures(candidate)
        head = f"{number} ({', '.join(candidate.changed_fields)}): rank {candidate.rank}"
        parts = [f"{head}, {describe_gain(candidate)}, {describe_changes(candidate)}", gains]
        words.append(". ".join([*filter(None, parts), *([f"Moves {moved}"] if moved else [])]))
    return words
