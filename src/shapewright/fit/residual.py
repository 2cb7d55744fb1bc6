"""What a GEMM record's physics leaves over, learned by boosted trees and written down as a table.

The trees see the shape, what physics says of it (tiles, waves, split, bounds) and of the kernels that came next, and
learn ln(measured / physics) by its absolute error, since two collections of one shape differ by 4 to 11 % with long
tails. In 16 bits, where all libraries call the vendor's, one model serves all devices of an architecture and all
libraries, told apart by two columns; in narrower formats each section has its own. A model is evaluated at every knot
of the grid that was measured: pricing needs the table alone, no tree and no library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.fit.logs import Array, folds_of
from shapewright.fit.runner_up import runner_up_columns
from shapewright.fit.trees import fit_trees
from shapewright.operations import Gemm
from shapewright.perf.gemm import flatten, price_gemm
from shapewright.perf.gemm_job import make_gemm_job
from shapewright.perf.residual import LOG_STEP

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.price import GemmPrice

    Mask = NDArray[np.bool_]

# Chosen by errors over whole (n, k) shapes left out in turn (docs/decisions/0003): for one section's rows, for those of
# sections that run the same kernels, and for all libraries of a device, between whose corrections little is left.
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
# Folds of the fitted shapes, whose left-out residuals make the interval.
NUM_INNER_FOLDS = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class LearnedSection:
    """One section of a record over all knots of its table, and what was measured there.

    Attributes:
        physics_s: Time by the formulas. [s], shape [knots]
        seen: What the trees see of each knot; shape [knots, features].
        measured_s: Measured times of each library, NaN where none was measured. [s], shape [knots]
    """

    physics_s: Array
    seen: Array
    measured_s: Mapping[str, Array]


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction:
    """ln(measured / physics) at all knots; shape [knots].

    Attributes:
        of_all: By trees that saw every fitted shape.
        left_out: By trees that saw no row of the knot's (n, k).
    """

    of_all: Array
    left_out: Array

    def unseen(self, fitted: Mask) -> Array:
        """At each knot by trees that did not see its (n, k): those of all shapes where it is no fitted one."""
        return np.where(fitted, self.left_out, self.of_all)


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
    sees_runners_up: bool,
) -> LearnedSection:
    """Price all knots by a record without its residual, and gather what the trees see of them.

    Args:
        knots: Columns m, n, k.
        measured_s: Measured times of each library at the knots. [s]
        device: The device.
        record: Its record of GEMMs.
        dtype: Element format.
        layout: Which dimensions are contiguous.
        hot_cache: Operands may lie in the last-level cache.
        library: Library of the section, empty for all of them.
        sees_runners_up: Whether the trees see the kernels that came next, too.
    """
    dims = {letter: knots[letter].to_numpy(float) for letter in ("m", "n", "k")}
    operation = Gemm(name="row", dtype=dtype, layout=layout, **dims)
    price = price_gemm(operation, device, record, hot_cache=hot_cache, library=library)
    seen = features(**dims, price=price)
    if sees_runners_up:
        job = make_gemm_job(dtype, None, device, record, hot_cache=hot_cache, library=library)
        assert job.section is not None
        assert job.rates is not None
        _, products = flatten(operation)
        behind = runner_up_columns(products, job.section.parameters, job.rates)
        seen = np.concatenate([seen, behind], axis=1)
    return LearnedSection(physics_s=np.asarray(price.time_s), seen=seen, measured_s=measured_s)


def between(section: LearnedSection, knots: pd.DataFrame, said: Array) -> LearnedSection:
    """The section of all libraries, whose trees see sizes and what each library's section says. [knots, columns]"""
    return replace(section, seen=np.column_stack([np.log2(knots[["m", "n", "k"]].to_numpy(float)), said]))


def features(m: Array, n: Array, k: Array, price: GemmPrice) -> Array:
    """What the trees see of each product and its best kernel; shape [products, features]."""
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
    fitted: Mask,
    folds: NDArray[np.int64],
    *,
    trees: Mapping[str, Any],
) -> list[Correction]:
    """Learn what the physics of several sections leaves over, by one model.

    Args:
        sections: What to learn from, all over the same knots.
        marks: Columns that tell sections apart; shape [sections, marks].
        fitted: Knots whose (n, k) may be learned from.
        folds: Fold of each knot's (n, k).
        trees: Words of the trees.
    """
    seen = [
        np.column_stack([one.seen, np.tile(mark, (len(one.seen), 1))])
        for one, mark in zip(sections, marks, strict=True)
    ]
    parts = []
    for one, own in zip(sections, seen, strict=True):
        for measured_s in one.measured_s.values():
            known = np.flatnonzero(fitted & np.isfinite(measured_s))
            parts.append((own[known], np.log(measured_s / one.physics_s)[known], folds[known]))
    rows, target, fold = (np.concatenate(column) for column in zip(*parts, strict=True))

    model = fit_trees(rows, target, trees)
    found = [Correction(of_all=model.predict(own), left_out=np.zeros(len(own))) for own in seen]
    for number in range(NUM_INNER_FOLDS):
        others = fold != number
        model = fit_trees(rows[others], target[others], trees)
        for own, correction in zip(seen, found, strict=True):
            correction.left_out[folds == number] = model.predict(own[folds == number])
    return found


def shape_folds(knots: pd.DataFrame) -> NDArray[np.int64]:
    """Fold of each knot, by its whole (n, k)."""
    return folds_of(knots.n, knots.k) % NUM_INNER_FOLDS


def to_log_steps(logs: Array) -> NDArray[np.int8]:
    """Corrections as a table stores them."""
    return np.clip(np.rint(logs / LOG_STEP), -127, 127).astype(np.int8)
