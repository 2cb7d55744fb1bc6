"""What formulas leave over: a learned correction of a time, read off a table over the logarithms of its sizes.

Legend: u = log2 of a size, w a weight in 0..1, r the logarithm of measured over physics.

    time = physics * exp(w r(u_1, u_2, ...))       r: linear between the table's knots

Libraries choose kernels by heuristics that no formula here knows. Their marks on measured times are learned by boosted
trees (fit.residual) and stored as one number per knot; between knots the correction is interpolated, beyond the table
it fades. This file serves single products over m, n and k; perf.attention_residual and perf.expert_residual read their
tables by it. Batches of products, and devices that borrow another family's record, get none: it was judged not to help
there (docs/decisions/0003).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Doublings beyond the table after which nothing is left of the correction. Judgement: data end there.
FADE_DOUBLINGS = 2.0
# Shapes corrected together: a few dozen arrays of this many float64 stay in the second cache.
_ROWS_PER_BLOCK = 4096
AXES = {"gemm": ("m", "n", "k"), "moe": ("rows", "experts", "inner", "hidden")}
"""Sizes that the tables of a kind of record run over. Of experts: rows of each expert in use, such experts, the width
between an expert's products, and the width before and after; a layer for each kernel of a library's rule."""
# What one unit of a stored number stands for; a byte then spans factors of 0.28 to 3.6.
LOG_STEP = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualTable:
    """Correction of one section of a record.

    Attributes:
        knots_log2: Rising log2 of each size at the knots; m, n and k for products.
        log_steps: ln(measured / physics) in units of ``log_step``; int8, shape [*knots], or [layers, *knots] where
            several tables share their knots.
        log_step: What one unit of a stored number stands for.
    """

    knots_log2: tuple[Array, ...]
    log_steps: NDArray[np.int8]
    log_step: float = LOG_STEP

    @property
    def has_layers(self) -> bool:
        """Whether several tables share the knots."""
        return self.log_steps.ndim > len(self.knots_log2)


def log_correction(table: ResidualTable, *sizes: Array, layer: NDArray[np.intp] | None = None) -> tuple[Array, Array]:
    """Correction of each shape, and how much of it counts.

    Args:
        table: The section's table.
        *sizes: One 1-d array for each axis of the table; m, n and k for products.
        layer: Which of the tables that share knots; None where there is one.

    Returns:
        w r, to be added to the logarithm of a time, and w, 1 inside the table and 0 far from it.
    """
    places = np.log2(np.stack(sizes))
    num_shapes = places.shape[1]
    if num_shapes <= _ROWS_PER_BLOCK:
        return _log_correction(table, places, layer)
    parts = [slice(start, start + _ROWS_PER_BLOCK) for start in range(0, num_shapes, _ROWS_PER_BLOCK)]
    found = [_log_correction(table, places[:, part], None if layer is None else layer[part]) for part in parts]
    logs, weights = zip(*found, strict=True)
    return np.concatenate(logs), np.concatenate(weights)


def _log_correction(table: ResidualTable, places: Array, layer: NDArray[np.intp] | None) -> tuple[Array, Array]:
    logs, beyond = interpolate(table, places, layer)
    fade = np.maximum(1.0 - beyond / FADE_DOUBLINGS, 0.0)
    return fade * logs, fade


def interpolate(table: ResidualTable, places: Array, layer: NDArray[np.intp] | None = None) -> tuple[Array, Array]:
    """R at some places, that of the nearest one inside for places outside, and how many doublings outside they lie.

    Args:
        table: The table.
        places: log2 of the sizes. [axes, shapes]
        layer: As of log_correction. [shapes]
    """
    lower = np.empty(places.shape, dtype=np.int64)
    below, above = np.empty(places.shape), np.empty(places.shape)
    for axis, knots in enumerate(table.knots_log2):
        found = knots[1:-1].searchsorted(places[axis], side="right")
        lower[axis], below[axis], above[axis] = found, knots[found], knots[found + 1]
    share = (places - below) / (above - below)
    # Beyond the first and the last knot, where the share leaves 0..1, by how many doublings.
    inside = np.minimum(np.maximum(share, 0.0), 1.0)
    beyond = (np.abs(share - inside) * (above - below)).sum(axis=0)
    # The corners of the cell that holds a shape, then one axis after the other.
    first: NDArray[np.integer[Any]] = np.zeros(places.shape[1], dtype=np.int64) if layer is None else layer
    strides: list[int] = []
    for axis, knots in enumerate(table.knots_log2):
        first = first * len(knots) + lower[axis]
        strides = [stride * len(knots) for stride in strides] + [1]
    corners = first + (_corners(len(strides)) @ np.array(strides))[:, None]
    steps = table.log_steps.reshape(-1).take(corners).astype(float).reshape(*[2] * len(strides), -1)
    for along in inside:
        steps = steps[0] + (steps[1] - steps[0]) * along
    return steps * table.log_step, beyond


@cache
def _corners(num_axes: int) -> NDArray[np.int64]:
    """The corners of a cell as steps along each axis, the first axis slowest."""
    return np.array([[corner >> axis & 1 for axis in reversed(range(num_axes))] for corner in range(2**num_axes)])


@cache
def load_residuals(file_name: str, kind: str = "gemm") -> Mapping[str, ResidualTable]:
    """Tables of one record, by the name of their section (see section_name).

    Args:
        file_name: The file beside the record.
        kind: Kind of the record, a key of AXES.

    Raises:
        CalibrationError: the file is missing or malformed.
    """
    path = resources.files("shapewright.perf") / "data" / kind / file_name
    try:
        with resources.as_file(path) as found, np.load(found, allow_pickle=False) as stored:
            knots = tuple(np.log2(stored[axis].astype(float)) for axis in AXES[kind])
            return {
                name.removeprefix("residual:"): ResidualTable(knots_log2=knots, log_steps=stored[name])
                for name in stored.files
                if name.startswith("residual:")
            }
    except (OSError, KeyError, ValueError) as error:
        raise CalibrationError(f"residuals {file_name} of a {kind} record cannot be read: {error}") from error


def section_name(dtype: str, library: str) -> str:
    """Name of a section's table in a file.

    >>> section_name("bf16", ""), section_name("fp8", "vllm 0.24.0")
    ('bf16', 'fp8 of vllm 0.24.0')
    """
    return f"{dtype} of {library}" if library else dtype
