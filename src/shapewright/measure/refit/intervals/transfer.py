"""Groups of intervals of devices without a record of their own, from left-out measured devices.

``left_out`` describes how an interval follows from the devices' biases and scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from shapewright.hardware import load_device
from shapewright.measure.refit.intervals.left_out import bias_of, left_out_interval, left_out_widening, prior_bias_of
from shapewright.measure.refit.intervals.residual_intervals import Groups, Interval, Parts, parts_of, widen_interval
from shapewright.pricing.calibration.records import TRANSFER_WIDENING, load_record

# Distance classes of donors, nearest first.
DISTANCES = ("architecture", "generic", "distant", "foreign")
# Two independent errors of equal size.
TWO_GENERATIONS = np.sqrt(2.0)


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
