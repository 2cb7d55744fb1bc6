"""Interval of an unmeasured device, from leaving out each measured device in turn.

Legend: r = ln(measured / predicted) of a row, b the median of a device's r (its bias), e = r - b the scatter of its
rows.

Most of the error of a borrowed record is common to all rows of a device: its clock and its library's kernels. The
residual of the next device is therefore modelled as

    r = s T + e        T Student's, with as many degrees of freedom as left-out devices, s^2 = mean of b^2

and an interval holds 90 % of |r|. Biases are assumed to be 0 in the mean, since the next device may err the other way;
with few devices T has long tails, and the interval is wide. If a regime of time has its own biases, s^2 is the mean of
those and of the overall ones. A distance class with few devices (one, or none) takes a prior for the biases from a
wider one, which counts as additional devices. Devices that share the cause of their distance, such as the chips of
another vendor, have correlated errors: together they count as one, with the mean of their b^2.

The share of the ends that is the device's bias gives the error correlation of two operations (``shared_error``):

    share = (s t)^2 / ((s t)^2 + q^2)        t, q the 90 % quantiles of |T| and |e|
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapewright.measure.fit.shared import COVERAGE, regimes_of
from shapewright.measure.refit.intervals.residual_intervals import (
    POOL_EDGES_S,
    POOL_FEWEST_ROWS,
    POOL_ROWS,
    Interval,
    covering_factor,
    draw_rows,
    stretch_scores,
)

if TYPE_CHECKING:
    from jaxtyping import Float

FEWEST_BIAS_ROWS = 60
"""Fewest rows for a device's bias in a regime of time."""
PRIOR_DEVICES = 2.0
"""Number of left-out devices that a prior from a wider class counts as. Judgment."""
LARGEST_END = 4.0
"""Largest end, as a logarithm: a factor of 55 means that nothing is known."""
_POINTS = (np.arange(200) + 0.5) / 200.0
"""Probabilities at which distributions are sampled."""
_LEAST_SQUARE = 1e-12
"""Avoids 0 / 0 for rows without error."""
_NO_BIASES: Mapping[str, float] = MappingProxyType({})
_NO_CAUSES: Mapping[str, str] = MappingProxyType({})

