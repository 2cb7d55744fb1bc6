"""Memory of a job: bars for a person, and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.capacity import ALLOCATOR_BAND_FRACTION, is_tight
from shapewright.perf.host import host_link_bytes_per_s
from shapewright.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.report.question_json import device_to_json
from shapewright.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.capacity import Capacity, Offload, Remedy
    from shapewright.hardware import Device

REMEDIES_TITLE = "what makes it fit: on these devices first, cheapest in device time per token first"
_BAR_CHARACTERS = 40
_VERDICT_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}
_STYLES = {
    "weights": "cyan",
    "gradients": "blue",
    "optimizer": "magenta",
    "activations": "yellow",
    "logits": "red",
    "kv_cache": "green",
    "gathered": "cyan",
    "workspace": "white",
    "runtime": "white",
}
# Stages alike are most of a long pipeline: the ends and the busiest are shown.
_MOST_STAGES = 16


def capacity_to_json(found: Capacity) -> dict[str, Any]:
    """Turn the result into plain values; units stand in the keys."""
    return {
        "schema_version": SCHEMA_VERSION,
        "fits": found.fits,
        "verdict": found.verdict,
        "total_bytes": found.busiest.total_bytes,
        "capacity_bytes": found.device.memory_bytes,
        "headroom_bytes": found.headroom_bytes,
        "allocator_band_fraction": ALLOCATOR_BAND_FRACTION,
        "total_high_bytes": found.busiest.total_bytes * (1.0 + ALLOCATOR_BAND_FRACTION),
        "components": {f"{name}_bytes": amount for name, amount in found.busiest.components.items()},
        "stage": found.busiest.stage,
        "stages": [
            {"stage": stage.stage, "total_bytes": stage.total_bytes}
            | {f"{name}_bytes": amount for name, amount in stage.components.items()}
            for stage in found.stages
        ],
        "largest_micro_batch_size": found.largest_micro_batch_size,
        "largest_seq_len": found.largest_seq_len if found.workload.phase != "decode" else None,
        "largest_context_len": found.largest_seq_len if found.workload.phase == "decode" else None,
        "remedies": [_remedy_to_json(remedy, found) for remedy in found.remedies],
        "nearest": None if found.nearest is None else _remedy_to_json(found.nearest, found),
        "host_bytes": found.busiest.host_bytes,
        "offload": _offload_to_json(found.offload, found),
        "optimizer_offload": _offload_to_json(found.optimizer_offload, found),
        "optimizer": found.optimizer or None,
        "software": found.software,
        "config": asdict(found.config),
        "device": device_to_json(found.device),
        "workload": asdict(found.workload),
        "layout": {**asdict(found.layout), "num_devices": found.layout.num_devices},
        "notes": list(found.notes),
    }


def _remedy_to_json(remedy: Remedy, found: Capacity) -> dict[str, Any]:
    return {
        "changes": dict(remedy.changes),
        "flags": _flags(remedy.changes),
        "total_bytes": remedy.needed_bytes,
        "tight": is_tight(remedy.needed_bytes, found.device),
        "num_devices": remedy.num_devices,
        "step_time_s": remedy.step_time_s,
        "slowdown_fraction": remedy.slowdown_fraction,
    }


def capacity_words(found: Capacity) -> dict[str, Any]:
    """What the command prints: verdict, component bars, largest sizes, and remedies as columns."""
    longest = "largest context_len" if found.workload.phase == "decode" else "largest seq_len"
    return {
        "verdict": verdict_words(found),
        "components": _component_rows(found, _shown_components(found)),
        "largest": {
            "largest micro_batch_size": _or_none(found.largest_micro_batch_size),
            longest: _or_none(found.largest_seq_len),
        },
        "remedies": remedy_columns(found),
    }


def print_capacity(found: Capacity, console: Console) -> None:
    """Print verdict, components, stages, largest sizes and remedies."""
    workload, name = found.workload, found.config.title
    length = f"context={workload.context_len}" if workload.phase == "decode" else f"s={workload.seq_len}"
    recompute = f", {workload.recompute_words}" if workload.recompute != "none" else ""
    console.print(
        f"{name} on {found.layout.num_devices} x {found.device.title}: {workload.phase}, "
        f"b={workload.micro_batch_size} {length}, {workload.dtype}{recompute}",
        style="bold",
        soft_wrap=True,
    )
    console.print(verdict_words(found), style=_VERDICT_STYLES[found.verdict], soft_wrap=True)
    console.print()
    _print_components(found, console)
    if len(found.stages) > 1:
        console.print()
        print_table(stage_columns(found), console)
    console.print()
    print_facts(capacity_words(found)["largest"], console)
    if found.remedies:
        console.print()
        console.print(REMEDIES_TITLE, style="bold")
        print_table(remedy_columns(found), console)
    if found.nearest is not None:
        console.print(nearest_words(found, found.nearest), style="bold", soft_wrap=True)
    for line in offload_words(found):
        console.print(line, soft_wrap=True)
    print_notes(found.notes, console)


def nearest_words(found: Capacity, nearest: Remedy) -> str:
    """What comes closest to fitting, and what it needs, in one line."""
    return (
        f"nearest: {format_bytes(nearest.needed_bytes)} of {format_bytes(found.device.memory_bytes)} on "
        f"{nearest.num_devices:,} devices with {_flags(nearest.changes)}"
    )


def offload_words(found: Capacity) -> list[str]:
    """What waits in the host's memory, one line for each kind; none where nothing does."""
    workload, lines = found.workload, []
    if workload.offload_activations and found.offload is not None:
        lines.append(f"saved activations in the host's memory: {_describe_offload(found.offload, found.device)}")
    if workload.offload_optimizer and found.optimizer_offload is not None:
        lines.append(
            f"optimizer states in the host's memory: {_describe_offload(found.optimizer_offload, found.device)}"
        )
    if lines:
        size = found.device.node_size
        shared = f", {format_bytes(size * found.busiest.host_bytes)} of one with {size} devices" if size > 1 else ""
        lines.append(
            f"the host needs {format_bytes(found.busiest.host_bytes)} for each device{shared}; its own size is not "
            f"known here"
        )
    return lines


