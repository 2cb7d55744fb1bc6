"""Calibration files: one JSON file with a device description and the records fitted to that device.

``shapewright calibrate`` writes them; ``--calibration FILE`` uses their records instead of those of the package. The
file describes its device, so that a device without a device file, such as a CPU, can be priced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapewright.core.errors import CalibrationError, UnknownDeviceError, short_repr
from shapewright.core.files import read_start
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.hardware.device import PRICING_FIELDS, Device
from shapewright.hardware.device_file import build_device
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.records import RECORD_KINDS, CalibrationRecord, parse_record
from shapewright.pricing.calibration.schema import check_record

SCHEMA_VERSION = 2
FILE_KIND = "shapewright calibration"
# All records of a device together take a few hundred kB; a file far above that is something else.
_LARGEST_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Content of a calibration file.

    Attributes:
        device: The measured device, as the file describes it.
        records: Fitted records by kind.
        path: Path that it was read from.
    """

    device: Device
    records: Mapping[str, CalibrationRecord]
    path: str


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file.

    Raises:
        CalibrationError: the file cannot be read, has another schema version, or is malformed.
    """
    where = f"calibration file {path}"
    try:
        content = read_start(path, _LARGEST_FILE_BYTES + 1)
        raw = json.loads(content.decode("utf-8")) if len(content) <= _LARGEST_FILE_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not JSON"
        raise CalibrationError(f"{where} cannot be read ({reason}); {_HINT}") from error
    if not isinstance(raw, dict) or raw.get("kind") != FILE_KIND:
        raise CalibrationError(f"{where} is not a calibration file; {_HINT}")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        is_older = isinstance(version, int) and version < SCHEMA_VERSION
        way_out = (
            "fit it again from its measurements with 'shapewright calibrate'" if is_older else "upgrade shapewright"
        )
        raise CalibrationError(
            f"{where} has schema version {short_repr(version)}, known here is {SCHEMA_VERSION}; {way_out}"
        )
    described, records = raw.get("device"), raw.get("records")
    if not isinstance(described, dict) or not isinstance(records, dict) or not records:
        raise CalibrationError(f"{where} lacks its device or its records; {_HINT}")
    for kind, record in records.items():
        if kind not in RECORD_KINDS:
            raise CalibrationError(f"{where} has a record of kind {short_repr(kind)}; known are {_KNOWN_KINDS}")
        try:
            check_record(kind, record, where=f"records.{kind}")
            if record.get("residual") is not None:
                raise CalibrationError(f"records.{kind}.residual belongs to records of the package alone")
        except CalibrationError as error:
            raise CalibrationError(f"{where}: {error}; {_HINT}") from None
    device = build_device(described, where=where, complete=False)
    return Calibration(
        device=device,
        records={kind: parse_record(kind, record) for kind, record in records.items()},
        path=str(path),
    )


def calibrated_device(name: str | Device, path: str | Path) -> Device:
    """Return a device with the records of a calibration file.

    Args:
        name: Name, alias or file of the device, or the device itself; without a device file, the description in the
            calibration file is used.

    Raises:
        CalibrationError: the file cannot be used, or belongs to another device.
        UnknownDeviceError: no such device exists, and the calibration is for another name.
    """
    calibration = read_calibration(path)
    measured = calibration.device
    if isinstance(name, Device):
        device = name
    elif name.strip().casefold() == measured.name:
        device = _packaged_device(measured)
    else:
        device = load_device(name)
    if device.name != measured.name:
        raise CalibrationError(
            f"calibration file {path} is of {measured.name}, not of {device.name}",
            advice=with_fields(
                "give {right}, or measure {name}", right=FieldName("device", measured.name), name=device.name
            ),
        )
    return replace(device, own_records=calibration.records)


def _packaged_device(measured: Device) -> Device:
    """Return the device file of that name or, without one, the description in the calibration file."""
    try:
        return load_device(measured.name)
    except UnknownDeviceError:
        return measured


_NOT_IN_DEVICE_FILES = (*PRICING_FIELDS, "provenance", "sources")


def device_table(device: Device) -> dict[str, Any]:
    """Describe a device as the content of a device file, without absent fields."""
    found: dict[str, Any] = {}
    for name in device.__dataclass_fields__:
        value = getattr(device, name)
        if name in _NOT_IN_DEVICE_FILES or value is None or value in ("", (), False):
            continue
        found[name] = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
    return found


_KNOWN_KINDS = ", ".join(RECORD_KINDS)
_HINT = "give a file that 'shapewright calibrate' wrote"
