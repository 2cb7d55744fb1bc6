"""Groups of intervals of devices priced without a record of their own, from measured devices left out. Not a script.

How an interval is made of devices' biases and scatter: ``shapewright.fit.left_out``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from interval_groups import Groups, Parts, parts_of

from shapewright.fit.intervals import Interval, widened
from shapewright.fit.left_out import bias_of, left_out_interval, spread_of, usual_bias
from shapewright.hardware import load_device
from shapewright.perf.calibration import TRANSFER_WIDENING, load_record

# How far a lender may be, nearest first.
CLASSES = ("architecture", "generic", "distant", "foreign")
# Errors of two steps, each as large as one.
TWO_STEPS = np.sqrt(2.0)


class OtherDevices(NamedTuple):
    """What is known of devices of which no table has rows of a kind: biases, ln(measured / predicted), by class.

    Attributes:
        same: Of this kind of operation, of devices of which single rows are known; by device.
        usual: Of another kind, which say what biases are usual; by device.
    """

    same: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    usual: Mapping[str, Mapping[str, float]] = MappingProxyType({})


def transfer_groups(kind: str, rows: pd.DataFrame, others: OtherDevices | None = None) -> Groups:
    """Intervals of devices priced without their own record, by how far the lender is and by format.

    Each group has a twin without each device that it is made of, for who prices that one as if nobody had measured it.

    Args:
        kind: Kind of record.
        rows: Rows priced uncalibrated, with the ``format`` of each as groups are named.
        others: What is known of other devices.
    """
    others = others or OtherDevices()
    lent = {name: load_record(kind, load_device(name), uncalibrated=True) for name in rows.device.unique()}
    rows = rows.assign(
        place=rows.device.map({name: record.distance for name, record in lent.items()}),
        device=rows.device.map({name: record.borrower for name, record in lent.items()}),
    )
    parts = {place: parts_of(rows[rows.place == place], ["device"]) for place in CLASSES}
    groups: Groups = {}
    for place in CLASSES:
        there = rows[rows.place == place]
        usual = others.usual.get(place, {})
        if place == "distant":  # two generations err independently
            usual = {name: TWO_STEPS * bias_of(rows) for name, rows in parts["generic"].items()}
        # Where none of a class was measured, it scatters more than the nearer one: judgement, as TRANSFER_WIDENING is.
        farther = TRANSFER_WIDENING[place] / TRANSFER_WIDENING["generic"]
        kin = kin_of(place, {*parts[place], *others.same.get(place, {}), *usual})
        known = ClassOfDevices(parts[place], others.same.get(place, {}), usual, parts["generic"], farther, kin)
        for left_out in ("", *known.parts):
            groups[_name(place, "", left_out)] = known.without(left_out).interval()
        formats = sorted(set(there.format) - {""})
        for name in (*formats, *sorted({entry.split("/")[0] for entry in formats if "/" in entry})):
            own = parts_of(there[(there.format == name) | there.format.str.startswith(f"{name}/")], ["device"])
            for left_out in ("", *own):
                groups[_name(place, name, left_out)] = known.without(left_out).interval_of(without(own, left_out))
    return groups


class ClassOfDevices(NamedTuple):
    """Devices left out that lie equally far from their lenders.

    Attributes:
        parts: Rows of each.
        biases: Of devices of which single rows are known.
        usual: Biases of devices in another kind of operation.
        nearer: Rows of the next nearer class, whose scatter stands in where ``parts`` is empty.
        farther: What that is multiplied by.
        kin: What devices share that the class is strange by.
    """

    parts: Parts
    biases: Mapping[str, float]
    usual: Mapping[str, float]
    nearer: Parts
    farther: float
    kin: Mapping[str, str]

    def without(self, name: str) -> ClassOfDevices:
        """The same but one device."""
        return ClassOfDevices(
            without(self.parts, name),
            without(self.biases, name),
            without(self.usual, name),
            without(self.nearer, name),
            self.farther,
            self.kin,
        )

    def interval(self) -> Interval | None:
        """Of all formats; None where nothing is known of such devices."""
        if not (self.parts or self.biases or self.usual) or not (self.parts or self.nearer):
            return None
        known: dict[str, Any] = {
            "biases": self.biases,
            "kin": self.kin,
            "usual": usual_bias(self.usual, self.kin),
            "scatter": self.nearer,
            "scatter_factor": self.farther,
        }
        return widened(left_out_interval(self.parts, **known), spread_of(self.parts, **known))

    def interval_of(self, own: Parts) -> Interval | None:
        """Of one format, whose rows are given; None where no other device of the class has any."""
        if not own:
            return None
        of_parts = {name: bias_of(rows) for name, rows in self.parts.items()}
        known: dict[str, Any] = {
            "kin": self.kin,
            "usual": usual_bias({**self.usual, **self.biases, **of_parts}, self.kin),
        }
        return widened(left_out_interval(own, **known), spread_of(own, **known))


def kin_of(place: str, devices: Iterable[str]) -> dict[str, str]:
    """What devices of a class share that it is strange by.

    Chips of another maker have its matrix units and its libraries, whichever of them is priced: five chips of two
    makers tell as much of a third maker as two. Another family has an architecture, and a sibling but its own board.
    """
    if place == "architecture":
        return {}
    chips = {name: load_device(name) for name in devices}
    return {name: chip.vendor if place == "foreign" else chip.architecture for name, chip in chips.items()}


def without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The same entries but one."""
    return {other: entry for other, entry in entries.items() if other != name}


def _name(place: str, entry: str, left_out: str) -> str:
    return "/".join(word for word in (place, entry, left_out and f"without {left_out}") if word)
