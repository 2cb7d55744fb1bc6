"""Figures of the page: data of shapewright.figures as charts, with the text that belongs to each of their points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from shapewright.errors import ShapewrightError
from shapewright.figures.tiles import find_product, lay_tiles
from shapewright.operations import Collective, Gemm
from shapewright.report.charts import BarChart, BarPart, Chart, Points, XYChart
from shapewright.report.design_review import drawn_parts, memory_chart, waterfall_chart
from shapewright.report.echarts import chart_option
from shapewright.report.gather_review import explain_prediction
from shapewright.report.pipeline_chart import pipeline_chart
from shapewright.report.prediction_json import operation_to_json
from shapewright.report.roofline_chart import CEILING, describe_ceiling, step_roofline_chart
from shapewright.report.search_text import describe_changes
from shapewright.units import GIGA, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.capacity import Capacity
    from shapewright.compare import Comparison
    from shapewright.explorer.measured import Measurements
    from shapewright.predict import Prediction
    from shapewright.question import Question
    from shapewright.search import SearchResult

Answer = dict[str, Any]

# Passes that a layer is drawn in, in the order of work.
_LAYER_PASSES = ("forward", "backward", "recompute")


def figure(chart: Chart, texts: Mapping[str, Sequence[str]] | None = None, **more: Any) -> Answer:
    """A chart as ECharts takes it, the text of its points by series, and what else the page needs to know."""
    return {"title": chart.title, "alt": chart.alt, "option": chart_option(chart), "texts": texts or {}, **more}


def answer_tiles(question: Question, operation: str, pass_name: str, measured: Measurements) -> Answer:
    """Tiles and waves of one product, with their words."""
    prediction = question.predict()
    entry = find_product(prediction, operation, pass_name)
    grid = lay_tiles(prediction, entry)
    facts = operation_to_json(entry)
    split = f", split of k {facts['split_k']}" if facts["split_k"] > 1 else ""
    text = {
        "product": f"{facts['name']} ({facts['pass']}): {facts['shape']}",
        "tile": f"{grid.tile_m} x {grid.tile_n}{split}",
        "tiles": f"{grid.num_tiles:,}",
        "waves": f"{grid.num_waves:,} on {grid.num_slots} SMs",
        "last wave": f"{grid.num_last:,} of {grid.num_slots} SMs busy",
        "tile efficiency": format_percent(grid.tile_efficiency),
        "wave efficiency": format_percent(grid.wave_efficiency),
        "time": format_seconds(facts["time_s"]),
        "alignment": f"{facts['alignment']} B" if facts["alignment"] else "",
    }
    product = entry.operation
    found = measured.find_product(product, prediction.device.name) if isinstance(product, Gemm) else None
    if found is not None:
        text["measured"] = f"{format_seconds(found.time_s)}, {found.library}"
    return {"schema_version": 1, **asdict(grid), "name": facts["name"], "pass": facts["pass"], "text": text}


def answer_breakdown(question: Question) -> Answer:
    """Where a step's time goes: layer, roofline, waterfall and pipeline, each as a figure or with why not."""
    prediction = question.predict()
    answer: Answer = {"schema_version": 1}
    makers: dict[str, Callable[[Prediction], Answer]] = {
        "layer": _layer,
        "roofline": _roofline,
        "waterfall": partial(_waterfall, uncalibrated=question.uncalibrated),
        "pipeline": _pipeline,
    }
    for name, make in makers.items():
        try:
            answer[name] = make(prediction)
        except ShapewrightError as error:
            answer[name] = {"problem": str(error)}
    return answer


def _layer(prediction: Prediction) -> Answer:
    """One bar for each pass, stacked from its operations."""
    entries = [
        entry for entry in prediction.operations if entry.operation.stage == "every" and entry.total_time_s > 0.0
    ]
    passes = [name for name in _LAYER_PASSES if any(entry.operation.pass_name == name for entry in entries)]
    sums: dict[str, dict[str, float]] = {}
    for entry in entries:
        if entry.operation.pass_name in passes:
            by_pass = sums.setdefault(_role(entry), dict.fromkeys(passes, 0.0))
            by_pass[entry.operation.pass_name] += entry.total_time_s
    chart = BarChart(
        title="Layers",
        value_label="ms a step, all layers of one device",
        categories=passes,
        parts=[BarPart(name, [1e3 * by_pass[one] for one in passes]) for name, by_pass in sums.items()],
        alt="Time of all layers of one device in one step by operation, one bar for each pass.",
    )
    step_s = prediction.step_time_s
    texts = {
        name: [
            f"{name}, {one}: {format_seconds(by_pass[one])}, {format_percent(by_pass[one] / step_s)} of the step"
            for one in passes
        ]
        for name, by_pass in sums.items()
    }
    return figure(chart, texts)


