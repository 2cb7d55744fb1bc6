"""The law of loss against public losses of held-out models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from judging import ALL_LIMITS, measured_file

from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.statistics import loss_errors
from shapewright.measure.fit.loss_rows import FORMAT, LossRows, read_loss_rows

pytest.importorskip("scipy", reason="fits need the fit extra")
pytest.importorskip("pandas", reason="fits need the fit extra")

from shapewright.measure.refit.loss import fit_sources, predict_left_out, scatter_about_law
from shapewright.prediction.loss.law import Z_90, load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss

if TYPE_CHECKING:
    from shapewright.measure.fit.shared import Array

LIMITS = ALL_LIMITS["loss"]
SOURCES = ("gemstones", "grid", "morph")


@pytest.fixture(scope="module")
def rows() -> LossRows:
    """All losses."""
    skipped: Counter[str] = Counter()
    return read_loss_rows(read_columns(measured_file("loss_by_shape.csv"), FORMAT, skipped), skipped)


@pytest.fixture(scope="module")
def left_out(rows: LossRows) -> tuple[Array, Array]:
    """Predictions of models left out, and their deviations by the coefficients."""
    return predict_left_out(rows, fit_sources)


def groups(rows: LossRows) -> Array:
    """Number of the recipe of each row."""
    return np.unique(rows.recipe.astype(str), return_inverse=True)[1].reshape(-1)


@pytest.mark.parametrize("source", SOURCES)
def test_models_left_out(source: str, rows: LossRows, left_out: tuple[Array, Array]) -> None:
    """Losses, differences between models of one size, and their order, in nats."""
    inside = rows.source == source
    errors = loss_errors(
        left_out[0][inside],
        rows.loss_nats[inside],
        groups(rows)[inside],
        np.log(np.asarray(rows.shape.num_parameters)[inside]),
        np.log(rows.tokens[inside]),
    )

    assert errors.mean_nats < LIMITS["mean_nats"][source]
    assert errors.difference_nats is not None
    assert errors.difference_nats < LIMITS["difference_nats"][source]
    assert errors.order_fraction is not None
    assert 1.0 - errors.order_fraction < LIMITS["out_of_order"][source] + 1e-9


@pytest.mark.parametrize("source", SOURCES)
def test_intervals_of_models_left_out(source: str, rows: LossRows, left_out: tuple[Array, Array]) -> None:
    """With the scatter of one half of the models, the interval covers 85 to 95 % of the losses of the other half."""
    errors, deviation = left_out[0] - rows.loss_nats, left_out[1]
    inside = rows.source == source
    draw = np.random.default_rng(0)
    shares = []
    for _ in range(20):
        models = draw.permutation(np.unique(rows.model[inside]))
        for half in (models[::2], models[1::2]):
            ours, theirs = (inside & chosen for chosen in (np.isin(rows.model, half), ~np.isin(rows.model, half)))
            scatter = scatter_about_law(errors[ours], deviation[ours])
            covered = np.abs(errors[theirs]) <= Z_90 * np.sqrt(deviation[theirs] ** 2 + scatter**2)
            shares.append(float(covered.mean()))

    assert 0.85 <= np.mean(shares) <= 0.95


def test_fields_that_no_loss_varies_leave_levels_alone() -> None:
    """MLP ratio and key-value heads, alike in all models of a recipe, widen differences and not the loss itself."""
    law = load_loss_law("gemstones, constant, dolma, batch of 4194304 tokens")
    own = ShapeForLoss(
        num_parameters=5e8, hidden_size=1280, num_layers=15, head_dim=128, intermediate_size=5120, num_heads=10,
        num_kv_heads=5,
    )  # fmt: skip
    other = replace(own, num_kv_heads=1, intermediate_size=7000)

    assert law.standard_deviation_nats(own, 1e11) < 1.1 * law.scatter_nats
    assert law.standard_deviation_nats(other, 1e11) > 1.1 * law.scatter_nats


def test_large_models_are_ordered_by_small_ones(rows: LossRows) -> None:
    """Of Morph's largest models, a fit to the smaller ones orders all pairs correctly."""
    large = (rows.source == "morph") & (np.asarray(rows.shape.num_parameters) > 1.2e8)
    predicted = fit_sources(rows.take(~large)).predict(rows.take(large))
    actual = rows.loss_nats[large]
    pairs = [
        (actual[i] - actual[j], predicted[i] - predicted[j])
        for i in range(len(actual))
        for j in range(i)
        if abs(actual[i] - actual[j]) > 0.01
    ]

    assert len(pairs) > 50
    assert np.mean([a * b <= 0.0 for a, b in pairs]) < LIMITS["wrong_order_of_larger"]
