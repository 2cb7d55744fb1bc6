"""Calibration records: what measurements taught about a device, kept apart from what its vendor says.

A record is one JSON file, ``data/<kind>/<name>.json``, written by a script in ``scripts/`` and never by hand. Its
parameters are fractions of data-sheet rates and cycles, so that a device nobody measured can borrow them from a
sibling; then the record says so, and the interval widens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError
from shapewright.hardware import load_device
from shapewright.perf.lenders import Sheet, choose_lender

if TYPE_CHECKING:
    from shapewright.hardware import Device

RECORD_KINDS = ("gemm", "moe", "attention", "pointwise", "collectives")

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
        lent_as: Why this one is borrowed, in words (perf.lenders); empty where it is exact.
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
    lent_as: str = ""
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
    return _find_record(kind, Sheet.of(device), uncalibrated=uncalibrated, physics_only=physics_only)


@lru_cache(maxsize=1024)
def _find_record(kind: str, sheet: Sheet, *, uncalibrated: bool, physics_only: bool) -> CalibrationRecord:
    """The record that ships with the package, and what it is to a device that borrows it."""
    record = _choose_record(kind, sheet, uncalibrated=uncalibrated, physics_only=physics_only)
    if record.transfer == "exact":
        return record
    measured = next((each.device for each in list_records(kind) if sheet.name in each.devices), sheet.name)
    lent = replace(record, borrower=measured, farther=_farther(kind, sheet, Sheet.of(load_device(record.device))))
    return _without_borrower(lent) if uncalibrated else lent


def _without_borrower(record: CalibrationRecord) -> CalibrationRecord:
    """A record without kernels that it holds of the very device that borrows it, such as another maker's softmax."""
    kinds = record.parameters.get("kinds", {})
    kept = {name: entry for name, entry in kinds.items() if entry.get("device") != record.borrower}
    if len(kept) == len(kinds):
        return record
    return replace(record, parameters={**record.parameters, "kinds": kept})


def _farther(kind: str, borrower: Sheet, lender: Sheet) -> str:
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


def _choose_record(kind: str, sheet: Sheet, *, uncalibrated: bool, physics_only: bool) -> CalibrationRecord:
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
        return replace(records[0], transfer="generic", lent_as="the only one measured")
    lender, transfer, words = choose_lender(kind, sheet, [Sheet.of(load_device(each.device)) for each in strangers])
    record = next(each for each in strangers if each.device == lender)
    return replace(record, transfer=transfer, lent_as=words)


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
