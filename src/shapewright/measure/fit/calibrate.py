"""Fit a calibration file to the rows of a store.

A device without a data sheet, such as a CPU, is described by its measurements: its rates and bandwidth are the best of
any row. MFU on such a device is therefore a share of its best measured GEMM, and no prediction is faster than those.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import CalibrationError, UnknownDeviceError, short_repr
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.measure.fit.attention_record import fit_attention_record
from shapewright.measure.fit.gemm_record import fit_gemm_sections
from shapewright.measure.fit.pointwise_record import assume_pointwise_record, fit_pointwise_record
from shapewright.measure.fit.shared import describe_form, gemm_table, good_rows, round_numbers
from shapewright.pricing.calibration.file import FILE_KIND, SCHEMA_VERSION, device_table

if TYPE_CHECKING:
    from shapewright.measure.store.record import Row, Run

# Attention records hold cycles fitted with this clock, so its value cancels. [Hz]
NOMINAL_CLOCK_HZ = 1e9
# Vendor of a device that is described by its measurements.
_MEASURED_VENDOR = "measured"
# A row that moves fewer bytes than this may be served by the first-level cache. [byte]
_LEAST_STREAM_BYTES = 2.0**18


def describe_device(name: str, rows: Sequence[Row], facts: Mapping[str, Any]) -> tuple[Device, list[str]]:
    """Describe a device without a data sheet by its measured rows.

    Args:
        name: Name of the device in the rows.
        rows: Valid rows of it.
        facts: Facts that the bench recorded about it: ``num_threads`` or ``num_sms``, ``memory_bytes``, ``l2_bytes``,
            ``processor``.

    Returns:
        The device, and remarks on how it was described.

    Raises:
        CalibrationError: no row is a GEMM, which the rates are taken from.
    """
    rates: dict[str, float] = {}
    for row in rows:
        if row.kind == "gemm" and row.median_s:
            rates[row.dtype] = max(rates.get(row.dtype, 0.0), row.flops / (row.min_s or row.median_s))
    if not rates:
        raise CalibrationError(f"the store has no GEMM measured on {name}, so no rate is known; run 'bench smoke'")
    streams = [row for row in rows if row.num_bytes >= _LEAST_STREAM_BYTES and row.median_s]
    cold = [row for row in streams if row.is_cold]
    bandwidth = max(row.num_bytes / (row.min_s or row.median_s or 1.0) for row in (cold or streams or rows))
    remarks = [
        f"{name} has no data sheet: its rates and bandwidth are the best measured ones, and MFU is relative to those"
    ]
    if not cold:
        remarks.append(
            f"no row's inputs exceeded the cache of {name}: the measured bandwidth is used for memory too, so larger "
            "tensors will be slower than predicted"
        )
    memory_bytes = float(facts.get("memory_bytes") or 0.0)
    if not memory_bytes:
        memory_bytes = float(os.sysconf("SC_PAGE_SIZE")) * float(os.sysconf("SC_PHYS_PAGES"))
        remarks.append(f"the rows do not state the memory of {name}; that of this machine is used")
    device = Device(
        name=name,
        title=str(facts.get("processor") or name),
        vendor=_MEASURED_VENDOR,
        architecture="other",
        dense_flops_per_s=rates,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        # Without rows that exceed the cache, cache and memory cannot be told apart.
        l2_bytes=float(facts["l2_bytes"]) if cold and facts.get("l2_bytes") else None,
        num_sms=int(facts.get("num_threads") or facts.get("num_sms") or 1),
        boost_clock_hz=NOMINAL_CLOCK_HZ,
        notes="Described by measurements: best rate by format, best bandwidth, threads as SMs, a nominal clock.",
    )
    return device, remarks


Fitted = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class CalibrationResult:
    """Result of a fit.

    Attributes:
        content: Content of the calibration file.
        errors: Held-out errors: kind of operation, format or phase, rows, mean and median error, bias.
        remarks: Remarks for the user.
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
    """Fit records to the rows of a store: GEMMs, and pointwise operations and attention where there are enough rows.

    Args:
        runs: Its runs, which hold facts about the device.
        device: Name or file of the device; may be omitted if the store has one device only.
        source: Name of the store, for the provenance.
        on_kind: Called with the name of each kind before it is fitted.

    Raises:
        CalibrationError: there are too few rows, or rows of several devices.
        DeviceError: the device is unknown and cannot be described.
    """
    given = _given_device(device)
    name, used = good_rows(rows, given.name if given is not None else device)
    facts = next((run.device_facts for run in runs if run.device == name and run.device_facts), {})
    described, remarks = (given, []) if given is not None else describe_measured_device(name, used, facts)
    today = datetime.now(UTC).date().isoformat()
    libraries = sorted({row.library for row in used})
    if len(libraries) > 1:
        remarks.append(f"rows of {len(libraries)} libraries are fitted together: {'; '.join(libraries)}")
    errors: list[dict[str, Any]] = []
    records: dict[str, Any] = {}

    def keep(kind: str, fitted: Fitted, split: str) -> None:
        parameters, interval, reports = (round_numbers(part) for part in fitted)
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
        if fitted is None and kind == "pointwise" and described.vendor == _MEASURED_VENDOR:
            # Another device's record is 2 to 3 times off here: its bandwidth and starts are those of a GPU.
            parameters, interval, report = assume_pointwise_record(sections, described)
            keep(kind, (parameters, interval, {kind: report}), report["split"])
            remarks.append(
                "too few pointwise rows to fit: priced by the traffic of the GEMMs, with a wide interval; run "
                "'shapewright bench pointwise'"
            )
        elif fitted is None:
            treatment = "keeps the nearest record of the package"
            if described.vendor == _MEASURED_VENDOR:
                treatment = "is priced as the GEMMs and the softmax in it"
            remarks.append(f"too few {kind} rows to fit: {kind} {treatment}; run 'shapewright bench {kind}'")
        else:
            parameters, interval, report = fitted
            remarks += _kernel_remarks(kind, report)
            keep(kind, (parameters, interval, {kind: report} if kind == "pointwise" else report), split)
    content = {
        "schema_version": SCHEMA_VERSION,
        "kind": FILE_KIND,
        "device": round_numbers(device_table(described)),
        "remarks": remarks,
        "records": records,
    }
    return CalibrationResult(content, tuple(errors), tuple(remarks))


