"""Intervals of devices without a record of their own, from leaving out each measured device in turn.

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

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shapewright.hardware.loader import load_device
from shapewright.measure.fit.shared import COVERAGE, regimes_of
from shapewright.measure.refit.intervals.residual_intervals import (
    POOL_EDGES_S,
    POOL_FEWEST_ROWS,
    POOL_ROWS,
    Groups,
    Interval,
    Parts,
    covering_factor,
    draw_rows,
    parts_of,
    stretch_scores,
    widen_interval,
)
from shapewright.pricing.calibration.records import TRANSFER_WIDENING, load_record

if TYPE_CHECKING:
    import pandas as pd
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

DISTANCES = ("architecture", "generic", "distant", "foreign")
"""Distance classes of donors, nearest first."""
TWO_GENERATIONS = np.sqrt(2.0)
"""Two independent errors of equal size."""

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


class OtherDevices(NamedTuple):
    """Biases, ln(measured / predicted), of devices without rows of a kind, by distance class.

    Attributes:
        same: Of this kind of operation, for devices of which single rows are known; by device.
        prior: Of another kind, as a prior; by device.
    """

    same: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    prior: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def transfer_groups(kind: str, rows: pd.DataFrame, others: OtherDevices | None = None) -> Groups:
    """Return intervals of devices without a record of their own, by distance of the donor and by format.

    Each group has a version without each of its devices, for pricing that device as unmeasured.

    Args:
        rows: Rows priced uncalibrated, with ``format`` and ``format_family``, by each of which groups are named.
    """
    others = others or OtherDevices()
    borrowed = {
        name: load_record(kind, load_device(name).with_pricing(uncalibrated=True)) for name in rows.device.unique()
    }
    rows = rows.assign(
        distance=rows.device.map({name: record.distance for name, record in borrowed.items()}),
        device=rows.device.map({name: record.recipient for name, record in borrowed.items()}),
    )
    parts = {distance: parts_of(rows[rows.distance == distance], ["device"]) for distance in DISTANCES}
    groups: Groups = {}
    for distance in DISTANCES:
        there = rows[rows.distance == distance]
        prior = others.prior.get(distance, {})
        if distance == "distant":  # two generations err independently
            prior = {name: TWO_GENERATIONS * bias_of(rows) for name, rows in parts["generic"].items()}
        # A class without measured devices scatters more than the nearer one: judgment, as TRANSFER_WIDENING.
        scatter_factor = TRANSFER_WIDENING[distance] / TRANSFER_WIDENING["generic"]
        causes = causes_of(distance, {*parts[distance], *others.same.get(distance, {}), *prior})
        known = DistanceClass(
            parts[distance], others.same.get(distance, {}), prior, parts["generic"], scatter_factor, causes
        )
        for left_out in ("", *known.parts):
            groups[_name(distance, "", left_out)] = known.without(left_out).interval()
        formats = sorted(set(there.format) - {""})
        for name in (*formats, *sorted({*there.format_family} - {"", *formats})):
            own = parts_of(there[(there.format == name) | (there.format_family == name)], ["device"])
            for left_out in ("", *own):
                groups[_name(distance, name, left_out)] = known.without(left_out).interval_of(without(own, left_out))
    return groups


class DistanceClass(NamedTuple):
    """Left-out devices at the same distance from their donors.

    Attributes:
        parts: Rows of each.
        biases: Biases of devices of which single rows are known.
        prior: Biases of devices in another kind of operation.
        nearer: Rows of the next nearer class, whose scatter is used if ``parts`` is empty.
        scatter_factor: Factor on that scatter.
        causes: Common cause of the distance of each device.
    """

    parts: Parts
    biases: Mapping[str, float]
    prior: Mapping[str, float]
    nearer: Parts
    scatter_factor: float
    causes: Mapping[str, str]

    def without(self, name: str) -> DistanceClass:
        """Return the class without one device."""
        parts, biases, prior, nearer = (
            without(each, name) for each in (self.parts, self.biases, self.prior, self.nearer)
        )
        return self._replace(parts=parts, biases=biases, prior=prior, nearer=nearer)

    def interval(self) -> Interval | None:
        """Return the interval of all formats; None if nothing is known of such devices."""
        if not (self.parts or self.biases or self.prior) or not (self.parts or self.nearer):
            return None
        known: dict[str, Any] = {
            "biases": self.biases,
            "causes": self.causes,
            "prior": prior_bias_of(self.prior, self.causes),
            "scatter": self.nearer,
            "scatter_factor": self.scatter_factor,
        }
        return widen_interval(left_out_interval(self.parts, **known), left_out_widening(self.parts, **known))

    def interval_of(self, own: Parts) -> Interval | None:
        """Return the interval of one format with these rows; None without rows."""
        if not own:
            return None
        of_parts = {name: bias_of(rows) for name, rows in self.parts.items()}
        known: dict[str, Any] = {
            "causes": self.causes,
            "prior": prior_bias_of({**self.prior, **self.biases, **of_parts}, self.causes),
        }
        return widen_interval(left_out_interval(own, **known), left_out_widening(own, **known))


def causes_of(distance: str, devices: Iterable[str]) -> dict[str, str]:
    """Return the common cause of the distance of each device of a class.

    Chips of another vendor share its matrix units and libraries: five chips of two vendors count as two. Chips of
    another family share an architecture, and a sibling differs by its board only.
    """
    if distance == "architecture":
        return {}
    chips = {name: load_device(name) for name in devices}
    return {name: chip.vendor if distance == "foreign" else chip.architecture for name, chip in chips.items()}


def without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the entries without one."""
    return {other: entry for other, entry in entries.items() if other != name}


def _name(distance: str, entry: str, left_out: str) -> str:
    return "/".join(word for word in (distance, entry, left_out and f"without {left_out}") if word)
