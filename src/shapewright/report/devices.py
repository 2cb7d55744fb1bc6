"""Devices as tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.errors import CalibrationError
from shapewright.hardware import PRICING_FIELDS, list_devices, load_device
from shapewright.perf.calibration import RECORD_KINDS, load_record
from shapewright.perf.collective_transfer import beyond_bridge
from shapewright.report.columns import Column, columns_of, print_table
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.units import GIGA, TERA, format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.hardware import Device

_COLUMNS = (
    Column("name", is_text=True),
    Column("title", rank=3, is_text=True),
    Column("architecture", rank=2, is_text=True),
    Column("SMs", rank=1),
    Column("16-bit TFLOP/s", rank=1),
    Column("fp8 TFLOP/s", rank=1),
    Column("memory"),
    Column("TB/s", rank=1),
    Column("node", rank=3),
    Column("measured", is_text=True),
)


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


def borrowed_records(device: Device) -> dict[str, dict[str, str]]:
    """Whose record prices each kind of operation that was not measured on a device, and how far that is."""
    if device.roofline_only or device.num_sms is None:
        return {}
    found = {}
    for kind in RECORD_KINDS:
        try:
            record = load_record(kind, device)
        except CalibrationError:
            continue
        if record.transfer != "exact":
            found[kind] = {
                "device": record.device,
                "distance": record.distance,
                "words": record.distance_words,
                "lent_as": record.lent_as,
            }
    return found


def _borrowed_words(device: Device) -> str:
    """The same in a line; empty where everything was measured."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for kind, lender in borrowed_records(device).items():
        kinds.setdefault((lender["device"], lender["words"], lender["lent_as"]), []).append(kind)
    parts = [f"{', '.join(own)} from {name} ({words}: {why})" for (name, words, why), own in kinds.items()]
    unbridged = beyond_bridge(device, load_record("collectives", device)) if device.link_group_size else None
    if parts and unbridged:
        parts.append(
            f"collectives of more than {device.link_group_size} in a node, over PCIe, from {unbridged[1].device}"
        )
    return "; ".join(parts)


def device_columns() -> list[Column]:
    """All devices, one row each, as the columns of a table."""
    return columns_of((_row(load_device(name)) for name in list_devices()), _COLUMNS)


def _row(device: Device) -> list[str]:
    rates = device.dense_flops_per_s
    sixteen = rates.get("bf16", rates.get("fp16"))
    return [
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
    ]


def device_to_json(device: Device) -> dict[str, Any]:
    """One device as plain values."""
    facts = {
        key: dict(value) if hasattr(value, "items") else value
        for key, value in asdict(device).items()
        if key not in PRICING_FIELDS
    }
    return {
        "schema_version": SCHEMA_VERSION,
        **facts,
        "measured": calibration_words(device),
        "borrowed": borrowed_records(device),
    }


def devices_to_json() -> dict[str, Any]:
    """All devices."""
    devices = [device_to_json(load_device(name)) for name in list_devices()]
    for facts in devices:
        del facts["schema_version"]
    return {"schema_version": SCHEMA_VERSION, "devices": devices}


def print_device(device: Device, console: Console) -> None:
    """Every number of a device with its source."""
    console.print(
        f"{device.title} ({device.name}), {device.vendor} {device.architecture}, numbers per {device.scope}",
        style="bold",
        soft_wrap=True,
    )
    print_table(device_number_columns(device), console)
    console.print(f"measured: {calibration_words(device)}")
    if borrowed := _borrowed_words(device):
        console.print(
            f"borrowed: {borrowed}; scaled by the data sheets, intervals from devices left out", soft_wrap=True
        )
    if device.aliases:
        console.print("also known as: " + ", ".join(device.aliases), soft_wrap=True)
    if device.notes:
        console.print(f"note: {device.notes}", soft_wrap=True)


def device_number_columns(device: Device) -> list[Column]:
    """Every number of a device with its source, as the columns of a table."""
    rows = []
    for key, value in _numbers(device).items():
        origin = device.provenance.get(key, {})
        source = device.sources.get(origin.get("source", ""), {})
        place = ", ".join(part for part in (source.get("title", ""), origin.get("place", "")) if part)
        rows.append([key, _in_units(key, value), origin.get("kind", ""), place])
    headings = (
        Column("number", is_text=True),
        Column("value"),
        Column("kind", is_text=True),
        Column("source", is_text=True),
    )
    return columns_of(rows, headings)


def _numbers(device: Device) -> dict[str, Any]:
    """Every number, and the two words that say how numbers are to be read."""
    words = {"intra_node_link": device.intra_node_link, "compute_capability": device.compute_capability}
    return {**device.numbers, **{key: word for key, word in words.items() if word}}


def _in_units(key: str, value: float | str) -> str:
    """A number of a device file in the unit that people say it in; its key holds the base unit."""
    if isinstance(value, str):
        return value
    if "flops_per_s" in key:
        return f"{value / TERA:g} TFLOP/s"
    if key.endswith("_bytes_per_s"):
        return f"{value / GIGA:g} GB/s"
    if key.endswith("_bytes"):
        return f"{value / GIGA:g} GB" if value >= GIGA else format_bytes(value)
    if key.endswith("_hz"):
        return f"{value / GIGA:g} GHz"
    return f"{value:g} W" if key.endswith("_watts") else f"{value:g}"
