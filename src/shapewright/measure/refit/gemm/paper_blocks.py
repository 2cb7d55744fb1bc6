"""Fit MI250X's losses of large B and long contractions to whole blocks instead of single GEMMs.

MI250X runs the two GEMMs of an MLP inside a layer as fast as alone up to h = 11,500. Alone they then lose a fifth of
their rate, the upper one from 11,904 on, which a layer loses at 14,000. Models run layers, so the section that prices
them is fitted to blocks, and GEMMs timed alone have a section of their own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shapewright.lowering.operations import Gemm, Pointwise
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.paper_layers import FORMAT, PaperLayer, find_floors, find_misfits, price_block
from shapewright.measure.fit.gemm_section import (
    Array,
    Entries,
    fit_vector,
    percentage_errors,
    predict_rows,
    transform,
    untransform,
)

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.hardware import Device
    from shapewright.lowering.operations import Operation
    from shapewright.pricing.gemm.kernels import DeviceRates

# Parameters that blocks determine: name, start and transform. Mask and softmax of an attention block are a fused kernel
# elsewhere: their time here, the same for every hidden size, is fitted too and left to the pointwise refit.
ENTRIES: Entries = (
    ("long_k", 1e5, "log"),
    ("reach_bytes", 1.5e9, "log"),
    ("reach_loss", 0.3, "logit"),
    ("reach_steepness", 8.0, "log"),
)
MASK: Entries = (("mask_s", 0.05, "log"),)
# GEMMs of a block with weights, as (n / h, k / h).
MLP, ATTENTION = ((4.0, 1.0), (1.0, 4.0)), ((3.0, 1.0), (1.0, 1.0))
GEMMS_OF_BLOCK = {"mlp": MLP, "attention": ATTENTION, "layer": MLP + ATTENTION}
FREE_KINDS = ("mask", "softmax")


def read_blocks(folder: Path, device: Device, gpu: str) -> pd.DataFrame:
    """Read unfused blocks of the paper's layers: kind, tokens, hidden size, measured time, predicted rest."""
    columns, context, rows = read_columns(folder / "paper_layers.csv", FORMAT, Counter()), Context(), []
    is_chosen = (columns.labels["gpu"].values == gpu) & (columns.labels["flash_attention"].values == "0")
    is_chosen &= columns.numbers["tensor_parallel"] == 1.0
    for kind in GEMMS_OF_BLOCK:
        seconds = columns.numbers[f"{kind}_s"]
        is_used = is_chosen & (seconds > 0.0)
        if kind != "mlp":
            is_used &= ~find_floors(columns.labels["log"].codes, seconds)
        if kind == "attention":
            is_used &= ~find_misfits(columns)
        for row in np.flatnonzero(is_used).tolist():
            layer = PaperLayer.of(columns, row)
            priced = price_block(kind, layer, device, is_flash=False, context=context)
            other_s = sum(entry.total_time_s for entry in priced if not _is_fitted(entry.operation))
            tokens = layer.micro_batch_size * layer.seq_len
            rows.append((kind, tokens, layer.hidden_size, float(seconds[row]), other_s))
    return pd.DataFrame(rows, columns=["kind", "tokens", "hidden_size", "measured_s", "other_s"])


def _is_fitted(operation: Operation) -> bool:
    if isinstance(operation, Gemm):
        return operation.batch == 1
    return isinstance(operation, Pointwise) and operation.operation in FREE_KINDS


def fit_blocks(
    blocks: pd.DataFrame,
    is_held_out: NDArray[np.bool_],
    section: dict[str, Any],
    spans: list[dict[str, float]],
    rates: DeviceRates,
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return slow cases of a section for layers, and their errors on MLP blocks of held-out hidden sizes.

    Args:
        is_held_out: Which of them are held out. [rows]
        section: The section fitted to single GEMMs.
        spans: Those of its spans that blocks have too.
    """
    entries = (*ENTRIES, *MASK)

    def predict(rows: pd.DataFrame, values: dict[str, float]) -> Array:
        own = {**section, "slow_cases": build(values)}
        total_s = rows.other_s + np.where(rows.kind == "mlp", 0.0, values["mask_s"])
        for kind, gemms in GEMMS_OF_BLOCK.items():
            here = rows[rows.kind == kind]
            for n, k in gemms:
                sizes = {"m": here.tokens, "n": n * here.hidden_size, "k": k * here.hidden_size}
                total_s[here.index] += predict_rows(pd.DataFrame(sizes).assign(batch=1), own, rates, "NT")
        predicted_s: Array = total_s.to_numpy()
        return predicted_s

    def build(values: dict[str, float]) -> dict[str, Any]:
        found = {name: values[name] for name, _, _ in ENTRIES}
        return {**section["slow_cases"], **found, "spans": spans}

    seen, held_out = blocks[~is_held_out], blocks[is_held_out & (blocks.kind == "mlp")]
    measured, start = seen.measured_s.to_numpy(), transform(entries)
    x, _ = fit_vector(lambda x: predict(seen, untransform(x, entries)), measured, start, most_evaluations=80)
    values = untransform(x, entries)
    return build(values), {
        **percentage_errors(predict(held_out, values), held_out.measured_s.to_numpy()),
        "mask_s": values["mask_s"],
    }
