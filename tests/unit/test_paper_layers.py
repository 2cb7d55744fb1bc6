"""Rows of the paper's layers without the value that their name announces."""

from __future__ import annotations

import numpy as np
import pytest

from shapewright.hardware import load_device
from shapewright.measure.accuracy.chunk import Columns
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.tables.paper_layers import PaperLayer, find_misfits, price_block


def test_blocks_longer_than_their_layer_are_misfits() -> None:
    """Parts of 1.09 times the whole are noise, of 1.2 times are not; without a layer or an MLP nothing is known."""
    numbers = {
        "attention_s": np.array([0.59, 0.70, 9.00, 9.00]),
        "mlp_s": np.array([0.50, 0.50, 0.50, np.nan]),
        "layer_s": np.array([1.00, 1.00, np.nan, 1.00]),
    }

    assert find_misfits(Columns(4, numbers, {})).tolist() == [False, True, False, False]


@pytest.mark.parametrize("uncalibrated", [False, True])
def test_uncalibrated_blocks_borrow_every_record(uncalibrated: bool) -> None:
    """Without the device's own calibration no operation of a block is priced by it, pointwise ones included."""
    layer = PaperLayer(hidden_size=2560, num_heads=32, seq_len=2048, micro_batch_size=4, tensor_parallel=1)
    context = Context(uncalibrated=uncalibrated)
    priced = price_block("layer", layer, load_device("a100-sxm-40gb"), is_flash=False, context=context)
    kinds = {entry.operation.kind for entry in priced if entry.price.calibration.is_borrowed}

    assert kinds == ({entry.operation.kind for entry in priced} if uncalibrated else set())
