"""Charts of one predicted step: operations, layers, waterfall of losses, and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.chart import BarChart, BarPart, Mark
from shapewright.app.report.step.memory import verdict_words
from shapewright.core.units import GIB, format_percent, format_seconds
from shapewright.lowering.operations import Collective

if TYPE_CHECKING:
    from shapewright.prediction.capacity import Capacity
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.utilization import Utilization, WaterfallPart

LAYER_PASSES = ("forward", "backward", "recompute")
"""Passes over the layers, in execution order."""

_MILLISECOND_S = 1e-3
_MAX_OPERATIONS = 14
_PASS_LABELS = {"forward": "forward", "backward": "backward", "recompute": "recomputed", "step": "once per step"}
# Losses below this share of the step are not drawn.
_MIN_WATERFALL_FRACTION = 0.0005


def operations_chart(prediction: Prediction) -> BarChart:
    """Time of the step by operation, stacked by pass; the most expensive operations only."""
    by_name: dict[str, dict[str, float]] = {}
    for entry in prediction.busiest_operations:
        passes = by_name.setdefault(entry.operation.module, dict.fromkeys(_PASS_LABELS, 0.0))
        passes[entry.operation.pass_name] += entry.total_time_s / _MILLISECOND_S
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1].values()))[:_MAX_OPERATIONS]
    used = [name for name in _PASS_LABELS if any(passes[name] for _, passes in ranked)]
    slowest, times = ranked[0]
    share = sum(times.values()) * _MILLISECOND_S / prediction.step_time_s
    return BarChart(
        title="Where the step's time goes",
        value_label="time in one step (ms)",
        categories=[name for name, _ in ranked],
        parts=[BarPart(_PASS_LABELS[name], [passes[name] for _, passes in ranked]) for name in used],
        alt=f"{slowest} takes most: {format_percent(share)} of the step.",
    )


def layer_chart(prediction: Prediction) -> BarChart:
    """Time of all layers of one device: one bar per pass, stacked by operation."""
    entries = [
        entry for entry in prediction.operations if entry.operation.stage == "every" and entry.total_time_s > 0.0
    ]
    passes = [name for name in LAYER_PASSES if any(entry.operation.pass_name == name for entry in entries)]
    sums: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry.operation.pass_name in passes:
            by_pass = sums.setdefault(_operation_label(entry), dict.fromkeys(passes, 0.0))
            by_pass[entry.operation.pass_name] += entry.total_time_s
    return BarChart(
        title="Layers",
        value_label="ms a step, all layers of one device",
        categories=passes,
        parts=[BarPart(name, [1e3 * by_pass[each] for each in passes]) for name, by_pass in sums.items()],
        alt="Time of all layers of one device in one step by operation, one bar for each pass.",
    )


def shown_waterfall_parts(found: Utilization) -> list[WaterfallPart]:
    """Parts of the waterfall that are large enough to draw."""
    least_s = _MIN_WATERFALL_FRACTION * found.seconds
    return [part for part in found.waterfall if abs(part.time_s) >= least_s]


def waterfall_chart(found: Utilization) -> BarChart:
    """Waterfall from the model's FLOPs at the data-sheet peak to the predicted step, one loss per bar."""
    parts = shown_waterfall_parts(found)
    starts, start = [], 0.0
    for part in parts:
        starts.append(max(start + min(part.time_s, 0.0), 0.0) / _MILLISECOND_S)
        start += part.time_s
    return BarChart(
        title="From the dense peak to this step",
        value_label="time (ms)",
        categories=[part.name.replace("_", " ") for part in parts],
        parts=[
            BarPart("before", starts, color="transparent"),
            BarPart("adds", [max(part.time_s, 0.0) / _MILLISECOND_S for part in parts]),
            BarPart("takes back", [max(-part.time_s, 0.0) / _MILLISECOND_S for part in parts]),
        ],
        alt=f"The model's arithmetic at peak would take {format_seconds(parts[0].time_s)}, the step takes "
        f"{format_seconds(found.seconds)}.",
    )


def memory_chart(capacity: Capacity) -> BarChart:
    """Memory components of each pipeline stage against the device's capacity."""
    stages = [stage.components for stage in capacity.stages]
    names = [name for name in stages[0] if any(stage[name] for stage in stages)]
    return BarChart(
        title="Memory of one device",
        value_label="GiB",
        categories=[f"stage {stage.stage}" for stage in capacity.stages],
        parts=[BarPart(name.replace("_", " "), [stage[name] / GIB for stage in stages]) for name in names],
        limits=(Mark("x", capacity.device.memory_bytes / GIB, "device"),),
        alt=f"The busiest stage {verdict_words(capacity)}.",
    )


def _operation_label(entry: PricedOperation) -> str:
    """Label shared by the forward and backward passes of an operation."""
    if isinstance(entry.operation, Collective):
        return "communication"
    return ".".join(entry.operation.module_path[:2])
