"""Answers with figures: each chart of shapewright.app.figures as an ECharts option, with the texts of its tooltips."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.app.explorer.views.outputs import (
    BreakdownOutput,
    FieldSweepOutput,
    FigureOutput,
    FigureProblem,
    HeadGridCell,
    HeadGridOutput,
    LocalMaximum,
    SweepPointOutput,
    TilesOutput,
    figure,
)
from shapewright.app.figures.chart import Band, Points
from shapewright.app.figures.devices import throughput_chart
from shapewright.app.figures.field_sweep import MeasuredStep, describe_point, field_sweep_chart, point_labels
from shapewright.app.figures.heat_maps import head_grid_map, predict_head_grid
from shapewright.app.figures.plan import pipeline_chart
from shapewright.app.figures.shapes import loss_against_time_chart, speedup_chart
from shapewright.app.figures.step import (
    CEILING,
    describe_ceiling,
    layer_chart,
    memory_chart,
    shown_waterfall_parts,
    step_roofline_chart,
    waterfall_chart,
)
from shapewright.app.figures.sweep_values import SWEPT_FIELDS, sweep_field
from shapewright.app.figures.tiles import find_gemm, lay_out_tiles
from shapewright.app.report.outputs.mfu import mfu_output
from shapewright.app.report.outputs.model import take
from shapewright.app.report.outputs.predict import operation_output
from shapewright.app.report.review import explain_prediction
from shapewright.core.errors import ShapewrightError
from shapewright.core.units import format_bytes, format_percent, format_rate, format_seconds
from shapewright.lowering.operations import Gemm

if TYPE_CHECKING:
    from shapewright.app.explorer.measured import Measurements
    from shapewright.app.figures.sweep_values import FieldSweep, SweepPoint
    from shapewright.app.report.outputs.compare import CompareOutput
    from shapewright.app.report.outputs.memory import MemoryOutput
    from shapewright.app.report.outputs.plan import DesignOutput
    from shapewright.app.report.outputs.search import SearchOutput
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

Answer = dict[str, Any]


def design_figure(found: DesignOutput) -> FigureOutput:
    """Loss against time of a design, with size and tokens of each run."""
    chart = loss_against_time_chart(found)
    texts: dict[str, list[str]] = {}
    for series in chart.series:
        assert not isinstance(series, Band)
        labels = series.labels if isinstance(series, Points) else [series.name] * len(series.x)
        texts[series.name] = [
            f"{label}, {hours:,.3g} hours, {loss:.3f} nats"
            for label, hours, loss in zip(labels, series.x, series.y, strict=True)
        ]
    return figure(chart, texts)


def answer_tiles(scenario: Scenario, operation: str, pass_name: str, measured: Measurements) -> Answer:
    """Tiles and waves of one GEMM, as numbers and as text."""
    prediction = scenario.predict()
    entry = find_gemm(prediction, operation, pass_name)
    grid = lay_out_tiles(prediction, entry)
    facts = operation_output(entry)
    split = f", split-k {facts.split_k}" if (facts.split_k or 1) > 1 else ""
    text = {
        "gemm": f"{facts.name} ({facts.pass_name}): {facts.shape}",
        "tile": f"{grid.tile_m} x {grid.tile_n}{split}",
        "tiles": f"{grid.num_tiles:,}",
        "waves": f"{grid.num_waves:,} on {grid.num_slots} SMs",
        "last wave": f"{grid.num_last:,} of {grid.num_slots} SMs busy",
        "tile efficiency": format_percent(grid.tile_efficiency),
        "wave efficiency": format_percent(grid.wave_efficiency),
        "time": format_seconds(facts.time_s),
        "alignment": f"{facts.alignment} B" if facts.alignment else "",
    }
    gemm = entry.operation
    found = measured.find_gemm(gemm, prediction.device.name) if isinstance(gemm, Gemm) else None
    if found is not None:
        text["measured"] = f"{format_seconds(found.time_s)}, {found.library}"
    return TilesOutput(grid=grid, name=facts.name, pass_name=facts.pass_name, text=text).to_json()


def answer_breakdown(scenario: Scenario) -> Answer:
    """Layers, roofline, waterfall and pipeline of a step; a figure that cannot be drawn has a ``problem`` instead."""
    prediction = scenario.predict()
    return BreakdownOutput(
        layer=_draw(_layer_figure, prediction),
        roofline=_draw(_roofline_figure, prediction),
        waterfall=_draw(_waterfall_figure, prediction),
        pipeline=_draw(_pipeline_figure, prediction),
    ).to_json()


def _draw(make: Callable[[Prediction], FigureOutput], prediction: Prediction) -> FigureOutput | FigureProblem:
    try:
        return make(prediction)
    except ShapewrightError as error:
        return FigureProblem(problem=str(error))


def _layer_figure(prediction: Prediction) -> FigureOutput:
    chart = layer_chart(prediction)
    step_ms = 1e3 * prediction.step_time_s
    texts = {
        part.name: [
            f"{part.name}, {pass_name}: {format_seconds(1e-3 * value_ms)}, {format_percent(value_ms / step_ms)} of "
            f"the step"
            for pass_name, value_ms in zip(chart.categories, part.values, strict=True)
        ]
        for part in chart.parts
    }
    return figure(chart, texts)


def _roofline_figure(prediction: Prediction) -> FigureOutput:
    chart = step_roofline_chart(prediction)
    texts = {part.name: list(part.labels) for part in chart.series if isinstance(part, Points)}
    return figure(chart, {**texts, CEILING: [describe_ceiling(prediction)] * 3})


def _waterfall_figure(prediction: Prediction) -> FigureOutput:
    found = mfu_output(explain_prediction(prediction))
    chart, parts = waterfall_chart(found), shown_waterfall_parts(found)
    texts = [f"{format_seconds(part.time_s)}, {format_percent(part.fraction)}: {part.why}" for part in parts]
    rows = [[name, text] for name, text in zip(chart.categories, texts, strict=True)]
    lines = [f"{name}: {text.partition(':')[0]}" for name, text in rows]
    return figure(chart, {"adds": lines, "takes back": lines}, rows=rows)


def _pipeline_figure(prediction: Prediction) -> FigureOutput:
    chart, shown, passes = pipeline_chart(prediction)
    texts: dict[str, list[str]] = {}
    for span in chart.spans:
        texts.setdefault(span.kind, []).append(
            f"{chart.rows[span.row]}, {span.text}, {span.kind}: {format_seconds(span.end - span.start)}"
        )
    bubble_s = prediction.bubble_time_s
    share = format_percent(bubble_s / prediction.step_time_s)
    words = f"bubble {format_seconds(bubble_s)}, {share} of the step; stages with less work idle longer"
    if shown < passes:
        words += f"; the first {shown} of {passes} micro-batches are shown"
    return figure(chart, texts, words=words)


def memory_figure(output: MemoryOutput) -> FigureOutput:
    """Memory of one device of each pipeline stage by component, against the device's capacity."""
    capacity = output.capacity_bytes
    texts: dict[str, list[str]] = {}
    for stage in output.stages:
        for name, num_bytes in stage.components.by_name.items():
            component = name.replace("_", " ")
            where = f"stage {stage.stage}, " if len(output.stages) > 1 else ""
            line = (
                f"{where}{component}: {format_bytes(num_bytes)}, {format_percent(num_bytes / capacity)} of the device"
            )
            texts.setdefault(component, []).append(line)
    return figure(memory_chart(output), texts)


