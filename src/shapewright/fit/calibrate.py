"""Calibrate: from the rows of a store to the content of a calibration file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError, UnknownDeviceError
from shapewright.fit.described import describe_device
from shapewright.fit.logs import tidy
from shapewright.fit.measured_rows import gemm_table, good_rows
from shapewright.fit.own_attention import fit_attention_record
from shapewright.fit.own_gemm import fit_gemm_sections
from shapewright.fit.own_pointwise import fit_pointwise_record
from shapewright.hardware import Device, load_device
from shapewright.perf.calibration_file import FILE_KIND, SCHEMA_VERSION, device_table

if TYPE_CHECKING:
    from shapewright.store.record import Row, Run

Fitted = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class CalibrationResult:
    """What came of a fit.

    Attributes:
        content: Content of the calibration file.
        errors: Held-out errors: kind of operation, format or phase, rows, mean and median error, bias.
        remarks: What the reader must know.
    """

    content: dict[str, Any]
    errors: tuple[dict[str, Any], ...]
    remarks: tuple[str, ...]


def calibrate_rows(
    rows: Sequence[Row],
    runs: Sequence[Run],
    *,
    device: str = "",
    source: str = "",
    command: str = "",
    on_kind: Callable[[str], None] = lambda _kind: None,
) -> CalibrationResult:
    """Fit records to the rows of a store: products, and pointwise operations and attention where it has enough of them.

    Args:
        rows: Rows of a store.
        runs: Its runs; they say what is known of the device.
        device: Name or file of the device; may be left out where the store has one device alone.
        source: Name of the store, for the records.
        command: What was asked for, for the records.
        on_kind: Called with each kind that is begun.

    Raises:
        CalibrationError: there are too few rows, or of several devices.
        DeviceError: the device is not known and cannot be described.
    """
    given = _given_device(device)
    name, used = good_rows(rows, given.name if given is not None else device)
    facts = next((run.device_facts for run in runs if run.device == name and run.device_facts), {})
    described, remarks = (given, []) if given is not None else _device_of(name, used, facts)
    today = datetime.now(UTC).date().isoformat()
    libraries = sorted({row.library for row in used})
    if len(libraries) > 1:
        remarks.append(f"rows of {len(libraries)} libraries are fitted together: {'; '.join(libraries)}")
    errors: list[dict[str, Any]] = []
    records: dict[str, Any] = {}

    def keep(kind: str, fitted: Fitted, split: str) -> None:
        parameters, interval, reports = (tidy(part) for part in fitted)
        body = {
            "kind": kind,
            "devices": [name],
            "architecture": described.architecture,
            "parameters": parameters,
            "interval": interval,
            "provenance": {"source": source, "date": today, "command": command, "split": split, "sections": reports},
        }
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:8]
        records[kind] = {"id": f"own/{kind}/{name}/{today}/{digest}", **body}
        errors.extend(_errors(kind, reports))

    on_kind("gemm")
    sections, intervals, reports, gemm_remarks = fit_gemm_sections(gemm_table(used), described)
    remarks += gemm_remarks
    gemm_parameters = {"dtypes": sections, "libraries": {}}
    keep("gemm", (gemm_parameters, {"dtypes": intervals, "libraries": {}}, reports), "whole (n, k) shapes")
    for kind, fit_kind, split in (
        ("pointwise", fit_pointwise_record, "whole sizes"),
        ("attention", fit_attention_record, "whole head layouts"),
    ):
        on_kind(kind)
        fitted = fit_kind(used, described)
        if fitted is None:
            remarks.append(f"too few {kind} rows to fit: {kind} keeps the package's nearest record")
        else:
            parameters, interval, report = fitted
            remarks += _kernel_remarks(kind, report)
            keep(kind, (parameters, interval, {kind: report} if kind == "pointwise" else report), split)
    content = {
        "schema_version": SCHEMA_VERSION,
        "kind": FILE_KIND,
        "device": tidy(device_table(described)),
        "remarks": remarks,
        "records": records,
    }
    return CalibrationResult(content, tuple(errors), tuple(remarks))


def _given_device(name: str) -> Device | None:
    """A device that was named; None where none was, or one without a device file, such as ``cpu``."""
    if not name:
        return None
    try:
        return load_device(name)
    except UnknownDeviceError:
        return None


def _device_of(name: str, rows: Sequence[Row], facts: Any) -> tuple[Device, list[str]]:
    """The device file of what was measured; a CPU is described by its rows.

    Raises:
        CalibrationError: a GPU without a device file was measured.
    """
    try:
        return load_device(name), []
    except UnknownDeviceError:
        if name != "cpu":
            raise CalibrationError(
                f"no device file is of {name!r}, which the store measured; write one ('shapewright devices template > "
                "my.toml', with that name) and give it with --device my.toml"
            ) from None
    return describe_device(name, rows, facts)


def _kernel_remarks(kind: str, report: dict[str, Any]) -> list[str]:
    """Which kernel a record is of, where several were measured."""
    parts = {part: found for part, found in report.items() if isinstance(found, dict)}
    return [
        f"{kind} {part} is that of {found['kernel']}: {others} rows of other kernels are left aside"
        for part, found in parts.items()
        if (others := found.get("rows_of_other_kernels"))
    ]


def _errors(kind: str, reports: dict[str, Any]) -> list[dict[str, Any]]:
    """Held-out errors of a record's sections, under one set of names."""
    found = []
    for part, report in reports.items():
        held = report.get("held_out") if isinstance(report, dict) else None
        if held:
            found.append(
                {
                    "kind": kind,
                    "part": part,
                    "rows": held["rows"],
                    "mape": held.get("mean_ape", held.get("mean_absolute_error")),
                    "median_ape": held.get("median_ape", held.get("median_absolute_error")),
                    "p90_ape": held.get("p90_ape", held.get("p90_absolute_error")),
                    "bias": held.get("bias", held.get("median_bias")),
                }
            )
    return found
