"""Figures of merit against hand-worked numbers and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapewright.measure.accuracy.statistics import (
    absolute_percentage_errors,
    bias,
    coverage,
    kendall_tau,
    ranking_regrets,
)


def test_errors_by_hand() -> None:
    """10 % too much and 25 % too little."""
    errors = absolute_percentage_errors(np.array([1.1, 3.0]), np.array([1.0, 4.0]))

    assert errors == pytest.approx([0.1, 0.25])


def test_bias_of_opposite_errors_cancels() -> None:
    """Twice too much and twice too little are no bias in the logarithm."""
    assert bias(np.array([2.0, 1.0]), np.array([1.0, 2.0])) == pytest.approx(0.0)


def test_coverage_counts_the_ends() -> None:
    """A measurement on the end of its interval is inside: 3 of these 4."""
    low, high = np.full(4, 1.0), np.full(4, 2.0)

    assert coverage(low, high, np.array([1.0, 2.0, 1.5, 2.1])) == 0.75


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # one of six pairs is out of order
        ([1, 1, 1], [1, 2, 3], None),
        ([1], [1], None),
    ],
)
def test_kendall_by_hand(x: list[float], y: list[float], expected: float | None) -> None:
    """Concordant minus discordant pairs over all pairs; no value where all values of one side are equal."""
    assert kendall_tau(np.array(x, dtype=float), np.array(y, dtype=float)) == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=2, max_size=80))
def test_kendall_agrees_with_scipy(pairs: list[tuple[int, int]]) -> None:
    """With ties on either side it is SciPy's tau-b."""
    stats = pytest.importorskip("scipy.stats", reason="the oracle is SciPy")
    x, y = np.array(pairs, dtype=float).T
    found = kendall_tau(x, y)
    if found is None:
        assert len(set(x)) == 1 or len(set(y)) == 1
    else:
        assert found == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)


def test_kendall_of_many_rows_is_quick_and_sees_noise() -> None:
    """100,000 random rows have a tau near 0 (standard deviation 0.002), and all of them count."""
    random = np.random.default_rng(0)

    assert abs(kendall_tau(random.random(100_000), random.random(100_000)) or 1.0) < 0.01


def test_ranking_regret_by_hand() -> None:
    """Of three shapes the second is chosen and takes 3 s, the best 2 s: 50 %; a group of one has no choice."""
    predicted, measured = np.array([2.0, 1.0, 3.0, 1.0]), np.array([2.0, 3.0, 4.0, 9.0])
    groups, work = np.array([7.0, 7.0, 7.0, 8.0]), np.ones(4)

    assert ranking_regrets(predicted, measured, groups, work).tolist() == [0.5]
    assert ranking_regrets(predicted, measured, np.full(4, np.nan), work).size == 0


def test_ranking_regret_counts_time_per_work() -> None:
    """A shape that is 3 % larger may take 3 % longer: it is chosen over one that takes 1 % longer, and rightly."""
    predicted, measured = np.array([1.03, 1.01]), np.array([1.03, 1.02])

    assert ranking_regrets(predicted, measured, np.zeros(2), np.array([1.03, 1.0])).tolist() == [0.0]
