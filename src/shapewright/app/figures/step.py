"""Charts of one predicted step: operations, layers, waterfall of losses, memory, roofline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, floor, log2
from typing import TYPE_CHECKING

import numpy as np

from shapewright.app.figures.chart import BarChart, BarPart, Line, Mark, Points, XYChart, fold_small_parts
from shapewright.app.figures.measured import PricedSample, Sample, price_samples
from shapewright.app.report.outputs.predict import operation_output
from shapewright.core.units import (
    GIB,
    GIGA,
    TERA,
    format_amount,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
)
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective

if TYPE_CHECKING:
    from shapewright.app.report.outputs.memory import MemoryOutput
    from shapewright.app.report.outputs.mfu import MfuOutput, WaterfallOutput
    from shapewright.app.report.outputs.predict import OperationOutput
    from shapewright.hardware.device import Device
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.predict import Prediction

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
    parts = fold_small_parts(
        [BarPart(name, [by_pass[each] / _MILLISECOND_S for each in passes]) for name, by_pass in sums.items()]
    )
    return BarChart(
        title="Layers",
        value_label="ms a step, all layers of one device",
        categories=passes,
        parts=[
            replace(part, texts=[format_seconds(value * _MILLISECOND_S) if value else "" for value in part.values])
            for part in parts
        ],
        alt="Time of all layers of one device in one step by operation, one bar for each pass.",
    )


def shown_waterfall_parts(output: MfuOutput) -> list[WaterfallOutput]:
    """Parts of the waterfall that are large enough to draw."""
    return [part for part in output.waterfall if abs(part.time_s) >= _MIN_WATERFALL_FRACTION * output.seconds]


def waterfall_chart(output: MfuOutput) -> BarChart:
    """Waterfall from the model's FLOPs at the data-sheet peak to the measured step, one loss per bar."""
    parts = shown_waterfall_parts(output)
    starts, start = [], 0.0
    for part in parts:
        starts.append(max(start + min(part.time_s, 0.0), 0.0) / _MILLISECOND_S)
        start += part.time_s
    shown = [BarPart("before", starts, color="transparent")]
    for name, sign in (("adds", 1.0), ("takes back", -1.0)):
        times_s = [max(sign * part.time_s, 0.0) for part in parts]
        if any(times_s):
            mark = "-" if sign < 0.0 else ""
            texts = [f"{mark}{format_seconds(time_s)}" if time_s else "" for time_s in times_s]
            shown.append(BarPart(name, [time_s / _MILLISECOND_S for time_s in times_s], texts=texts))
    return BarChart(
        title="From the dense peak to this step",
        value_label="time (ms)",
        categories=[part.name.replace("_", " ") for part in parts],
        parts=shown,
        texts_inside=False,
        alt=f"The model's arithmetic at peak would take {format_seconds(parts[0].time_s)}, the step takes "
        f"{format_seconds(output.seconds)}.",
    )


def component_words(name: str, output: MemoryOutput) -> str:
    """Name of a component in the legend; of a single bar with its value, since narrow parts have no room for theirs."""
    words = name.replace("_", " ")
    first, *others = output.stages
    return words if others else f"{words} {format_bytes(first.components.by_name[name])}"


def memory_chart(output: MemoryOutput) -> BarChart:
    """Memory components of each pipeline stage against the device's capacity."""
    stages = [stage.components.by_name for stage in output.stages]
    names = [name for name in stages[0] if any(stage[name] for stage in stages)]
    return BarChart(
        title="Memory of one device",
        value_label="GiB",
        categories=[f"stage {stage.stage}" for stage in output.stages],
        parts=[
            BarPart(
                component_words(name, output),
                [stage[name] / GIB for stage in stages],
                texts=[format_bytes(stage[name]) for stage in stages],
            )
            for name in names
        ],
        limits=(Mark("x", output.capacity_bytes / GIB, "device"),),
        alt=f"Memory of one device of each stage; the fullest needs {format_bytes(output.total_bytes)} of "
        f"{format_bytes(output.capacity_bytes)}.",
    )


