"""Intervals from residuals: conformal quantiles by regime, stretched intervals of fitted rows, pools of devices.

Legend: r = ln(measured / predicted) of a row, E the ends of its interval as logarithms, low below 0 and high above.

With many held-out rows, their quantiles are the interval (``fit.shared.interval_of``). With few held-out layouts, the
interval of fitted rows (by kernel and regime) is stretched by a factor from the held-out ones:

    stretch = 90 % quantile of max(r / E low, r / E high)          over held-out rows of a regime of time

Libraries and collections are pooled with equal weight, however many rows each has. ``leave_one_out_widening`` estimates
how far an unmeasured one lies outside the pool of the others. Left-out devices: ``left_out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from shapewright.measure.fit.shared import COVERAGE, interval_of, regimes_of, upper_quantile

if TYPE_CHECKING:
    from jaxtyping import Float

EDGES_S = (5e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2)
"""Regimes of predicted time: below 10 us the launch dominates, beyond 1 ms the rate."""
FEWEST_ROWS = 60
"""Fewest rows of a regime of a fitted section."""
POOL_EDGES_S = (1e-5, 1e-4, 1e-3)
POOL_FEWEST_ROWS = 300
POOL_ROWS = 4000
"""Most rows of each device (or library) in a pool."""
MOST_REPEATS = 5
"""Most repetitions of a row, by which small parts reach the weight of large ones."""
LEAST_LOG = 0.01
"""Smallest distance of the ends of a fitted section before stretching: clocks alone scatter by a percent."""
MOST_STRETCH = 4.0
"""Largest stretch: held-out rows beyond it have layouts unlike the fitted ones."""
LARGEST_SPREAD = 2.0
"""Largest widening by left-out parts or devices."""

Interval = dict[str, list[float]]
Stretch = dict[str, list[float]]


def ends_of(
    interval: Mapping[str, Any], predicted: Float[np.ndarray, " rows"]
) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
    """Return the logarithms of an interval's ends for rows with these predicted times."""
    regime = np.searchsorted(interval["edges_s"], predicted)
    low, high = (np.log(np.asarray(interval[end], dtype=float))[regime] for end in ("low", "high"))
    return low, high


def is_inside(
    interval: Mapping[str, Any], predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """Return 1 for each row inside its interval, 0 for the others."""
    low, high = ends_of(interval, predicted)
    logs = np.log(measured / predicted)
    found: Float[np.ndarray, " rows"] = ((logs >= low) & (logs <= high)).astype(float)
    return found


def fitted_interval(predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]) -> Interval:
    """Return the interval of fitted rows by regime, to be stretched."""
    return with_minimum_width(interval_of(predicted, measured, edges_s=EDGES_S, fewest=FEWEST_ROWS))


def with_minimum_width(interval: Interval) -> Interval:
    """Return an interval whose ends lie at least LEAST_LOG from 1 on either side."""
    low = [min(low, float(np.exp(-LEAST_LOG))) for low in interval["low"]]
    high = [max(high, float(np.exp(LEAST_LOG))) for high in interval["high"]]
    return {"edges_s": list(interval["edges_s"]), "low": low, "high": high}


