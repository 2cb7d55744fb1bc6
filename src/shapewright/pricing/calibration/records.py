"""Calibration records: fitted parameters of one kind of operation on one measured device.

A record is one JSON file, ``data/<kind>/<name>.json``, written by ``python -m shapewright.measure.refit``. Its
parameters are fractions of data-sheet rates, and cycles, so that an unmeasured device can borrow them from a similar
measured one. ``load_record`` finds the record of a device or of its donor; a borrowed record has wider intervals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass, read_only
from shapewright.hardware.architectures import find_architecture
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.donors import DeviceSpec, choose_donor
from shapewright.pricing.calibration.source import CalibrationSource

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.source import Transfer

_DATA = resources.files("shapewright.pricing") / "data"

RECORD_KINDS = ("gemm", "moe", "attention", "pointwise", "collectives")
FP32_GEMM = "gemm-fp32"
"""Kind of the records of GEMMs in fp32, which run on other units, with kernels of their own, than the narrower formats
of kind ``gemm``. GEMM pricing takes it in place of a record of that kind (pricing.gemm.section).
"""
FP32_POINTWISE = "pointwise-fp32"
"""Kind of the records of fp32 elementwise operations, layer norm and softmax, which prices them in place of a record of
kind ``pointwise`` (pricing.pointwise).
"""
FORMAT_RECORD_KINDS = (FP32_GEMM, FP32_POINTWISE)

KERNEL_KINDS = (
    "attention_training",
    "attention_encoder",
    "mla",
    "norms",
    "fused_ops",
    "quantize",
    "linear_attention",
    "sparse_attention",
    "collectives_more",
    "expert_exchange",
)
"""Kinds of records of single kernels (pricing.kernels), which few devices have."""

CORRECTIONS = "corrections"
"""Parameter of collectives records: what their protocols leave over, learned like a residual table."""

# Kinds with held-out devices to judge the transfer by. Pointwise shares are A100's on every device; published steps on
# Blackwell show that they are no further off there than on Hopper.
_HELD_OUT_KINDS = ("gemm", *FORMAT_RECORD_KINDS, "moe", "attention", "collectives")

# Factor on the logarithm of an interval's ends by transfer distance, used where no held-out devices of that class exist
# (calibration.intervals).
TRANSFER_WIDENING: Mapping[str, float] = {
    "exact": 1.0,
    "architecture": 1.6,
    "generic": 2.5,
    "distant": 3.5,  # two generations err independently: the root of 2 times one
    "foreign": 4.0,
}

# Text for each transfer distance; keys as in TRANSFER_WIDENING.
_DISTANCE_WORDS: Mapping[str, str] = {
    "exact": "itself",
    "architecture": "a sibling",
    "generic": "another architecture",
    "distant": "an architecture two generations away",
    "foreign": "another vendor's, or with another kind of link",
}

SIBLING_FACTOR = 1.5
"""Devices of one architecture whose SM counts or memory bandwidths differ by more than this factor get the interval of
another architecture's record. The measured siblings, H100 and H200, differ by 1.43 in bandwidth.
"""


@dataclass(frozen=True, kw_only=True)
class CalibrationRecord:
    """Fitted parameters of one kind of operation on one measured device.

    Attributes:
        id: Name of the record, with the date of the fit.
        kind: One of RECORD_KINDS, FORMAT_RECORD_KINDS or KERNEL_KINDS.
        device: The device that was measured.
        devices: Canonical names of the devices that the record is exact for.
        architecture: Architecture of the measured device.
        parameters: Fitted numbers; the pricing module of the kind defines their meaning.
        interval: Residual quantiles of held-out rows; the pricing module of the kind defines their sections.
        provenance: Source file, rows, split, date, command and errors of the fit.
        transfer: ``exact``, ``architecture`` (a sibling's record) or ``generic`` (another architecture's record).
        residual: Learned correction of the formulas: ``file`` of tables and the ``interval`` of corrected prices. None
            where nothing was learned, or where the device is priced by formulas alone.
        recipient: Device that borrows the record, by the name of its own record if it has one; empty where exact.
        distance_override: Key of TRANSFER_WIDENING where the two devices are further apart than ``transfer`` says:
            ``generic`` for siblings of different size (SIBLING_FACTOR), ``distant`` for architectures two generations
            apart, ``foreign`` for another vendor and for collectives over other links. Empty otherwise.
        donor_reason: Why this record was chosen, in words (calibration.donors); empty where exact.
        older_software: Whether the priced software is older than the measured one, which widens the interval.
        left_out: Kernels whose sections were removed for this use (experts.kernels), in words.
        parameters_without_own_shapes: Parameters fitted without the shapes by which errors are reported, where
            ``parameters`` were fitted with them.
        is_for_new_shapes: Whether it is one of ``without_own_shapes``.
    """

    id: str
    kind: str
    device: str
    devices: tuple[str, ...]
    architecture: str
    parameters: Mapping[str, Any]
    interval: Mapping[str, Any]
    provenance: Mapping[str, Any]
    transfer: Transfer = "exact"
    residual: Mapping[str, Any] | None = None
    recipient: str = ""
    distance_override: str = ""
    donor_reason: str = ""
    older_software: bool = False
    left_out: str = ""
    parameters_without_own_shapes: Mapping[str, Any] | None = None
    is_for_new_shapes: bool = False

    @property
    def distance(self) -> str:
        """Transfer distance between the measured and the priced device: a key of TRANSFER_WIDENING."""
        return self.distance_override or self.transfer

    @property
    def distance_words(self) -> str:
        """Text for the relation of the measured device to the priced one."""
        if self.transfer == "architecture" and self.distance == "generic":
            return "a sibling of another size"
        return _DISTANCE_WORDS[self.distance]

    @property
    def interval_widening(self) -> float:
        """Factor on the logarithm of the interval's ends."""
        return TRANSFER_WIDENING[self.distance]

    @property
    def without_own_shapes(self) -> CalibrationRecord:
        """The record as if the shapes by which its errors are reported had not been measured (docs/decisions/0003).

        For rows of these shapes alone. Records that never saw them, and forests, stay as they are.
        """
        return replace(
            self,
            parameters=self.parameters_without_own_shapes or self.parameters,
            parameters_without_own_shapes=None,
            is_for_new_shapes=True,
        )

    @cached_property
    def source(self) -> CalibrationSource:
        """The record as the source of prices; one object that all its prices share."""
        return CalibrationSource(
            transfer=self.transfer,
            record_id=self.id,
            donor=self.device,
            reason=self.donor_reason,
            left_out=self.left_out,
        )


