"""Rows of the paper's layers that say nothing of what they are named after."""

from __future__ import annotations

import numpy as np

from shapewright.accuracy.columns import Columns
from shapewright.accuracy.paper_layers import find_misfits


def test_blocks_longer_than_their_layer_are_misfits() -> None:
    """Parts of 1.09 times the whole are noise, of 1.2 times are not; without a layer or an MLP nothing is known."""
    numbers = {
        "attention_s": np.array([0.59, 0.70, 9.00, 9.00]),
        "mlp_s": np.array([0.50, 0.50, 0.50, np.nan]),
        "layer_s": np.array([1.00, 1.00, np.nan, 1.00]),
    }

    assert find_misfits(Columns(4, numbers, {})).tolist() == [False, True, False, False]
