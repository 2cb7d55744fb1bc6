"""Residual forests: learned corrections of formula times, as the boosted trees themselves.

    time = formula * exp(w r),   r = sum over trees of the value of the leaf that a shape falls into

A residual table (calibration.residual) interpolates between knots. Where kernels change at odd sizes, as cuBLAS's fp32
kernels do, knots lose most of what the trees found (docs/decisions/0017); the trees are small enough to be stored. All
trees are evaluated level by level for a block of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.calibration.residual import fade, reading_residuals

if TYPE_CHECKING:
    from pathlib import Path

    from jaxtyping import Float, Int

    PerShape = Float[np.ndarray, "shapes"]
    PerNode = Float[np.ndarray, "trees nodes"]
    NodeIndex = Int[np.ndarray, "trees nodes"]

# Shapes evaluated together: 300 trees x 512 places of 8 bytes stay in the L2 cache.
_ROWS_PER_BLOCK = 512
SIZES = ("m", "n", "k", "batch")
"""Sizes whose range bounds the rows that were learned from."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ResidualForest:
    """Boosted trees of one section of a record.

    Attributes:
        feature: Feature that each inner node compares; leaves repeat any. [trees, nodes]
        threshold: A shape with more goes right. [trees, nodes]
        left: Node to the left; a leaf is its own left and right. [trees, nodes]
        right: Node to the right. [trees, nodes]
        value: Contribution of each leaf; 0 at inner nodes. [trees, nodes]
        depth: Number of comparisons that reach every leaf.
        least_log2: log2 of the smallest m, n, k and batch among the rows. [4]
        most_log2: log2 of the largest. [4]
    """

    feature: NodeIndex
    threshold: PerNode
    left: NodeIndex
    right: NodeIndex
    value: PerNode
    depth: int
    least_log2: Float[np.ndarray, 4]
    most_log2: Float[np.ndarray, 4]


def forest_features(
    m: PerShape, n: PerShape, k: PerShape, batch: PerShape, time_s: PerShape
) -> Float[np.ndarray, "features shapes"]:
    """Return what the trees compare: log2 of sizes, outputs, rows, B, work and formula time. [features, shapes]"""
    logs = np.log2(np.stack([m, n, k, batch, time_s]))
    m, n, k, batch, time = logs
    return np.stack([m, n, k, batch, m + n, batch + m, n + k, batch + m + n + k, time])


def forest_correction(
    forest: ResidualForest, m: PerShape, n: PerShape, k: PerShape, batch: PerShape, time_s: PerShape
) -> tuple[PerShape, PerShape]:
    """Look up the correction of each shape and its weight, as calibration.residual.log_correction does.

    Args:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        time_s: Formula times. [s]
    """
    features = forest_features(m, n, k, batch, time_s)
    logs = np.concatenate(
        [
            _sum_leaves(forest, features[:, start : start + _ROWS_PER_BLOCK])
            for start in range(0, features.shape[1], _ROWS_PER_BLOCK)
        ]
    )
    places = features[: len(SIZES)]
    beyond = np.maximum(forest.least_log2[:, None] - places, 0.0) + np.maximum(places - forest.most_log2[:, None], 0.0)
    weight = fade(beyond.sum(axis=0))
    return weight * logs, weight


def _sum_leaves(forest: ResidualForest, features: Float[np.ndarray, "features shapes"]) -> PerShape:
    num_trees, num_nodes = forest.feature.shape
    num_shapes = features.shape[1]
    roots = (np.arange(num_trees) * num_nodes)[:, None]
    node = np.broadcast_to(roots, (num_trees, num_shapes))
    columns = np.arange(num_shapes)
    flat, width = features.reshape(-1), num_shapes
    feature, threshold = forest.feature.reshape(-1), forest.threshold.reshape(-1)
    left, right = forest.left.reshape(-1), forest.right.reshape(-1)
    for _ in range(forest.depth):
        goes_left = flat.take(feature.take(node) * width + columns) <= threshold.take(node)
        node = roots + np.where(goes_left, left.take(node), right.take(node))
    total: PerShape = forest.value.reshape(-1).take(node).sum(axis=0)
    return total


FOREST = "forest"
"""Value of ``form`` in the residual of a record whose file holds forests instead of tables."""
_ARRAYS = ("feature", "threshold", "left", "right", "value")


@cache
def load_forests(file_name: str, kind: str) -> Mapping[str, ResidualForest]:
    """Load the forests of one record, by section name (calibration.residual.section_name).

    Args:
        file_name: Name of the file next to the record.

    Raises:
        CalibrationError: the file is missing or malformed.
    """
    with reading_residuals(file_name, kind) as stored:
        return {str(section): _read(stored, place) for place, section in enumerate(stored["sections"])}


def _read(stored: Mapping[str, Any], place: int) -> ResidualForest:
    arrays = {
        name: stored[f"{name}{place}"].astype(float if name in ("threshold", "value") else np.int64) for name in _ARRAYS
    }
    least, most = stored[f"range{place}"].astype(float)
    return ResidualForest(**arrays, depth=int(stored[f"depth{place}"]), least_log2=least, most_log2=most)


def save_forests(path: Path, forests: Mapping[str, ResidualForest]) -> None:
    """Write the forests of a record next to it, in the narrowest types that hold them."""
    arrays: dict[str, Any] = {"sections": np.array(list(forests))}
    for place, forest in enumerate(forests.values()):
        for name in _ARRAYS:
            narrow = np.int8 if name in ("feature", "left", "right") else np.float16 if name == "value" else np.float32
            arrays[f"{name}{place}"] = getattr(forest, name).astype(narrow)
        arrays[f"range{place}"] = np.stack([forest.least_log2, forest.most_log2])
        arrays[f"depth{place}"] = np.array(forest.depth)
    np.savez_compressed(path, **arrays)
