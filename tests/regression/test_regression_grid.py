"""Answers of the regression grid: nothing moves by more than two parts in a million unless the tables are renewed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import write_regression_grid as grid


@pytest.mark.parametrize(
    ("table", "group"), [(table, group) for table in grid.list_tables() for group in grid.list_groups(table)]
)
def test_answers_are_those_of_the_table(table: str, group: str) -> None:
    """No cell moved; the message names those that did, and says what to do where that is meant."""
    moves = grid.find_moves(table, group, grid.answer_group(table, group))

    if moves:
        pytest.fail(grid.describe(moves), pytrace=False)


def test_a_move_is_named_with_its_size() -> None:
    """Of two numbers, a column and a text, those that differ by more than the tolerance are named."""
    old = {"predict x": {"time_s": 2.0, "bytes": 100.0, "rows": (3.0, 0.5), "kind": "a", "gone": 1.0}}
    new = {"predict x": {"time_s": 2.0 * (1 + 1e-7), "bytes": 104.0, "rows": (3.0, 0.51), "kind": "b"}}
    moves = list(grid.compare(old, new))

    assert [move.cell for move in moves] == ["bytes", "rows", "kind", "gone"]
    assert moves[0].size == pytest.approx(0.04)
    assert moves[1].size == pytest.approx(0.01)
    assert "4 cells of 1 answers moved, numbers by 2.5 % in the median" in grid.describe(moves)
    assert "bytes: 100 -> 104 (+4 %)" in str(moves[0])
    assert "gone: 1 -> nothing" in str(moves[3])


def test_a_column_shows_swapped_rows_and_small_ones() -> None:
    """Swapped rows leave the sum as it is, a small row barely moves it; the mean of logarithms shows both."""
    from regression_answers import summarize

    before = summarize([5.0, 2.0, 1e-6])

    assert summarize([2.0, 5.0, 1e-6])[0] == before[0]
    assert summarize([2.0, 5.0, 1e-6])[1] != pytest.approx(before[1], abs=1e-3)
    assert summarize([5.0, 2.0, 1.01e-6])[1] != pytest.approx(before[1], abs=1e-3)
