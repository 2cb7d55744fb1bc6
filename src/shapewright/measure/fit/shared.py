"""What fits share: rows of a store, splits by whole shapes, least squares on logarithms, intervals, errors."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shapewright.core.errors import CalibrationError, MissingExtraError
from shapewright.core.texts import with_fields
from shapewright.measure.store.record import OK

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Bool, Float, Int

    from shapewright.measure.store.record import Row

Array = NDArray[np.float64]
# Name of a free parameter, such as a field or a field of a kind.
Name = TypeVar("Name", bound=Hashable)

NUM_FOLDS = 5
HELD_OUT_FOLD = 0
# A regime of an interval needs this many residuals; smaller ones are merged with the next.
_FEWEST_RESIDUALS = 40
_DECADES_S = (1e-5, 1e-4, 1e-3, 1e-2)
COVERAGE = 0.90
HELD_OUT_SHARE = 0.2
# The preferred form is taken unless another errs less on what is left out, by 3 % of the error.
_WORTHWHILE_RATIO = 1.03


def fold_of(*key: object) -> int:
    """Return the fold of a whole shape, the same on every machine.

    >>> fold_of(32, 8, 128) == fold_of(32, 8, 128), 0 <= fold_of("x") < NUM_FOLDS
    (True, True)
    """
    return zlib.crc32("/".join(map(str, key)).encode()) % NUM_FOLDS


def fold_of_rows(*columns: Sequence[object]) -> Int[np.ndarray, " rows"]:
    """Return the fold of each row from the columns that identify its shape."""
    known: dict[tuple[object, ...], int] = {}
    return np.array([known.setdefault(key, fold_of(*key)) for key in zip(*columns, strict=True)])


def half_of_rows(*columns: Sequence[object]) -> Int[np.ndarray, " rows"]:
    """Return 0 or 1 for each row by its whole shape, independent of the folds."""
    return fold_of_rows(["half"] * len(columns[0]), *columns) % 2


def split_by_shape(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split rows into fitted and held-out ones by whole (n, k), so that no held-out row has a fitted neighbor."""
    shapes = rows[["n", "k"]].drop_duplicates().reset_index(drop=True)
    shapes["held_out"] = np.random.default_rng(0).random(len(shapes)) < HELD_OUT_SHARE
    marked = rows.merge(shapes, on=["n", "k"])
    return marked[~marked.held_out], marked[marked.held_out]


def fit_log_times(
    predict: Callable[[dict[Name, float]], Float[np.ndarray, " rows"]],
    measured: Float[np.ndarray, " rows"],
    start: Mapping[Name, float],
    bounds: Mapping[Name, tuple[float, float]],
    *,
    most_evaluations: int = 60,
    pull: float = 0.0,
) -> tuple[dict[Name, float], float]:
    """Fit positive parameters to the logarithm of measured times with a robust loss.

    Args:
        predict: Returns times from parameters. [s]
        measured: Measured times. [s]
        most_evaluations: Limit on evaluations, Jacobians not counted.
        pull: Residual of a parameter that is a factor of e from its start, relative to residuals that are logarithms of
            times; keeps parameters that the rows do not determine near their start.

    Returns:
        The parameters and the cost.
    """
    from scipy.optimize import least_squares

    names = list(bounds)
    low, high = (np.log([bounds[name][side] for name in names]) for side in (0, 1))
    first = np.clip(np.log([start[name] for name in names]), low + 1e-6, high - 1e-6)

    anchor = first.copy()

    def residuals(vector: Float[np.ndarray, " parameters"]) -> Float[np.ndarray, " residuals"]:
        errors: Array = np.log(predict(unfold(vector)) / measured)
        return np.concatenate([errors, pull * (vector - anchor)]) if pull else errors

    def unfold(vector: Float[np.ndarray, " parameters"]) -> dict[Name, float]:
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