def timeline_chart(timeline_bytes: Sequence[float], backward_start: int) -> XYChart:
    """Chart of the memory of tensors over a traced step.

    Args:
        timeline_bytes: Size of the tensors that exist, at points of the step.
        backward_start: Index of the point at which the backward pass begins; 0 without one.
    """
    marks = [Mark(axis="x", value=float(backward_start), text="backward pass")] if backward_start else []
    return XYChart(
        title="Memory over the step",
        x_label="progress of the step (tensors made and released)",
        y_label="tensors (GB)",
        series=[
            Line(
                name="tensors",
                x=[float(index) for index in range(len(timeline_bytes))],
                y=[value / GIGA for value in timeline_bytes],
            )
        ],
        alt=f"Tensors that exist over the step, {format_bytes(max(timeline_bytes, default=0.0))} at the peak.",
        marks=marks,
        y_from_zero=True,
    )


def _operation_label(entry: PricedOperation) -> str:
    """Label shared by the forward and backward passes of an operation."""
    if isinstance(entry.operation, Collective):
        return "communication"
    return ".".join(entry.operation.module_path[:2])


# Points beyond this number hide each other; every n-th one is drawn instead.
_MAX_SAMPLE_POINTS = 600
# The roofline of a step shows the most expensive operations.
_MAX_STEP_POINTS = 60
_MAX_NAMED_POINTS = 12
_SLOPE_POINTS = 17