def _given_device(name: str) -> Device | None:
    """Return the named device; None if no name is given or no device file has it, such as ``cpu``."""
    if not name:
        return None
    try:
        return load_device(name)
    except UnknownDeviceError:
        return None


def describe_measured_device(name: str, rows: Sequence[Row], facts: Mapping[str, Any]) -> tuple[Device, list[str]]:
    """Return the device file of the measured device; describe a CPU by its rows.

    Args:
        name: Name of the device in the rows.
        rows: Valid rows of it.
        facts: Facts that the bench recorded about it.

    Raises:
        CalibrationError: a GPU without a device file was measured.
    """
    try:
        return load_device(name), []
    except UnknownDeviceError:
        if name != "cpu":
            raise CalibrationError(
                f"no device file for {short_repr(name)}, the device of the store",
                advice=with_fields(
                    "write one ('shapewright devices template > my.toml', with that name) and give {file}",
                    file=FieldName("device", "my.toml"),
                ),
            ) from None
    return describe_device(name, rows, facts)


def _kernel_remarks(kind: str, report: dict[str, Any]) -> list[str]:
    """List which kernel each record describes if several were measured, and which form if there was a choice."""
    parts = {part: found for part, found in report.items() if isinstance(found, dict)}
    kernels = [
        f"{kind} {part} describes {found['kernel']}: {others} rows of other kernels are not used"
        for part, found in parts.items()
        if (others := found.get("rows_of_other_kernels"))
    ]
    return kernels + [
        f"{kind} {part}: {describe_form(found['form'], found['forms'], 'head layouts')}"
        for part, found in parts.items()
        if "form" in found
    ]


def _errors(kind: str, reports: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the held-out errors of a record's sections under common names."""
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
