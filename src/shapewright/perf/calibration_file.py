"""A calibration of one's own: one JSON file that describes a device and holds the records fitted to it.

``shapewright calibrate`` writes it; ``--calibration FILE`` puts its records before those of the package. A device
without a device file, such as a CPU, is described in the file itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shapewright.errors import CalibrationError, UnknownDeviceError
from shapewright.hardware import PRICING_FIELDS, Device, device_of, load_device
from shapewright.perf.calibration import RECORD_KINDS, CalibrationRecord, parse_record

SCHEMA_VERSION = 2
FILE_KIND = "shapewright calibration"
# Records of every kind together have a few hundred kB; far above that it is something else.
_LARGEST_FILE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a calibration file holds.

    Attributes:
        device: The device that was measured, as the file describes it.
        records: Fitted records, by kind.
        path: Where it was read from.
    """

    device: Device
    records: Mapping[str, CalibrationRecord]
    path: str


def read_calibration(path: str | Path) -> Calibration:
    """Read a calibration file.

    Raises:
        CalibrationError: it cannot be read, is of a newer version, or is malformed.
    """
    where = f"calibration file {path}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(_LARGEST_FILE_BYTES + 1)
        raw = json.loads(content.decode("utf-8")) if len(content) <= _LARGEST_FILE_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is no JSON"
        raise CalibrationError(f"{where} cannot be read ({reason}); {_HINT}") from error
    if not isinstance(raw, dict) or raw.get("kind") != FILE_KIND:
        raise CalibrationError(f"{where} is no calibration; {_HINT}")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION:
        is_older = isinstance(version, int) and version < SCHEMA_VERSION
        way_out = (
            "fit it again from its measurements with 'shapewright calibrate'" if is_older else "upgrade shapewright"
        )
        raise CalibrationError(f"{where} has schema version {version!r}, known here is {SCHEMA_VERSION}; {way_out}")
    described, records = raw.get("device"), raw.get("records")
    if not isinstance(described, dict) or not isinstance(records, dict) or not records:
        raise CalibrationError(f"{where} lacks its device or its records; {_HINT}")
    for kind in records:
        if kind not in RECORD_KINDS or not isinstance(records[kind], dict):
            raise CalibrationError(f"{where} has a record of kind {kind!r}; known are {', '.join(RECORD_KINDS)}")
    device = device_of(described, where=where, complete=False)
    return Calibration(
        device=device,
        records={kind: parse_record(kind, f"{kind} of {where}", record) for kind, record in records.items()},
        path=str(path),
    )


def calibrated_device(name: str | Device, path: str | Path) -> Device:
    """A device with the records of a calibration file.

    Args:
        name: Name, alias or file of the device, or the device; one without a device file is taken as the calibration
            describes it.
        path: The calibration file.

    Raises:
        CalibrationError: the file cannot be used, or is of another device.
        UnknownDeviceError: there is no such device, and the calibration is not of one of that name.
    """
    calibration = read_calibration(path)
    measured = calibration.device
    if isinstance(name, Device):
        device = name
    elif name.strip().casefold() == measured.name:
        device = _of_the_package(measured)
    else:
        device = load_device(name)
    if device.name != measured.name:
        raise CalibrationError(
            f"calibration file {path} is of {measured.name}, not of {device.name}; give --device {measured.name}, or "
            f"measure {device.name}"
        )
    return replace(device, own_records=calibration.records)


def _of_the_package(measured: Device) -> Device:
    """The device file of that name, or, without one, the file's own description."""
    try:
        return load_device(measured.name)
    except UnknownDeviceError:
        return measured


_NOT_OF_A_SHEET = (*PRICING_FIELDS, "provenance", "sources")


def device_table(device: Device) -> dict[str, Any]:
    """Content of a device file that describes a device: what it gives, and nothing else."""
    found: dict[str, Any] = {}
    for name in device.__dataclass_fields__:
        value = getattr(device, name)
        if name in _NOT_OF_A_SHEET or value is None or value in ("", (), False):
            continue
        found[name] = dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
    return found


_HINT = "give a file that 'shapewright calibrate' wrote"
