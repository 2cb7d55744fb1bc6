"""Devices and model presets as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.report.columns import Column, columns_of, print_table
from shapewright.app.report.outputs.catalogue import models_output
from shapewright.core.errors import UnknownModelError, close_names
from shapewright.core.units import GIGA, TERA, format_bytes
from shapewright.models.read import list_presets

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.catalogue import DeviceOutput, DevicesOutput
    from shapewright.hardware.device import Device
    from shapewright.models.transformer import TransformerConfig


def _rate_words(device: Device, *dtypes: str) -> str:
    """Dense rate of the first of some formats that a device has, in TFLOP/s."""
    rate = next((device.dense_flops_per_s[dtype] for dtype in dtypes if dtype in device.dense_flops_per_s), 0.0)
    return f"{rate / TERA:,.0f}" if rate else ""


_DEVICE_COLUMNS = (
    Column("name", "{device.name}", is_text=True),
    Column("title", "{device.title}", rank=3, is_text=True),
    Column("architecture", "{device.architecture}", rank=2, is_text=True),
    Column("SMs", lambda row: str(row.device.num_sms or ""), rank=1),
    Column("16-bit TFLOP/s", lambda row: _rate_words(row.device, "bf16", "fp16"), rank=1),
    Column("fp8 TFLOP/s", lambda row: _rate_words(row.device, "fp8"), rank=1),
    Column("memory", "{device.memory_bytes}"),
    Column("TB/s", lambda row: f"{row.device.memory_bandwidth_bytes_per_s / TERA:.2f}", rank=1),
    Column("node", "{device.node_size}", rank=3),
    Column("measured", "{measured}", is_text=True),
)


def _borrowed_words(output: DeviceOutput) -> str:
    """Calibration donors in one line; empty where every kind has its own record."""
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for kind, donor in output.borrowed.items():
        kinds.setdefault((donor.device, donor.words, donor.lent_as), []).append(kind)
    parts = [f"{', '.join(own)} from {name} ({words}: {why})" for (name, words, why), own in kinds.items()]
    if output.pcie_collectives:
        group = output.device.link_group_size
        parts.append(f"collectives of more than {group} in a node, over PCIe, from {output.pcie_collectives}")
    return "; ".join(parts)


def print_devices(output: DevicesOutput, console: Console) -> None:
    """Print all devices, one row each."""
    print_table(columns_of(output.devices, _DEVICE_COLUMNS), console)


def print_device(output: DeviceOutput, console: Console) -> None:
    """Print every number of a device with its source."""
    device = output.device
    console.print(
        f"{device.title} ({device.name}), {device.vendor} {device.architecture}, numbers per {device.scope}",
        style="bold",
        soft_wrap=True,
    )
    print_table(device_number_columns(device), console)
    console.print(f"measured: {output.measured}")
    if borrowed := _borrowed_words(output):
        console.print(
            f"borrowed: {borrowed}; scaled by data-sheet ratios, intervals from leave-one-device-out errors",
            soft_wrap=True,
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
    """Every number of a device, with the name of its link and its compute capability."""
    words = {"intra_node_link": device.intra_node_link, "compute_capability": device.compute_capability}
    return {**device.numbers, **{key: word for key, word in words.items() if word}}


def _in_units(key: str, value: float | str) -> str:
    """Format a number of a device file in its usual unit; the key names the base unit."""
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


def _experts_words(config: TransformerConfig) -> str:
    return f"{config.num_experts}/{config.num_experts_per_token}" if config.num_experts else ""


# Letters as in docs/notation.md.
_MODEL_COLUMNS = (
    Column("name", "{name}", is_text=True),
    Column("title", "{title}", rank=5, is_text=True),
    Column("type", "{config.model_type}", rank=4, is_text=True),
    Column("parameters", "{parameters:count}"),
    Column("L", "{config.num_layers}", rank=1),
    Column("h", "{config.hidden_size}", rank=1),
    Column("a", "{config.num_heads}", rank=1),
    Column("a_kv", "{config.num_kv_heads}", rank=1),
    Column("d", "{config.head_dim}", rank=1),
    Column("f", "{config.intermediate_size}", rank=1),
    Column("v", "{config.vocab_size}", rank=2),
    Column(
        "experts",
        lambda preset: _experts_words(preset.config),
        rank=3,
    ),
    Column("positions", "{config.max_position_embeddings}", rank=6),
)


def select_presets(pattern: str | None) -> list[str]:
    """List preset names that contain a pattern.

    Raises:
        UnknownModelError: no name contains it.
    """
    names = [name for name in list_presets() if pattern is None or pattern.casefold() in name]
    if not names:
        hint = close_names(pattern or "", list_presets()) or "list all with 'shapewright models'"
        raise UnknownModelError(f"no preset has {pattern!r} in its name; {hint}")
    return names


def model_columns(pattern: str | None) -> list[Column]:
    """Presets, one row each, as the columns of a table."""
    return columns_of(models_output(select_presets(pattern)).models, _MODEL_COLUMNS)
