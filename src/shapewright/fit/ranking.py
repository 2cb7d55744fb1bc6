"""Ranking regret: what it costs to choose among alternatives by predicted instead of measured times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shapewright.fit.logs import Array

if TYPE_CHECKING:
    import pandas as pd


def ranking_regret(rows: pd.DataFrame, predicted: Array, group: Sequence[str]) -> Array:
    """How much slower than the measured best of its group the predicted best is, for each group of two or more.

    Args:
        rows: Measurements, with ``latency_s``.
        predicted: What the choice goes by, row by row; any unit.
        group: Columns that alternatives share.

    Returns:
        measured(choice) / measured(best) - 1 of each group.
    """
    groups = rows.assign(predicted=predicted).groupby(list(group))
    regrets = [
        float(part.latency_s.to_numpy()[np.argmin(part.predicted.to_numpy())] / part.latency_s.min() - 1.0)
        for _, part in groups
        if len(part) > 1
    ]
    return np.array(regrets)