def comparison_figure(output: CompareOutput) -> FigureOutput:
    """Tokens per second of each device that runs the job."""
    chart = throughput_chart(output)
    texts = [
        f"{row.name}: {row.tokens_per_s or 0:,.0f} tokens/s{'' if row.fits else ', does not fit'}"
        for row in output.devices
        if row.runs
    ]
    return figure(chart, {part.name: texts for part in chart.parts})


def speedup_figure(found: SearchOutput) -> FigureOutput:
    """The Pareto front of a search by loss, or parameters, and speed-up."""
    chart = speedup_chart(found)
    return figure(chart, {part.name: part.labels for part in chart.series if isinstance(part, Points)})


def answer_sweep(
    scenario: Scenario, field: str, metric: str, values: list[int] | None, measured: Measurements
) -> Answer:
    """Throughput over one field, with ends of waves, alignment classes, local maxima and measured steps."""
    sweep = sweep_field(scenario, field, values=values)
    texts = {point.value: describe_point(sweep, point) for point in sweep.points}
    steps = {point.value: measured.find_step(point.prediction) for point in sweep.points}
    seen = [
        MeasuredStep(point, step.time_s, step.library)
        for point in sweep.points
        if (step := steps[point.value]) is not None
    ]
    chart = field_sweep_chart(sweep, metric, seen)
    current = next((point for point in sweep.points if point.value == sweep.current), None)
    return FieldSweepOutput(
        field=field,
        fields=list(SWEPT_FIELDS),
        current=sweep.current,
        watched=sweep.wave_gemm,
        wave_ends=list(sweep.wave_ends),
        local_maxima=[
            LocalMaximum(value=value, text=texts[value], gain_text=_describe_gain(sweep, value, current))
            for value in sweep.local_maxima
        ],
        points=[
            take(
                SweepPointOutput,
                point.prediction,
                value=point.value,
                measured_step_time_s=None if (step := steps[point.value]) is None else step.time_s,
                alignment_bytes=point.alignment_bytes,
                num_waves=point.num_waves,
                text=texts[point.value],
            )
            for point in sweep.points
        ],
        figure=figure(chart, point_labels(sweep, chart)),
    ).to_json()


def _describe_gain(sweep: FieldSweep, value: int, current: SweepPoint | None) -> str:
    """Model rate at a local maximum relative to the current value's."""
    point = next(point for point in sweep.points if point.value == value)
    if current is None or not current.prediction.model_flops_per_s:
        return ""
    change = point.prediction.model_flops_per_s / current.prediction.model_flops_per_s - 1.0
    return "current" if value == sweep.current else f"{'+' if change >= 0.0 else ''}{format_percent(change)} rate"


def answer_head_grid(scenario: Scenario) -> Answer:
    """Model rate over numbers of heads and hidden sizes."""
    grid = predict_head_grid(scenario)
    cells: list[HeadGridCell] = []
    for count, row in zip(grid.heads, grid.predictions, strict=True):
        for width, cell in zip(grid.widths, row, strict=True):
            changes, text = None, ""
            if cell is not None:
                names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim")
                changes = {name: getattr(cell.config, name) for name in names}
                text = (
                    f"{count} heads of {cell.config.head_dim}, hidden size {width:,}: "
                    f"{format_rate(cell.model_flops_per_s)}, step {format_seconds(cell.step_time_s)}"
                )
            cells.append(HeadGridCell(num_heads=count, hidden_size=width, text=text, changes=changes))
    chart = head_grid_map(grid)
    texts = {chart.value_label: [cell.text for cell in cells]}
    return HeadGridOutput(cells=cells, figure=figure(chart, texts)).to_json()
