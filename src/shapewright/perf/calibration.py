"""Calibration records: what measurements taught about a device, kept apart from what its vendor says.

A record is one JSON file, ``data/<kind>/<name>.json``, written by a script in ``scripts/`` and never by hand. Its
parameters are fractions of data-sheet rates and cycles, so that a device nobody measured can borrow them from a
sibling; then the record says so, and the interval widens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.errors import CalibrationError
from shapewright.hardware import load_device

if TYPE_CHECKING:
    from shapewright.hardware import Device

RECORD_KINDS = ("gemm", "moe", "attention", "pointwise", "collectives")

# Whose record an architecture borrows when neither it nor a chip with its multiprocessors (Device.sm_kind) has one,
# nearest first. The order is judgement: same vendor and the nearest generation of matrix unit. Everything ends at
# ampere, the best measured family. Of a device's siblings the record of the nearest bandwidth and rate counts, of
# another family the first by its file's name.
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

# Generations of a maker, whose chips and libraries change together; what is two apart is distant.
GENERATIONS: Mapping[str, int] = {
    "volta": 0,
    "turing": 1,
    "ampere": 2,
    "ada": 3,
    "hopper": 3,
    "blackwell": 4,
    "blackwell-ultra": 4,
    "blackwell-consumer": 4,
    "cdna2": 0,
    "cdna3": 1,
    "cdna4": 2,
}

# Kinds measured on more than one device. Pointwise shares are A100's everywhere, and published steps on Blackwell hold
# them to be no farther off there than on Hopper.
_LEFT_OUT_KINDS = ("gemm", "moe", "attention", "collectives")

UNCALIBRATED = "uncalibrated"
"""How the label of a price begins that no measurement of its device stands behind."""
ROOFLINE_BOUND = f"{UNCALIBRATED} (roofline bound)"
"""Label of a price that no measurement at all stands behind."""

# How much wider the logarithmic interval becomes with distance where no residuals of devices left out say it
# (perf.intervals).
TRANSFER_WIDENING: Mapping[str, float] = {
    "exact": 1.0,
    "architecture": 1.6,
    "generic": 2.5,
    "distant": 3.5,  # two generations err independently: the root of 2 times one
    "foreign": 4.0,
}

# What the device is that a record was measured on, in words; keys as TRANSFER_WIDENING has them.
_DISTANCE_WORDS: Mapping[str, str] = {
    "exact": "itself",
    "architecture": "a sibling",
    "generic": "another family",
    "distant": "a family two generations away",
    "foreign": "another maker's, or joined by other links",
}

SIBLING_FACTOR = 1.5
"""Devices of an architecture whose numbers of SMs or memory bandwidths differ by more have intervals as wide as those
of another family's record: the siblings that were measured, H100 and H200, differ by 1.43 in bandwidth."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """Fitted parameters of one kind of operation on one device.

    Attributes:
        id: Name of the record, with the date of the fit.
        kind: One of RECORD_KINDS.
        device: The device that was measured.
        devices: Canonical device names for which it is exact.
        architecture: Family of the measured device.
        parameters: Fitted numbers; their meaning is in the pricing module of that kind.
        interval: Residual quantiles of held-out rows; their meaning likewise.
        provenance: Source file, rows, split, date, command, errors.
        transfer: ``exact``, ``architecture`` (a sibling's record) or ``generic`` (another family's).
        residual: What the parameters' formulas leave over: ``file`` of tables, and the narrower ``interval`` of prices
            that are corrected by them. None where nothing was learned, or physics alone is asked for.
        borrower: The device that borrows it, by the name it was measured under if it was; empty where it is exact.
        farther: A key of TRANSFER_WIDENING where the priced device is farther from the measured one than ``transfer``
            says: ``generic`` for devices of an architecture that are not alike (see SIBLING_FACTOR), ``distant`` for
            those two generations apart, ``foreign`` for chips of another maker and for collectives over other links.
        older_software: It prices what ran older software than was measured, whose intervals are wider.
        left_out: Kernels whose sections were taken out for this use (perf.expert_kernels), in words.
    """

    id: str
    kind: str
    device: str
    devices: tuple[str, ...]
    architecture: str
    parameters: Mapping[str, Any]
    interval: Mapping[str, Any]
    provenance: Mapping[str, Any]
    transfer: str = "exact"
    residual: Mapping[str, Any] | None = None
    borrower: str = ""
    farther: str = ""
    older_software: bool = False
    left_out: str = ""

    @property
    def distance(self) -> str:
        """How far the priced device is from the measured one: a key of TRANSFER_WIDENING."""
        return self.farther or self.transfer

    @property
    def distance_words(self) -> str:
        """What the measured device is to the priced one, in words."""
        if self.transfer == "architecture" and self.distance == "generic":
            return "a sibling of another size"
        return _DISTANCE_WORDS[self.distance]

    @property
    def interval_widening(self) -> float:
        """Factor on the logarithm of the interval's ends for a borrowed record."""
        return TRANSFER_WIDENING[self.distance]

    @property
    def label(self) -> str:
        """What to show beside a number: the id, or ``uncalibrated`` and whose record was borrowed."""
        name = f"{self.id} without {self.left_out}" if self.left_out else self.id
        return name if self.transfer == "exact" else f"{UNCALIBRATED} (borrows {name})"


