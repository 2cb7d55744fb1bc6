"""What the fits share: splits by whole shapes, log-scale least squares, intervals, and the rounding of a record."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_FOLDS = 5
HELD_OUT_FOLD = 0
# A regime of the interval needs this many residuals; fewer are joined with the next.
_FEWEST_RESIDUALS = 40
_DECADES_S = (1e-5, 1e-4, 1e-3, 1e-2)
COVERAGE = 0.90


def fold_of(*key: object) -> int:
    """Fold of a whole shape, the same on every machine.

    >>> fold_of(32, 8, 128) == fold_of(32, 8, 128), 0 <= fold_of("x") < NUM_FOLDS
    (True, True)
    """
    return zlib.crc32("/".join(map(str, key)).encode()) % NUM_FOLDS


def folds_of(*columns: Sequence[object]) -> NDArray[np.int64]:
    """Fold of each row, from the columns that name its shape."""
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(key, fold_of(*key)) for key in zip(*columns, strict=True)])


def fit_logs(
    predict: Callable[[dict[str, float]], Array],
    measured: Array,
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    *,
    most_evaluations: int = 60,
    pull: float = 0.0,
) -> tuple[dict[str, float], float]:
    """Fit positive parameters to the logarithm of measured times, robustly.

    Args:
        predict: Times from parameters. [s]
        measured: Measured times. [s]
        start: First guess of every parameter.
        bounds: Range of every parameter.
        most_evaluations: Limit on evaluations (Jacobians not counted).
        pull: Residual of a parameter that is a factor of e off its start, against residuals that are logarithms of
            times; keeps what the rows cannot tell at its start.

    Returns:
        The parameters and the cost.
    """
    from scipy.optimize import least_squares

    names = list(bounds)
    low, high = (np.log([bounds[name][side] for name in names]) for side in (0, 1))
    first = np.clip(np.log([start[name] for name in names]), low + 1e-6, high - 1e-6)

    anchor = first.copy()

    def residuals(vector: Array) -> Array:
        errors: Array = np.log(predict(unfold(vector)) / measured)
        return np.concatenate([errors, pull * (vector - anchor)]) if pull else errors

    def unfold(vector: Array) -> dict[str, float]:
        return {name: float(np.exp(value)) for name, value in zip(names, vector, strict=True)}

    result = least_squares(
        residuals,
        first,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=0.1,
        max_nfev=most_evaluations,
        diff_step=1e-3,
    )
    return unfold(result.x), float(result.cost)


def error_summary(predicted: Array, measured: Array) -> dict[str, float]:
    """Errors of a prediction, as fractions of the measurement."""
    ratio = predicted / measured
    absolute = np.abs(ratio - 1.0)
    return {
        "rows": len(measured),
        "mean_absolute_error": _round(absolute.mean()),
        "median_absolute_error": _round(np.median(absolute)),
        "p90_absolute_error": _round(np.quantile(absolute, 0.9)),
        "median_bias": _round(np.median(ratio) - 1.0),
    }


def interval_of(
    predicted: Array,
    measured: Array,
    coverage: float = COVERAGE,
    *,
    edges_s: Sequence[float] = _DECADES_S,
    fewest: int = _FEWEST_RESIDUALS,
) -> dict[str, list[float]]:
    """Quantiles of measured / predicted by regime of predicted time, for a 90 % interval.

    Args:
        predicted: Times of rows that the fit has not seen. [s]
        measured: Their measurements. [s]
        coverage: Share of these rows to cover; above 0.9 where rows are not independent.
        edges_s: Ends of regimes; by default decades. [s]
        fewest: Rows that a regime needs; with fewer it is joined with the next.
    """
    ratio = measured / predicted
    tail = (1.0 - coverage) / 2.0
    edges, regimes = regimes_of(predicted, edges_s, fewest)
    low = [_round(min(upper_quantile(-ratio[inside], 1.0 - tail) * -1.0, 1.0)) for inside in regimes]
    high = [_round(max(upper_quantile(ratio[inside], 1.0 - tail), 1.0)) for inside in regimes]
    return {"edges_s": edges, "low": low, "high": high}


def regimes_of(predicted: Array, edges_s: Sequence[float], fewest: int) -> tuple[list[float], list[NDArray[np.bool_]]]:
    """Edges between regimes of predicted time and the rows of each; regimes with too few rows are joined with the next.

    Args:
        predicted: Predicted times. [s]
        edges_s: Ends of regimes to try, rising. [s]
        fewest: Rows that a regime needs.
    """
    edges: list[float] = []
    regimes: list[NDArray[np.bool_]] = []
    begin = 0.0
    for edge in (*edges_s, np.inf):
        inside = (predicted > begin) & (predicted <= edge)
        rest = predicted > edge
        if inside.sum() < fewest and edge != np.inf:
            continue
        if edge == np.inf or rest.sum() < fewest:
            regimes.append(predicted > begin)
            break
        regimes.append(inside)
        edges.append(edge)
        begin = edge
    return edges, regimes


def upper_quantile(values: Array, share: float) -> float:
    """Quantile with the finite-sample correction of split conformal prediction: the (n + 1) quantile."""
    return float(np.quantile(values, min(1.0, share * (len(values) + 1) / len(values))))


def coverage_of(interval: Mapping[str, list[float]], predicted: Array, measured: Array) -> float:
    """Share of measurements inside the interval."""
    regime = np.searchsorted(interval["edges_s"], predicted)
    low, high = (np.asarray(interval[end])[regime] for end in ("low", "high"))
    return _round(np.mean((measured >= predicted * low) & (measured <= predicted * high)))


def tidy(value: Any) -> Any:
    """Plain Python values with four significant digits, which is more than any fit here knows."""
    if isinstance(value, Mapping):
        return {str(key): tidy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [tidy(item) for item in value]
    if isinstance(value, (np.floating, float)):
        return _round(value)
    return int(value) if isinstance(value, np.integer) else value


def _round(value: Any) -> float:
    return float(f"{float(value):.4g}")
