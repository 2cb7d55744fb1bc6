"""Boosted trees for what formulas leave over: the words that all of them share, and the one place that fits them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.fit.logs import Array

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


def fit_trees(seen: Array, target: Array, words: Mapping[str, Any], weight: Array | None = None) -> Any:
    """Fit trees to ln(measured / physics).

    Args:
        seen: What the trees see; shape [rows, features].
        target: What they learn; shape [rows].
        words: LightGBM's words beyond REPEATABLE.
        weight: How much each row counts; alike by default.
    """
    from lightgbm import LGBMRegressor

    return LGBMRegressor(**REPEATABLE, **words).fit(seen, target, sample_weight=weight)
