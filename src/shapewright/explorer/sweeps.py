"""The crest view and the heat map: sweeps of shapewright.figures as charts with their words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.explorer.figures import figure
from shapewright.figures.heat import heat_heads_by_width
from shapewright.figures.sweep import SWEPT_FIELDS, sweep_field
from shapewright.report.charts import Band, HeatMap, Line, Mark, Points, XYChart
from shapewright.units import TERA, format_percent, format_rate, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.explorer.measured import Measurement, Measurements
    from shapewright.figures.sweep import Sweep, SweepPoint
    from shapewright.predict import Prediction
    from shapewright.question import Question

Answer = dict[str, Any]

MEASURES = {"rate": "model TFLOP/s per device", "tokens": "tokens/s per device", "step": "step [ms]"}
"""What the crest view can show."""

_MOST_MARKS = 24
# The interval is drawn along values whose operands load in full width; the others lie far below and would fray it.
_WIDE_LOAD_BYTES = 16
# Alignment classes, best first, in colours that grow warmer; what needs no class is drawn as the best.
_CLASS_COLORS = {128: "#0072b2", 64: "#56b4e9", 32: "#009e73", 16: "#b8a800", 8: "#e69f00", 4: "#d55e00", 2: "#cc79a7"}


def answer_sweep(
    question: Question, field: str, measure: str, values: list[int] | None, measured: Measurements
) -> Answer:
    """Throughput over one field, with wave ends, alignment classes, crests, and what was measured."""
    sweep = sweep_field(question.config, field, **question.terms, values=values)
    words = [_words(sweep, point) for point in sweep.points]
    by_value = {point.value: text for point, text in zip(sweep.points, words, strict=True)}
    chart, texts = _chart(sweep, measure, by_value)
    steps = {point.value: measured.find_step(point.prediction) for point in sweep.points}
    seen = _measured_points(sweep, measure, steps)
    chart = replace(chart, series=[*chart.series, *seen])
    texts |= {one.name: list(one.labels) for one in seen}
    here = next((point for point in sweep.points if point.value == sweep.current), None)
    return {
        "schema_version": 1,
        "field": field,
        "fields": list(SWEPT_FIELDS),
        "current": sweep.current,
        "watched": sweep.watched,
        "wave_ends": list(sweep.wave_ends),
        "crests": [
            {"value": value, "text": by_value[value], "gain_text": _gain(sweep, value, here)} for value in sweep.crests
        ],
        "points": [
            {
                "value": point.value,
                "model_flops_per_s": point.prediction.model_flops_per_s,
                "tokens_per_s_per_device": point.prediction.tokens_per_s_per_device,
                "step_time_s": point.prediction.step_time_s,
                "step_time_low_s": point.prediction.step_time_low_s,
                "step_time_high_s": point.prediction.step_time_high_s,
                "measured_step_time_s": None if (step := steps[point.value]) is None else step.time_s,
                "alignment_bytes": point.alignment_bytes,
                "num_waves": point.num_waves,
                "text": text,
            }
            for point, text in zip(sweep.points, words, strict=True)
        ],
        "figure": figure(chart, texts),
    }


def _chart(sweep: Sweep, measure: str, words: dict[int, str]) -> tuple[XYChart, dict[str, list[str]]]:
    values = [point.value for point in sweep.points]
    classes = sorted({point.alignment_bytes or 0 for point in sweep.points}, reverse=True)
    best = [point for point in sweep.points if (point.alignment_bytes or 0) == classes[0]]
    banded = [point for point in sweep.points if (point.alignment_bytes or 0) >= min(classes[0], _WIDE_LOAD_BYTES)]
    best_name = f"aligned to {classes[0]} B" if classes[0] else "predicted"
    series: list[Any] = [
        Band(
            "90 % interval",
            [point.value for point in banded],
            [_measure(point.prediction, measure, slow=True) for point in banded],
            [_measure(point.prediction, measure, fast=True) for point in banded],
            color="#0072b2",
        ),
        Line(best_name, [point.value for point in best], [_measure(point.prediction, measure) for point in best],
             color="#0072b2"),
    ]  # fmt: skip
    texts: dict[str, list[str]] = {best_name: [words[point.value] for point in best]}
    for alignment in classes[1:]:
        chosen = [point for point in sweep.points if (point.alignment_bytes or 0) == alignment]
        name = f"aligned to {alignment} B" if alignment else "not aligned"
        texts[name] = [words[point.value] for point in chosen]
        color = _CLASS_COLORS.get(alignment, "#7f7f7f")
        rates = [_measure(point.prediction, measure) for point in chosen]
        series.append(Line(name, [point.value for point in chosen], rates, color=color))
    by_value = {point.value: point for point in sweep.points}
    crests = [by_value[value] for value in sweep.crests]
    texts["crests"] = [words[point.value] for point in crests]
    series.append(_points("crests", crests, measure, texts["crests"], "#009e73"))
    here = [point for point in sweep.points if point.value == sweep.current]
    texts["this shape"] = [words[point.value] for point in here]
    series.append(_points("this shape", here, measure, texts["this shape"], "#d55e00"))
    ends = sweep.wave_ends if len(sweep.wave_ends) <= _MOST_MARKS else ()
    chart = XYChart(
        title="Crests",
        x_label=sweep.field.replace("_", " "),
        y_label=MEASURES[measure],
        series=series,
        marks=[Mark("x", value) for value in ends],
        alt=f"{MEASURES[measure]} over {sweep.field.replace('_', ' ')} from {values[0]} to {values[-1]}; "
        f"crests at {', '.join(map(str, sweep.crests[:4])) or 'no value'}.",
    )
    return chart, texts


def _measured_points(sweep: Sweep, measure: str, steps: Mapping[int, Measurement | None]) -> list[Points]:
    """Measured steps of the very same shapes, if there are any."""
    seen = [(point, step) for point in sweep.points if (step := steps[point.value]) is not None]
    labels = [
        f"{sweep.field}={point.value:,}: step of {format_seconds(step.time_s)} measured with {step.library}"
        for point, step in seen
    ]
    shown = [_measure(point.prediction, measure, step_s=step.time_s) for point, step in seen]
    return [Points("measured", [point.value for point, _ in seen], shown, labels, color="#333333")] if seen else []


def _points(name: str, points: list[SweepPoint], measure: str, labels: list[str], color: str) -> Points:
    return Points(
        name,
        [point.value for point in points],
        [_measure(point.prediction, measure) for point in points],
        labels=labels,
        color=color,
    )


def _measure(
    prediction: Prediction, measure: str, *, slow: bool = False, fast: bool = False, step_s: float = 0.0
) -> float:
    """What is drawn of a step, of the slow or fast end of its interval, or of a step that took so long."""
    own_s = prediction.step_time_s
    end_s = prediction.step_time_high_s if slow else max(prediction.step_time_low_s, 1e-3 * own_s) if fast else own_s
    end_s = step_s or end_s
    if measure == "step":
        return 1e3 * end_s
    rate = prediction.model_flops_per_s / TERA if measure == "rate" else prediction.tokens_per_s_per_device
    return rate * own_s / end_s


def _words(sweep: Sweep, point: SweepPoint) -> str:
    prediction = point.prediction
    parts = [
        f"{sweep.field}={point.value:,}: {format_rate(prediction.model_flops_per_s)}",
        f"step {format_seconds(prediction.step_time_s)}",
        f"{prediction.tokens_per_s_per_device:,.0f} tokens/s",
    ]
    if point.alignment_bytes is not None:
        parts.append(f"aligned to {point.alignment_bytes} B")
    if point.num_waves is not None:
        parts.append(f"{sweep.watched} in {point.num_waves} waves")
    return ", ".join(parts)


def _gain(sweep: Sweep, value: int, here: SweepPoint | None) -> str:
    """Model rate of a crest against that of the current value."""
    point = next(point for point in sweep.points if point.value == value)
    if here is None or not here.prediction.model_flops_per_s:
        return ""
    change = point.prediction.model_flops_per_s / here.prediction.model_flops_per_s - 1.0
    return "here" if value == sweep.current else f"{'+' if change >= 0.0 else ''}{format_percent(change)} rate"


def answer_heat(question: Question) -> Answer:
    """Model rate over numbers of heads and hidden sizes."""
    grid = heat_heads_by_width(question.config, **question.terms)
    rates = [[None if cell is None else cell.model_flops_per_s / TERA for cell in row] for row in grid.predictions]
    chart = HeatMap(
        title="Heads and hidden size",
        x_label="hidden size",
        y_label="heads",
        value_label="model TFLOP/s",
        x_values=[str(width) for width in grid.widths],
        y_values=[str(count) for count in grid.heads],
        values=rates,
        alt="Model TFLOP/s per device by number of heads and hidden size; empty cells cannot be.",
        outlined=grid.current,
    )
    cells: list[dict[str, Any]] = []
    for count, row in zip(grid.heads, grid.predictions, strict=True):
        for width, cell in zip(grid.widths, row, strict=True):
            text = "" if cell is None else (
                f"{count} heads of {cell.config.head_dim}, hidden size {width:,}: "
                f"{format_rate(cell.model_flops_per_s)}, step {format_seconds(cell.step_time_s)}"
            )  # fmt: skip
            changes = None if cell is None else _heat_changes(cell)
            cells.append({"num_heads": count, "hidden_size": width, "text": text, "changes": changes})
    return {
        "schema_version": 1,
        "cells": cells,
        "figure": figure(chart, {chart.value_label: [cell["text"] for cell in cells]}),
    }


def _heat_changes(prediction: Prediction) -> dict[str, int]:
    config = prediction.config
    return {name: getattr(config, name) for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim")}
