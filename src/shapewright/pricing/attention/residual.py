"""Residual tables of attention: learned corrections of the formulas' times.

Legend: u = log2 of a size, w a weight in 0..1, r = ln(measured / formula).

    time = formula * exp(w r(u_kv_heads, u_heads per kv head, u_sequences, u_keys))   r: linear between the knots

One table per kernel, head width and window. It was learned on causal calls over whole sequences, or of one new token,
and fades with the distance from those: sizes outside the table, other widths and windows, chunks of a prompt. Latent
heads, non-causal masks, backward passes and devices of another architecture get no correction (docs/decisions/0004).
"""

from __future__ import annotations

from functools import cache
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.calibration.residual import ResidualTable, reading_residuals
from shapewright.pricing.calibration.residual import log_correction as correct_sizes

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from shapewright.pricing.attention.kernels import AttentionShape

    PerCall = Float[np.ndarray, "*calls"]
    CallMask = Bool[np.ndarray, "*calls"]
    CallIndex = Int[np.ndarray, "*calls"]

# Value of one unit of a stored number; a byte then spans factors of 0.02 to 45.
LOG_STEP = 0.03
AXES = ("num_kv_heads", "group", "batch_size", "kv_len")


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionResidual(ResidualTable):
    """Residual table of one kernel in one phase, over key-value heads, heads per key-value head, sequences and keys.

    Attributes:
        windows: Measured windows, ascending, one layer of the table each; 0 for none. [element]
    """

    windows: tuple[int, ...]
    log_step: float = LOG_STEP


def log_correction(
    table: AttentionResidual,
    shape: AttentionShape,
    head_dim: float,
    *,
    is_decode: bool,
    where: bool | np.bool_ | CallMask = True,
) -> tuple[PerCall, PerCall]:
    """Look up the correction of each call and its weight.

    Args:
        head_dim: Head width that the kernel was measured at. [element]
        is_decode: Whether the table holds calls of one new token instead of whole sequences.
        where: Calls that may be corrected; the others get 0.

    Returns:
        w r, to be added to the logarithm of a time, and w, which is 1 inside the table and 0 far from it.
    """
    sizes = (shape.num_kv_heads, shape.num_heads / shape.num_kv_heads, shape.batch_size, shape.kv_len)
    measured = where & (shape.head_dim == shape.v_head_dim) & shape.causal
    window, away = _nearest_window(table, shape)
    away = away + np.abs(np.log2(shape.head_dim / head_dim))
    away = away + np.log2(shape.query_len if is_decode else np.maximum(shape.kv_len / shape.query_len, 1.0))
    found = correct_sizes(
        table,
        *(size.reshape(-1) for size in sizes),
        layer=window.reshape(-1),
        away=np.where(measured, away, np.inf).reshape(-1),
    )
    logs, weight = (column.reshape(np.shape(shape.batch_size)) for column in found)
    return logs, weight


def _nearest_window(table: AttentionResidual, shape: AttentionShape) -> tuple[CallIndex, PerCall]:
    """Index of the nearest window's layer, and its distance in doublings, for each call."""
    index, away = np.zeros(shape.batch_size.shape, dtype=np.intp), np.zeros(shape.batch_size.shape)
    for window in np.unique(shape.window_size):
        here = shape.window_size == window
        # A window as wide as the keys has no effect; whether it is depends on the call's length.
        for is_wide in (False, True):
            chosen = here & ((window >= shape.kv_len) == is_wide)
            index[chosen], away[chosen] = _place_of_window(table, float(window), 0.0 if is_wide else np.inf)
    return index, away


def _place_of_window(table: AttentionResidual, window: float, kv_len: float) -> tuple[int, float]:
    """Index of a window's layer, and its distance in doublings; a window as wide as the keys counts as none.

    A measured window uses its own layer even where it is as wide as the keys.
    """
    if window in table.windows:
        return table.windows.index(int(window)), 0.0
    if window >= kv_len and 0 in table.windows:
        return table.windows.index(0), 0.0
    measured = [known for known in table.windows if known > 0 and window > 0.0]
    if not measured:
        return 0, np.inf
    nearest = min(measured, key=lambda known: abs(log2(window / known)))
    return table.windows.index(nearest), abs(log2(window / nearest))


@cache
def load_residual(file_name: str, name: str) -> AttentionResidual:
    """Load the table of one kernel and phase, by the name in its record."""
    phase = "decode" if name.endswith("/decode") else "prefill"
    with reading_residuals(file_name, "attention") as stored:
        windows = tuple(sorted(int(key.split("@")[1]) for key in stored.files if key.startswith(f"{name}@")))
        tables = np.stack([stored[f"{name}@{window}"] for window in windows])
        knots = tuple(
            np.log2(stored[f"{axis}/{phase}"][:length].astype(float))
            for axis, length in zip(AXES, tables.shape[1:], strict=True)
        )
    return AttentionResidual(knots_log2=knots, windows=windows, log_steps=tables)
