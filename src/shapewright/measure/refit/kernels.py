"""Fit the records of kernels that are priced by their work, from the tables that list them.

It takes some minutes. A kernel has weights of its terms, and a residual table if unseen layouts gain by it. Its
interval is the spread at measured sizes, which grows with the distance from them: rows that a fit saw lie close to its
table, those of a layout that it did not see may not. A spread from the latter alone is too wide at the former and too
narrow beyond the outermost layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.records import dataclass
from shapewright.hardware.loader import find_measured_device
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.attention import TRAINING
from shapewright.measure.accuracy.tables.kernels import FUSED, NORMS, KernelGroup, KernelTable
from shapewright.measure.accuracy.tables.registry import KERNEL_TABLES
from shapewright.measure.fit.shared import (
    Array,
    error_summary,
    fit_log_times,
    fold_of_rows,
    interval_of,
    mean_error,
    upper_quantile,
)
from shapewright.measure.refit.record_files import SAME_CHIP, SOURCE, command, record_path, write_record
from shapewright.pricing.calibration.intervals import interval_factors, widen_by_error
from shapewright.pricing.calibration.residual import ResidualTable
from shapewright.pricing.kernels.price import (
    GAP_ERROR,
    LABEL_SEPARATOR,
    LOG_STEP,
    correct_kernel,
    doublings_from_knots,
    kernel_rates,
)
from shapewright.pricing.kernels.work import POWER, KernelWork, estimate_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.measure.accuracy.chunk import Columns

# Start and range of the weights of each group of terms, and of the exponent.
_COMPUTE, _MEMORY, _SERIAL, _POWER = (1.5, 0.01, 60.0), (1.3, 0.02, 40.0), (1.0, 1e-4, 300.0), (2.0, 1.0, 12.0)
_RARE_START = 0.05
ROWS_PER_FIT = 1500
MOST_EVALUATIONS = 40
# Residual of a weight that is a factor of e from its start, next to residuals that are logarithms of times.
PULL_TO_START = 0.02
# With up to this many layouts each is left out alone, and the outermost are not judged: nothing lies beyond them.
FEW_LAYOUTS = 8
# Either of two layouts lies beyond the other, but layouts that were not measured lie between. Fitted to two layouts of
# kernels with more, tables err 4.4, 3.9 and 3.2 to 6 % on those between (MLA, sparse, linear attention), the terms
# alone 7.2, 7.7 and 15 %. So a table that does not help on the other layout is judged again on numbers of sequences;
# those of one layout stand in for those of the other, so that they do not tell which axes are better: the first count.
PAIR_OF_LAYOUTS = 2
# A table is used if its error on layouts left out is below that of the terms alone times this; the second ratio where
# the same shapes recur on other devices.
WORTHWHILE_RATIO, RECURRING_RATIO = 0.97, 1.05
FEWEST_SEEN = 6
# Share that a cell takes of each neighbor along an axis. Encoders of H200 and L40S on heads left out: 0 5.69 %, 0.05
# 5.72 %, 0.1 5.85 %, 0.2 6.35 %; a little keeps a table from repeating the rows it is made of.
SMOOTHING = 0.05
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


@dataclass(frozen=True)
class KernelFit:
    """A fitted kernel.

    Attributes:
        weights: Weights of its terms.
        axes: Axes of its residual table; empty without one.
        table: Residual table.
        rows: Its rows as predicted.
        report: Errors.
    """

    weights: dict[str, float]
    axes: tuple[str, ...]
    table: ResidualTable | None
    rows: KernelRows
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
        measured: Their times. [s]
        layouts: Columns that identify a layout.
        choices: Axes of tables to try, the most likely first; those of which the work has all places.
        shapes_recur: Whether the same shapes are priced on other devices (KernelTable.shapes_recur).
    """
    names = np.unique(np.stack(layouts), axis=1, return_inverse=True)[1].reshape(-1)
    num_layouts, sequences = len(np.unique(names)), work.places.get("sequences", names)
    if num_layouts == 1:
        layouts = [sequences]  # a kernel with one layout is judged on numbers of sequences
    folds, is_judged = _folds(layouts)
    names = folds if num_layouts == 1 else names
    choices = [axes for axes in choices if set(axes) <= set(work.places)]
    unseen, doublings = _leave_out(work, measured, folds, choices)
    weights = fit_weights(work, measured)
    fitted_s = estimate_kernel(work, weights).total_s
    known = is_judged & ~np.isnan(unseen[()])
    if not known.any():  # too few rows to leave any out
        rows = KernelRows(measured, fitted_s, unseen[()], doublings[()], folds, names)
        return KernelFit(weights, (), None, rows, {"fit": error_summary(fitted_s, measured)})
    errors = {axes: mean_error(times[known], measured[known]) for axes, times in unseen.items()}
    ratio = RECURRING_RATIO if shapes_recur else WORTHWHILE_RATIO
    best = min(choices, key=lambda axes: errors[axes], default=())
    best = best if errors[best] < ratio * errors[()] else ()
    if not best and num_layouts == PAIR_OF_LAYOUTS < len(np.unique(sequences)):
        parts, _ = _folds([sequences])
        unseen_parts, doublings_parts = _leave_out(work, measured, parts, choices)
        in_parts = ~np.isnan(unseen_parts[()])
        off = {axes: mean_error(times[in_parts], measured[in_parts]) for axes, times in unseen_parts.items()}
        best = next((axes for axes in choices if off[axes] < ratio * off[()]), ())
        if best:
            known, folds, unseen, doublings = in_parts, parts, unseen_parts, doublings_parts
    own = tabulate(work, np.log(measured / fitted_s), best) if best else None
    if own is not None:
        fitted_s = fitted_s * np.exp(correct_kernel(own, work, best))
    report = {"left_out": error_summary(unseen[best][known], measured[known])}
    report["left_out_terms_alone"] = error_summary(unseen[()][known], measured[known])
    rows = KernelRows(measured, fitted_s, unseen[best], doublings[best], folds, names)
    return KernelFit(weights, best, own, rows, report)


