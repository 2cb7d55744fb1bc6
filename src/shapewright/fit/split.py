"""Which measured rows no fit ever sees: whole shapes, so that a neighbour of a fitted row is no easy win."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

HELD_OUT_SHARE = 0.2


def is_for_judging(m: int, n: int, k: int) -> bool:
    """Whether a random product of the bench is one of those that are judged and never fitted, about half of them.

    >>> is_for_judging(128, 64, 32), is_for_judging(129, 64, 32)
    (True, False)
    """
    return ((m * 31 + n) * 31 + k) % 2 == 0


def split_by_shape(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Hold out whole (n, k) shapes."""
    shapes = rows[["n", "k"]].drop_duplicates().reset_index(drop=True)
    shapes["held_out"] = np.random.default_rng(0).random(len(shapes)) < HELD_OUT_SHARE
    marked = rows.merge(shapes, on=["n", "k"])
    return marked[~marked.held_out], marked[marked.held_out]
