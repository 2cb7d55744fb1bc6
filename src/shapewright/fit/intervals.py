"""Intervals from residuals: conformal quantiles by regime, the stretch of fitted rows' ones, pools of devices.

Legend: r = ln(measured / predicted) of a row, E the ends of its interval as logarithms, low below 0 and high above.

Where unseen rows are many, their quantiles are the interval (fit.logs.interval_of). Where they are few whole layouts,
the rows that the fit saw give the form (ends by kernel and regime) and the unseen ones a factor on it:

    stretch = 90 % quantile of max(r / E low, r / E high)          over unseen rows of a regime of time

Libraries and collections are pooled with equal weight, however many rows each has. How far one that was not measured
may lie outside the others' pool is asked of each in turn (``spread_over``). Devices left out: ``fit.left_out``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shapewright.fit.logs import COVERAGE, Array, interval_of, regimes_of, upper_quantile

EDGES_S = (5e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2)
"""Regimes of predicted time: below 10 us a kernel is its start, beyond 1 ms its rate."""
FEWEST_ROWS = 60
"""Rows that a regime of a fitted section needs."""
POOL_EDGES_S = (1e-5, 1e-4, 1e-3)
POOL_FEWEST_ROWS = 300
POOL_ROWS = 4000
"""Rows of each device (or library) in a pool."""
MOST_REPEATS = 5
"""How often a row of a small part counts, so that it weighs as much as a large one."""
LEAST_LOG = 0.01
"""Ends of a fitted section lie at least so far out before they are stretched: clocks alone scatter by a percent."""
MOST_STRETCH = 4.0
"""Most that unseen rows may stretch: where they ask for more, their few layouts are unlike those that were seen."""
LARGEST_SPREAD = 2.0
"""Most that parts, or devices, which were left out may widen an interval made of the others."""

Interval = dict[str, list[float]]
Stretch = dict[str, list[float]]


def ends_of(interval: Mapping[str, Any], predicted: Array) -> tuple[Array, Array]:
    """Logarithms of an interval's ends, as rows of these predicted times have them."""
    regime = np.searchsorted(interval["edges_s"], predicted)
    low, high = (np.log(np.asarray(interval[end], dtype=float))[regime] for end in ("low", "high"))
    return low, high


def is_inside(interval: Mapping[str, Any], predicted: Array, measured: Array) -> Array:
    """1 for each row inside its interval, 0 for the others."""
    low, high = ends_of(interval, predicted)
    logs = np.log(measured / predicted)
    return ((logs >= low) & (logs <= high)).astype(float)


def form_of(predicted: Array, measured: Array) -> Interval:
    """Interval of rows that a fit saw, by regime: the form, to be stretched."""
    return at_least(interval_of(predicted, measured, edges_s=EDGES_S, fewest=FEWEST_ROWS))


def at_least(interval: Interval) -> Interval:
    """An interval with ends that a factor can stretch, on both sides of 1."""
    low = [min(low, float(np.exp(-LEAST_LOG))) for low in interval["low"]]
    high = [max(high, float(np.exp(LEAST_LOG))) for high in interval["high"]]
    return {"edges_s": list(interval["edges_s"]), "low": low, "high": high}


def stretch_scores(interval: Mapping[str, Any], predicted: Array, measured: Array) -> Array:
    """How many times farther out than an interval's end each row lies; at most 1 inside."""
    low, high = ends_of(interval, predicted)
    logs = np.log(measured / predicted)
    scores: Array = np.maximum(logs / low, logs / high)
    return scores


def stretches(scores: Array, predicted: Array) -> Stretch:
    """Their 90 % quantiles by regime, MOST_STRETCH at most."""
    edges, regimes = regimes_of(predicted, EDGES_S, POOL_FEWEST_ROWS)
    factors = [upper_quantile(scores[inside], COVERAGE) for inside in regimes]
    return {"edges_s": edges, "factor": [min(factor, MOST_STRETCH) for factor in factors]}


def stretch(interval: Interval, factors: Stretch) -> Interval:
    """An interval whose ends are as many times farther out as the factors of their regimes say."""
    edges = sorted({*interval["edges_s"], *factors["edges_s"]})
    middles = np.array([edge * 0.999 for edge in edges] + [edges[-1] * 1.001 if edges else 1.0])
    low, high = ends_of(interval, middles)
    factor = np.asarray(factors["factor"])[np.searchsorted(factors["edges_s"], middles)]
    return {
        "edges_s": [float(edge) for edge in edges],
        "low": [float(end) for end in np.exp(low * factor)],
        "high": [float(end) for end in np.exp(high * factor)],
    }


def draw(predicted: Array, measured: Array, rows: int) -> tuple[Array, Array]:
    """So many rows in an order drawn with a fixed seed; few rows are repeated, up to MOST_REPEATS times."""
    order = np.random.default_rng(0).permutation(len(predicted))
    chosen = np.resize(order, min(rows, MOST_REPEATS * len(order)))
    return predicted[chosen], measured[chosen]


def pool(
    parts: Sequence[tuple[Array, Array]],
    *,
    both_ways: bool = False,
    edges_s: Sequence[float] = POOL_EDGES_S,
    fewest: int = POOL_FEWEST_ROWS,
) -> Interval:
    """Interval of parts (devices, libraries, collections) that count alike.

    Args:
        parts: Predicted and measured times of each. [s]
        both_ways: Take each residual with both signs: what erred one way on few devices may err the other way on the
            next, as two siblings do that borrow from each other.
        edges_s: Ends of regimes to try. [s]
        fewest: Rows that a regime needs.
    """
    share = min(POOL_ROWS, max(len(predicted) for predicted, _ in parts))
    drawn = [draw(predicted, measured, share) for predicted, measured in parts]
    predicted, measured = (np.concatenate(columns) for columns in zip(*drawn, strict=True))
    if both_ways:
        predicted, measured = np.tile(predicted, 2), np.concatenate([measured, predicted**2 / measured])
    return interval_of(predicted, measured, edges_s=edges_s, fewest=fewest)


def widened(interval: Interval, widening: float) -> Interval:
    """The same with ends as many times farther out."""
    ends = {end: [float(value**widening) for value in interval[end]] for end in ("low", "high")}
    return {**interval, **ends}


def spread_over(parts: Mapping[str, tuple[Array, Array]]) -> float:
    """Factor on a pool's ends with which parts that it was not made of lie inside as often as they should, in the mean.

    Each part in turn is judged by the pool of the others; 1 where there is but one, and never below.
    """
    if len(parts) < 2:
        return 1.0
    scores = []
    for name, rows in parts.items():
        others = pool([part for other, part in parts.items() if other != name], both_ways=True)
        scores.append(stretch_scores(others, *draw(*rows, POOL_ROWS)))
    return covering_spread(scores)


def covering_spread(scores: Sequence[Array]) -> float:
    """Least factor on an interval's ends, from 1 on, with which it holds as many rows of its judges as it should.

    Args:
        scores: Of each judge, what stretch_scores gives; each counts as much in the mean, however many rows it has.
    """
    low, high = 1.0, LARGEST_SPREAD
    for _ in range(20):
        middle = 0.5 * (low + high)
        covered = float(np.mean([np.mean(each <= middle) for each in scores]))
        low, high = (low, middle) if covered >= COVERAGE else (middle, high)
    return high