def predict_in_turn(
    groups: Any, predict: Callable[[Any, Any], Float[np.ndarray, " left"]]
) -> Float[np.ndarray, " rows"]:
    """Predict the rows of each group by a fit to the others.

    Args:
        groups: Group of each row, such as its fold. [rows]
        predict: Takes masks of the rows to fit and of those to predict, and returns predictions of the latter.
    """
    predicted = np.empty(len(groups))
    for group in np.unique(groups):
        left = groups == group
        predicted[left] = predict(~left, left)
    return predicted


def error_summary(predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]) -> dict[str, float]:
    """Return the errors of predictions as fractions of the measurements."""
    ratio = predicted / measured
    absolute = np.abs(ratio - 1.0)
    return {
        "rows": len(measured),
        "mean_absolute_error": _round(absolute.mean()),
        "median_absolute_error": _round(np.median(absolute)),
        "p90_absolute_error": _round(np.quantile(absolute, 0.9)),
        "median_bias": _round(np.median(ratio) - 1.0),
    }


def mean_error(predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]) -> float:
    """Return the mean absolute error of predictions as a fraction of the measurements."""
    return float(np.mean(np.abs(predicted / measured - 1.0)))


def choose_form(errors: Mapping[str, float]) -> str:
    """Return the form that errs least on what is left out, or one about as good before it in the list.

    >>> choose_form({"roofline": 0.102, "tiles": 0.1}), choose_form({"roofline": 0.12, "tiles": 0.1})
    ('roofline', 'tiles')
    """
    least = min(errors.values())
    return next(name for name, error in errors.items() if error <= _WORTHWHILE_RATIO * least)


def describe_form(chosen: str, errors: Mapping[str, float], left_out: str) -> str:
    """Describe the choice of a form, and the errors of all.

    >>> describe_form("tiles", {"roofline": 0.12, "tiles": 0.1}, "shapes")
    'tiles is 10.0% off on shapes left out (roofline 12.0%)'
    """
    others = ", ".join(f"{name} {error:.1%}" for name, error in errors.items() if name != chosen)
    return f"{chosen} is {errors[chosen]:.1%} off on {left_out} left out ({others})"


def interval_of(
    predicted: Float[np.ndarray, " rows"],
    measured: Float[np.ndarray, " rows"],
    coverage: float = COVERAGE,
    *,
    edges_s: Sequence[float] = _DECADES_S,
    fewest: int = _FEWEST_RESIDUALS,
) -> dict[str, list[float]]:
    """Return quantiles of measured / predicted by regime of predicted time, for a 90 % interval.

    Args:
        predicted: Times of rows that were held out of the fit. [s]
        measured: Their measured times. [s]
        coverage: Share of these rows to cover; above 0.9 if rows are not independent.
        edges_s: Upper ends of the regimes; decades by default. [s]
        fewest: Rows that a regime needs; with fewer it is merged with the next.
    """
    ratio = measured / predicted
    tail = (1.0 - coverage) / 2.0
    edges, regimes = regimes_of(predicted, edges_s, fewest)
    low = [_round(min(upper_quantile(-ratio[inside], 1.0 - tail) * -1.0, 1.0)) for inside in regimes]
    high = [_round(max(upper_quantile(ratio[inside], 1.0 - tail), 1.0)) for inside in regimes]
    return {"edges_s": edges, "low": low, "high": high}


def regimes_of(
    predicted: Float[np.ndarray, " rows"], edges_s: Sequence[float], fewest: int
) -> tuple[list[float], list[Bool[np.ndarray, " rows"]]]:
    """Return the edges between regimes of predicted time and the rows of each; small regimes are merged with the next.

    Args:
        predicted: Predicted times. [s]
        edges_s: Candidate edges, rising. [s]
    """
    edges: list[float] = []
    regimes: list[Bool[np.ndarray, " rows"]] = []
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


def upper_quantile(values: Float[np.ndarray, " values"], share: float) -> float:
    """Return a quantile with the finite-sample correction of split conformal prediction, (n + 1) / n."""
    return float(np.quantile(values, min(1.0, share * (len(values) + 1) / len(values))))


def coverage_of(
    interval: Mapping[str, list[float]], predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]
) -> float:
    """Return the share of measurements inside the interval."""
    regime = np.searchsorted(interval["edges_s"], predicted)
    low, high = (np.asarray(interval[end])[regime] for end in ("low", "high"))
    return _round(np.mean((measured >= predicted * low) & (measured <= predicted * high)))


