"""A traced module as a page: verdict, findings, operations, and memory over time and by module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Line, Mark, XYChart
from shapewright.app.report.check import finding_words
from shapewright.app.report.page import Figure, Section, Table, Words, table_of
from shapewright.app.report.predict import operation_columns
from shapewright.app.report.traced.outputs import traced_memory_output
from shapewright.app.report.traced.text import component_facts, memory_columns, prediction_facts
from shapewright.core.units import GIGA, format_bytes

if TYPE_CHECKING:
    from shapewright.app.report.traced.outputs import TracedMemoryOutput
    from shapewright.lint.traced import TracedCheck
    from shapewright.prediction.traced import TracedPrediction


def timeline_chart(output: TracedMemoryOutput) -> XYChart:
    """Tensors that exist over the step."""
    marks = [Mark(axis="x", value=float(output.backward_start), text="backward pass")] if output.backward_start else []
    return XYChart(
        title="Memory over the step",
        x_label="progress of the step (tensors made and released)",
        y_label="tensors (GB)",
        series=[
            Line(
                name="tensors",
                x=[float(index) for index in range(len(output.timeline_bytes))],
                y=[value / GIGA for value in output.timeline_bytes],
            )
        ],
        alt=f"Tensors that exist over the step, {format_bytes(max(output.timeline_bytes, default=0.0))} at the peak.",
        marks=marks,
        y_from_zero=True,
    )


def memory_page_sections(prediction: TracedPrediction) -> list[Section]:
    """Sections of the page of a trace's memory."""
    output = traced_memory_output(prediction)
    return [
        Table(
            title="Peak memory",
            columns=tuple(component_facts(output)),
            rows=(tuple(component_facts(output).values()),),
        ),
        Figure(timeline_chart(output), caption=f"Peak at {output.memory.peak_operation or 'the forward pass'}."),
        table_of("Modules", memory_columns(output)),
    ]


def review_page_sections(report: TracedCheck) -> list[Section]:
    """Sections of the design review of a traced module."""
    prediction = report.prediction
    facts = prediction_facts(prediction)
    findings = []
    for finding in report.findings:
        words = finding_words(finding)
        findings.append(
            f"{finding.severity}: {finding.code} {finding.name}: {words['message']} {words['cost']} "
            + " ".join(words["suggestions"])
        )
    return [
        Table(title="Verdict", columns=tuple(facts), rows=(tuple(facts.values()),)),
        Words("Findings", findings or ["no findings"]),
        table_of("Operations, slowest first", operation_columns(prediction, top=60)),
        *memory_page_sections(prediction),
        Words("Limits", list(prediction.warnings) or ["none noted"]),
        Words("Records", [f"{kind}: {source.label}" for kind, source in prediction.calibration.items()]),
    ]
