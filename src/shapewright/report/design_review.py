"""The case for or against a shape, as the sections of one page, from the verdict down to where numbers come from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shapewright.perf.calibration import RECORD_KINDS, load_record
from shapewright.perf.software import TUNED
from shapewright.report.capacity import remedy_columns, verdict_words
from shapewright.report.charts import BarChart, BarPart, Mark
from shapewright.report.check_text import better_shape_columns, finding_words
from shapewright.report.columns import Column, columns_of
from shapewright.report.devices import device_number_columns
from shapewright.report.page import Figure, Section, Table, Words, table_of
from shapewright.report.prediction_text import describe, operation_columns, verdict
from shapewright.report.roofline_chart import describe_ceiling, step_roofline_chart
from shapewright.report.search_text import QUALITY_NOTE, candidate_columns, describe_letters, describe_space
from shapewright.units import GIB, format_percent, format_seconds

if TYPE_CHECKING:
    from shapewright.capacity import Capacity
    from shapewright.lint import CheckReport, Finding
    from shapewright.predict import Prediction
    from shapewright.question import Question
    from shapewright.search import SearchResult
    from shapewright.utilization import Utilization, WaterfallPart

_MILLISECOND_S = 1e-3
_OPERATIONS_DRAWN = 14
_OPERATIONS_LISTED = 40
_CANDIDATES_LISTED = 12
_PASS_WORDS = {"forward": "forward", "backward": "backward", "recompute": "recomputed", "step": "once per step"}
_BACKWARD_WORDS = ("dgrad", "wgrad", "backward")
# Losses below this share of the step are left out of the waterfall.
_DRAWN_FROM_FRACTION = 0.0005
_FINDING_COLUMNS = (
    Column("severity", is_text=True),
    Column("rule", is_text=True),
    Column("what is wrong", is_text=True),
    Column("cost"),
    Column("instead", is_text=True),
)


@dataclass(frozen=True, kw_only=True)
class Review:
    """Everything that a review is written from.

    Attributes:
        question: What was asked.
        check: What the lint found, with the prediction of the step.
        capacity: Memory against the device; None where the layout cannot run at all.
        utilization: Where the predicted step's time goes, from the dense peak down; None outside training.
        search: Faster shapes of the same size; None where none were looked for.
        no_search: Why none were looked for, in one line.
    """

    question: Question
    check: CheckReport
    capacity: Capacity | None
    utilization: Utilization | None
    search: SearchResult | None
    no_search: str = ""


def review_title(review: Review) -> str:
    """Heading of the page."""
    config = review.question.config
    return f"{config.title} on {review.question.device.title}"


def review_subtitle(review: Review) -> str:
    """One line: model, device, workload, layout."""
    prediction = review.check.prediction
    return describe(prediction) if prediction is not None else review.check.problem


def review_sections(review: Review) -> list[Section]:
    """The page, top to bottom: what to know first stands first."""
    prediction = review.check.prediction
    sections: list[Section] = [_verdict(review)]
    if prediction is not None:
        sections.append(_operations_figure(prediction))
    if review.utilization is not None:
        sections.append(waterfall_figure(review.utilization))
    if prediction is not None:
        chart = step_roofline_chart(prediction)
        sections.append(Figure(chart, caption=f"{chart.alt} {describe_ceiling(prediction)}."))
    sections.append(_findings(review.check.findings))
    if review.capacity is not None:
        sections += _memory(review.capacity)
    sections += _alternatives(review)
    if prediction is not None:
        listed = operation_columns(prediction, top=_OPERATIONS_LISTED)
        hidden = len(prediction.operations) - _OPERATIONS_LISTED
        note = f"{hidden} more operations are left out." if hidden > 0 else ""
        sections.append(table_of("Operations, slowest first", listed, note=note))
    return [*sections, _assumptions(review), *_provenance(review)]


def _verdict(review: Review) -> Section:
    """The answer in one table."""
    prediction = review.check.prediction
    if prediction is None:
        return Words("Verdict", [f"Cannot run: {review.check.problem}"])
    facts = verdict(prediction)
    if review.capacity is not None:
        facts["memory"] = verdict_words(review.capacity)
    costly = [finding for finding in review.check.findings if finding.cost_s is not None]
    facts["findings"] = f"{len(review.check.findings)}" + (
        f"; the costliest, {costly[0].code} {costly[0].name}, takes {format_percent(costly[0].cost_fraction or 0.0)} "
        "of the step"
        if costly
        else ""
    )
    if review.search is not None and review.search.candidates:
        best = review.search.candidates[0]
        facts["best shape of this size"] = (
            f"{best.speedup.factor:.3f}x ({best.speedup.low:.3f} to {best.speedup.high:.3f}), "
            f"changes {', '.join(best.changed_fields)}"
        )
    rows = tuple(facts.items())
    return Table("Verdict", ("what", "predicted"), rows, words=("what", "predicted"), note=_INTERVAL_NOTE)


_INTERVAL_NOTE = "Ranges in brackets are 90 % intervals, from residuals on shapes that the fit did not see."


_STEP_NOTE = (
    "predicted is a tuned stack of today: no stragglers, no data loading, a host that keeps up, clocks of kernels "
    "measured alone, so rather too fast; the interval spans older software, which --software names"
)


def _operations_figure(prediction: Prediction) -> Figure:
    """Time of the step by operation, its passes stacked."""
    by_name: dict[str, dict[str, float]] = {}
    for entry in prediction.busiest_operations:
        passes = by_name.setdefault(_module(entry.operation.name), dict.fromkeys(_PASS_WORDS, 0.0))
        passes[entry.operation.pass_name] += entry.total_time_s / _MILLISECOND_S
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1].values()))[:_OPERATIONS_DRAWN]
    used = [name for name in _PASS_WORDS if any(passes[name] for _, passes in ranked)]
    slowest, times = ranked[0]
    share = sum(times.values()) * _MILLISECOND_S / prediction.step_time_s
    chart = BarChart(
        title="Where the step's time goes",
        value_label="time in one step (ms)",
        categories=[name for name, _ in ranked],
        parts=[BarPart(_PASS_WORDS[name], [passes[name] for _, passes in ranked]) for name in used],
        alt=f"{slowest} takes most: {format_percent(share)} of the step.",
    )
    return Figure(chart, caption=chart.alt, chart_height_px=110 + 28 * len(ranked))


def _module(name: str) -> str:
    """Operation without its pass: its forward and backward products stand in one bar."""
    stem, _, last = name.rpartition(".")
    return stem if last in _BACKWARD_WORDS else name


def drawn_parts(found: Utilization) -> list[WaterfallPart]:
    """Parts of a waterfall that are large enough to see."""
    least_s = _DRAWN_FROM_FRACTION * found.seconds
    return [part for part in found.waterfall if abs(part.time_s) >= least_s]


def waterfall_chart(found: Utilization) -> BarChart:
    """From the model's arithmetic at peak to the predicted step, one loss after the other."""
    parts = drawn_parts(found)
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


