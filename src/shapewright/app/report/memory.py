"""Memory of a job as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.app.report.outputs.memory import changes_as_flags
from shapewright.core.units import format_bytes, format_percent, format_seconds
from shapewright.prediction.capacity import ALLOCATOR_BAND_FRACTION, is_tight
from shapewright.pricing.host import host_link_bytes_per_s

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.hardware import Device
    from shapewright.prediction.capacity import Capacity, FitOption, Offload

REMEDIES_TITLE = "options that fit: same devices first, then by device time per token"
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
# Most stages of a long pipeline are alike: the first ones, the last and the busiest are shown.
_MOST_STAGES = 16


def capacity_words(found: Capacity) -> dict[str, Any]:
    """Texts of the command: verdict, components, largest sizes, and remedies as columns."""
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
    recompute = f", {workload.recompute_text}" if workload.recompute != "none" else ""
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
    if found.fit_options:
        console.print()
        console.print(REMEDIES_TITLE, style="bold")
        print_table(remedy_columns(found), console)
    if found.closest_option is not None:
        console.print(nearest_words(found, found.closest_option), style="bold", soft_wrap=True)
    for line in offload_words(found):
        console.print(line, soft_wrap=True)
    print_notes(found.notes, console)


def nearest_words(found: Capacity, nearest: FitOption) -> str:
    """The option closest to fitting, in one line."""
    return (
        f"nearest: {format_bytes(nearest.needed_bytes)} of {format_bytes(found.device.memory_bytes)} on "
        f"{nearest.num_devices:,} devices with {changes_as_flags(nearest.changes)}"
    )


def offload_words(found: Capacity) -> list[str]:
    """Tensors kept in host memory, one line per kind; empty without offloading."""
    workload, lines = found.workload, []
    if workload.offload_activations and found.offload is not None:
        lines.append(f"saved activations in host memory: {_describe_offload(found.offload, found.device)}")
    if workload.offload_optimizer and found.optimizer_offload is not None:
        lines.append(f"optimizer states in host memory: {_describe_offload(found.optimizer_offload, found.device)}")
    if lines:
        size = found.device.node_size
        shared = f", {format_bytes(size * found.busiest.host_bytes)} with {size} devices per host" if size > 1 else ""
        lines.append(
            f"the host needs {format_bytes(found.busiest.host_bytes)} per device{shared}; the size of its "
            f"memory is not modelled"
        )
    return lines


def _describe_offload(offload: Offload, device: Device) -> str:
    """Bytes, traffic and time of one kind of offloading."""
    words = f"frees {format_bytes(offload.freed_bytes)}, moves {format_bytes(offload.moved_bytes)} per step"
    if offload.transfer_s is None:
        return f"{words} over a host link of unknown rate"
    rate = f"{format_bytes(host_link_bytes_per_s(device))}/s"
    words += f" over the host link of {rate}: {format_seconds(offload.transfer_s)} one way"
    if offload.exposed_s is None or offload.step_time_s is None:
        return words
    if offload.exposed_s <= 0.0:
        return f"{words}, hidden behind the step of {format_seconds(offload.step_time_s)}"
    share = "" if offload.exposed_fraction is None else f" ({format_percent(offload.exposed_fraction)} of the copies)"
    return f"{words}; the step takes {format_seconds(offload.exposed_s)} longer{share}"


def verdict_words(found: Capacity) -> str:
    """Whether the job fits, and the memory left or missing, in one line."""
    needed, capacity = format_bytes(found.busiest.total_bytes), format_bytes(found.device.memory_bytes)
    where = f" on stage {found.busiest.stage}" if len(found.stages) > 1 else ""
    rest = format_bytes(abs(found.headroom_bytes))
    if not found.fits:
        return f"does not fit: needs {needed} of {capacity}{where}, {rest} over capacity"
    band = format_percent(ALLOCATOR_BAND_FRACTION)
    if found.verdict == "tight":
        return (
            f"tight: needs {needed} of {capacity}{where}, {rest} left; allocator and communication buffers may take "
            f"up to {band} on top"
        )
    return f"fits: needs {needed} of {capacity}{where}, {rest} left, up to {band} of it may go to the allocator"


def _print_components(found: Capacity, console: Console) -> None:
    """Print a bar per component of the busiest stage, proportional to its share of the device."""
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
    """Bytes of the busiest stage by non-empty component, and their sum."""
    parts = {name: amount for name, amount in found.busiest.components.items() if amount}
    return {**parts, "total": found.busiest.total_bytes}


def _component_rows(found: Capacity, parts: dict[str, float]) -> list[list[str]]:
    return [
        [name.replace("_", " "), format_bytes(amount), format_percent(amount / found.device.memory_bytes)]
        for name, amount in parts.items()
    ]


def stage_columns(found: Capacity) -> list[Column]:
    """Stages, one row each; of a long pipeline only the first ones, the last and the busiest."""
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
    """Options that make the job fit, as the columns of a table."""
    rows = [
        [
            changes_as_flags(remedy.changes),
            str(remedy.num_devices),
            format_bytes(remedy.needed_bytes) + (" (tight)" if is_tight(remedy.needed_bytes, found.device) else ""),
            "" if remedy.step_time_s is None else format_seconds(remedy.step_time_s),
            "" if remedy.slowdown_fraction is None else f"{round(100 * remedy.slowdown_fraction):+d} %",
        ]
        for remedy in found.fit_options
    ]
    headings = (
        Column("change", is_text=True),
        Column("devices"),
        Column("memory", rank=1),
        Column("step", rank=1),
        Column("time per token"),
    )
    return columns_of(rows, headings)


def _or_none(value: int) -> str:
    return f"{value:,}" if value else "none fits"