def _leave_out(
    work: KernelWork, measured: Array, folds: NDArray[np.int64], choices: Sequence[tuple[str, ...]]
) -> tuple[dict[tuple[str, ...], Array], dict[tuple[str, ...], Array]]:
    """Leave out each fold in turn: predictions of its rows [s], and their distances from the table, by axes."""
    unseen: dict[tuple[str, ...], Array] = {axes: np.full(len(measured), np.nan) for axes in ((), *choices)}
    doublings: dict[tuple[str, ...], Array] = {axes: np.zeros(len(measured)) for axes in ((), *choices)}
    for fold in np.unique(folds):
        left, seen = folds == fold, folds != fold
        if seen.sum() < FEWEST_SEEN:
            continue
        weights = fit_weights(work.take(seen), measured[seen])
        terms_s = estimate_kernel(work, weights).total_s
        logs = np.log(measured / terms_s)
        unseen[()][left] = terms_s[left]
        for axes in choices:
            table = tabulate(work.take(seen), logs[seen], axes)
            unseen[axes][left] = terms_s[left] * np.exp(correct_kernel(table, work.take(left), axes))
            doublings[axes][left] = doublings_from_knots(table, work.take(left), axes)
    return unseen, doublings


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


# Source and licence of tables, if not SOURCE.
_CUDNN, _LIGER = "NVIDIA/cudnn-frontend @3929da2, MIT", "linkedin/Liger-Kernel @ead96b6, BSD-2-Clause"
SOURCES = {TRAINING.name: _CUDNN, NORMS.name: _CUDNN, FUSED.name: _LIGER}


def refit(data: Path, kinds: Sequence[str] = ()) -> None:
    """Fit every record of these kinds, or of all."""
    for table in KERNEL_TABLES:
        if not kinds or table.name in kinds:
            columns = table.label_sizes(read_columns(data / table.file_name, table.columns, Counter()))
            for (name,), rows in columns.groups("device"):
                print(write_device(table, name, rows))


def write_device(table: KernelTable, alias: str, columns: Columns) -> Path:
    """Fit and write the record of one device from its rows."""
    device = find_measured_device(alias)
    rates = kernel_rates(device)
    fits: dict[str, KernelFit] = {}
    arrays: dict[str, Any] = {}
    for labels, rows in columns.groups(*table.labels):
        name = LABEL_SEPARATOR.join(labels)
        work = table.build(rows, KernelGroup(dict(zip(table.labels, labels, strict=True)), device, rates))
        layouts = [np.nan_to_num(rows.numbers[column]) for column in table.layout]
        fit = fit_kernel(work, rows.numbers["latency_s"], layouts, table.axes, shapes_recur=table.shapes_recur)
        fits[name] = fit
        if fit.table is not None:
            arrays[f"{name}@steps"] = fit.table.log_steps
            arrays |= {f"{name}@{axis}": knots.astype(np.float32) for axis, knots in enumerate(fit.table.knots_log2)}
        error = fit.report.get("left_out", fit.report.get("fit", {}))["mean_absolute_error"]
        print(f"{device.name:16s} {name:60s} {rows.num_rows:6d} {error:.3f} {' '.join(fit.axes)}", flush=True)
    predicted = {name: fit.rows for name, fit in fits.items()}
    cells: dict[str, list[Array]] = {}
    for name, inside in coverage_left_out(predicted).items():
        words = dict(zip(table.labels, name.split(LABEL_SEPARATOR), strict=True))
        cells.setdefault(f"{words.get(table.dtype) or 'bf16'} {words[table.library]}", []).append(inside)
    covered = {cell: np.concatenate(parts) for cell, parts in cells.items()}
    file = f"{device.name}.npz"
    record: dict[str, Any] = {
        "devices": [device.name, *SAME_CHIP.get(device.name, ())],
        "architecture": device.architecture,
        "parameters": {"kernels": {name: fit.content for name, fit in fits.items()}},
        "interval": intervals_of(predicted),
        "residual": {"file": file} if arrays else None,
        "provenance": {
            "source": SOURCES.get(table.name, SOURCE),
            "files": [table.file_name],
            "rows": columns.num_rows,
            "split": f"layouts ({', '.join(table.layout)}) left out whole in turn; parameters fitted on all of them",
            "command": command("kernels", f"--kind {table.name}"),
            "reports": {name: fit.report for name, fit in fits.items()},
            "covered_left_out": {
                cell: {"rows": int(known.sum()), "covered": float(inside[known].mean())}
                for cell, inside in covered.items()
                if (known := ~np.isnan(inside)).any()
            },
        },
    }
    path = write_record(table.name, device.name, record)
    if arrays:
        np.savez_compressed(record_path(table.name, device.name).with_suffix(".npz"), **arrays)
    return path
