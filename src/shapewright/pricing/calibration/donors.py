"""Donor selection: which measured device's record prices an unmeasured device.

The donor is the nearest device of the first group below that has a record:

    same kernels         its architecture, or one that runs the same kernels, with the same SM; nearest in size
    same SM              another architecture with the same SM (Device.sm_kind): GA102's kernels are AD102's
    same architecture    its architecture with another SM: A100's kernels on GA102, where nothing nearer exists
    same vendor          for an architecture without an entry of its own: the vendor's device nearest in size
    nearest architecture the first measured architecture among its donors (hardware.architectures); of its devices the
                         nearest in balance

Distance in size is |ln| of the ratios of memory bandwidth and peak rate, summed: devices with the same SM and similar
rates hit the same limits. Distance in balance is |ln| of the ratio of 16-bit FLOPs per byte of memory traffic: a record
holds fractions of peak and of bandwidth, and the balance decides which of the two limits a shape. For collectives only
devices with the same kind of link are candidates, if there are any. Ties are broken by name.
Alternatives that were measured: docs/decisions/0013.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shapewright.hardware.architectures import LAST_RESORT_DONOR, find_architecture

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.source import Transfer

# 16-bit formats, in order of preference, whose data-sheet rate defines the balance.
_WIDE_FORMATS = ("bf16", "fp16")


class DeviceSpec(NamedTuple):
    """Data-sheet numbers that decide the donor of a device and the transfer distance.

    Attributes:
        name: Name of the device.
        vendor: Vendor.
        architecture: Architecture.
        compute_capability: Version of the instruction set; empty if unknown.
        sm_kind: What kernels of an SM are compiled for (Device.sm_kind).
        bandwidth_bytes_per_s: Memory bandwidth. [byte/s]
        flops_per_s: Largest dense rate of any format. [flop/s]
        wide_flops_per_s: Dense 16-bit rate; the largest rate where the data sheet has none. [flop/s]
        num_sms: Number of SMs; None if unknown.
        has_link: Whether a link other than the host's joins the devices of a node.
    """

    name: str
    vendor: str
    architecture: str
    compute_capability: str
    sm_kind: tuple[str, str, float] | None
    bandwidth_bytes_per_s: float
    flops_per_s: float
    wide_flops_per_s: float
    num_sms: int | None
    has_link: bool

    @classmethod
    def of(cls, device: Device) -> DeviceSpec:
        """Take the numbers from a device."""
        rates = device.dense_flops_per_s
        largest = max(rates.values(), default=1.0)
        return cls(
            name=device.name,
            vendor=device.vendor,
            architecture=device.architecture,
            compute_capability=device.compute_capability,
            sm_kind=device.sm_kind,
            bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
            flops_per_s=largest,
            wide_flops_per_s=next((rates[name] for name in _WIDE_FORMATS if name in rates), largest),
            num_sms=device.num_sms,
            has_link=has_link(device),
        )

    def is_same_sm(self, other: DeviceSpec) -> bool:
        """Whether two devices have the same SM: A10 and A100 are both Ampere and do not."""
        versions = {self.compute_capability, other.compute_capability} - {""}
        return self.architecture != other.architecture or len(versions) < 2

    def size_distance(self, other: DeviceSpec) -> float:
        """Distance in size: the sum of |ln| of the ratios of bandwidth and of peak rate."""
        pairs = ((self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s), (self.flops_per_s, other.flops_per_s))
        return sum(abs(math.log(here / there)) for here, there in pairs)

    def balance_distance(self, other: DeviceSpec) -> float:
        """Distance in balance: |ln| of the ratio of 16-bit FLOPs per byte of memory bandwidth."""
        return abs(math.log(self._flops_per_byte / other._flops_per_byte))

    @property
    def _flops_per_byte(self) -> float:
        return self.wide_flops_per_s / self.bandwidth_bytes_per_s


def has_link(device: Device) -> bool:
    """Whether a link other than the host's joins the devices of a node."""
    return device.intra_node_bandwidth_bytes_per_s is not None


class DonorChoice(NamedTuple):
    """Device whose record is borrowed.

    Attributes:
        device: Name of the donor.
        transfer: Value of CalibrationRecord.transfer.
        donor_reason: Why it was chosen, in words.
    """

    device: str
    transfer: Transfer
    donor_reason: str


def choose_donor(kind: str, spec: DeviceSpec, measured: Sequence[DeviceSpec]) -> DonorChoice:
    """Choose the device whose record prices an unmeasured device.

    Args:
        measured: Candidates: the other devices that have a record of the kind, at least one.
    """
    if kind in ("collectives", "collectives_more"):
        # Links decide the price of a collective, not SMs.
        measured = [other for other in measured if other.has_link == spec.has_link] or measured

    def choose(
        found: Sequence[DeviceSpec], distance: Callable[[DeviceSpec], float], transfer: Transfer, donor_reason: str
    ) -> DonorChoice:
        nearest = min(found, key=lambda other: (distance(other), other.name))
        return DonorChoice(nearest.name, transfer, donor_reason)

    known = find_architecture(spec.architecture)
    alike = (spec.architecture, *known.same_kernels)
    family = [other for other in measured if other.architecture in alike]
    if close := [other for other in family if spec.is_same_sm(other)]:
        return choose(close, spec.size_distance, "architecture", "its nearest in bandwidth and rate")
    # The tiles that fit and the work of an SM per clock matter more than the architecture's name: GA102's SM is Ada's.
    if same := [other for other in measured if other.sm_kind == spec.sm_kind is not None]:
        return choose(same, spec.size_distance, "generic", "with the same SM")
    if family:
        return choose(family, spec.size_distance, "generic", "of its architecture, with another SM")
    same_vendor = [other for other in measured if other.vendor == spec.vendor]
    if same_vendor and not known.donors:
        return choose(same_vendor, spec.size_distance, "generic", "its vendor's nearest in bandwidth and rate")
    for name in (*known.donors, LAST_RESORT_DONOR):
        if devices := [other for other in measured if other.architecture == name]:
            nearest = "" if len(devices) == 1 else ", its nearest in FLOPs per byte"
            return choose(devices, spec.balance_distance, "generic", f"the nearest measured architecture{nearest}")
    only = "the only one with this kind of link" if kind == "collectives" and len(measured) == 1 else ""
    return choose(measured, spec.balance_distance, "generic", only or "the nearest in FLOPs per byte")
