"""Devices as tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError
from shapewright.hardware import list_devices, load_device
from shapewright.perf.calibration import RECORD_KINDS, load_record
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.units import TERA, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shapewright.hardware import Device


def calibration_words(device: Device) -> str:
    """Kinds of operation that were measured on a device."""
    if device.roofline_only or device.num_sms is None:
        return "roofline only"
    measured = [kind for kind in RECORD_KINDS if _is_measured(kind, device)]
    return ", ".join(measured) or "none"


def _is_measured(kind: str, device: Device) -> bool:
    try:
        return load_record(kind, device).transfer == "exact"
    except CalibrationError:
        return False


def devices_table() -> Table:
    """All devices, one row each."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("name", "title", "architecture"):
        table.add_column(name, overflow="fold")
    for name in ("SMs", "16-bit TFLOP/s", "fp8 TFLOP/s", "memory", "TB/s", "node"):
        table.add_column(name, justify="right")
    table.add_column("measured")
    for name in list_devices():
        device = load_device(name)
        rates = device.dense_flops_per_s
        sixteen = rates.get("bf16", rates.get("fp16"))
        table.add_row(
            device.name,
            device.title,
            device.architecture,
            str(device.num_sms or ""),
            f"{sixteen / TERA:,.0f}" if sixteen else "",
            f"{rates['fp8'] / TERA:,.0f}" if "fp8" in rates else "",
            format_bytes(device.memory_bytes),
            f"{device.memory_bandwidth_bytes_per_s / TERA:.2f}",
            str(device.node_size),
            calibration_words(device),
        )
    return table


def device_to_json(device: Device) -> dict[str, Any]:
    """One device as plain values."""
    facts = {key: dict(value) if hasattr(value, "items") else value for key, value in asdict(device).items()}
    return {"schema_version": SCHEMA_VERSION, **facts, "measured": calibration_words(device)}


def devices_to_json() -> dict[str, Any]:
    """All devices."""
    devices = [device_to_json(load_device(name)) for name in list_devices()]
    for facts in devices:
        del facts["schema_version"]
    return {"schema_version": SCHEMA_VERSION, "devices": devices}


def print_device(device: Device, console: Console) -> None:
    """Every number of a device, in base units, with its source."""
    from rich.table import Table

    console.print(
        f"{device.title} ({device.name}), {device.vendor} {device.architecture}, numbers per {device.scope}",
        style="bold",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("number", "value", "kind", "source"):
        table.add_column(name, overflow="fold")
    for key, value in _numbers(device).items():
        origin = device.provenance.get(key, {})
        source = device.sources.get(origin.get("source", ""), {})
        place = ", ".join(part for part in (source.get("title", ""), origin.get("place", "")) if part)
        table.add_row(
            key, f"{value:g}" if isinstance(value, int | float) else str(value), origin.get("kind", ""), place
        )
    console.print(table)
    console.print(f"measured: {calibration_words(device)}")
    if device.aliases:
        console.print("also known as: " + ", ".join(device.aliases), soft_wrap=True)
    if device.notes:
        console.print(f"note: {device.notes}", soft_wrap=True)


def _numbers(device: Device) -> dict[str, Any]:
    """Fields with a value, rates one by one."""
    words = {"name", "title", "vendor", "architecture", "scope", "aliases", "provenance", "sources", "notes"}
    facts = {key: value for key, value in asdict(device).items() if key not in words and value not in (None, "")}
    rates = facts.pop("dense_flops_per_s")
    return {**{f"dense_flops_per_s.{dtype}": rate for dtype, rate in rates.items()}, **facts}
