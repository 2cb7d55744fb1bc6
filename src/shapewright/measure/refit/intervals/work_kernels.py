"""Intervals of kernels that are priced by their work: spread at measured sizes, and growth with the distance from them.

Rows that a fit saw lie close to its residual table, those of a layout that it did not see may not. A spread from the
latter alone is too wide at the former and too narrow beyond the outermost layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.measure.fit.shared import Array, interval_of, upper_quantile
from shapewright.pricing.calibration.intervals import interval_factors, widen_by_error
from shapewright.pricing.kernels.price import GAP_ERROR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

# Aims that cover about 90 % of rows of further layouts: residuals of one layout correlate.
AIMED_COVERAGE, AIMED_COVERAGE_OF_LAYOUTS = 0.92, 0.95
# Rows left out this near to the knots of a table without them tell about its spread, not about the distance.
NEAR_DOUBLINGS = 0.02
FEWEST_FOR_INTERVAL, FEWEST_RESIDUALS = 40, 20
# A kernel with fewer layouts takes at least the error at one doubling of all kernels.
FEWEST_LAYOUTS = 4


class KernelRows(NamedTuple):
    """Rows of some kernels with their predictions.

    Attributes:
        measured_s: Measured times. [s]
        fitted_s: Predictions of the fit to all rows. [s]
        unseen_s: Predictions of the fit that left their layout out; NaN where too few rows were left. [s]
        doublings: Distance from the knots of the table without their layout (doublings_from_knots).
        folds: The fold that was left out.
        layouts: Number of the layout, or of the fold where a kernel has one. Folds may be parts of two layouts.
    """

    measured_s: Array
    fitted_s: Array
    unseen_s: Array
    doublings: Array
    folds: NDArray[np.int64]
    layouts: NDArray[np.int64]

    def take(self, index: Any) -> KernelRows:
        """Return the rows of a mask."""
        return KernelRows(*(column[index] for column in self))


def intervals_of(kernels: Mapping[str, KernelRows]) -> dict[str, dict[str, Any]]:
    """Intervals of the kernels of one device; those with few rows left out share one."""
    pooled = _pooled(kernels)
    spreads = {name: _spread_of(rows) for name, rows in pooled.items()}
    everywhere = np.concatenate([excess for _, excess in spreads.values()])
    return {
        name: {**interval, GAP_ERROR: _gap_error(excess, everywhere, pooled[name])}
        for name, (interval, excess) in spreads.items()
    }


def coverage_left_out(kernels: Mapping[str, KernelRows]) -> dict[str, Array]:
    """Whether each row lies in an interval made without its layout, by kernel; NaN where none can be made."""
    pooled, covered = _pooled(kernels), {}
    excesses = {name: _spread_of(rows)[1] for name, rows in pooled.items()}
    for name, rows in kernels.items():
        inside = np.full(len(rows.folds), np.nan)
        others = np.concatenate([np.empty(0), *(excess for other, excess in excesses.items() if other != name)])
        for fold in np.unique(rows.folds):
            calibrated = pooled[name].take(pooled[name].folds != fold)
            here = (rows.folds == fold) & ~np.isnan(rows.unseen_s)
            if len(calibrated.folds) >= FEWEST_FOR_INTERVAL and here.any():
                left, (interval, excess) = rows.take(here), _spread_of(calibrated)
                gap_error = _gap_error(excess, others, calibrated)
                ends = interval_factors(interval, left.unseen_s, 1.0)
                low, high = widen_by_error(ends, gap_error * np.sqrt(left.doublings))
                ratio = left.measured_s / left.unseen_s
                inside[here] = (ratio >= low) & (ratio <= high)
        covered[name] = inside
    return covered


def _pooled(kernels: Mapping[str, KernelRows]) -> dict[str, KernelRows]:
    """Rows that give the interval of each kernel: its own, or those of all kernels with few rows left out.

    Few rows leave most cells of a table empty, so that the distance from its sizes tells little.
    """
    few = [name for name, rows in kernels.items() if (~np.isnan(rows.unseen_s)).sum() < FEWEST_FOR_INTERVAL]
    if not few:
        return dict(kernels)
    columns = [np.concatenate(parts) for parts in zip(*(kernels[name] for name in few), strict=True)]
    shared = KernelRows(*columns)._replace(doublings=np.zeros(len(columns[0])))
    return {name: shared if name in few else rows for name, rows in kernels.items()}


def _spread_of(rows: KernelRows) -> tuple[dict[str, Any], Array]:
    """Interval at the sizes of the table, and what each row further away needs beyond it, at one doubling.

    Where leaving layouts out does not lead away from the table's sizes, those rows give the interval.
    """
    left = rows.take(~np.isnan(rows.unseen_s))
    near = left.doublings <= NEAR_DOUBLINGS
    if len(near) and near.mean() >= 0.5:
        interval = interval_of(left.unseen_s[near], left.measured_s[near], AIMED_COVERAGE_OF_LAYOUTS)
    else:
        interval = interval_of(rows.fitted_s, rows.measured_s, AIMED_COVERAGE)
    away = left.take(~near)
    logs = np.log(away.measured_s / away.unseen_s)
    low, high = np.log(interval_factors(interval, away.unseen_s, 1.0))
    return interval, np.sqrt(np.maximum(logs**2 - np.where(logs < 0.0, low, high) ** 2, 0.0) / away.doublings)


def _gap_error(excess: Array, everywhere: Array, rows: KernelRows) -> float:
    """Error at one doubling; with few layouts at least that of all kernels of the device."""
    known = [excess] if len(np.unique(rows.layouts)) >= FEWEST_LAYOUTS else [excess, everywhere]
    return max([0.0, *(upper_quantile(each, AIMED_COVERAGE) for each in known if len(each) >= FEWEST_RESIDUALS)])