def stretch_scores(
    interval: Mapping[str, Any], predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """Return the residual of each row relative to the end of its interval; at most 1 inside."""
    low, high = ends_of(interval, predicted)
    logs = np.log(measured / predicted)
    scores: Float[np.ndarray, " rows"] = np.maximum(logs / low, logs / high)
    return scores


def stretch_factors(scores: Float[np.ndarray, " rows"], predicted: Float[np.ndarray, " rows"]) -> Stretch:
    """Return the 90 % quantiles of stretch scores by regime, MOST_STRETCH at most."""
    edges, regimes = regimes_of(predicted, EDGES_S, POOL_FEWEST_ROWS)
    factors = [upper_quantile(scores[inside], COVERAGE) for inside in regimes]
    return {"edges_s": edges, "factor": [min(factor, MOST_STRETCH) for factor in factors]}


def stretch(interval: Interval, factors: Stretch) -> Interval:
    """Return an interval with its ends multiplied, as logarithms, by the factors of their regimes."""
    edges = sorted({*interval["edges_s"], *factors["edges_s"]})
    middles = np.array([edge * 0.999 for edge in edges] + [edges[-1] * 1.001 if edges else 1.0])
    low, high = ends_of(interval, middles)
    factor = np.asarray(factors["factor"])[np.searchsorted(factors["edges_s"], middles)]
    return {
        "edges_s": [float(edge) for edge in edges],
        "low": [float(end) for end in np.exp(low * factor)],
        "high": [float(end) for end in np.exp(high * factor)],
    }


def draw_rows(
    predicted: Float[np.ndarray, " rows"], measured: Float[np.ndarray, " rows"], rows: int
) -> tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]:
    """Return ``rows`` rows in an order drawn with a fixed seed; few rows repeat, up to MOST_REPEATS times."""
    order = np.random.default_rng(0).permutation(len(predicted))
    chosen = np.resize(order, min(rows, MOST_REPEATS * len(order)))
    return predicted[chosen], measured[chosen]


def pool(
    parts: Sequence[tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]],
    *,
    both_ways: bool = False,
    edges_s: Sequence[float] = POOL_EDGES_S,
    fewest: int = POOL_FEWEST_ROWS,
) -> Interval:
    """Return the interval of equally weighted parts (devices, libraries, collections).

    Args:
        parts: Predicted and measured times of each. [s]
        both_ways: Use each residual with both signs: an error of one sign on few devices may have the other sign on the
            next, as for two siblings that borrow from each other.
        edges_s: Candidate edges of regimes. [s]
    """
    share = min(POOL_ROWS, max(len(predicted) for predicted, _ in parts))
    drawn = [draw_rows(predicted, measured, share) for predicted, measured in parts]
    predicted, measured = (np.concatenate(columns) for columns in zip(*drawn, strict=True))
    if both_ways:
        predicted, measured = np.tile(predicted, 2), np.concatenate([measured, predicted**2 / measured])
    return interval_of(predicted, measured, edges_s=edges_s, fewest=fewest)


def widen_interval(interval: Interval, widening: float) -> Interval:
    """Return the interval with the logarithms of its ends times ``widening``."""
    ends = {end: [float(value**widening) for value in interval[end]] for end in ("low", "high")}
    return {**interval, **ends}


def leave_one_out_widening(parts: Mapping[str, tuple[Float[np.ndarray, " rows"], Float[np.ndarray, " rows"]]]) -> float:
    """Return the factor on a pool's ends with which left-out parts have the intended mean coverage.

    Each part in turn is compared with the pool of the others; the factor is at least 1, and 1 for a single part.
    """
    if len(parts) < 2:
        return 1.0
    scores = []
    for name, rows in parts.items():
        others = pool([part for other, part in parts.items() if other != name], both_ways=True)
        scores.append(stretch_scores(others, *draw_rows(*rows, POOL_ROWS)))
    return covering_factor(scores)


def covering_factor(scores: Sequence[Float[np.ndarray, " rows"]]) -> float:
    """Return the smallest factor, at least 1, on an interval's ends that gives the intended coverage.

    Args:
        scores: Stretch scores of each left-out part; parts have equal weight, however many rows they have.
    """
    low, high = 1.0, LARGEST_SPREAD
    for _ in range(20):
        middle = 0.5 * (low + high)
        covered = float(np.mean([np.mean(each <= middle) for each in scores]))
        low, high = (low, middle) if covered >= COVERAGE else (middle, high)
    return high


# A third library lies nearer to the mean of two than they to each other: with equal and independent spreads, its
# squared distance is 3/2 of one variance, and theirs is 2.
THIRD_LIBRARY = np.sqrt(3.0 / 4.0)

Groups = dict[str, Interval | None]
Parts = dict[str, tuple[np.ndarray, np.ndarray]]