def _role(entry: PricedOperation) -> str:
    """What an operation does, without the pass that its name ends in."""
    if isinstance(entry.operation, Collective):
        return "communication"
    parts = [word for word in entry.operation.name.split(".") if word not in ("dgrad", "wgrad", "backward")]
    return ".".join(parts[:2])


def _roofline(prediction: Prediction) -> Answer:
    """Operations under the device's two ceilings."""
    chart = step_roofline_chart(prediction)
    texts = {one.name: list(one.labels) for one in chart.series if isinstance(one, Points)}
    return figure(chart, {**texts, CEILING: [describe_ceiling(prediction)] * 3})


def _waterfall(prediction: Prediction, *, uncalibrated: bool) -> Answer:
    """From the model's arithmetic at the dense peak to the predicted step, loss by loss."""
    found = explain_prediction(prediction, uncalibrated=uncalibrated)
    chart, parts = waterfall_chart(found), drawn_parts(found)
    texts = [
        f"{format_seconds(part.time_s)}, {format_percent(part.time_s / found.seconds)}: {part.why}" for part in parts
    ]
    rows = [[name, text] for name, text in zip(chart.categories, texts, strict=True)]
    lines = [f"{name}: {text.partition(':')[0]}" for name, text in rows]
    return figure(chart, {"adds": lines, "takes back": lines}, rows=rows)


def memory_figure(found: Capacity) -> Answer:
    """Bytes of one device of each pipeline stage by component, against the device's capacity."""
    capacity, chart = found.device.memory_bytes, memory_chart(found)
    texts: dict[str, list[str]] = {}
    for stage in found.stages:
        for name, amount in stage.components.items():
            word = name.replace("_", " ")
            where = f"stage {stage.stage}, " if len(found.stages) > 1 else ""
            line = f"{where}{word}: {format_bytes(amount)}, {format_percent(amount / capacity)} of the device"
            texts.setdefault(word, []).append(line)
    return figure(chart, texts)


def _pipeline(prediction: Prediction) -> Answer:
    """The pipeline's schedule, pass by pass."""
    chart, shown, passes = pipeline_chart(prediction)
    texts: dict[str, list[str]] = {}
    for span in chart.spans:
        texts.setdefault(span.kind, []).append(
            f"{chart.rows[span.row]}, {span.text}, {span.kind}: {format_seconds(span.end - span.start)}"
        )
    bubble_s = prediction.bubble_time_s
    share = format_percent(bubble_s / prediction.step_time_s)
    words = f"bubble {format_seconds(bubble_s)}, {share} of the step; stages with less to do wait longer"
    if shown < passes:
        words += f"; the first {shown} of {passes} micro-batches are drawn"
    return figure(chart, texts, words=words)


def comparison_figure(found: Comparison) -> Answer:
    """Tokens per second of each device that runs the job."""
    rows = [row for row in found.rows if row.prediction is not None]
    names = [row.device.name for row in rows]
    parts = [
        BarPart("fits", [(row.tokens_per_s or 0.0) if row.fits else 0.0 for row in rows], color="#0072b2"),
        BarPart("does not fit", [0.0 if row.fits else row.tokens_per_s or 0.0 for row in rows], color="#cc79a7"),
    ]
    chart = BarChart(
        title="Devices",
        value_label="tokens/s of the whole job",
        categories=names,
        parts=parts,
        alt="Tokens per second of the same job on each device.",
    )
    texts = [
        f"{row.device.name}: {row.tokens_per_s or 0:,.0f} tokens/s{'' if row.fits else ', does not fit'}"
        for row in rows
    ]
    return figure(chart, {part.name: texts for part in parts})


def front_figure(result: SearchResult) -> Answer:
    """The Pareto front of a search by parameters and speed-up; each point knows which shape it is."""
    shapes = result.front
    labels = [
        f"{describe_changes(shape)}: {shape.speedup.factor:.3f}x ({shape.speedup.low:.3f} to {shape.speedup.high:.3f})"
        for shape in shapes
    ]
    own = result.baseline.prediction.parameters.total
    chart = XYChart(
        title="Pareto front",
        x_label="parameters [B]",
        y_label="speed-up",
        series=[
            Points(
                "shape",
                [shape.prediction.parameters.total / GIGA for shape in shapes],
                [shape.speedup.factor for shape in shapes],
                labels=labels,
            ),
            Points("this shape", [own / GIGA], [1.0], labels=["as it is: 1.000x"], color="#d55e00"),
        ],
        alt="Shapes that no other beats in speed, parameters, cache and memory, by parameters and speed-up.",
    )
    return figure(chart, {"shape": labels, "this shape": ["as it is: 1.000x"]})
