"""Boosted trees for the residual of a GEMM record's formulas: tabulated, or a forest that is stored with a record.

Features are the shape, the predicted quantities (tiles, waves, split, bounds) and, in 16 bits, the other kernels of the
menu; the target is ln(measured / physics) with an absolute-error loss, since two collections of one shape differ by 4
to 11 % with long tails. In 16 bits, where all libraries call the vendor's kernels, one model serves all devices of an
architecture and all libraries, with two indicator columns; in narrower formats each section has its own. A model is
evaluated at every measured knot of the grid, so that pricing needs the table only.

Runner-up kernels are the next best tiles of each GEMM and their relative times. Where several kernels take nearly the
same time, a library's heuristic and the formulas disagree, and a correction is likely. How full each tile of the menu
leaves its waves tells what the library's own choice would lose, whichever tile that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from shapewright.core.records import dataclass
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.fit.shared import Array, folds_of_groups
from shapewright.measure.refit.record_files import fit_trees
from shapewright.pricing.calibration.forest import SIZES, ResidualForest, forest_features
from shapewright.pricing.calibration.residual import LOG_STEP
from shapewright.pricing.gemm.kernels import alignment_factor, estimate_kernels, every_kernel, join_s
from shapewright.pricing.gemm.price import ROWS_PER_BLOCK, flatten, price_gemm
from shapewright.pricing.gemm.section import prepare_gemm_pricing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.gemm.kernels import DeviceRates
    from shapewright.pricing.gemm.parameters import GemmParameters
    from shapewright.pricing.gemm.shapes import Gemms
    from shapewright.pricing.price import GemmPrice

    Mask = NDArray[np.bool_]

# Runner-up tiles among the features.
NUM_RUNNERS_UP = 3


def kernel_columns(gemms: Gemms, parameters: GemmParameters, rates: DeviceRates) -> Array:
    """Return features of the menu's kernels and of the operands of single GEMMs.

    Returns:
        Shape [gemms, 5 * NUM_RUNNERS_UP + 1 + tiles + 5]. Of each of the next best tiles, with its best split of k, its
        rows, columns and split, ln(its time / the best time), and its last wave as a share of a full one; then
        ln(best time without a split / best time); of every tile without a split, the mean fill of its waves; then
        the columns of ``operand_columns``.
    """
    blocks = [slice(start, start + ROWS_PER_BLOCK) for start in range(0, len(gemms.m), ROWS_PER_BLOCK)]
    kernels = np.concatenate([_block(gemms.rows(part), parameters, rates) for part in blocks])
    return np.concatenate([kernels, operand_columns(gemms)], axis=1)


def operand_columns(gemms: Gemms) -> Array:
    """Return log2 of sums that trees add up badly, though caches hold operands by them.

    Returns:
        Elements of all matrices together, of the largest, min(m, n), elements of A and B, operations per element;
        shape [gemms, 5].
    """
    m, n, k = gemms.m, gemms.n, gemms.k
    sizes = np.stack([m * k, n * k, m * n])
    elements = sizes.sum(axis=0)
    columns = [elements, sizes.max(axis=0), np.minimum(m, n), elements - m * n, 2.0 * m * n * k / elements]
    logs: Array = np.log2(np.stack(columns, axis=1))
    return logs


def _block(gemms: Gemms, parameters: GemmParameters, rates: DeviceRates) -> Array:
    p, num_gemms = parameters, len(gemms.m)
    factor, _ = alignment_factor(gemms, rates.element_bits, p)
    times = estimate_kernels(gemms, factor, every_kernel(p), p, rates)
    by_tile = (len(p.tile_m), len(p.split_k), num_gemms)
    time_s = (join_s(times.compute_s, times.memory_s, p.overlap_power) + times.added_s).reshape(by_tile)
    waves = (times.num_tiles / rates.num_sms).reshape(by_tile)
    best_s, tile_s, split = time_s.min(axis=(0, 1)), time_s.min(axis=1), time_s.argmin(axis=1)
    each, order = np.arange(num_gemms), tile_s.argsort(axis=0)
    columns = []
    for tile in order[1 : 1 + NUM_RUNNERS_UP]:
        own_split = split[tile, each]
        columns += [p.tile_m[tile], p.tile_n[tile], p.split_k[own_split], np.log(tile_s[tile, each] / best_s)]
        columns.append(waves[tile, own_split, each] % 1.0)
    columns.append(np.log(time_s[:, 0].min(axis=0) / best_s))
    columns += list(waves[:, 0] / np.ceil(waves[:, 0]))
    return np.stack(columns, axis=1)


# Chosen by errors over whole (n, k) shapes left out in turn (docs/decisions/0003): for the rows of one section, for
# sections that run the same kernels, and for all libraries of a device, whose combination needs little.
OWN_TREES: dict[str, Any] = {
    "objective": "l1",
    "n_estimators": 300,
    "learning_rate": 0.05,
    "num_leaves": 127,
    "min_child_samples": 20,
    "colsample_bytree": 0.6,
}
SHARED_TREES: dict[str, Any] = {**OWN_TREES, "n_estimators": 500, "num_leaves": 255}
MIDDLE_TREES: dict[str, Any] = {**OWN_TREES, "n_estimators": 200, "learning_rate": 0.07, "num_leaves": 63}
# Folds of the shapes that the formulas were fitted to, whose left-out residuals give the interval, and of the others,
# by which errors are reported.
NUM_FITTED_FOLDS = 4
NUM_HELD_OUT_FOLDS = 2
NO_FOLD = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedSection:
    """One section of a record over all knots of its table, with the measurements there.

    Attributes:
        physics_s: Time by the formulas. [s], shape [knots]
        seen: Features of each knot; shape [knots, features].
        measured_s: Measured times of each library, NaN where unmeasured. [s], shape [knots]
    """

    physics_s: Array
    seen: Array
    measured_s: Mapping[str, Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """Learned ln(measured / physics) at all knots; shape [knots].

    Attributes:
        of_all: By trees fitted to every measured shape.
        left_out: By trees that saw no row of the knot's (n, k), nor of others of its fold.
    """

    of_all: Array
    left_out: Array


def learn_section(
    knots: pd.DataFrame,
    measured_s: Mapping[str, Array],
    device: Device,
    record: CalibrationRecord,
    *,
    dtype: str,
    layout: str,
    hot_cache: bool,
    library: str,
    uses_kernels: bool,
) -> LearnedSection:
    """Price all knots by a record without its residual, and compute the features of the trees.

    Args:
        knots: Columns m, n, k.
        measured_s: Measured times of each library at the knots. [s]
        hot_cache: Operands may lie in the last-level cache.
        library: Library of the section; empty for all of them.
        uses_kernels: Include features of the menu's kernels and of the operands.
    """
    dims = {letter: knots[letter].to_numpy(float) for letter in ("m", "n", "k")}
    operation = Gemm(name="row", dtype=dtype, layout=layout, **dims)
    price = price_gemm(operation, device, record, hot_cache=hot_cache, library=library)
    seen = features(**dims, price=price)
    if uses_kernels:
        pricing = prepare_gemm_pricing(dtype, None, device, record, hot_cache=hot_cache, library=library)
        assert pricing.section is not None
        assert pricing.rates is not None
        _, gemms = flatten(operation)
        kernels = kernel_columns(gemms, pricing.section.parameters, pricing.rates)
        seen = np.concatenate([seen, kernels], axis=1)
    return LearnedSection(physics_s=np.asarray(price.time_s), seen=seen, measured_s=measured_s)


def combined_section(section: LearnedSection, knots: pd.DataFrame, corrections: Array) -> LearnedSection:
    """Return the section of all libraries, with sizes and the libraries' corrections as features. [knots, columns]"""
    return replace(section, seen=np.column_stack([np.log2(knots[["m", "n", "k"]].to_numpy(float)), corrections]))


