"""Answers with figures: each chart of shapewright.app.figures as an ECharts option, with the texts of its tooltips."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
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
    SweepVerdict,
    TilesOutput,
    figure,
)
from shapewright.app.figures.chart import Band, Points
from shapewright.app.figures.devices import throughput_chart
from shapewright.app.figures.field_sweep import (
    MeasuredStep,
    certainty_words,
    describe_point,
    field_sweep_chart,
    pair_with_current,
    point_labels,
)
from shapewright.app.figures.heat_maps import head_grid_map, predict_head_grid
from shapewright.app.figures.plan import pipeline_chart
from shapewright.app.figures.shapes import loss_against_time_chart, speedup_chart
from shapewright.app.figures.step import (
    component_words,
    describe_ceilings,
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
from shapewright.core.units import format_amount, format_bytes, format_percent, format_rate, format_seconds
from shapewright.lowering.operations.gemm import Gemm
from shapewright.prediction.loss.effect import NARROWEST_FREE_HEAD, WIDEST_FREE_HEAD

if TYPE_CHECKING:
    from shapewright.app.explorer.measured import Measurement, Measurements
    from shapewright.app.figures.sweep_values import FieldSweep, SweepPoint
    from shapewright.app.report.outputs.compare import CompareOutput
    from shapewright.app.report.outputs.design import DesignOutput
    from shapewright.app.report.outputs.memory import MemoryOutput
    from shapewright.app.report.outputs.search import SearchOutput
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.prediction.speedup import Speedup

Answer = dict[str, Any]


def design_figure(found: DesignOutput) -> FigureOutput:
    """Loss against time of a design, with size and tokens of each run."""
    chart = loss_against_time_chart(found)
    texts: dict[str, list[str]] = {}
    for series in chart.series:
        assert not isinstance(series, Band)
        labels = series.labels if isinstance(series, Points) else [series.name] * len(series.x)
        texts[series.name] = [
            f"{label}, {format_amount(hours)} hours, {loss:.3f} nats"
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
    ceilings = describe_ceilings(prediction)
    texts = {
        part.name: list(part.labels) if isinstance(part, Points) else [ceilings[part.name]] * len(part.x)
        for part in chart.series
    }
    return figure(chart, texts)


def _waterfall_figure(prediction: Prediction) -> FigureOutput:
    found = mfu_output(explain_prediction(prediction))
    chart, parts = waterfall_chart(found), shown_waterfall_parts(found)
    amounts = [f"{format_seconds(part.time_s)}, {format_percent(part.fraction)}" for part in parts]
    named = list(zip(chart.categories, amounts, parts, strict=True))
    rows = [[name, f"{amount}: {part.why}"] for name, amount, part in named]
    lines = [f"{name}: {amount}" for name, amount, _ in named]
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
            where = f"stage {stage.stage}, " if len(output.stages) > 1 else ""
            line = (
                f"{where}{name.replace('_', ' ')}: {format_bytes(num_bytes)}, "
                f"{format_percent(num_bytes / capacity)} of the device"
            )
            texts.setdefault(component_words(name, output), []).append(line)
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
    """Time or throughput over one field, compared with the current value: alignment, waves, maxima, measured steps."""
    sweep = sweep_field(scenario, field, values=values)
    pairs = pair_with_current(sweep)
    texts = {point.value: describe_point(sweep, point, pairs.get(point.value)) for point in sweep.points}
    steps = {point.value: measured.find_step(point.prediction) for point in sweep.points}
    seen = [
        MeasuredStep(point, step.time_s, step.library)
        for point in sweep.points
        if (step := steps[point.value]) is not None
    ]
    chart = field_sweep_chart(sweep, metric, pairs, seen)
    return FieldSweepOutput(
        field=field,
        fields=list(SWEPT_FIELDS),
        current=sweep.current,
        verdict=judge_current_value(sweep, pairs),
        watched=sweep.wave_gemm,
        wave_ends=list(sweep.wave_ends),
        local_maxima=[
            LocalMaximum(value=value, text=texts[value], gain_text=_describe_gain(sweep, value, pairs.get(value)))
            for value in sweep.local_maxima
        ],
        points=[
            _sweep_point(point, pairs.get(point.value), steps[point.value], texts[point.value])
            for point in sweep.points
        ],
        figure=figure(chart, point_labels(chart, texts)),
    ).to_json()


def _sweep_point(point: SweepPoint, pair: Speedup | None, step: Measurement | None, text: str) -> SweepPointOutput:
    return take(
        SweepPointOutput,
        point.prediction,
        value=point.value,
        speedup=pair and pair.factor,
        speedup_low=pair and pair.low,
        speedup_high=pair and pair.high,
        probability_faster=pair and pair.probability_faster,
        measured_step_time_s=step and step.time_s,
        alignment_bytes=point.alignment_bytes,
        num_waves=point.num_waves,
        text=text,
    )


def _describe_gain(sweep: FieldSweep, value: int, pair: Speedup | None) -> str:
    """Time per token at a local maximum against the current value's, with its certainty."""
    if pair is None:
        return ""
    if value == sweep.current:
        return "current"
    change, chance = 1.0 / pair.factor - 1.0, max(pair.probability_faster, 1.0 - pair.probability_faster)
    return f"{'+' if change >= 0.0 else ''}{format_percent(change)} time{_per(sweep)}, {certainty_words(chance)}"


