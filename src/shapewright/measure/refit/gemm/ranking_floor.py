"""Estimate the lowest ranking regret of GEMMs that a predictor with the neighboring measurements reaches.

Trees get the features of the residual tables, and the residuals of the rows next to a row in m, n and k, in its own
section and in every other of its architecture, and of the same GEMM in the others: timed by the other library and on
the sibling. A fifth of the rows at a time is left out at random. No predictor has that much information, so a limit
below this regret is hardly reachable. For comparison the section that prices models, with (n, k) left out, evaluated
against the mean of libraries, which scatters less than one. Nothing is written; a minute per section, some per
architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.hardware import load_device
from shapewright.measure.fit.gemm_section import Array, percentage_errors
from shapewright.measure.refit.gemm.residual import (
    LETTERS,
    SMALLEST_RANKED_M,
    TABLE,
    Learner,
    measured_knots,
    ranking_regret,
)
from shapewright.measure.refit.gemm.residual_trees import OWN_TREES
from shapewright.measure.refit.gemm.rows import SOURCES
from shapewright.measure.refit.trees import fit_trees

# Neighbors on either side: m is measured finely, n and k by factors of 1.2 to 2.
NEIGHBORS = {"m": (-3, -2, -1, 1, 2, 3), "n": (-1, 1), "k": (-1, 1)}
NUM_FOLDS = 5
TREES: dict[str, Any] = {**OWN_TREES, "n_estimators": 500, "num_leaves": 63}


def neighbor_residuals(logs: Array, axis: int, offsets: tuple[int, ...]) -> list[Array]:
    """Return the residuals of the measured rows next to each row along one axis; NaN where there is none.

    Args:
        logs: ln(measured / physics) over m, n, k, NaN where unmeasured.
        axis: Axis of the neighbors.
        offsets: Distances in measured rows; one array is returned for each.
    """
    lines = np.moveaxis(logs, axis, -1)
    found = np.full((len(offsets), *lines.shape), np.nan)
    for line in np.ndindex(lines.shape[:-1]):
        known = np.flatnonzero(np.isfinite(lines[line]))
        for one, offset in zip(found, offsets, strict=True):
            at = np.arange(len(known)) + offset
            is_inside = (at >= 0) & (at < len(known))
            one[line][known[is_inside]] = lines[line][known[at[is_inside]]]
    return [np.moveaxis(one, -1, axis).reshape(-1) for one in found]


def predict_with_neighbors(learner: Learner, name: tuple[str, str], around: Mapping[tuple[str, str], Array]) -> Array:
    """Return times of one section by trees that see all residuals but the row's own. [s], NaN where unmeasured.

    Args:
        learner: Sections and their measurements.
        name: Device and library.
        around: Residuals of each section's rows (first column) and of their neighbors.
    """
    section, logs = learner.sections[name], around[name][:, 0]
    others = [columns for one, columns in around.items() if one != name]
    seen = np.concatenate([section.seen, around[name][:, 1:], *others], axis=1)
    known = np.isfinite(logs)
    folds = np.random.default_rng(0).integers(0, NUM_FOLDS, len(logs))
    found = np.full(len(logs), np.nan)
    for fold in range(NUM_FOLDS):
        taught, asked = known & (folds != fold), known & (folds == fold)
        found[asked] = fit_trees(seen[taught], logs[taught], TREES).predict(seen[asked])
    predicted_s: Array = section.physics_s * np.exp(found)
    return predicted_s


def residuals_around(learner: Learner) -> dict[tuple[str, str], Array]:
    """Return the residuals of each section's rows and of their neighbors; NaN where unmeasured."""
    shape = [learner.knots[letter].nunique() for letter in LETTERS]
    around = {}
    for name, measured_s in learner.measured_s.items():
        logs = np.log(measured_s / learner.sections[name].physics_s)
        beside = [
            column
            for axis, letter in enumerate(LETTERS)
            for column in neighbor_residuals(logs.reshape(shape), axis, NEIGHBORS[letter])
        ]
        around[name] = np.stack([logs, *beside], axis=1)
    return around


def report(data: Path, architectures: Sequence[str] = ()) -> None:
    """Print error and regret of every 16-bit section, where all libraries call the vendor's kernels."""
    sources = [source for source in SOURCES if source.table == TABLE and source.dtype == "bf16"]
    architecture_of = {source.device: load_device(source.device).architecture for source in sources}
    axes = measured_knots(data)
    for architecture in architectures or dict.fromkeys(architecture_of.values()):
        own = [source for source in sources if architecture_of[source.device] == architecture]
        learner = Learner(data, axes, own)
        around = residuals_around(learner)
        for name, measured_s in learner.measured_s.items():
            print_report(", ".join(name), learner, measured_s, predict_with_neighbors(learner, name, around))
        learner.learn()
        for source in own:
            each = [learner.measured_s[source.device, library] for library in learner.libraries(source.device)]
            mean_s = np.exp(np.mean(np.log(each), axis=0))
            unseen = np.exp(learner.found[source.device, ""].without_own_shape(learner.fitted))
            predicted_s = learner.sections[source.device, ""].physics_s * unseen
            print_report(f"{source.device}, mean of libraries", learner, mean_s, predicted_s)


def print_report(name: str, learner: Learner, measured_s: Array, predicted_s: Array) -> None:
    """Print one section's error, and its regret among shapes of one n k at one m."""
    rows = learner.knots.assign(
        latency_s=measured_s, predicted_s=predicted_s, parameters=learner.knots.n * learner.knots.k
    )
    rows = rows[np.isfinite(measured_s)]
    error = percentage_errors(rows.predicted_s.to_numpy(), rows.latency_s.to_numpy())["mean_ape"]
    ranked = rows[rows.m >= SMALLEST_RANKED_M]
    regret = ranking_regret(ranked, ranked.predicted_s.to_numpy(), ["m", "parameters"])
    print(
        f"{name}: mean error {error:.2%}, regret of {len(regret)} groups: "
        f"median {np.median(regret):.1%}, p90 {np.quantile(regret, 0.9):.1%}",
        flush=True,
    )
