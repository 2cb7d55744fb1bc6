"""A prediction for a person: verdict, operations, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.report.prediction_json import operation_to_json
from shapewright.units import format_bytes, format_count, format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shapewright.predict import Prediction, PricedOperation


def print_prediction(
    prediction: Prediction, console: Console, *, notes: tuple[str, ...] = (), top: int | None = 20
) -> None:
    """Print a whole prediction.

    Args:
        prediction: What to print.
        console: Where to.
        notes: What the reader of the config had to say.
        top: Operations to list, slowest first; None for all.
    """
    console.print(describe(prediction), style="bold", highlight=False)
    console.print(verdict_table(prediction))
    console.print(operations_table(prediction, top=top))
    hidden = 0 if top is None else max(0, len(prediction.operations) - top)
    if hidden:
        console.print(f"{hidden} more operations; --all lists them", style="dim", highlight=False)
    for line in (*notes, *prediction.warnings):
        console.print(f"note: {line}", style="yellow", highlight=False, soft_wrap=True)


def describe(prediction: Prediction) -> str:
    """One line: model, device, workload, layout."""
    config, workload, layout = prediction.config, prediction.workload, prediction.layout
    lengths = f"s={workload.seq_len}" if workload.phase != "decode" else f"context={workload.context_len}"
    degrees = {
        "TP": layout.tensor_parallel,
        "PP": layout.pipeline_parallel,
        "DP": layout.data_parallel,
        "CP": layout.context_parallel,
        "EP": layout.expert_parallel,
    }
    spread = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one device"
    name = config.name or config.model_type or "model"
    recompute = f", {workload.recompute} recompute" if workload.recompute != "none" else ""
    size = format_count(prediction.parameters.total)
    return (
        f"{name} ({size} parameters) on {prediction.device.title}: {workload.phase}, "
        f"b={workload.micro_batch_size} {lengths}, {workload.dtype}, {workload.attention} attention{recompute}; "
        f"{spread}"
    )


def verdict_table(prediction: Prediction) -> Table:
    """The answer in one row."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False)
    workload = prediction.workload
    step = {"train": "step", "prefill": "time to first token", "decode": "time per token"}[workload.phase]
    capacity, used = prediction.device.memory_bytes, prediction.memory.total_bytes
    middle, low, high = map(
        format_seconds, (prediction.step_time_s, prediction.step_time_low_s, prediction.step_time_high_s)
    )
    cells = {
        step: f"{middle} ({low} to {high})",
        "tokens/s/device": f"{prediction.tokens_per_s_per_device:,.0f}",
        "model rate": format_rate(prediction.model_flops_per_s),
        "MFU": format_percent(prediction.mfu),
        "HFU": format_percent(prediction.hfu),
        "layer forward": format_seconds(prediction.layer_forward_time_s),
        "memory": f"{format_bytes(used)} of {format_bytes(capacity)}" + ("" if used <= capacity else " (does not fit)"),
    }
    for name in cells:
        table.add_column(name, header_style="dim")
    table.add_row(*cells.values())
    return table


def operations_table(prediction: Prediction, *, top: int | None = None) -> Table:
    """Operations, slowest first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("operation", overflow="fold")
    table.add_column("pass")
    table.add_column("m x n x k")
    for name in (
        "runs",
        "time",
        "share",
        "TFLOP/s",
        "peak",
        "tile",
        "tiles full",
        "waves",
        "waves full",
        "align",
        "bound by",
    ):
        table.add_column(name, justify="right")
    ranked = sorted(prediction.operations, key=lambda entry: -entry.total_time_s)[:top]
    peak = prediction.device.peak_flops_per_s(prediction.workload.dtype)
    for entry in ranked:
        table.add_row(*_row(entry, prediction.step_time_s, peak))
    return table


def _row(entry: PricedOperation, step_s: float, peak: float) -> list[str]:
    facts = operation_to_json(entry)
    rate = facts["flops"] / facts["time_s"] if facts["flops"] and facts["time_s"] else 0.0
    return [
        facts["name"],
        facts["pass"],
        facts["shape"],
        str(facts["repeats"]),
        format_seconds(facts["time_s"]),
        format_percent(entry.total_time_s / step_s) if step_s else "",
        f"{rate / 1e12:.0f}" if rate else "",
        format_percent(rate / peak) if rate else "",
        f"{facts['tile'][0]}x{facts['tile'][1]}" + (f"/{facts['split_k']}" if facts["split_k"] > 1 else "")
        if facts["tile"]
        else "",
        format_percent(facts["tile_efficiency"]) if facts["tile"] else "",
        str(facts["num_waves"]) if facts["tile"] else "",
        format_percent(facts["wave_efficiency"]) if facts["tile"] else "",
        f"{facts['alignment']} B" if facts["alignment"] else "",
        facts["bound_by"],
    ]
