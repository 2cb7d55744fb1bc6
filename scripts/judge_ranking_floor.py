"""How low could ranking regret be? Choose among products by one who knows all that was measured but the row itself.

Usage: python scripts/judge_ranking_floor.py --data DIR [--architecture hopper]

DIR holds gemm.parquet. Trees are told what those of calibrate_gemm_residual.py see and beside it what physics leaves
over of the rows next to a row in m, n and k, in its own section and in every other of its architecture, and of the row
itself in the others: the same product, timed by the other library and on the sibling. A fifth of the rows at a time is
left out by chance. No question comes with so much, so a bar that this does not reach is hardly reached with less.
Beside it the section that prices models, (n, k) left out, judged by the mean of libraries, which scatters less than
one. It writes nothing; a minute for each section, and some for each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from calibrate_gemm_residual import LETTERS, SMALLEST_RANKED_M, TABLE, Learner, measured_knots
from calibration import argument_parser
from gemm_rows import SOURCES

from shapewright.fit.gemm import Array, judge
from shapewright.fit.ranking import ranking_regret
from shapewright.fit.residual import OWN_TREES
from shapewright.fit.trees import fit_trees
from shapewright.hardware import load_device

# Measured rows to either side that are told: m is measured finely, n and k by factors of 1.2 to 2.
NEIGHBOURS = {"m": (-3, -2, -1, 1, 2, 3), "n": (-1, 1), "k": (-1, 1)}
NUM_FOLDS = 5
TREES: dict[str, Any] = {**OWN_TREES, "n_estimators": 500, "num_leaves": 63}


def neighbours(logs: Array, axis: int, offsets: tuple[int, ...]) -> list[Array]:
    """What physics leaves over of the measured rows next to each along one axis; NaN where there is none.

    Args:
        logs: ln(measured / physics) over m, n, k, NaN where nothing was measured.
        axis: Along which.
        offsets: How many measured rows further; one array for each.
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


def informed(learner: Learner, name: tuple[str, str], around: Mapping[tuple[str, str], Array]) -> Array:
    """Predicted times of one section by trees that know all but the row. [s], NaN where nothing was measured.

    Args:
        learner: Sections and what was measured of them.
        name: Device and library.
        around: What physics leaves over of each section's rows (first column) and of those next to them.
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


def surroundings(learner: Learner) -> dict[tuple[str, str], Array]:
    """What physics leaves over of each section's rows, and of those next to them; NaN where nothing was measured."""
    shape = [learner.knots[letter].nunique() for letter in LETTERS]
    around = {}
    for name, measured_s in learner.measured_s.items():
        logs = np.log(measured_s / learner.sections[name].physics_s)
        beside = [
            column
            for axis, letter in enumerate(LETTERS)
            for column in neighbours(logs.reshape(shape), axis, NEIGHBOURS[letter])
        ]
        around[name] = np.stack([logs, *beside], axis=1)
    return around


def main() -> None:
    """Print error and regret of every section in 16 bits, all of whose libraries call the vendor's kernels."""
    sources = [source for source in SOURCES if source.table == TABLE and source.dtype == "bf16"]
    architecture_of = {source.device: load_device(source.device).architecture for source in sources}
    parser = argument_parser(__doc__)
    parser.add_argument("--architecture", choices=sorted(set(architecture_of.values())), help="default: all")
    given = parser.parse_args()
    axes = measured_knots(given.data)
    for architecture in [given.architecture] if given.architecture else dict.fromkeys(architecture_of.values()):
        own = [source for source in sources if architecture_of[source.device] == architecture]
        learner = Learner(given.data, axes, own)
        around = surroundings(learner)
        for name, measured_s in learner.measured_s.items():
            report(", ".join(name), learner, measured_s, informed(learner, name, around))
        learner.learn()
        for source in own:
            each = [learner.measured_s[source.device, library] for library in learner.libraries(source.device)]
            mean_s = np.exp(np.mean(np.log(each), axis=0))
            unseen = np.exp(learner.found[source.device, ""].unseen(learner.fitted))
            predicted_s = learner.sections[source.device, ""].physics_s * unseen
            report(f"{source.device}, mean of libraries", learner, mean_s, predicted_s)


def report(name: str, learner: Learner, measured_s: Array, predicted_s: Array) -> None:
    """Print one section's error, and its regret among shapes of one n k at one m."""
    rows = learner.knots.assign(
        latency_s=measured_s, predicted_s=predicted_s, parameters=learner.knots.n * learner.knots.k
    )
    rows = rows[np.isfinite(measured_s)]
    error = judge(rows.predicted_s.to_numpy(), rows.latency_s.to_numpy())["mean_ape"]
    ranked = rows[rows.m >= SMALLEST_RANKED_M]
    regret = ranking_regret(ranked, ranked.predicted_s.to_numpy(), ["m", "parameters"])
    print(
        f"{name}: mean error {error:.2%}, regret of {len(regret)} groups: "
        f"median {np.median(regret):.1%}, p90 {np.quantile(regret, 0.9):.1%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