def features(m: Array, n: Array, k: Array, price: GemmPrice) -> Array:
    """Return the features of each GEMM and its best kernel; shape [gemms, features]."""
    log_m, log_n, log_k = np.log2(m), np.log2(n), np.log2(k)
    columns: list[Any] = [
        log_m,
        log_n,
        log_k,
        log_m + log_n,
        log_m + log_k,
        log_n + log_k,
        log_n - log_k,
        log_m + log_n + log_k,
    ]
    columns += [m % 128, n % 128, *(np.ceil(m / tile) * tile / m for tile in (64, 128, 256))]
    columns += [np.log(np.asarray(price.time_s)), np.log(np.asarray(price.compute_s) / np.asarray(price.memory_s))]
    columns += [price.tile_m, price.tile_n, price.split_k, np.log2(price.num_tiles), price.num_waves]
    columns += [price.tile_efficiency, price.wave_efficiency]
    return np.stack(columns, axis=1)


def learn_together(
    sections: Sequence[LearnedSection],
    marks: Array,
    folds: NDArray[np.int64],
    *,
    trees: Mapping[str, Any],
) -> list[Correction]:
    """Learn the residuals of several sections with one model.

    Args:
        marks: Indicator columns of each section; shape [sections, marks].
        folds: Fold of each knot's (n, k); NO_FOLD where nothing was measured.
    """
    seen = [
        np.column_stack([one.seen, np.tile(mark, (len(one.seen), 1))])
        for one, mark in zip(sections, marks, strict=True)
    ]
    parts = []
    for one, own in zip(sections, seen, strict=True):
        for measured_s in one.measured_s.values():
            known = np.flatnonzero(np.isfinite(measured_s))
            parts.append((own[known], np.log(measured_s / one.physics_s)[known], folds[known]))
    rows, target, fold = (np.concatenate(column) for column in zip(*parts, strict=True))

    model = fit_trees(rows, target, trees)
    of_all = [model.predict(own) for own in seen]
    found = [Correction(of_all=each, left_out=each.copy()) for each in of_all]
    for number in np.unique(fold):
        others = fold != number
        model = fit_trees(rows[others], target[others], trees)
        for own, correction in zip(seen, found, strict=True):
            correction.left_out[folds == number] = model.predict(own[folds == number])
    return found


def shape_folds(knots: pd.DataFrame, measured: Mask, held_out: Mask) -> NDArray[np.int64]:
    """Return the fold of each knot by its whole (n, k): shapes that the formulas saw apart from those held out of them.

    Args:
        knots: Columns n, k.
        measured: Knots whose (n, k) was measured. [knots]
        held_out: Knots whose (n, k) was held out of the fit of the formulas. [knots]

    Returns:
        NO_FOLD where nothing was measured.
    """
    folds = np.full(len(knots), NO_FOLD)
    for chosen, first, count in (
        (measured & ~held_out, 0, NUM_FITTED_FOLDS),
        (measured & held_out, NUM_FITTED_FOLDS, NUM_HELD_OUT_FOLDS),
    ):
        shapes = list(zip(knots.n[chosen], knots.k[chosen], strict=True))
        folds[chosen] = first + folds_of_groups(shapes, count)
    return folds


def to_log_steps(logs: Array) -> NDArray[np.int8]:
    """Return corrections in the steps of a stored table."""
    return np.clip(np.rint(logs / LOG_STEP), -127, 127).astype(np.int8)


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
