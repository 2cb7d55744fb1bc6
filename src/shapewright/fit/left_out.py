"""Interval of a device that nobody measured, from what leaving out each measured device in turn does.

Legend: r = ln(measured / predicted) of a row, b the median of a device's r (its bias), e = r - b what its rows scatter.

Most of what a borrowed record is wrong by is one error for all rows of a device: its clock, its library's kernels. So
the next device's residual is drawn as

    r = s T + e        T Student's, with as many degrees of freedom as devices were left out, s^2 = mean of b^2

and an interval holds 90 % of |r|. Biases of 0 in the mean are assumed, since the next device may err the other way;
with few devices T has long tails, and the interval is wide. Where a regime of time has its own biases, half of s^2 is
theirs and half that of all times. A class of devices that says little (one device, or none) is told by a wider one
what biases are usual: that counts as so many devices more. Devices that share what the class is strange by, such as
the chips of another maker, err alike: together they count as one, with the mean of their b^2.

How much of the ends is the device's bias says how the errors of two operations correlate (``shared_error``):

    share = (s t)^2 / ((s t)^2 + q^2)        t, q the 90 % quantiles of |T| and |e|
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shapewright.fit.intervals import (
    POOL_EDGES_S,
    POOL_FEWEST_ROWS,
    POOL_ROWS,
    Interval,
    covering_spread,
    draw,
    stretch_scores,
)
from shapewright.fit.logs import COVERAGE, Array, regimes_of

FEWEST_BIAS_ROWS = 60
"""Rows that give a device a bias of its own in a regime of time."""
PRIOR_DEVICES = 2.0
"""As how many devices left out it counts what a wider class says of biases. Judgement."""
LARGEST_END = 4.0
"""Most that an end lies out, as a logarithm: a factor of 55 says that nothing is known."""
_POINTS = (np.arange(200) + 0.5) / 200.0
"""Where distributions are read off."""
_LEAST_SQUARE = 1e-12
"""Keeps the share of rows without any error from being 0 / 0."""
_NO_BIASES: Mapping[str, float] = MappingProxyType({})
_NO_KIN: Mapping[str, str] = MappingProxyType({})

Rows = tuple[Array, Array]
"""Predicted and measured times of one device. [s]"""


class UsualBias(NamedTuple):
    """What a wider class of devices says of biases.

    Attributes:
        scale: Root of the mean square of its devices' biases, as a logarithm.
        devices: As how many devices it counts.
    """

    scale: float
    devices: float = PRIOR_DEVICES


def spread_of(parts: Mapping[str, Rows], **others: Any) -> float:
    """Factor on an interval's ends with which devices that it was not made of lie inside as often as they should.

    Each of ``parts`` in turn is judged by the interval of the others, and their coverage counts in the mean; 1 for one
    device alone, and never below. Devices scatter unlike each other, which a pool of two or three does not show.

    Args:
        parts: Rows of each device.
        others: What else left_out_interval takes.
    """
    if len(parts) < 2:
        return 1.0
    scores = []
    for name, (predicted, measured) in parts.items():
        rest = left_out_interval({other: rows for other, rows in parts.items() if other != name}, **others)
        scores.append(stretch_scores(rest, *draw(predicted, measured, POOL_ROWS)))
    return covering_spread(scores)


def bias_of(rows: Rows) -> float:
    """Median of ln(measured / predicted)."""
    return float(np.median(np.log(rows[1] / rows[0])))


def usual_bias(biases: Mapping[str, float], kin: Mapping[str, str] = _NO_KIN) -> UsualBias | None:
    """What devices with these biases tell another class; None of none.

    Args:
        biases: Of each device.
        kin: See left_out_interval.
    """
    if not biases:
        return None
    squares = _by_kin([(name, bias**2) for name, bias in biases.items()], kin)
    return UsualBias(float(np.sqrt(np.mean(squares))))


def left_out_interval(
    parts: Mapping[str, Rows],
    *,
    biases: Mapping[str, float] = _NO_BIASES,
    kin: Mapping[str, str] = _NO_KIN,
    usual: UsualBias | None = None,
    scatter: Mapping[str, Rows] | None = None,
    scatter_factor: float = 1.0,
) -> Interval:
    """Interval of the next device of a class.

    Args:
        parts: Rows of each device that was left out.
        biases: Of further devices, of which single rows are known.
        kin: What devices share that they are strange by, such as their maker: those of one word count as one device.
            Who is not listed stands for itself.
        usual: What a wider class says of biases.
        scatter: Rows of other devices whose scatter stands in where ``parts`` is empty.
        scatter_factor: What their scatter is multiplied by there.

    Returns:
        The interval, with ``shared``: the share of its ends that is the device's bias, by regime.

    Raises:
        ValueError: neither parts nor scatter has rows, or nothing says how large biases are.
    """
    known = parts or scatter or {}
    if not known or not (parts or biases or usual):
        raise ValueError("an interval of a device left out needs rows of some device and the bias of one; give both")
    predicted = np.concatenate([rows[0] for rows in known.values()])
    edges, _ = regimes_of(predicted, POOL_EDGES_S, POOL_FEWEST_ROWS)
    bounds = [-np.inf, *edges, np.inf]
    ends = []
    shares = []
    for low, high in pairwise(bounds):
        scatters, squares = _regime_of(known, parts, low, high)
        squares += [(name, bias**2) for name, bias in biases.items()]
        end, share = _end([(1.0 if parts else scatter_factor) * own for own in scatters], _by_kin(squares, kin), usual)
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
) -> tuple[list[Array], list[tuple[str, float]]]:
    """Scatter of each device's rows about their bias in a regime of predicted time, and b^2 of those in ``devices``."""
    scatters, squares = [], []
    for name, (predicted, measured) in known.items():
        inside = (predicted > low) & (predicted <= high)
        logs = np.log(measured / predicted)
        own = logs[inside] if inside.sum() >= FEWEST_BIAS_ROWS else logs
        scatters.append(own - np.median(own))
        if name in devices:
            squares.append((name, 0.5 * float(np.median(logs) ** 2 + np.median(own) ** 2)))
    return scatters, squares


