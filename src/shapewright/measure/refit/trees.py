"""Fit boosted trees to the residuals of the pricing formulas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.measure.fit.shared import Array

# The same rows give the same trees, in one thread.
REPEATABLE: dict[str, Any] = {
    "subsample": 0.7,
    "subsample_freq": 1,
    "deterministic": True,
    "force_row_wise": True,
    "random_state": 0,
    "n_jobs": 1,
    "verbose": -1,
}


def fit_trees(features: Array, target: Array, parameters: Mapping[str, Any], weight: Array | None = None) -> Any:
    """Fit trees to ln(measured / physics).

    Args:
        features: Features; shape [rows, features].
        target: Values to learn; shape [rows].
        parameters: LightGBM parameters in addition to REPEATABLE.
        weight: Weight of each row; equal by default.
    """
    from lightgbm import LGBMRegressor

    return LGBMRegressor(**REPEATABLE, **parameters).fit(features, target, sample_weight=weight)
