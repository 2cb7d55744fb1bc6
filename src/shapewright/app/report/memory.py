"""Memory of a job as text and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.app.report.predict import finetuning_words
from shapewright.core.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.memory import MemoryOutput, OffloadOutput, RemedyOutput
    from shapewright.app.report.page import Figure

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


def largest_sizes(output: MemoryOutput) -> dict[str, str]:
    """Largest batch and length that fit, as texts by name."""
    longest = "largest context_len" if output.workload.phase == "decode" else "largest seq_len"
    return {
        "largest micro_batch_size": _or_none(output.largest_micro_batch_size),
        longest: _or_none(largest_length(output)),
    }


def largest_length(output: MemoryOutput) -> int:
    """Longest sequence that fits, in decode the longest context; 0 if none does."""
    return output.largest_context_len or output.largest_seq_len or 0


def print_memory_report(output: MemoryOutput, console: Console) -> None:
    """Print verdict, components, stages, largest sizes and remedies."""
    workload = output.workload
    length = f"context={workload.context_len}" if workload.phase == "decode" else f"s={workload.seq_len}"
    recompute = f", {workload.recompute_text}" if workload.recompute != "none" else ""
    console.print(
        f"{output.config.title} on {output.layout.num_devices} x {output.device.title}: {workload.phase}, "
        f"b={workload.micro_batch_size} {length}, {workload.dtype}{recompute}"
        f"{finetuning_words(output.config, workload)}",
        style="bold",
        soft_wrap=True,
    )
    console.print(verdict_words(output), style=_VERDICT_STYLES[output.verdict], soft_wrap=True)
    console.print()
    _print_components(output, console)
    if len(output.stages) > 1:
        console.print()
        print_table(stage_columns(output), console)
    console.print()
    print_facts(largest_sizes(output), console)
    if output.remedies:
        console.print()
        console.print(REMEDIES_TITLE, style="bold")
        print_table(remedy_columns(output), console)
    if output.nearest is not None:
        console.print(_nearest_words(output, output.nearest), style="bold", soft_wrap=True)
    for line in offload_words(output):
        console.print(line, soft_wrap=True)
    print_notes(output.notes, console)


def _nearest_words(output: MemoryOutput, nearest: RemedyOutput) -> str:
    """The option closest to fitting, in one line."""
    return (
        f"nearest: {format_bytes(nearest.total_bytes)} of {format_bytes(output.capacity_bytes)} on "
        f"{nearest.num_devices:,} devices with {nearest.flags}"
    )


def offload_words(output: MemoryOutput) -> list[str]:
    """Tensors kept in host memory, one line per kind; empty without offloading."""
    workload, lines = output.workload, []
    if workload.offload_activations and output.offload is not None:
        lines.append(f"saved activations in host memory: {_describe_offload(output.offload, output)}")
    if workload.offload_optimizer and output.optimizer_offload is not None:
        lines.append(f"optimizer states in host memory: {_describe_offload(output.optimizer_offload, output)}")
    if lines:
        size = output.device.node_size
        shared = f", {format_bytes(size * output.host_bytes)} with {size} devices per host" if size > 1 else ""
        lines.append(
            f"the host needs {format_bytes(output.host_bytes)} per device{shared}; "
            "the size of its memory is not modelled"
        )
    return lines


def _describe_offload(offload: OffloadOutput, output: MemoryOutput) -> str:
    """Bytes, traffic and time of one kind of offloading."""
    words = f"frees {format_bytes(offload.freed_bytes)}, moves {format_bytes(offload.moved_bytes)} per step"
    if offload.transfer_s is None or output.host_link_bytes_per_s is None:
        return f"{words} over a host link of unknown rate"
    rate = f"{format_bytes(output.host_link_bytes_per_s)}/s"
    words += f" over the host link of {rate}: {format_seconds(offload.transfer_s)} one way"
    if offload.exposed_s is None or offload.step_time_s is None:
        return words
    if offload.exposed_s <= 0.0:
        return f"{words}, hidden behind the step of {format_seconds(offload.step_time_s)}"
    share = "" if offload.exposed_fraction is None else f" ({format_percent(offload.exposed_fraction)} of the copies)"
    return f"{words}; the step takes {format_seconds(offload.exposed_s)} longer{share}"


def verdict_words(output: MemoryOutput) -> str:
    """Whether the job fits, and the memory left or missing, in one line."""
    needed, capacity = format_bytes(output.total_bytes), format_bytes(output.capacity_bytes)
    where = f" on stage {output.stage}" if len(output.stages) > 1 else ""
    rest = format_bytes(abs(output.headroom_bytes))
    if not output.fits:
        return f"does not fit: needs {needed} of {capacity}{where}, {rest} over capacity"
    band = format_bytes(output.total_high_bytes - output.total_bytes)
    return (
        f"{output.verdict}: needs {needed} of {capacity}{where}, {rest} left; allocator and communication buffers may "
        f"take up to {band}"
    )


def _print_components(output: MemoryOutput, console: Console) -> None:
    """Print a bar per component of the fullest stage, proportional to its share of the device."""
    from rich.text import Text

    capacity = max(output.capacity_bytes, output.total_bytes)
    headings = (Column("component", is_text=True), Column("memory"), Column("of device"))
    columns = columns_of(component_rows(output), headings)
    lines = ["  ".join(cells) for cells in zip(*(column.lines() for column in columns), strict=True)]
    console.print(lines[0], style="dim", soft_wrap=True)
    room = min(_BAR_CHARACTERS, console.width - len(lines[0]) - 2)
    for line, (name, amount) in zip(lines[1:], _shown_components(output).items(), strict=True):
        text = Text(line)
        if room > 0:
            text.append("  " + "#" * round(room * amount / capacity), style=_STYLES.get(name, "bold"))
        console.print(text, soft_wrap=True)


def _shown_components(output: MemoryOutput) -> dict[str, float]:
    """Bytes of the fullest stage by non-empty component, and their sum."""
    parts = {name: amount for name, amount in output.components.by_name.items() if amount}
    return {**parts, "total": output.total_bytes}


def component_rows(output: MemoryOutput) -> list[list[str]]:
    """Name, bytes and share of the device by component of the fullest stage, and of their sum."""
    return [
        [name.replace("_", " "), format_bytes(amount), format_percent(amount / output.capacity_bytes)]
        for name, amount in _shown_components(output).items()
    ]


def stage_columns(output: MemoryOutput) -> list[Column]:
    """Stages, one row each; of a long pipeline only the first ones, the last and the fullest."""
    stages = output.stages
    if len(stages) > _MOST_STAGES:
        shown = {*range(_MOST_STAGES - 2), output.stage, len(stages) - 1}
        stages = [stage for stage in stages if stage.stage in shown]
    parts = [stage.components.by_name for stage in stages]
    kinds = [name for name in parts[0] if any(each[name] for each in parts)]
    rows = [
        [str(stage.stage), format_bytes(stage.total_bytes), *(format_bytes(each[name]) for name in kinds)]
        for stage, each in zip(stages, parts, strict=True)
    ]
    headings = [Column("stage"), Column("total"), *(Column(name.replace("_", " "), rank=1) for name in kinds)]
    return columns_of(rows, headings)


_REMEDY_COLUMNS = (
    Column("change", "{flags}", is_text=True),
    Column("devices", "{num_devices}"),
    Column("memory", lambda remedy: format_bytes(remedy.total_bytes) + (" (tight)" if remedy.tight else ""), rank=1),
    Column("step", "{step_time_s}", rank=1),
    Column("time per token", lambda remedy: _slowdown_words(remedy.slowdown_fraction)),
)


def remedy_columns(output: MemoryOutput) -> list[Column]:
    """Changes that make the job fit, as the columns of a table."""
    return columns_of(output.remedies, _REMEDY_COLUMNS)


def _slowdown_words(fraction: float | None) -> str:
    return "" if fraction is None else f"{round(100 * fraction):+d} %"


def _or_none(value: int) -> str:
    return f"{value:,}" if value else "none fits"


def memory_page(output: MemoryOutput) -> str:
    """Render the memory of a job as one HTML document."""
    from shapewright.app.report.page import Section, Table, Words, render_page, table_of

    sections: list[Section] = [
        memory_figure(output),
        Table(
            "Components of the fullest stage",
            ("component", "memory", "of device"),
            [tuple(row) for row in component_rows(output)],
            words=("component",),
        ),
    ]
    if len(output.stages) > 1:
        sections.append(table_of("Stages", stage_columns(output)))
    if output.remedies:
        sections.append(table_of(REMEDIES_TITLE[0].upper() + REMEDIES_TITLE[1:], remedy_columns(output)))
    longest = "context_len" if output.workload.phase == "decode" else "seq_len"
    facts = [
        f"largest micro_batch_size: {output.largest_micro_batch_size or 'none fits'}",
        f"largest {longest}: {largest_length(output) or 'none fits'}",
    ]
    sections.append(Words("Limits and notes", [*facts, *offload_words(output), *output.notes]))
    title = f"Memory of {output.config.title} on {output.layout.num_devices} x {output.device.title}"
    return render_page(title, sections)


def memory_figure(output: MemoryOutput) -> Figure:
    """Components of each stage against the device, with the verdict."""
    from shapewright.app.figures.step import memory_chart
    from shapewright.app.report.page import Figure, sentence

    caption = sentence(verdict_words(output))
    return Figure(memory_chart(output), caption, chart_height_px=150 + 24 * len(output.stages))