def parts_of(rows: pd.DataFrame, by: list[str]) -> Parts:
    """Return predicted and measured times of each distinct combination of labels."""
    return {
        " ".join(map(str, key)): (part.predicted.to_numpy(), part.measured.to_numpy()) for key, part in rows.groupby(by)
    }


def own_groups(
    rows: pd.DataFrame, regime: str, known: Mapping[str, Interval] | None = None
) -> tuple[Groups, dict[str, Any]]:
    """Return intervals of sections: those of fitted rows, stretched as the held-out rows of a regime need.

    Args:
        rows: Rows with ``path`` (name of the group), ``regime_s`` (time that selects the regime), ``is_held_out`` and
            ``half``.
        regime: Column whose values share a stretch, such as the phase.
        known: Intervals of paths whose fitted rows are not representative, such as those with a learned table.

    Returns:
        The groups, and the coverage of held-out rows by stretches from the other half of their shapes.
    """
    fitted = {
        path: fitted_interval(part.regime_s.to_numpy(), (part.measured / part.predicted * part.regime_s).to_numpy())
        for path, part in rows[~rows.is_held_out].groupby("path")
    } | {path: with_minimum_width(form) for path, form in (known or {}).items()}
    held_out = rows[rows.is_held_out & rows.path.isin(fitted)].copy()
    held_out["scores"] = np.nan
    for path, part in held_out.groupby("path"):
        scaled = (part.measured / part.predicted * part.regime_s).to_numpy()
        held_out.loc[part.index, "scores"] = stretch_scores(fitted[path], part.regime_s.to_numpy(), scaled)
    groups: Groups = {}
    judged = []
    for word, part in held_out.groupby(regime):
        factors = stretch_factors(part.scores.to_numpy(), part.regime_s.to_numpy())
        groups |= {
            path: stretch(fitted[path], factors)
            for path in rows.loc[rows[regime] == word, "path"].unique()
            if path in fitted
        }
        for half in (0, 1):
            others, these = part[part.half != half], part[part.half == half]
            if len(others) and len(these):
                factors = stretch_factors(others.scores.to_numpy(), others.regime_s.to_numpy())
                at = np.searchsorted(factors["edges_s"], these.regime_s)
                judged.append(these.assign(covered=these.scores <= np.asarray(factors["factor"])[at]))
    return groups, summary(pd.concat(judged))


def summary(judged: pd.DataFrame) -> dict[str, Any]:
    """Return coverage: overall, and of the cells (device, dtype, library) outside 85 to 95 %."""
    cells = judged.groupby(["table", "device", "dtype", "library"]).covered.agg(["mean", "size"])
    cells = cells[cells["size"] >= 200]
    outside = cells[(cells["mean"] < 0.85) | (cells["mean"] > 0.95)]
    return {
        "rows": len(judged),
        "covered": round(float(judged.covered.mean()), 3),
        "cells": len(cells),
        "cells_inside": len(cells) - len(outside),
        "outside": {" ".join(map(str, key)): round(float(row["mean"]), 3) for key, row in outside.iterrows()},
    }


def library_groups(rows: pd.DataFrame) -> Groups:
    """Return pools of libraries priced with another's section, by device and format, by format, and of all.

    Pools of all devices have a version without each of them, for pricing that device as unmeasured.

    Args:
        rows: Rows with ``format`` and ``format_family``, by each of which groups are named.
    """
    groups: Groups = {}
    formats = sorted({*rows.format, *rows.format_family})
    devices = sorted(rows.device.unique())
    for place, ending, there in (
        ("other library", "", rows),
        *((f"other library/{device}", "", rows[rows.device == device]) for device in devices),
        *(("other library", f"/without {device}", rows[rows.device != device]) for device in devices),
    ):
        for name in ("", *formats):
            here = there[(there.format == name) | (there.format_family == name)] if name else there
            if len(here):
                parts = parts_of(here, ["device", "library"])
                found = widen_interval(pool(list(parts.values())), THIRD_LIBRARY)
                groups[f"{place}/{name}{ending}" if name else f"{place}{ending}"] = found
    return groups
