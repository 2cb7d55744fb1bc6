"""Who lends to a device that nobody measured: the nearest device of the first group below that has a record.

    alike        its architecture, or one whose kernels it runs, with its multiprocessors; the nearest in size
    same SM      another architecture with its multiprocessors (Device.sm_kind): GA102's are AD102's
    family       its architecture with other multiprocessors: A100's kernels on GA102, if nobody is nearer
    same maker   of a generation that no file knows: the maker's nearest chip in size
    nearest kin  the nearest family of matrix units that was measured (ARCHITECTURE_KIN); of its devices the nearest in
                 balance

Size is memory bandwidth and peak rate: the same multiprocessors behind a memory and a number alike have met the same
limits. Balance is 16-bit FLOPs per byte of memory traffic: a record holds shares of the peak and of the bandwidth, and
which of the two binds a shape is decided by their ratio, so that a lender of like balance was measured where the
device will be. For collectives only devices that are joined alike are asked, if there are any: PCIe is no NVLink. Ties
go by name. The groups are one for all kinds of operation.
What other choices came to: docs/decisions/0013-strangers.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shapewright.hardware import Device

# Whose record an architecture borrows when neither it nor a chip with its multiprocessors (Device.sm_kind) has one,
# nearest first. The order is judgement: same vendor and the nearest generation of matrix unit. Everything ends at
# ampere, the best measured family.
ARCHITECTURE_KIN: Mapping[str, tuple[str, ...]] = {
    "volta": ("turing", "ampere"),
    "turing": ("volta", "ampere"),
    "ampere": ("hopper", "ada"),
    "ada": ("ampere",),
    "hopper": ("ampere",),
    "blackwell": ("hopper", "ampere"),
    "blackwell-ultra": ("blackwell", "hopper", "ampere"),
    "blackwell-consumer": ("ada", "ampere"),
    "cdna2": ("ampere",),
    "cdna3": ("cdna2", "ampere"),
    "cdna4": ("cdna3", "cdna2", "ampere"),
}
GENERIC_KIN = ("ampere",)
# Generations whose SMs run the same kernels: Blackwell Ultra is Blackwell with more rate in 4 bits, more memory and
# less int8; its compute capability 10.3 is of the family 10.0.
SAME_KERNELS: Mapping[str, tuple[str, ...]] = {"blackwell-ultra": ("blackwell",), "blackwell": ("blackwell-ultra",)}
# Formats of which a sheet gives the rate that balance is counted by, first found first.
_WIDE_FORMATS = ("bf16", "fp16")


class Sheet(NamedTuple):
    """What decides whose record a device borrows, and how far it is from it.

    Attributes:
        name: Name of the device.
        vendor: Maker.
        architecture: Family.
        compute_capability: Version of the instruction set; empty if unknown.
        sm_kind: What kernels of a multiprocessor are compiled for (Device.sm_kind).
        bandwidth_bytes_per_s: Memory bandwidth. [byte/s]
        flops_per_s: Largest dense rate of any format. [flop/s]
        wide_flops_per_s: Dense rate in 16 bits; the largest where a sheet has none. [flop/s]
        num_sms: Multiprocessors; None if unknown.
        has_link: Whether more than the host joins the devices of a node.
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
    def of(cls, device: Device) -> Sheet:
        """What a data sheet says of it."""
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

    def is_same_sm(self, other: Sheet) -> bool:
        """Whether two chips have the same multiprocessors: A10 and A100 are both Ampere and do not."""
        versions = {self.compute_capability, other.compute_capability} - {""}
        return self.architecture != other.architecture or len(versions) < 2

    def size_distance(self, other: Sheet) -> float:
        """How far two chips lie apart in size: the sum of |ln| of the ratios of their bandwidths and rates."""
        pairs = ((self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s), (self.flops_per_s, other.flops_per_s))
        return sum(abs(math.log(here / there)) for here, there in pairs)

    def balance_distance(self, other: Sheet) -> float:
        """How far two chips lie apart in balance: |ln| of the ratio of their 16-bit FLOPs per byte of bandwidth."""
        return abs(math.log(self._flops_per_byte / other._flops_per_byte))

    @property
    def _flops_per_byte(self) -> float:
        return self.wide_flops_per_s / self.bandwidth_bytes_per_s


def has_link(device: Device) -> bool:
    """Whether more than the host joins the devices of a node."""
    return device.intra_node_bandwidth_bytes_per_s is not None


class Lent(NamedTuple):
    """Whose record a device borrows.

    Attributes:
        device: Name of the lender.
        transfer: How it is lent (CalibrationRecord.transfer).
        lent_as: By what rule it was chosen, in words.
    """

    device: str
    transfer: str
    lent_as: str


def choose_lender(kind: str, sheet: Sheet, measured: Sequence[Sheet]) -> Lent:
    """Whose record a device borrows, how and why.

    Args:
        kind: Kind of the records.
        sheet: What the device's data sheet says.
        measured: The other devices that have a record of the kind, one at least.
    """
    if kind == "collectives":
        # What joins the devices decides, and not what they compute with.
        measured = [other for other in measured if other.has_link == sheet.has_link] or measured

    def lend(found: Sequence[Sheet], distance: Callable[[Sheet], float], transfer: str, lent_as: str) -> Lent:
        nearest = min(found, key=lambda other: (distance(other), other.name))
        return Lent(nearest.name, transfer, lent_as)

    alike = (sheet.architecture, *SAME_KERNELS.get(sheet.architecture, ()))
    family = [other for other in measured if other.architecture in alike]
    if close := [other for other in family if sheet.is_same_sm(other)]:
        return lend(close, sheet.size_distance, "architecture", "its nearest in bandwidth and rate")
    # Which tiles fit, and what an SM does in a clock, says more than the name of an architecture: GA102's is Ada's.
    if same := [other for other in measured if other.sm_kind == sheet.sm_kind is not None]:
        return lend(same, sheet.size_distance, "generic", "of the same multiprocessors")
    if family:
        return lend(family, sheet.size_distance, "generic", "of its architecture, with other multiprocessors")
    same_maker = [other for other in measured if other.vendor == sheet.vendor]
    if same_maker and sheet.architecture not in ARCHITECTURE_KIN:
        return lend(same_maker, sheet.size_distance, "generic", "its maker's nearest in bandwidth and rate")
    for name in ARCHITECTURE_KIN.get(sheet.architecture, GENERIC_KIN) + GENERIC_KIN:
        if kin := [other for other in measured if other.architecture == name]:
            nearest = "" if len(kin) == 1 else ", of it the nearest in FLOPs per byte"
            return lend(kin, sheet.balance_distance, "generic", f"the nearest family measured{nearest}")
    only = "the only one joined alike" if kind == "collectives" and len(measured) == 1 else ""
    return lend(measured, sheet.balance_distance, "generic", only or "the nearest in FLOPs per byte")