def _describe_offload(offload: Offload, device: Device) -> str:
    """Bytes, traffic and price of one kind."""
    words = f"frees {format_bytes(offload.freed_bytes)}, moves {format_bytes(offload.moved_bytes)} a step"
    if offload.transfer_s is None:
        return f"{words} over a host link whose rate is not known"
    rate = f"{format_bytes(host_link_bytes_per_s(device))}/s"
    words += f" over the host link of {rate}: {format_seconds(offload.transfer_s)} one way"
    if offload.exposed_s is None or offload.step_time_s is None:
        return words
    if offload.exposed_s <= 0.0:
        return f"{words}, hidden behind the step of {format_seconds(offload.step_time_s)}"
    share = "" if offload.exposed_fraction is None else f" ({format_percent(offload.exposed_fraction)} of the copies)"
    return f"{words}; the step takes {format_seconds(offload.exposed_s)} longer{share}"


def _offload_to_json(offload: Offload | None, found: Capacity) -> dict[str, Any] | None:
    return None if offload is None else asdict(offload) | {"fits": offload.total_bytes <= found.device.memory_bytes}


def verdict_words(found: Capacity) -> str:
    """Whether it fits, and by how much, in one line."""
    needed, capacity = format_bytes(found.busiest.total_bytes), format_bytes(found.device.memory_bytes)
    where = f" on stage {found.busiest.stage}" if len(found.stages) > 1 else ""
    rest = format_bytes(abs(found.headroom_bytes))
    if not found.fits:
        return f"does not fit: needs {needed} of {capacity}{where}, {rest} too much"
    band = format_percent(ALLOCATOR_BAND_FRACTION)
    if found.verdict == "tight":
        return (
            f"tight: needs {needed} of {capacity}{where}, {rest} left; allocator and communication buffers may take "
            f"up to {band} more than that"
        )
    return f"fits: needs {needed} of {capacity}{where}, {rest} left, with up to {band} more for the allocator"


def _print_components(found: Capacity, console: Console) -> None:
    """One bar for each component of the busiest stage, as wide as its share of the device."""
    from rich.text import Text

    capacity = max(found.device.memory_bytes, found.busiest.total_bytes)
    parts = _shown_components(found)
    rows = _component_rows(found, parts)
    headings = (Column("component", is_text=True), Column("memory"), Column("of device"))
    lines = ["  ".join(cells) for cells in zip(*(column.lines() for column in columns_of(rows, headings)), strict=True)]
    console.print(lines[0], style="dim", soft_wrap=True)
    room = min(_BAR_CHARACTERS, console.width - len(lines[0]) - 2)
    for line, (name, amount) in zip(lines[1:], parts.items(), strict=True):
        text = Text(line)
        if room > 0:
            text.append("  " + "#" * round(room * amount / capacity), style=_STYLES.get(name, "bold"))
        console.print(text, soft_wrap=True)


def _shown_components(found: Capacity) -> dict[str, float]:
    """Bytes of the busiest stage by component, those without any left out, and their sum."""
    parts = {name: amount for name, amount in found.busiest.components.items() if amount}
    return {**parts, "total": found.busiest.total_bytes}


def _component_rows(found: Capacity, parts: dict[str, float]) -> list[list[str]]:
    return [
        [name.replace("_", " "), format_bytes(amount), format_percent(amount / found.device.memory_bytes)]
        for name, amount in parts.items()
    ]


def stage_columns(found: Capacity) -> list[Column]:
    """Stages, one row each; of a long pipeline the first ones, the last and the busiest."""
    stages = found.stages
    if len(stages) > _MOST_STAGES:
        shown = {*range(_MOST_STAGES - 2), found.busiest.stage, len(stages) - 1}
        stages = tuple(stage for stage in stages if stage.stage in shown)
    kinds = [name for name in stages[0].components if any(stage.components[name] for stage in stages)]
    rows = [
        [
            str(stage.stage),
            format_bytes(stage.total_bytes),
            *(format_bytes(stage.components[name]) for name in kinds),
        ]
        for stage in stages
    ]
    headings = [Column("stage"), Column("total"), *(Column(name.replace("_", " "), rank=1) for name in kinds)]
    return columns_of(rows, headings)


def remedy_columns(found: Capacity) -> list[Column]:
    """What makes it fit, as the columns of a table."""
    rows = [
        [
            _flags(remedy.changes),
            str(remedy.num_devices),
            format_bytes(remedy.needed_bytes) + (" (tight)" if is_tight(remedy.needed_bytes, found.device) else ""),
            "" if remedy.step_time_s is None else format_seconds(remedy.step_time_s),
            "" if remedy.slowdown_fraction is None else f"{round(100 * remedy.slowdown_fraction):+d} %",
        ]
        for remedy in found.remedies
    ]
    headings = (
        Column("change", is_text=True),
        Column("devices"),
        Column("memory", rank=1),
        Column("step", rank=1),
        Column("time per token"),
    )
    return columns_of(rows, headings)


def _flags(changes: Mapping[str, Any]) -> str:
    """Changes as options of the command line."""
    return " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in changes.items()
    )


def _or_none(value: int) -> str:
    return f"{value:,}" if value else "none fits"
