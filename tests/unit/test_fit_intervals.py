"""Making intervals: pools that count alike, stretch_factors that cover, parts left out in turn."""

from __future__ import annotations

import numpy as np
import pytest

from shapewright.measure.fit.shared import Array
from shapewright.measure.refit.intervals.residual_intervals import (
    LARGEST_SPREAD,
    fitted_interval,
    is_inside,
    leave_one_out_widening,
    pool,
    stretch,
    stretch_factors,
    stretch_scores,
)


def rows(count: int, spread: float, shift: float = 0.0, seed: int = 0) -> tuple[Array, Array]:
    """Predicted and measured times from 1 us to 10 ms, whose logarithms differ by a normal error."""
    rng = np.random.default_rng(seed)
    predicted = 10.0 ** rng.uniform(-6.0, -2.0, count)
    return predicted, predicted * np.exp(shift + rng.normal(0.0, spread, count))


def test_format_interval_covers_its_rows() -> None:
    """Nine of ten rows lie inside, in every regime."""
    predicted, measured = rows(20_000, 0.1)
    inside = is_inside(fitted_interval(predicted, measured), predicted, measured)

    assert inside.mean() == pytest.approx(0.9, abs=0.01)
    assert inside[predicted < 5e-6].mean() == pytest.approx(0.9, abs=0.02)


def test_stretch_covers_rows_that_scatter_more() -> None:
    """Held-out rows with twice the scatter stretch the fitted interval by two; it covers 90 % of others like them."""
    form = fitted_interval(*rows(20_000, 0.05))
    unseen, others = rows(5_000, 0.1, seed=1), rows(5_000, 0.1, seed=2)
    factors = stretch_factors(stretch_scores(form, *unseen), unseen[0])
    stretched = stretch(form, factors)

    assert factors["factor"] == pytest.approx([2.0] * len(factors["factor"]), rel=0.15)
    assert is_inside(form, *others).mean() < 0.65
    assert is_inside(stretched, *others).mean() == pytest.approx(0.9, abs=0.02)


def test_stretch_keeps_regimes_of_both() -> None:
    """Edges of the form and of the factors are both edges of what comes out."""
    form = {"edges_s": [1e-5], "low": [0.9, 0.8], "high": [1.1, 1.2]}
    found = stretch(form, {"edges_s": [1e-4], "factor": [1.0, 2.0]})

    assert found["edges_s"] == [1e-5, 1e-4]
    assert found["low"] == pytest.approx([0.9, 0.8, 0.64])
    assert found["high"] == pytest.approx([1.1, 1.2, 1.44])


def test_parts_of_a_pool_have_equal_weight() -> None:
    """A tenth of the rows has half the weight: the ends lie between those of the parts."""
    many, few = rows(4_000, 0.05), rows(800, 0.05, shift=0.5)
    found = pool([many, few])

    assert is_inside(found, *few).mean() > 0.85
    assert is_inside(found, *many).mean() > 0.85


def test_both_ways_takes_each_sign() -> None:
    """What was 30 % slow here may be 30 % fast there."""
    found = pool([rows(4_000, 0.05, shift=0.3)], both_ways=True)

    assert found["low"] == pytest.approx([1.0 / high for high in found["high"]], rel=1e-3)
    assert found["high"][0] == pytest.approx(np.exp(0.3 + 1.28 * 0.05), rel=0.03)


def test_spread_grows_until_parts_left_out_fit() -> None:
    """Equal parts need no spread; an outlier widens the pool up to a limit; a single part gives none."""
    alike = {name: rows(3_000, 0.1, seed=seed) for seed, name in enumerate("abc")}
    unmeasured = {**alike, "d": rows(3_000, 0.1, shift=0.8, seed=9)}

    assert leave_one_out_widening(alike) == pytest.approx(1.0, abs=0.05)
    assert 1.0 < leave_one_out_widening(unmeasured) <= LARGEST_SPREAD
    assert leave_one_out_widening({"a": alike["a"]}) == 1.0
