"""What tiles and waves leave over: a learned correction of a GEMM's time, read off a table over log m, log n, log k.

Legend: u = log2 of a dimension, w a weight in 0..1, r the logarithm of measured over physics.

    time = physics * exp(w r(u_m, u_n, u_k))       r: linear between the table's knots

Libraries choose kernels by heuristics that no formula here knows. Their marks on measured times are learned by boosted
trees (fit.residual) and stored as one number per knot; between knots the correction is interpolated, beyond the table
it fades. Batches of products, and devices that borrow a record, get none: it was judged not to help there
(docs/decisions/0003).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from shapewright.errors import CalibrationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Doublings beyond the table after which nothing is left of the correction. Judgement: data end there.
FADE_DOUBLINGS = 2.0
# Shapes corrected together: a few dozen arrays of this many float64 stay in the second cache.
_ROWS_PER_BLOCK = 4096
# What one unit of a stored number stands for; a byte then spans factors of 0.28 to 3.6.
LOG_STEP = 0.01
# The corners of a cell as steps along m, n and k.
_CORNERS = np.array([(up_m, up_n, up_k) for up_m in (0, 1) for up_n in (0, 1) for up_k in (0, 1)])


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualTable:
    """Correction of one section of a record.

    Attributes:
        knots_log2: Rising log2 of m, n and k at the knots.
        log_steps: ln(measured / physics) in units of LOG_STEP; int8, shape [knots of m, of n, of k].
    """

    knots_log2: tuple[Array, Array, Array]
    log_steps: NDArray[np.int8]


def log_correction(table: ResidualTable, m: Array, n: Array, k: Array) -> tuple[Array, Array]:
    """Correction of each shape, and how much of it counts.

    Args:
        table: The section's table.
        m: Rows of C, 1-d. [element]
        n: Columns of C. [element]
        k: Contraction. [element]

    Returns:
        w r, to be added to the logarithm of a time, and w, 1 inside the table and 0 far from it.
    """
    places = np.log2(np.stack([m, n, k]))
    if len(m) <= _ROWS_PER_BLOCK:
        return _log_correction(table, places)
    blocks = [places[:, start : start + _ROWS_PER_BLOCK] for start in range(0, len(m), _ROWS_PER_BLOCK)]
    logs, weights = zip(*(_log_correction(table, block) for block in blocks), strict=True)
    return np.concatenate(logs), np.concatenate(weights)


def _log_correction(table: ResidualTable, places: Array) -> tuple[Array, Array]:
    """Correction and weight where log2 of m, n and k are ``places``. [3, shapes]"""
    lower = np.empty(places.shape, dtype=np.int64)
    below, above = np.empty(places.shape), np.empty(places.shape)
    for axis, knots in enumerate(table.knots_log2):
        found = np.searchsorted(knots[1:-1], places[axis], side="right")
        lower[axis], below[axis], above[axis] = found, knots[found], knots[found + 1]
    share = (places - below) / (above - below)
    # Beyond the first and the last knot, where the share leaves 0..1, by how many doublings.
    inside = np.minimum(np.maximum(share, 0.0), 1.0)
    overshoot = (np.abs(share - inside) * (above - below)).sum(axis=0)
    # The eight corners of the cell that holds a shape, then one axis after the other.
    _, num_n, num_k = table.log_steps.shape
    first = (lower[0] * num_n + lower[1]) * num_k + lower[2]
    corners = first + (_CORNERS @ np.array([num_n * num_k, num_k, 1]))[:, None]
    steps = table.log_steps.reshape(-1).take(corners).astype(float).reshape(2, 2, 2, -1)
    for along in inside:
        steps = steps[0] + (steps[1] - steps[0]) * along
    fade = np.maximum(1.0 - overshoot / FADE_DOUBLINGS, 0.0)
    return fade * steps * LOG_STEP, fade


@cache
def load_residuals(file_name: str) -> Mapping[str, ResidualTable]:
    """Tables of one record, by the name of their section (see section_name).

    Raises:
        CalibrationError: the file is missing or malformed.
    """
    path = resources.files("shapewright.perf") / "data" / "gemm" / file_name
    try:
        with resources.as_file(path) as found, np.load(found, allow_pickle=False) as stored:
            knots = tuple(np.log2(stored[letter].astype(float)) for letter in ("m", "n", "k"))
            return {
                name.removeprefix("residual:"): ResidualTable(knots_log2=knots, log_steps=stored[name])
                for name in stored.files
                if name.startswith("residual:")
            }
    except (OSError, KeyError, ValueError) as error:
        raise CalibrationError(f"residuals {file_name} of a gemm record cannot be read: {error}") from error


def section_name(dtype: str, library: str) -> str:
    """Name of a section's table in a file.

    >>> section_name("bf16", ""), section_name("fp8", "vllm 0.24.0")
    ('bf16', 'fp8 of vllm 0.24.0')
    """
    return f"{dtype} of {library}" if library else dtype