Rows = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Predicted and measured times of one device. [s]"""


class PriorBias(NamedTuple):
    """Biases of a wider class of devices, as a prior.

    Attributes:
        scale: Root mean square of its devices' biases, as a logarithm.
        devices: Number of devices that it counts as.
    """

    scale: float
    devices: float = PRIOR_DEVICES


def left_out_widening(parts: Mapping[str, Rows], **others: Any) -> float:
    """Return the factor on an interval's ends with which left-out devices have the intended mean coverage.

    Each of ``parts`` in turn is compared with the interval of the others; the factor is at least 1, and 1 for a single
    device. It accounts for differences in scatter, which a pool of two or three devices does not show.
    """
    if len(parts) < 2:
        return 1.0
    scores = []
    for name, (predicted, measured) in parts.items():
        rest = left_out_interval({other: rows for other, rows in parts.items() if other != name}, **others)
        scores.append(stretch_scores(rest, *draw_rows(predicted, measured, POOL_ROWS)))
    return covering_factor(scores)


def bias_of(rows: Rows) -> float:
    """Return the median of ln(measured / predicted)."""
    return float(np.median(np.log(rows[1] / rows[0])))


def prior_bias_of(biases: Mapping[str, float], causes: Mapping[str, str] = _NO_CAUSES) -> PriorBias | None:
    """Return the prior that devices with these biases give another class; None without devices."""
    if not biases:
        return None
    squares = _mean_by_cause([(name, bias**2) for name, bias in biases.items()], causes)
    return PriorBias(float(np.sqrt(np.mean(squares))))


def left_out_interval(
    parts: Mapping[str, Rows],
    *,
    biases: Mapping[str, float] = _NO_BIASES,
    causes: Mapping[str, str] = _NO_CAUSES,
    prior: PriorBias | None = None,
    scatter: Mapping[str, Rows] | None = None,
    scatter_factor: float = 1.0,
) -> Interval:
    """Return the interval of the next device of a distance class.

    Args:
        biases: Biases of further devices, of which only single rows are known.
        causes: Common cause of devices, such as their vendor: those with the same one count as one device, and those
            that are not listed count separately.
        prior: Prior for the biases, from a wider class.
        scatter: Rows of other devices, whose scatter is used if ``parts`` is empty.

    Returns:
        The interval, with ``shared``: the share of its ends that is the device's bias, by regime.

    Raises:
        ValueError: neither parts nor scatter has rows, or no bias is known.
    """
    known = parts or scatter or {}
    if not known or not (parts or biases or prior):
        raise ValueError(
            "the interval of an unmeasured device needs rows of some device and the bias of one; give both"
        )
    predicted = np.concatenate([rows[0] for rows in known.values()])
    edges, _ = regimes_of(predicted, POOL_EDGES_S, POOL_FEWEST_ROWS)
    bounds = [-np.inf, *edges, np.inf]
    ends = []
    shares = []
    for low, high in pairwise(bounds):
        scatters, squares = _regime_of(known, parts, low, high)
        squares += [(name, bias**2) for name, bias in biases.items()]
        end, share = _end(
            [(1.0 if parts else scatter_factor) * own for own in scatters], _mean_by_cause(squares, causes), prior
        )
        ends.append(end)
        shares.append(share)
    return {
        "edges_s": [float(edge) for edge in edges],
        "low": [float(np.exp(-end)) for end in ends],
        "high": [float(np.exp(end)) for end in ends],
        "shared": shares,
    }


def _regime_of(
    known: Mapping[str, Rows], devices: Container[str], low: float, high: float
) -> tuple[list[Float[np.ndarray, " rows"]], list[tuple[str, float]]]:
    """Return the scatter of each device's rows in a regime of predicted time, and b^2 of those in ``devices``."""
    scatters, squares = [], []
    for name, (predicted, measured) in known.items():
        inside = (predicted > low) & (predicted <= high)
        logs = np.log(measured / predicted)
        own = logs[inside] if inside.sum() >= FEWEST_BIAS_ROWS else logs
        scatters.append(own - np.median(own))
        if name in devices:
            squares.append((name, 0.5 * float(np.median(logs) ** 2 + np.median(own) ** 2)))
    return scatters, squares


def _mean_by_cause(squares: Sequence[tuple[str, float]], causes: Mapping[str, str]) -> list[float]:
    """Return the mean of b^2 over devices with a common cause, for each cause."""
    found: dict[str, list[float]] = {}
    for name, square in squares:
        found.setdefault(causes.get(name, name), []).append(square)
    return [float(np.mean(own)) for own in found.values()]


def _end(
    scatters: Sequence[Float[np.ndarray, " rows"]], squares: Sequence[float], prior: PriorBias | None
) -> tuple[float, float]:
    """Return the logarithm of the upper end, and the share of it that is the device's bias.

    Args:
        squares: b^2 of each independent cause.
    """
    squares, weights = list(squares), [1.0] * len(squares)
    if prior is not None:
        squares.append(prior.scale**2)
        weights.append(prior.devices)
    student = float(np.sqrt(np.average(squares, weights=weights))) * _student(sum(weights))
    quantiles = [np.quantile(np.concatenate([own, -own]), _POINTS) for own in scatters]
    drawn = np.abs(student[:, None] + np.concatenate(quantiles)[None, :])
    of_bias, of_rows = (
        float(np.quantile(np.abs(part), COVERAGE)) ** 2 for part in (student, np.concatenate(quantiles))
    )
    return min(float(np.quantile(drawn, COVERAGE)), LARGEST_END), of_bias / max(of_bias + of_rows, _LEAST_SQUARE)


def _student(freedom: float) -> Float[np.ndarray, " probabilities"]:
    """Return quantiles of Student's distribution."""
    from scipy.stats import t

    quantiles: Float[np.ndarray, " probabilities"] = t.ppf(_POINTS, freedom)
    return quantiles