def load_record(kind: str, device: Device, *, without: tuple[str, ...] = ()) -> CalibrationRecord:
    """Load the record of a device, or the one it borrows from its donor.

    Args:
        kind: One of RECORD_KINDS, FORMAT_RECORD_KINDS or KERNEL_KINDS.
        device: The device to price; ``own_records``, ``uncalibrated`` and ``physics_only`` choose among records.
        without: Measured devices whose records lack the wanted kernel.

    Raises:
        CalibrationError: no record of this kind exists.
    """
    own = device.own_records.get(kind)
    if own is not None and not device.uncalibrated:
        assert isinstance(own, CalibrationRecord)
        return _by_formulas_alone(own) if device.physics_only else own
    spec = DeviceSpec.of(device)
    return _find_record(kind, spec, uncalibrated=device.uncalibrated, physics_only=device.physics_only, without=without)


@lru_cache(maxsize=1024)
def _find_record(
    kind: str, spec: DeviceSpec, *, uncalibrated: bool, physics_only: bool, without: tuple[str, ...] = ()
) -> CalibrationRecord:
    """Find a record of the package and set how it is transferred to the device."""
    record = _choose_record(kind, spec, uncalibrated=uncalibrated, physics_only=physics_only, without=without)
    if record.transfer == "exact":
        return record
    measured = next((each.device for each in list_records(kind) if spec.name in each.devices), spec.name)
    override = _distance_override(kind, spec, DeviceSpec.of(load_device(record.device)))
    borrowed = replace(record, recipient=measured, distance_override=override)
    return _without_recipient(borrowed) if uncalibrated else borrowed


def _without_recipient(record: CalibrationRecord) -> CalibrationRecord:
    """Remove kernels that were measured on the recipient itself, such as another vendor's softmax."""
    kinds = record.parameters.get("kinds", {})
    kept = {name: entry for name, entry in kinds.items() if entry.get("device") != record.recipient}
    if len(kept) == len(kinds):
        return record
    return replace(record, parameters={**record.parameters, "kinds": kept})


