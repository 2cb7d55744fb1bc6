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
# What one unit of a stored number stands for; a byte then spans factors of 0.28 to 3.6.
LOG_STEP = 0.01


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
    if len(m) <= _ROWS_PER_BLOCK:
        return _log_correction(table, m, n, k)
    blocks = [slice(start, start + _ROWS_PER_BLOCK) for start in range(0, len(m), _ROWS_PER_BLOCK)]
    logs, weights = zip(*(_log_correction(table, m[part], n[part], k[part]) for part in blocks), strict=True)
    return np.concatenate(logs), np.concatenate(weights)


def _log_correction(table: ResidualTable, m: Array, n: Array, k: Array) -> tuple[Array, Array]:
    flat = table.log_steps.reshape(-1)
    overshoot = np.zeros(len(m))
    # The eight corners of the cell that holds a shape: their places in the flat table, and their shares.
    corners: list[tuple[Any, Any]] = [(0, 1.0)]
    for dim, knots, length in zip((m, n, k), table.knots_log2, table.log_steps.shape, strict=True):
        place = np.log2(dim)
        overshoot += np.maximum(knots[0] - place, 0.0) + np.maximum(place - knots[-1], 0.0)
        lower = np.clip(np.searchsorted(knots, place, side="right") - 1, 0, length - 2)
        share = np.clip((place - knots[lower]) / (knots[lower + 1] - knots[lower]), 0.0, 1.0)
        corners = [
            (index * length + lower + step, weight * part)
            for index, weight in corners
            for step, part in ((0, 1.0 - share), (1, share))
        ]
    total = sum(weight * flat[index] for index, weight in corners)
    fade = np.maximum(1.0 - overshoot / FADE_DOUBLINGS, 0.0)
    return fade * total * LOG_STEP, fade


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
