"""Fit a kernel that is priced by its work: weights of its terms, and a residual table if unseen layouts gain by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.measure.fit.shared import Array, error_summary, fit_log_times, fold_of_rows, interval_of
from shapewright.pricing.calibration.residual import ResidualTable
from shapewright.pricing.kernels.price import LOG_STEP, correct_kernel
from shapewright.pricing.kernels.work import POWER, KernelWork, estimate_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

# Start and range of the weights of each group of terms, and of the exponent.
_COMPUTE, _MEMORY, _SERIAL, _POWER = (1.5, 0.01, 60.0), (1.3, 0.02, 40.0), (1.0, 1e-4, 300.0), (2.0, 1.0, 12.0)
_RARE_START = 0.05
ROWS_PER_FIT = 1500
MOST_EVALUATIONS = 40
# Residual of a weight that is a factor of e from its start, next to residuals that are logarithms of times.
PULL_TO_START = 0.02
# With up to this many layouts each is left out alone, and the outermost are not judged: nothing lies beyond them.
FEW_LAYOUTS = 8
# A table is used if its error on layouts left out is below that of the terms alone times this; the second ratio where
# the same shapes recur on other devices.
WORTHWHILE_RATIO, RECURRING_RATIO = 0.97, 1.05
FEWEST_SEEN = 6
# Share that a cell takes of each neighbor along an axis. Encoders of H200 and L40S on heads left out: 0 5.69 %, 0.05
# 5.72 %, 0.1 5.85 %, 0.2 6.35 %; a little keeps a table from repeating the rows it is made of.
SMOOTHING = 0.05
# Residuals of one layout correlate: aiming at 92 % covers about 90 % of rows of further layouts.
AIMED_COVERAGE = 0.92
FEWEST_FOR_INTERVAL = 40


@dataclass(frozen=True)
class KernelFit:
    """A fitted kernel.

    Attributes:
        weights: Weights of its terms.
        axes: Axes of its residual table; empty without one.
        table: Residual table.
        unseen_s: Predictions of rows whose layout the fit left out; of all rows where none could be left out. [s]
        measured_s: Their measured times. [s]
        report: Errors.
    """

    weights: dict[str, float]
    axes: tuple[str, ...]
    table: ResidualTable | None
    unseen_s: Array
    measured_s: Array
    report: dict[str, Any]

    @property
    def content(self) -> dict[str, Any]:
        """The kernel as a record holds it."""
        return {"weights": self.weights, "axes": list(self.axes)}


def fit_weights(work: KernelWork, measured: Array) -> dict[str, float]:
    """Fit the weights to a sample of the rows."""
    if len(measured) > ROWS_PER_FIT:
        chosen = np.random.default_rng(0).choice(len(measured), ROWS_PER_FIT, replace=False)
        work, measured = work.take(chosen), measured[chosen]
    ranges = dict.fromkeys(work.compute, _COMPUTE) | dict.fromkeys(work.memory, _MEMORY)
    ranges |= dict.fromkeys(work.serial, _SERIAL) | {POWER: _POWER}
    ranges |= {name: (_RARE_START, *ranges[name][1:]) for name in work.rare}
    return fit_log_times(
        lambda weights: estimate_kernel(work, weights).total_s,
        measured,
        {name: start for name, (start, _, _) in ranges.items()},
        {name: (low, high) for name, (_, low, high) in ranges.items()},
        most_evaluations=MOST_EVALUATIONS,
        pull=PULL_TO_START,
    )[0]


def tabulate(work: KernelWork, logs: Array, axes: Sequence[str]) -> ResidualTable:
    """Mean residual of the rows at each knot; empty cells take nine tenths of the mean of their neighbors.

    Args:
        work: The rows.
        logs: ln(measured / terms). [rows]
        axes: Places of the axes; the knots are the values that occur.
    """
    places = [np.round(np.log2(np.maximum(work.places[axis], 1e-9)), 4) for axis in axes]
    knots = [np.unique(place) for place in places]
    index = tuple(np.searchsorted(known, place) for known, place in zip(knots, places, strict=True))
    shape = tuple(len(known) for known in knots)
    sums, counts = np.zeros(shape), np.zeros(shape)
    np.add.at(sums, index, logs)
    np.add.at(counts, index, 1.0)
    cells, is_known = sums / np.maximum(counts, 1.0), counts > 0.0
    while not is_known.all():
        around, weight = np.zeros(shape), np.zeros(shape)
        for axis in range(len(shape)):
            upper = tuple(slice(1, None) if each == axis else slice(None) for each in range(len(shape)))
            lower = tuple(slice(None, -1) if each == axis else slice(None) for each in range(len(shape)))
            for here, there in ((upper, lower), (lower, upper)):
                around[here] += (cells * is_known)[there]
                weight[here] += is_known[there]
        fresh = ~is_known & (weight > 0.0)
        cells[fresh] = 0.9 * around[fresh] / weight[fresh]
        is_known = is_known | fresh
    for axis, known in enumerate(knots):  # a cell has two ends
        if len(known) == 1:
            knots[axis], cells = np.array([known[0], known[0] + 1.0]), np.repeat(cells, 2, axis=axis)
    for axis in range(cells.ndim):
        near = [np.roll(cells, step, axis=axis) for step in (1, -1)]
        for each, end in zip(near, (0, -1), strict=True):  # an outermost cell has itself for a neighbor
            edge = tuple(end if other == axis else slice(None) for other in range(cells.ndim))
            each[edge] = cells[edge]
        cells = (1.0 - 2.0 * SMOOTHING) * cells + SMOOTHING * (near[0] + near[1])
    steps = np.clip(np.rint(cells / LOG_STEP), -127, 127).astype(np.int8)
    return ResidualTable(knots_log2=tuple(knots), log_steps=steps, log_step=LOG_STEP)


def fit_kernel(
    work: KernelWork,
    measured: Array,
    layouts: Sequence[Array],
    choices: Sequence[tuple[str, ...]],
    *,
    shapes_recur: bool = False,
) -> KernelFit:
    """Fit one kernel, with tables along those axes that err least on layouts left out.

    Args:
        work: Work of the rows.
        measured: Their times. [s]
        layouts: Columns that identify a layout.
        choices: Axes of tables to try; those of which the work has all places.
        shapes_recur: Whether the same shapes are asked about on other devices (KernelTable.shapes_recur).
    """
    if "sequences" in work.places and all(len(np.unique(column)) == 1 for column in layouts):
        layouts = [work.places["sequences"]]  # a kernel with one layout is judged on numbers of sequences
    folds, is_judged = _folds(layouts)
    choices = [axes for axes in choices if set(axes) <= set(work.places)]
    unseen: dict[tuple[str, ...], Array] = {axes: np.full(len(measured), np.nan) for axes in ((), *choices)}
    for fold in sorted(set(folds[is_judged])):
        left = (folds == fold) & is_judged
        seen = folds != fold
        if seen.sum() < FEWEST_SEEN:
            continue
        weights = fit_weights(work.take(seen), measured[seen])
        terms_s = estimate_kernel(work, weights).total_s
        logs = np.log(measured / terms_s)
        unseen[()][left] = terms_s[left]
        for axes in choices:
            table = tabulate(work.take(seen), logs[seen], axes)
            unseen[axes][left] = terms_s[left] * np.exp(correct_kernel(table, work.take(left), axes))
    weights = fit_weights(work, measured)
    terms_s = estimate_kernel(work, weights).total_s
    known = ~np.isnan(unseen[()])
    if not known.any():  # too few rows to leave any out
        return KernelFit(weights, (), None, terms_s, measured, {"fit": error_summary(terms_s, measured)})
    errors = {axes: float(np.mean(np.abs(times[known] / measured[known] - 1.0))) for axes, times in unseen.items()}
    ratio = RECURRING_RATIO if shapes_recur else WORTHWHILE_RATIO
    best = min(choices, key=lambda axes: errors[axes], default=())
    best = best if errors[best] < ratio * errors[()] else ()
    own = tabulate(work, np.log(measured / terms_s), best) if best else None
    report = {"left_out": error_summary(unseen[best][known], measured[known])}
    report["left_out_terms_alone"] = error_summary(unseen[()][known], measured[known])
    return KernelFit(weights, best, own, unseen[best][known], measured[known], report)


def intervals_of(fits: Mapping[str, KernelFit]) -> dict[str, dict[str, list[float]]]:
    """Intervals of the kernels of one device; those with few rows left out share one."""
    few = [fit for fit in fits.values() if len(fit.measured_s) < FEWEST_FOR_INTERVAL]
    shared: dict[str, list[float]] = {}
    if few:
        shared = interval_of(
            np.concatenate([fit.unseen_s for fit in few]),
            np.concatenate([fit.measured_s for fit in few]),
            AIMED_COVERAGE,
        )
    return {
        name: shared
        if len(fit.measured_s) < FEWEST_FOR_INTERVAL
        else interval_of(fit.unseen_s, fit.measured_s, AIMED_COVERAGE)
        for name, fit in fits.items()
    }


def _folds(layouts: Sequence[Array]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Fold of each row's layout, and whether the row is judged."""
    keys = list(zip(*(column.tolist() for column in layouts), strict=True))
    known = sorted(set(keys))
    if len(known) > FEW_LAYOUTS:
        return fold_of_rows(*[column.tolist() for column in layouts]), np.ones(len(keys), dtype=bool)
    place = {key: number for number, key in enumerate(known)}
    folds = np.array([place[key] for key in keys])
    inner = (folds > 0) & (folds < len(known) - 1)
    return folds, inner if inner.any() else np.ones(len(keys), dtype=bool)