def _distance_override(kind: str, recipient: DeviceSpec, donor: DeviceSpec) -> str:
    """Return the value of ``CalibrationRecord.distance_override`` for a recipient and a donor."""
    if recipient.vendor != donor.vendor or (kind == "collectives" and recipient.has_link != donor.has_link):
        return "foreign"
    generations = [find_architecture(chip.architecture).generation for chip in (recipient, donor)]
    if kind in _HELD_OUT_KINDS and _are_distant(*generations):
        return "distant"
    pairs = (
        (recipient.num_sms, donor.num_sms),
        (recipient.bandwidth_bytes_per_s, donor.bandwidth_bytes_per_s),
    )
    are_alike = all(not a or not b or max(a / b, b / a) <= SIBLING_FACTOR for a, b in pairs)
    return "" if are_alike else "generic"


def _are_distant(one: int | None, other: int | None) -> bool:
    """Whether two known generations of a vendor are more than one apart."""
    return one is not None and other is not None and abs(one - other) > 1


def _choose_record(
    kind: str, spec: DeviceSpec, *, uncalibrated: bool, physics_only: bool, without: tuple[str, ...]
) -> CalibrationRecord:
    if physics_only:
        record = _choose_record(kind, spec, uncalibrated=uncalibrated, physics_only=False, without=without)
        return _by_formulas_alone(record)
    if not uncalibrated:
        # One by one, the file of the device's name first: the files of a kind take up to 12 ms to read.
        for file_name in sorted(_file_names(kind), key=lambda name: name != f"{spec.name}.json"):
            record = _read_record(kind, file_name)
            if spec.name in record.devices and record.device not in without:
                return record
    records = tuple(record for record in list_records(kind) if record.device not in without)
    candidates = [record for record in records if spec.name not in record.devices]
    if not candidates:
        if not records:
            raise CalibrationError(
                f"no {kind} calibration record to price {spec.name} with; "
                f"run python -m shapewright.measure.refit {kind}"
            )
        # With a single record there is no choice of donor; it counts as another architecture's.
        return replace(records[0], transfer="generic", donor_reason="the only one measured")
    donor, transfer, words = choose_donor(kind, spec, [DeviceSpec.of(load_device(each.device)) for each in candidates])
    record = next(each for each in candidates if each.device == donor)
    return replace(record, transfer=transfer, donor_reason=words)


def _by_formulas_alone(record: CalibrationRecord) -> CalibrationRecord:
    """Return a record without what was learned beside its formulas."""
    if not record.residual and CORRECTIONS not in record.parameters:
        return record
    kept = {name: value for name, value in record.parameters.items() if name != CORRECTIONS}
    return replace(record, residual=None, parameters=kept)


@cache
def list_records(kind: str) -> tuple[CalibrationRecord, ...]:
    """All records of a kind that ship with the package, in the order of their file names."""
    return tuple(_read_record(kind, name) for name in _file_names(kind))


@cache
def _file_names(kind: str) -> tuple[str, ...]:
    known = (*RECORD_KINDS, *FORMAT_RECORD_KINDS, *KERNEL_KINDS)
    if kind not in known:
        raise CalibrationError(f"unknown kind of calibration record {kind!r}; choose one of {', '.join(known)}")
    folder = _DATA / kind
    return (
        tuple(sorted(each.name for each in folder.iterdir() if each.name.endswith(".json"))) if folder.is_dir() else ()
    )


@cache
def _read_record(kind: str, file_name: str) -> CalibrationRecord:
    return parse_record(kind, json.loads((_DATA / kind / file_name).read_text(encoding="utf-8")))


def parse_record(kind: str, raw: Mapping[str, Any]) -> CalibrationRecord:
    """Build a read-only record from the content of its file; ``check_record`` has checked that of a user."""
    return CalibrationRecord(
        id=raw["id"],
        kind=kind,
        device=raw["devices"][0],
        devices=tuple(raw["devices"]),
        architecture=raw["architecture"],
        parameters=read_only(raw["parameters"]),
        interval=read_only(raw["interval"]),
        provenance=read_only(raw["provenance"]),
        residual=read_only(raw.get("residual")),
        parameters_without_own_shapes=read_only(raw.get("parameters_without_own_shapes")),
    )
