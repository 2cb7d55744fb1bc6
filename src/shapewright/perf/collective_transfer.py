"""What starting a collective costs on a device whose architecture was never measured: the mean of all families.

Starts follow no line of a data sheet: protocols of two to eight ranks start after 12 us on A100 and on B200, and after
8 us on H100 and H200, whose clock lies between theirs. So another family's device starts as late as the families do in
the mean, each of which counts once, and not as its lender does. Shares of the links carry over as they are: they differ
less. Only devices that are joined alike tell of each other: PCIe is no NVLink.
A bridge joins a pair or four cards. More of them talk over PCIe, as cards without a bridge do, of whose record those
calls take protocols and shares: four L40S reach 0.15 of PCIe's rate, where four A100 reach 0.7 of NVLink's.
How far it helps on devices left out: docs/decisions/0013-strangers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.hardware import load_device
from shapewright.perf.calibration import list_records, load_record
from shapewright.perf.lenders import has_link

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord


def borrowed_start_scale(record: CalibrationRecord, device: Device) -> float:
    """Factor on the starts of a lender's protocols, as the record is used; 1 where a sibling or the device lends.

    Args:
        record: A record of kind ``collectives``, of the package.
        device: The device to price, which may be joined otherwise than the lender: then nobody tells of it.
    """
    if record.transfer != "generic" or has_link(device) != has_link(load_device(record.device)):
        return 1.0
    return _scale(record.device, device.name)


def beyond_bridge(device: Device, record: CalibrationRecord) -> tuple[Device, CalibrationRecord] | None:
    """A bridged card as one without its bridge, and whose record prices that; None where the record is its own.

    Args:
        device: A card whose link joins few of a node.
        record: What prices it where the link reaches.
    """
    if record.transfer == "exact":
        return None
    unbridged = replace(device, intra_node_bandwidth_bytes_per_s=None, link_group_size=None)
    return unbridged, load_record("collectives", unbridged)


@cache
def _scale(lender: str, borrower: str) -> float:
    """Mean of the starts of families that are joined as the lender is, over the lender's, on logarithms."""
    families: dict[str, list[float]] = {}
    own = 0.0
    for record in list_records("collectives"):
        level = _log_start(record.parameters)
        own = level if record.device == lender else own
        is_alike = has_link(load_device(record.device)) == has_link(load_device(lender))
        if is_alike and borrower not in record.devices:
            families.setdefault(record.architecture, []).append(level)
    if not families:
        return 1.0
    return float(np.exp(np.mean([np.mean(levels) for levels in families.values()]) - own))


def _log_start(parameters: Mapping[str, Any]) -> float:
    """Mean logarithm of the earliest protocol's start, over operations and groups that speak of more than a machine."""
    skipped = parameters["groups_of_this_machine_only"]
    starts_s = [
        min(protocol["start_s"] for protocol in protocols)
        for groups in parameters["operations"].values()
        for size, protocols in groups.items()
        if size not in skipped
    ]
    return float(np.mean(np.log(starts_s)))
