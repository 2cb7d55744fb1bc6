"""Residual tables of attention: learned corrections of the formulas' times.

Legend: u = log2 of a size, w a weight in 0..1, r = ln(measured / formula).

    time = formula * exp(w r(u_kv_heads, u_heads per kv head, u_sequences, u_keys))   r: linear between the knots

One table per kernel, head width and window. It was learned on causal calls over whole sequences, or of one new token,
and fades with the distance from those: sizes outside the table, other widths and windows, chunks of a prompt. Latent
heads, non-causal masks, backward passes and devices of another architecture get no correction (docs/decisions/0004).
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache, cached_property
from importlib import resources
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.pricing.calibration.residual import FADE_DOUBLINGS, ResidualTable, interpolate

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from shapewright.pricing.attention.kernels import AttentionShape

    PerCall = Float[np.ndarray, "*calls"]
    CallMask = Bool[np.ndarray, "*calls"]
    CallIndex = Int[np.ndarray, "*calls"]

# Value of one unit of a stored number; a byte then spans factors of 0.02 to 45.
LOG_STEP = 0.03
AXES = ("num_kv_heads", "group", "batch_size", "kv_len")
# Up to this many calls are looked up one by one, as in a step: NumPy's call overhead would dominate.
_MOST_ONE_BY_ONE = 8
# Calls corrected together: sixteen corners of this many float64 fit the L2 cache of a core.
_ROWS_PER_BLOCK = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionResidual(ResidualTable):
    """Residual table of one kernel in one phase, over key-value heads, heads per key-value head, sequences and keys.

    Attributes:
        windows: Measured windows, ascending, one layer of the table each; 0 for none. [element]
    """

    windows: tuple[int, ...]
    log_step: float = LOG_STEP

    @cached_property
    def knots(self) -> list[list[float]]:
        """knots_log2 as floats, for looking up few calls."""
        return [knots.tolist() for knots in self.knots_log2]


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
    if shape.batch_size.size <= _MOST_ONE_BY_ONE:
        return _correct_few(table, shape, head_dim, sizes, measured, is_decode=is_decode)
    window, away = _nearest_window(table, shape)
    away = away + np.abs(np.log2(shape.head_dim / head_dim))
    away = away + np.log2(shape.query_len if is_decode else np.maximum(shape.kv_len / shape.query_len, 1.0))
    places = [np.log2(size).reshape(-1) for size in sizes]
    flat_window, flat_away = window.reshape(-1), np.where(measured, away, np.inf).reshape(-1)
    blocks = [slice(start, start + _ROWS_PER_BLOCK) for start in range(0, len(flat_away), _ROWS_PER_BLOCK)]
    parts = [_look_up(table, [place[rows] for place in places], flat_window[rows], flat_away[rows]) for rows in blocks]
    logs, weight = (np.concatenate(column).reshape(np.shape(shape.batch_size)) for column in zip(*parts, strict=True))
    return logs, weight


def _correct_few(
    table: AttentionResidual,
    shape: AttentionShape,
    head_dim: float,
    sizes: tuple[PerCall, ...],
    measured: CallMask,
    *,
    is_decode: bool,
) -> tuple[PerCall, PerCall]:
    """Compute the same for few calls, one after the other."""
    found = []
    columns = (measured, shape.query_len, shape.window_size, shape.head_dim, *sizes)
    for is_measured, query_len, window_size, width, *own in zip(
        *(each.ravel().tolist() for each in columns), strict=True
    ):
        if not is_measured:
            found.append((0.0, 0.0))
            continue
        kv_len = own[-1]
        window, away = _place_of_window(table, window_size, kv_len)
        away += abs(log2(width / head_dim)) + log2(query_len if is_decode else max(kv_len / query_len, 1.0))
        found.append(_look_up_one(table, [log2(size) for size in own], window, away))
    logs, weight = np.array(found).T
    return logs.reshape(shape.batch_size.shape), weight.reshape(shape.batch_size.shape)


def _look_up_one(table: AttentionResidual, places: list[float], window: int, away: float) -> tuple[float, float]:
    """Look up one call in floats; equals _look_up."""
    corners = [(window, 1.0)]
    for place, knots in zip(places, table.knots, strict=True):
        length = len(knots)
        away += max(knots[0] - place, 0.0) + max(place - knots[-1], 0.0)
        lower = min(max(bisect_right(knots, place) - 1, 0), length - 2)
        share = min(max((place - knots[lower]) / (knots[lower + 1] - knots[lower]), 0.0), 1.0)
        corners = [
            (index * length + lower + step, weight * part)
            for index, weight in corners
            for step, part in ((0, 1.0 - share), (1, share))
            if part > 0.0
        ]
    total = sum(weight * table.log_steps.item(index) for index, weight in corners)
    fade = max(1.0 - away / FADE_DOUBLINGS, 0.0)
    return fade * total * LOG_STEP, fade


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


def _look_up(
    table: AttentionResidual, places: list[PerCall], window: CallIndex, away: PerCall
) -> tuple[PerCall, PerCall]:
    logs, beyond = interpolate(table, np.stack(places), window)
    fade = np.maximum(1.0 - (away + beyond) / FADE_DOUBLINGS, 0.0)
    return fade * logs, fade


@cache
def load_residual(file_name: str, name: str) -> AttentionResidual:
    """Load the table of one kernel and phase, by the name in its record.

    Raises:
        CalibrationError: the file is missing or malformed.
    """
    path = resources.files("shapewright.pricing") / "data" / "attention" / file_name
    phase = "decode" if name.endswith("/decode") else "prefill"
    try:
        with resources.as_file(path) as found, np.load(found, allow_pickle=False) as stored:
            windows = tuple(sorted(int(key.split("@")[1]) for key in stored.files if key.startswith(f"{name}@")))
            tables = np.stack([stored[f"{name}@{window}"] for window in windows])
            knots = tuple(
                np.log2(stored[f"{axis}/{phase}"][:length].astype(float))
                for axis, length in zip(AXES, tables.shape[1:], strict=True)
            )
    except (OSError, KeyError, ValueError) as error:
        raise CalibrationError(f"residuals {file_name} of an attention record cannot be read: {error}") from error
    return AttentionResidual(knots_log2=knots, windows=windows, log_steps=tables)