def waterfall_figure(found: Utilization) -> Figure:
    """The waterfall with what each of its parts is."""
    chart, parts = waterfall_chart(found), drawn_parts(found)
    why = "; ".join(f"{part.name.replace('_', ' ')}: {part.why}" for part in parts)
    return Figure(chart, caption=f"{chart.alt} {why}.", chart_height_px=110 + 28 * len(parts))


def _findings(findings: Sequence[Finding]) -> Section:
    """What is wrong, by predicted cost."""
    if not findings:
        return Words("Findings", ["Nothing to find fault with."])
    rows = [
        [
            finding.severity,
            f"{finding.code} {finding.name}",
            finding_words(finding)["message"],
            "" if finding.cost_s is None else format_seconds(finding.cost_s),
            "; ".join(f"{suggestion.title} ({suggestion.kind})" for suggestion in finding.suggestions),
        ]
        for finding in findings
    ]
    note = "exact: the same function; runtime: batch, format or layout; retrain: another model."
    return table_of("Findings", columns_of(rows, _FINDING_COLUMNS), note=note)


def memory_chart(capacity: Capacity) -> BarChart:
    """Components of each stage against the device."""
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


def _memory(capacity: Capacity) -> list[Section]:
    """Memory of each stage, and what makes it fit."""
    chart = memory_chart(capacity)
    sections: list[Section] = [Figure(chart, caption=chart.alt, chart_height_px=150 + 24 * len(capacity.stages))]
    if capacity.remedies:
        sections.append(
            table_of(
                "What makes it fit: on these devices first, cheapest in device time first", remedy_columns(capacity)
            )
        )
    return sections


def _alternatives(review: Review) -> list[Section]:
    """Nearest and best shapes of the same size."""
    sections: list[Section] = []
    if review.check.better_shapes:
        sections.append(table_of("Nearest better shapes", better_shape_columns(review.check.better_shapes)))
    found = review.search
    if found is None:
        return (
            [*sections, Words("Faster shapes of the same size", [review.no_search])] if review.no_search else sections
        )
    if not found.candidates:
        return [*sections, Words("Faster shapes of the same size", [f"None: {describe_space(found)}."])]
    listed = candidate_columns(found.candidates[:_CANDIDATES_LISTED])
    note = f"{describe_letters(found.candidates[:_CANDIDATES_LISTED])}. {describe_space(found)}. {QUALITY_NOTE}"
    return [*sections, table_of("Faster shapes of the same size", listed, note=note)]


def _assumptions(review: Review) -> Section:
    """What the reader must know before believing a number."""
    prediction = review.check.prediction
    lines = [*review.question.notes, *(prediction.warnings if prediction is not None else ())]
    if prediction is not None and prediction.workload.phase == "train" and prediction.software == TUNED:
        lines.append(_STEP_NOTE)
    question = review.question
    asked = json.dumps(
        {
            "config": asdict(question.config),
            "workload": asdict(question.workload),
            "layout": asdict(question.layout),
        },
        indent=1,
        default=str,
    )
    return Words("Assumptions, and the question word for word", list(dict.fromkeys(lines)), code=asked)


def _provenance(review: Review) -> list[Section]:
    """Where the numbers come from: calibration records and the device's sheet."""
    device = review.question.device
    rows = []
    for kind in RECORD_KINDS:
        record = load_record(kind, device)
        measured = "this device" if record.transfer == "exact" else f"borrowed from {record.device}"
        rows.append([kind, record.id, measured])
    headings = (
        Column("operations", is_text=True),
        Column("calibration record", is_text=True),
        Column("measured on", is_text=True),
    )
    return [
        table_of("Calibration records", columns_of(rows, headings)),
        table_of(f"Numbers of {device.title}", device_number_columns(device), note=device.notes or ""),
    ]
