"""The fit of far pages and long contractions to MLP blocks, for a device whose products alone tell another story.

Not a script itself. MI250X runs the two products of an MLP in a layer as fast as one by one up to h = 11,500. Alone
they then lose a fifth of their rate, the upper one from 11,904 on, which a layer loses at 14,000. Models run layers, so
that the section which prices them takes the blocks' numbers, and products timed alone have a section of their own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from shapewright.accuracy.context import Context
from shapewright.accuracy.paper_layers import FORMAT, PaperLayer, price_block
from shapewright.accuracy.read import read_columns
from shapewright.fit.gemm import FIT_SCALE, PRIOR_WEIGHT, Array, Entries, judge, predict_rows, transform, untransform
from shapewright.operations import Gemm

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.hardware import Device
    from shapewright.perf.kernels import DeviceRates

# What blocks tell: name, start and transform.
ENTRIES: Entries = (
    ("long_k", 1e5, "log"),
    ("reach_bytes", 1.5e9, "log"),
    ("reach_loss", 0.3, "logit"),
    ("reach_steepness", 8.0, "log"),
)


def mlp_blocks(folder: Path, device: Device, gpu: str) -> pd.DataFrame:
    """Unfused MLP blocks of the paper's layers: sizes, measured time, and what is predicted besides their products."""
    columns = read_columns(folder / "paper_layers.csv", FORMAT, Counter())
    words, seconds = columns.labels["gpu"], columns.numbers["mlp_s"]
    rows, context = [], Context()
    for row in np.flatnonzero((seconds > 0.0) & (columns.numbers["tensor_parallel"] == 1.0)):
        if words[row] != gpu or columns.labels["flash_attention"][row] != "0":
            continue
        layer = PaperLayer(*(int(columns.numbers[name][row]) for name in FORMAT.numbers))
        priced = price_block("mlp", layer, device, is_flash=False, context=context)
        other_s = sum(entry.total_time_s for entry in priced if not isinstance(entry.operation, Gemm))
        rows.append((layer.micro_batch_size * layer.seq_len, layer.hidden_size, float(seconds[row]), other_s))
    return pd.DataFrame(rows, columns=["tokens", "hidden_size", "measured_s", "other_s"]).astype(float)


def fit_blocks(
    blocks: pd.DataFrame, is_unseen: Array, section: dict[str, Any], spans: list[dict[str, float]], rates: DeviceRates
) -> tuple[dict[str, Any], dict[str, float]]:
    """Slow cases of a section for layers, and their errors on blocks of unseen hidden sizes.

    Args:
        blocks: See mlp_blocks.
        is_unseen: Which of them judge. [rows]
        section: The section that products alone gave.
        spans: Those of its spans that blocks have too.
        rates: Rates of the device.
    """

    def predict(rows: pd.DataFrame, cases: dict[str, Any]) -> Array:
        own = {**section, "slow_cases": cases}
        h, m = rows.hidden_size, rows.tokens
        up = pd.DataFrame({"batch": 1.0, "m": m, "n": 4.0 * h, "k": h})
        down = pd.DataFrame({"batch": 1.0, "m": m, "n": h, "k": 4.0 * h})
        both_s = predict_rows(up, own, rates, "NT") + predict_rows(down, own, rates, "NT")
        return both_s + rows.other_s.to_numpy()

    def build(x: Array) -> dict[str, Any]:
        return {**section["slow_cases"], **untransform(x, ENTRIES), "spans": spans}

    seen, unseen = blocks[~is_unseen], blocks[is_unseen]
    start, target = transform(ENTRIES), np.log(seen.measured_s.to_numpy())

    def residuals(x: Array) -> Array:
        return np.concatenate([np.log(predict(seen, build(x))) - target, PRIOR_WEIGHT * FIT_SCALE * (x - start)])

    x = least_squares(residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=80, diff_step=1e-3).x
    cases = build(x)
    return cases, judge(predict(unseen, cases), unseen.measured_s.to_numpy())