def _per(sweep: FieldSweep) -> str:
    """What times are compared for: fields of workload and layout change the tokens or the devices of a step too."""
    return "" if SWEPT_FIELDS[sweep.field] == "model" else " per token"


# Fields that belong to the job: another value would be another job.
_GIVEN_FIELDS = ("seq_len", "context_len")
# Another value is proposed for a model that has up to these shares more or fewer parameters; a vocabulary only grows.
_MOST_GROWTH_FRACTION = 0.06
_MOST_SHRINKAGE_FRACTION = 0.001
# Smaller differences of the time are no reason to change a value.
_LEAST_GAIN_FRACTION = 0.002
_LEAST_CERTAINTY = 0.9
# Increase of the step time from one value to the next that is a cliff.
_CLIFF_FRACTION = 0.02


def judge_current_value(sweep: FieldSweep, pairs: Mapping[int, Speedup]) -> SweepVerdict:
    """Judge whether a value near the current one is faster at equal model size.

    Args:
        pairs: Speed-up of each value over the current one.
    """
    name = sweep.field.replace("_", " ")
    current = next((point for point in sweep.points if point.value == sweep.current), None)
    if current is None:
        return SweepVerdict(text=f"{name} {sweep.current:,} cannot run.", value=None)
    here = f"{name} {sweep.current:,}"
    size, room_bytes = current.prediction.parameters.total, float(current.prediction.device.memory_bytes)
    if current.prediction.memory.total_bytes > room_bytes:
        room_bytes = inf
    least = size if sweep.field == "vocab_size" else (1.0 - _MOST_SHRINKAGE_FRACTION) * size
    better = [
        point
        for point in sweep.points
        if least <= point.prediction.parameters.total <= (1.0 + _MOST_GROWTH_FRACTION) * size
        and sweep.field not in _GIVEN_FIELDS
        and (sweep.field != "num_heads" or NARROWEST_FREE_HEAD <= point.prediction.config.head_dim <= WIDEST_FREE_HEAD)
        and point.prediction.memory.total_bytes <= room_bytes
        and pairs[point.value].factor > 1.0 + _LEAST_GAIN_FRACTION
        and pairs[point.value].probability_faster > _LEAST_CERTAINTY
    ]
    if better:
        best = max(better, key=lambda point: pairs[point.value].factor)
        pair = pairs[best.value]
        larger = "is larger and still " if best.prediction.parameters.total > size else ""
        saved, chance = format_percent(1.0 - 1.0 / pair.factor), certainty_words(pair.probability_faster)
        return SweepVerdict(
            text=f"{here} wastes time: {best.value:,} {larger}takes {saved} less time{_per(sweep)} ({chance} certain).",
            value=best.value,
        )
    following = next((point for point in sweep.points if point.value > sweep.current), current)
    factor, growth = 1.0 / pairs[following.value].factor, following.value / sweep.current
    if growth <= 1.0 + _MOST_GROWTH_FRACTION and factor > (1.0 + _CLIFF_FRACTION) * growth:
        chance = certainty_words(1.0 - pairs[following.value].probability_faster)
        return SweepVerdict(
            text=f"{here} is at the edge of a cliff: {following.value:,} takes {factor:.3g} times as long"
            f"{_per(sweep)} ({chance} certain).",
            value=None,
        )
    others = "model as large is faster" if SWEPT_FIELDS[sweep.field] == "model" else "value is faster per token"
    return SweepVerdict(text=f"{here} is a good value: no {others} near it.", value=None)


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
