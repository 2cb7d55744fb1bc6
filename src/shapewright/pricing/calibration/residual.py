"""Residual tables: learned corrections of formula times, interpolated over the logarithms of sizes.

Legend: u = log2 of a size, w a weight in 0..1, r = ln(measured / formula).

    time = formula * exp(w r(u_1, u_2, ...))       r: multilinear between the table's knots

Libraries choose kernels by heuristics that the formulas do not model. Boosted trees (measure.refit.gemm.trees)
learn what the formulas leave over, and the result is stored as one number per knot. Outside the table the correction
fades. This module prices single GEMMs over m, n and k; attention.residual and the expert tables use it too. Batched
GEMMs and records of other architectures get no correction: on held-out data it did not help (docs/decisions/0003).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from numpy.lib.npyio import NpzFile

    Knots = Float[np.ndarray, "_"]  # each axis has its own number of knots
    LogSteps = Int[np.ndarray, "..."]
    PerShape = Float[np.ndarray, "shapes"]
    Layers = Int[np.ndarray, "shapes"]

# Distance outside the table, in doublings, at which the correction has faded to nothing. Judgement.
FADE_DOUBLINGS = 2.0
# Shapes corrected together: a few dozen float64 arrays of this length fit the L2 cache of a core.
_ROWS_PER_BLOCK = 4096
AXES = {"gemm": ("m", "n", "k"), "moe": ("rows", "experts", "inner", "hidden")}
"""Sizes that the tables of a kind of record are indexed by. For experts: rows of each active expert, active experts,
the width between an expert's two GEMMs, and the width before and after; one layer per kernel of a library's tile rule.
"""
# Value of one unit of a stored number; a byte then spans factors of 0.28 to 3.6.
LOG_STEP = 0.01
# A file holds the table of a section under the first prefix; where that saw the shapes by which errors are reported, it
# holds under the second what to add to leave them out.
TABLE_PREFIX = "residual:"
LEFT_OUT_PREFIX = "left_out:"


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualTable:
    """Residual table of one section of a record.

    Attributes:
        knots_log2: Ascending log2 of each size at the knots; m, n and k for GEMMs.
        log_steps: ln(measured / formula) in units of ``log_step``; int8, shape [*knots], or [layers, *knots] where
            several tables share their knots.
        log_step: Value of one unit of a stored number.
    """

    knots_log2: tuple[Knots, ...]
    log_steps: LogSteps
    log_step: float = LOG_STEP

    @property
    def has_layers(self) -> bool:
        """Whether several tables share the knots."""
        return self.log_steps.ndim > len(self.knots_log2)


def log_correction(
    table: ResidualTable, *sizes: PerShape, layer: Layers | None = None, away: PerShape | float = 0.0
) -> tuple[PerShape, PerShape]:
    """Look up the correction of each shape and its weight.

    Args:
        *sizes: One 1-d array for each axis of the table; m, n and k for GEMMs.
        layer: Index of each shape's table where several share the knots; None otherwise.
        away: Distance of each shape from what was measured, beside that of its sizes. [doubling]

    Returns:
        w r, to be added to the logarithm of a time, and w, which is 1 inside the table and 0 far from it.
    """
    places = np.log2(np.stack(sizes))
    parts = [slice(start, start + _ROWS_PER_BLOCK) for start in range(0, max(places.shape[1], 1), _ROWS_PER_BLOCK)]
    found = [interpolate(table, places[:, part], None if layer is None else layer[part]) for part in parts]
    logs, beyond = found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))
    weight = fade(away + beyond)
    return weight * logs, weight


def fade(away: PerShape) -> PerShape:
    """Return the weight of a correction at a distance from what was measured, in doublings."""
    weight: PerShape = np.maximum(1.0 - away / FADE_DOUBLINGS, 0.0)
    return weight


def interpolate(
    table: ResidualTable, places: Float[np.ndarray, "axes shapes"], layer: Layers | None = None
) -> tuple[PerShape, PerShape]:
    """Interpolate r at some points, clamped to the table, with the distance of each point outside it in doublings.

    Args:
        places: log2 of the sizes. [axes, shapes]
        layer: As in log_correction. [shapes]
    """
    lower = np.empty(places.shape, dtype=np.int64)
    below, above = np.empty(places.shape), np.empty(places.shape)
    for axis, knots in enumerate(table.knots_log2):
        found = knots[1:-1].searchsorted(places[axis], side="right")
        lower[axis], below[axis], above[axis] = found, knots[found], knots[found + 1]
    share = (places - below) / (above - below)
    # Distance in doublings beyond the first and the last knot, where the share leaves 0..1.
    inside = np.minimum(np.maximum(share, 0.0), 1.0)
    beyond = (np.abs(share - inside) * (above - below)).sum(axis=0)
    # Corners of the cell that holds each shape, then linear interpolation along one axis after the other.
    first: Layers = np.zeros(places.shape[1], dtype=np.int64) if layer is None else layer
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
def _corners(num_axes: int) -> Int[np.ndarray, "corners axes"]:
    """Corners of a cell as steps along each axis, the first axis slowest."""
    return np.array([[corner >> axis & 1 for axis in reversed(range(num_axes))] for corner in range(2**num_axes)])


@contextmanager
def reading_residuals(file_name: str, kind: str) -> Iterator[NpzFile]:
    """Open a file of the package with the residuals of a record.

    Args:
        file_name: Name of the file next to the record.
        kind: Kind of the record.

    Raises:
        CalibrationError: the file is missing or malformed.
    """
    path = resources.files("shapewright.pricing") / "data" / kind / file_name
    try:
        with resources.as_file(path) as found, np.load(found, allow_pickle=False) as stored:
            yield stored
    except (OSError, KeyError, ValueError) as error:
        raise CalibrationError(f"residuals {file_name} of a {kind} record cannot be read: {error}") from error


@cache
def load_residuals(
    file_name: str, kind: str = "gemm", *, without_own_shapes: bool = False
) -> Mapping[str, ResidualTable]:
    """Load the tables of one record, by section name (see section_name).

    Args:
        file_name: Name of the file next to the record.
        kind: Kind of the record, a key of AXES.
        without_own_shapes: At shapes by which errors are reported, what trees say that did not see them.
    """
    with reading_residuals(file_name, kind) as stored:
        knots = tuple(np.log2(stored[axis].astype(float)) for axis in AXES[kind])
        tables = {
            name.removeprefix(TABLE_PREFIX): stored[name] for name in stored.files if name.startswith(TABLE_PREFIX)
        }
        if without_own_shapes:
            tables = {
                name: steps + stored[LEFT_OUT_PREFIX + name] if LEFT_OUT_PREFIX + name in stored else steps
                for name, steps in tables.items()
            }
        return {name: ResidualTable(knots_log2=knots, log_steps=steps) for name, steps in tables.items()}


def section_name(dtype: str, library: str) -> str:
    """Return the name of a section's table in a file.

    >>> section_name("bf16", ""), section_name("fp8", "vllm 0.24.0")
    ('bf16', 'fp8 of vllm 0.24.0')
    """
    return f"{dtype} of {library}" if library else dtype