def samples_roofline_chart(samples: Sequence[Sample], device: Device, dtype: str) -> XYChart:
    """Draw operations below the roofline of one dtype.

    Args:
        samples: Samples; operations without FLOPs or in another dtype are ignored.
    """
    chosen = [sample for sample in samples if float(sample.operation.flops) > 0.0 and sample.operation.dtype == dtype]
    step = max(1, -(-len(chosen) // _MAX_SAMPLE_POINTS))
    priced = price_samples(chosen[::step], device)
    intensity = [_flops(entry) / float(entry.operation.num_bytes) for entry in priced]
    ridge = device.peak_flops_per_s(dtype) / device.memory_bandwidth_bytes_per_s
    least, most = min([*intensity, ridge]) / 2.0, max([*intensity, ridge]) * 2.0
    roof_x = sorted({*np.geomspace(least, most, 40).tolist(), ridge})
    peak = device.peak_flops_per_s(dtype) / TERA
    roof_y = [min(peak, value * device.memory_bandwidth_bytes_per_s / TERA) for value in roof_x]
    series: list[Line | Points] = [Line(f"roofline, {dtype}", roof_x, roof_y, color="#7f7f7f")]
    labels = [_label(entry) for entry in priced]
    predicted = [_flops(entry) / float(entry.price.time_s) / TERA for entry in priced]
    series.append(Points("predicted", intensity, predicted, labels, color="#0072b2"))
    seen = [at for at, entry in enumerate(priced) if entry.sample.measured_s]
    if seen:
        rates = [_flops(priced[at]) / float(priced[at].sample.measured_s or 1.0) / TERA for at in seen]
        names = [labels[at] for at in seen]
        series.append(Points("measured", [intensity[at] for at in seen], rates, names, color="#d55e00"))
    return XYChart(
        title=f"Roofline, {dtype}, {device.title}",
        x_label="FLOP per byte",
        y_label="TFLOP/s",
        series=series,
        alt=f"{len(priced)} operations by arithmetic intensity below the {dtype} roofline of {device.title}",
        x_log=True,
        y_log=True,
    )


def step_roofline_chart(prediction: Prediction) -> XYChart:
    """Draw the most expensive operations of a step that compute, on logarithmic axes, below the peak of their format.

    Where they have several formats, as in fp8, whose attention stays in 16 bits, each has its ceiling, and the names
    of the points say to which they belong.
    """
    ceilings = _ceilings(prediction)
    points: dict[str, list[tuple[float, float, str, str]]] = {}
    named: set[str] = set()
    for entry, facts in _step_points(prediction):
        # As in the table of operations: a mask leaves attention less to compute than the whole square.
        intensity, rate = facts.executed_flops / facts.bytes, facts.executed_flops / facts.time_s
        words = (
            f"{facts.name} ({facts.pass_name}): {format_rate(rate)}, {format_amount(intensity)} FLOPs per byte, "
            f"{format_percent(entry.total_time_s / prediction.step_time_s)} of the step"
        )
        # The slowest pass of a module carries its name; the others are near it.
        module = entry.operation.module
        name = module if module not in named and len(named) < _MAX_NAMED_POINTS else ""
        named.add(module)
        kind = facts.kind.replace("_", " ") + (f", {facts.dtype}" if len(ceilings) > 1 else "")
        points.setdefault(kind, []).append((intensity, rate / TERA, words, name))
    bandwidth = prediction.device.memory_bandwidth_bytes_per_s
    ridges = [peak / bandwidth for peak in ceilings.values()]
    known = [row[0] for rows in points.values() for row in rows] + ridges
    # The range ends at powers of two, which are ticks of the axis.
    low, high = 2.0 ** floor(log2(min(known) / 2.0)), 2.0 ** ceil(log2(max(known)))
    lines = []
    for (dtype, peak), ridge in zip(ceilings.items(), ridges, strict=True):
        # A line of constant bandwidth is curved where the rates span too little for a logarithmic axis.
        slope = np.geomspace(low, ridge, _SLOPE_POINTS).tolist()
        rates = [intensity * bandwidth / TERA for intensity in slope]
        lines.append(Line(_ceiling_name(dtype), [*slope, high], [*rates, peak / TERA]))
    return XYChart(
        title="Roofline",
        x_label="FLOPs per byte",
        y_label="TFLOP/s",
        series=[
            *lines,
            *(
                Points(
                    name,
                    [row[0] for row in rows],
                    [row[1] for row in rows],
                    labels=[row[2] for row in rows],
                    drawn=[row[3] for row in rows],
                )
                for name, rows in points.items()
            ),
        ],
        alt="Operations by arithmetic intensity and achieved rate under the device's peak and memory bandwidth.",
        x_log=True,
        y_log=True,
    )


def _step_points(prediction: Prediction) -> Iterator[tuple[PricedOperation, OperationOutput]]:
    """The most expensive operations of a step that compute."""
    entries = sorted(prediction.operations, key=lambda entry: -entry.total_time_s)
    for entry in entries[:_MAX_STEP_POINTS]:
        facts = operation_output(entry)
        if facts.flops and facts.bytes and facts.time_s and not isinstance(entry.operation, Collective):
            yield entry, facts


def _ceilings(prediction: Prediction) -> dict[str, float]:
    """Peak of each format that the drawn operations of a step compute in [flop/s]."""
    peaks = prediction.device.dense_flops_per_s
    dtypes = [prediction.workload.dtype, *(facts.dtype for _, facts in _step_points(prediction))]
    return {dtype: peaks[dtype] for dtype in dict.fromkeys(dtypes) if dtype in peaks}


def _ceiling_name(dtype: str) -> str:
    return f"{dtype} peak and memory"


def describe_ceilings(prediction: Prediction) -> dict[str, str]:
    """Text of each ceiling and of where its two parts meet, by the name of its line."""
    bandwidth = prediction.device.memory_bandwidth_bytes_per_s
    return {
        _ceiling_name(dtype): f"{format_rate(peak)} in {dtype} above {format_amount(peak / bandwidth)} FLOPs per byte, "
        f"{bandwidth / GIGA:,.0f} GB/s below"
        for dtype, peak in _ceilings(prediction).items()
    }


def _flops(entry: PricedSample) -> float:
    """Executed FLOPs; for attention only those that the mask leaves."""
    operation = entry.operation
    return float(operation.executed_flops if isinstance(operation, Attention) else operation.flops)


def _label(entry: PricedSample) -> str:
    return entry.sample.name or entry.operation.name