def crossed_coverage(
    predicted: Float[np.ndarray, " rows"],
    measured: Float[np.ndarray, " rows"],
    shapes: Sequence[Sequence[object]],
    coverage: float = COVERAGE,
) -> float | None:
    """Return the share of rows inside the interval of the other half of the shapes; of its own rows it is as aimed at.

    None if all shapes are in one half.

    Args:
        predicted: Times of rows that were held out of the fit. [s]
        measured: Their measured times. [s]
        shapes: Columns that identify the shape of a row; each half has whole shapes.
        coverage: As for interval_of.
    """
    half = half_of_rows(*shapes) == 0
    if half.all() or not half.any():
        return None
    shares = [
        coverage_of(interval_of(predicted[~own], measured[~own], coverage), predicted[own], measured[own])
        for own in (half, ~half)
    ]
    return _round(np.average(shares, weights=[half.sum(), (~half).sum()]))


def round_numbers(value: Any, digits: int = 4) -> Any:
    """Convert to plain Python values with some significant digits, which exceed the accuracy of a fit."""
    if isinstance(value, Mapping):
        return {str(key): round_numbers(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [round_numbers(item, digits) for item in value]
    if isinstance(value, (np.floating, float)):
        return float(f"{float(value):.{digits}g}")
    return int(value) if isinstance(value, np.integer) else value


def _round(value: Any) -> float:
    return float(f"{float(value):.4g}")


# Suites of random GEMMs: that of the bench, and the imported one of the measuring script that preceded it.
_RANDOM_SUITES = ("random", "campaign linear_random")


def good_rows(rows: Iterable[Row], device: str = "") -> tuple[str, list[Row]]:
    """Return the valid rows of one device without repetitions.

    Args:
        device: Canonical name; may be omitted if the store has one device only.

    Raises:
        CalibrationError: there are none, or rows of several devices and none was named.
    """
    fine = [row for row in rows if row.status == OK and row.repetition == 0 and row.median_s]
    counts = Counter(row.device for row in fine)
    listed = ", ".join(f"{name} ({count:,} rows)" for name, count in counts.most_common()) or "no valid row"
    if not device and len(counts) != 1:
        raise CalibrationError(f"the store holds {listed}", advice=with_fields("name one with {device}"))
    device = device or next(iter(counts))
    if device not in counts:
        raise CalibrationError(f"the store has no valid row of {device}; it holds {listed}")
    return device, [row for row in fine if row.device == device]


def is_held_out_shape(m: int, n: int, k: int) -> bool:
    """Whether a random GEMM of the bench is held out of all fits; about half of them are.

    >>> is_held_out_shape(128, 64, 32), is_held_out_shape(129, 64, 32)
    (True, False)
    """
    return ((m * 31 + n) * 31 + k) % 2 == 0


def gemm_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return GEMMs as a table with the columns of ``gemm_section``, and layout, dtype and cache state of each row.

    ``is_held_out`` marks the random GEMMs that are held out of all fits.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError(
            "fitting needs pandas and scipy, which are not installed; run: pip install 'shapewright[fit]'"
        ) from error
    names = ("library", "dtype", "layout", "batch", "m", "n", "k", "is_cold")
    kept = [row for row in rows if row.kind == "gemm"]
    columns: dict[str, Any] = {name: [getattr(row, name) for row in kept] for name in names}
    columns["is_held_out"] = [
        row.suite in _RANDOM_SUITES and is_held_out_shape(int(row.m or 0), int(row.n or 0), int(row.k or 0))
        for row in kept
    ]
    return pd.DataFrame({**columns, "latency_s": [row.median_s for row in kept]})


def folds_of_groups(keys: Sequence[object], num_folds: int) -> np.ndarray:
    """Fold of each row, so that rows of one key share a fold and folds have about as many keys.

    >>> folds_of_groups(["a", "b", "a", "c"], 2).tolist()
    [0, 1, 0, 0]
    """
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return np.array([order[key] % num_folds for key in keys])