def load_record(
    kind: str, device: Device, *, uncalibrated: bool = False, physics_only: bool = False
) -> CalibrationRecord:
    """Find the record of a device, or the nearest sibling's.

    Args:
        kind: One of RECORD_KINDS.
        device: The device to price on.
        uncalibrated: Leave the device's own record aside, as if nobody had measured it.
        physics_only: Leave the learned residual aside, as for a device that is so marked.

    Raises:
        CalibrationError: no record of this kind exists at all.
    """
    physics_only = physics_only or device.physics_only
    own = device.own_records.get(kind)
    if own is not None and not uncalibrated:
        assert isinstance(own, CalibrationRecord)
        return replace(own, residual=None) if physics_only and own.residual else own
    return _find_record(kind, _Sheet.of(device), uncalibrated=uncalibrated, physics_only=physics_only)


@lru_cache(maxsize=1024)
def _find_record(kind: str, sheet: _Sheet, *, uncalibrated: bool, physics_only: bool) -> CalibrationRecord:
    """The record that ships with the package, and what it is to a device that borrows it."""
    record = _choose_record(kind, sheet, uncalibrated=uncalibrated, physics_only=physics_only)
    if record.transfer == "exact":
        return record
    measured = next((each.device for each in list_records(kind) if sheet.name in each.devices), sheet.name)
    lent = replace(record, borrower=measured, farther=_farther(kind, sheet, _Sheet.of(load_device(record.device))))
    return _without_borrower(lent) if uncalibrated else lent


def _without_borrower(record: CalibrationRecord) -> CalibrationRecord:
    """A record without kernels that it holds of the very device that borrows it, such as another maker's softmax."""
    kinds = record.parameters.get("kinds", {})
    kept = {name: entry for name, entry in kinds.items() if entry.get("device") != record.borrower}
    if len(kept) == len(kinds):
        return record
    return replace(record, parameters={**record.parameters, "kinds": kept})


def _farther(kind: str, borrower: _Sheet, lender: _Sheet) -> str:
    """See CalibrationRecord."""
    if borrower.vendor != lender.vendor or (kind == "collectives" and borrower.has_link != lender.has_link):
        return "foreign"
    ages = [GENERATIONS.get(chip.architecture) for chip in (borrower, lender)]
    if kind in _LEFT_OUT_KINDS and ages[0] is not None and ages[1] is not None and abs(ages[0] - ages[1]) > 1:
        return "distant"
    pairs = (
        (borrower.num_sms, lender.num_sms),
        (borrower.bandwidth_bytes_per_s, lender.bandwidth_bytes_per_s),
    )
    are_alike = all(not a or not b or max(a / b, b / a) <= SIBLING_FACTOR for a, b in pairs)
    return "" if are_alike else "generic"


class _Sheet(NamedTuple):
    """What decides whose record a device borrows, and how far it is from it."""

    name: str
    vendor: str
    architecture: str
    compute_capability: str
    sm_kind: tuple[str, str, float] | None
    bandwidth_bytes_per_s: float
    flops_per_s: float
    num_sms: int | None
    has_link: bool

    @classmethod
    def of(cls, device: Device) -> _Sheet:
        return cls(
            name=device.name,
            vendor=device.vendor,
            architecture=device.architecture,
            compute_capability=device.compute_capability,
            sm_kind=device.sm_kind,
            bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
            flops_per_s=max(device.dense_flops_per_s.values(), default=1.0),
            num_sms=device.num_sms,
            has_link=device.intra_node_bandwidth_bytes_per_s is not None,
        )

    def is_same_sm(self, other: _Sheet) -> bool:
        """Whether two chips have the same multiprocessors: A10 and A100 are both Ampere and do not."""
        versions = {self.compute_capability, other.compute_capability} - {""}
        return self.architecture != other.architecture or len(versions) < 2

    def distance(self, other: _Sheet) -> float:
        """How far two chips lie apart: the sum of |ln| of the ratios of their bandwidths and rates."""
        pairs = ((self.bandwidth_bytes_per_s, other.bandwidth_bytes_per_s), (self.flops_per_s, other.flops_per_s))
        return sum(abs(math.log(here / there)) for here, there in pairs)