def _by_kin(squares: Sequence[tuple[str, float]], kin: Mapping[str, str]) -> list[float]:
    """Mean of b^2 over the devices that count as one, of each of those."""
    found: dict[str, list[float]] = {}
    for name, square in squares:
        found.setdefault(kin.get(name, name), []).append(square)
    return [float(np.mean(own)) for own in found.values()]


def _end(scatters: Sequence[Array], squares: Sequence[float], usual: UsualBias | None) -> tuple[float, float]:
    """Logarithm of the upper end, and the share of it that is the device's bias.

    Args:
        scatters: Of each device's rows about their bias.
        squares: b^2 of whatever counts as a device.
        usual: What a wider class says of biases.
    """
    squares, weights = list(squares), [1.0] * len(squares)
    if usual is not None:
        squares.append(usual.scale**2)
        weights.append(usual.devices)
    student = float(np.sqrt(np.average(squares, weights=weights))) * _student(sum(weights))
    quantiles = [np.quantile(np.concatenate([own, -own]), _POINTS) for own in scatters]
    drawn = np.abs(student[:, None] + np.concatenate(quantiles)[None, :])
    of_bias, of_rows = (
        float(np.quantile(np.abs(part), COVERAGE)) ** 2 for part in (student, np.concatenate(quantiles))
    )
    return min(float(np.quantile(drawn, COVERAGE)), LARGEST_END), of_bias / max(of_bias + of_rows, _LEAST_SQUARE)


def _student(freedom: float) -> Array:
    """Quantiles of Student's distribution."""
    from scipy.stats import t

    quantiles: Array = t.ppf(_POINTS, freedom)
    return quantiles
