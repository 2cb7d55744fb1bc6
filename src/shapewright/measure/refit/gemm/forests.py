"""Learn the residual of GEMM formulas as a forest that is stored with a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from shapewright.measure.fit.shared import Array
from shapewright.measure.refit.record_files import fit_trees
from shapewright.pricing.calibration.forest import SIZES, ResidualForest, forest_features

# Trees of 31 and 63 leaves err 0.1 to 0.7 points less and take two to four times the space (docs/decisions/0017).
TREES: Mapping[str, Any] = {
    "n_estimators": 300,
    "num_leaves": 20,
    "max_depth": 7,
    "learning_rate": 0.06,
    "min_child_samples": 20,
}


def learn_forest(
    rows: pd.DataFrame, physics_s: Array, kernel_s: Array, weight: Array | None = None, **changed: Any
) -> ResidualForest:
    """Learn ln(measured / formula) of GEMMs.

    Args:
        rows: Sizes, in columns m, n, k and batch.
        physics_s: Formula time of each. [s]
        kernel_s: Measured time of each. [s]
        weight: Weight of each row; equal by default.
        **changed: Parameters of the trees other than TREES.
    """
    sizes = [rows[name].to_numpy(float) for name in SIZES]
    m, n, k, batch = sizes
    features = forest_features(m, n, k, batch, physics_s).T
    model = fit_trees(features, np.log(kernel_s / physics_s), {**TREES, **changed}, weight)
    places = np.log2(np.stack(sizes))
    return forest_of(model, places.min(axis=1), places.max(axis=1))


def forest_of(model: Any, least_log2: Array, most_log2: Array) -> ResidualForest:
    """Return the trees of a LightGBM model as arrays; a node's children follow it."""
    trees = [tree["tree_structure"] for tree in model.booster_.dump_model()["tree_info"]]
    nodes = [_list_nodes(tree) for tree in trees]
    shape = (len(trees), max(len(each) for each in nodes))
    feature, left, right = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    threshold, value = np.zeros(shape), np.zeros(shape)
    for row, listed in enumerate(nodes):
        for place, (split, limit, go_left, go_right, leaf) in enumerate(listed):
            feature[row, place], threshold[row, place] = split, limit
            left[row, place], right[row, place], value[row, place] = go_left, go_right, leaf
    return ResidualForest(
        feature=feature,
        threshold=threshold.astype(np.float32).astype(float),
        left=left,
        right=right,
        value=value.astype(np.float16).astype(float),
        depth=max(_depth(tree) for tree in trees),
        least_log2=least_log2,
        most_log2=most_log2,
    )


def _list_nodes(root: Mapping[str, Any]) -> list[tuple[int, float, int, int, float]]:
    """List feature, threshold, left, right and value of every node; a leaf leads to itself."""
    listed: list[tuple[int, float, int, int, float]] = []

    def add(node: Mapping[str, Any]) -> int:
        place = len(listed)
        listed.append((0, 0.0, place, place, float(node.get("leaf_value", 0.0))))
        if "leaf_value" not in node:
            left, right = add(node["left_child"]), add(node["right_child"])
            listed[place] = (int(node["split_feature"]), float(node["threshold"]), left, right, 0.0)
        return place

    add(root)
    return listed


def _depth(node: Mapping[str, Any]) -> int:
    if "leaf_value" in node:
        return 0
    return 1 + max(_depth(node["left_child"]), _depth(node["right_child"]))