def _choose_record(kind: str, sheet: _Sheet, *, uncalibrated: bool, physics_only: bool) -> CalibrationRecord:
    if physics_only:
        record = _choose_record(kind, sheet, uncalibrated=uncalibrated, physics_only=False)
        return replace(record, residual=None) if record.residual else record
    records = list_records(kind)
    if not uncalibrated:
        for record in records:
            if sheet.name in record.devices:
                return record
    strangers = [record for record in records if sheet.name not in record.devices]
    if not strangers:
        if not records:
            raise CalibrationError(
                f"no {kind} calibration record to price {sheet.name} with; run scripts/calibrate_{kind}.py"
            )
        # With one record in all there is nobody else to ask: it counts as another family's.
        return replace(records[0], transfer="generic")
    lenders = {record.id: _Sheet.of(load_device(record.device)) for record in strangers}
    if kind == "collectives" and any(lender.has_link == sheet.has_link for lender in lenders.values()):
        # What joins the devices decides, and not what they compute with: PCIe is no NVLink.
        strangers = [record for record in strangers if lenders[record.id].has_link == sheet.has_link]
    alike = (sheet.architecture, *SAME_KERNELS.get(sheet.architecture, ()))
    siblings = [record for record in strangers if record.architecture in alike]
    close = [record for record in siblings if sheet.is_same_sm(lenders[record.id])]
    # Which tiles fit, and what an SM does in a clock, says more than the name of an architecture: GA102's is Ada's.
    kin = [] if close else [record for record in strangers if lenders[record.id].sm_kind == sheet.sm_kind is not None]
    # Of a generation that nobody here knows, the nearest chip of its maker knows most.
    same_maker = [record for record in strangers if lenders[record.id].vendor == sheet.vendor]
    nearest = [] if sheet.architecture in ARCHITECTURE_KIN else same_maker
    for found, transfer in ((close, "architecture"), (kin, "generic"), (siblings, "generic"), (nearest, "generic")):
        if found:
            return replace(min(found, key=lambda record: sheet.distance(lenders[record.id])), transfer=transfer)
    for family in ARCHITECTURE_KIN.get(sheet.architecture, GENERIC_KIN) + GENERIC_KIN:
        for record in strangers:
            if record.architecture == family:
                return replace(record, transfer="generic")
    return replace(strangers[0], transfer="generic")


@cache
def list_records(kind: str) -> tuple[CalibrationRecord, ...]:
    """All records of a kind that ship with the package, in the order of their file names."""
    if kind not in RECORD_KINDS:
        raise CalibrationError(f"unknown kind of calibration record {kind!r}; choose one of {', '.join(RECORD_KINDS)}")
    folder = resources.files("shapewright.perf") / "data" / kind
    if not folder.is_dir():
        return ()
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(_parse_record(kind, entry.name, entry.read_text(encoding="utf-8")) for entry in files)


def _parse_record(kind: str, file_name: str, text: str) -> CalibrationRecord:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise CalibrationError(f"calibration record {kind}/{file_name} is malformed: {error!r}") from error
    return parse_record(kind, f"{kind}/{file_name}", raw)


def parse_record(kind: str, where: str, raw: Mapping[str, Any]) -> CalibrationRecord:
    """Build a record from the content of its file.

    Raises:
        CalibrationError: something is missing or of another form.
    """
    try:
        return CalibrationRecord(
            id=raw["id"],
            kind=kind,
            device=raw["devices"][0],
            devices=tuple(raw["devices"]),
            architecture=raw["architecture"],
            parameters=raw["parameters"],
            interval=raw["interval"],
            provenance=raw["provenance"],
            residual=raw.get("residual"),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CalibrationError(f"calibration record {where} is malformed: {error!r}") from error
