"""A traced module as a page: verdict, findings, operations, and memory over time and by module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.figures.chart import Line, Mark, XYChart
from shapewright.app.report.check import finding_words
from shapewright.app.report.page import Figure, Section, Table, Words, render_page, table_of
from shapewright.app.report.predict import operation_columns
from shapewright.app.report.traced.text import component_facts, describe_trace, memory_columns, prediction_facts
from shapewright.core.units import GIGA, format_bytes

if TYPE_CHECKING:
    from shapewright.app.report.traced.outputs import TracedCheckOutput, TracedMemoryOutput


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


def memory_page_of_trace(output: TracedMemoryOutput) -> str:
    """Render the memory of a trace as one HTML document."""
    return render_page("Memory of a traced module", _memory_sections(output), subtitle=describe_trace(output))


def _memory_sections(output: TracedMemoryOutput) -> list[Section]:
    facts = component_facts(output)
    return [
        Table(title="Peak memory", columns=tuple(facts), rows=(tuple(facts.values()),)),
        Figure(timeline_chart(output), caption=f"Peak at {output.memory.peak_operation or 'the forward pass'}."),
        table_of("Modules", memory_columns(output)),
    ]


def review_page_of_trace(output: TracedCheckOutput) -> str:
    """Render the design review of a traced module as one HTML document."""
    facts = prediction_facts(output.step)
    findings = []
    for finding in output.findings:
        words = finding_words(finding)
        findings.append(
            f"{finding.severity}: {finding.code} {finding.name}: {words['message']} {words['cost']} "
            + " ".join(words["suggestions"])
        )
    sections = [
        Table(title="Verdict", columns=tuple(facts), rows=(tuple(facts.values()),)),
        Words("Findings", findings or ["no findings"]),
        table_of("Operations, slowest first", operation_columns(output.step, top=60)),
        *_memory_sections(output.memory),
        Words("Limits", list(output.warnings) or ["none noted"]),
        Words("Records", [f"{kind}: {record}" for kind, record in output.step.calibration_records.items()]),
    ]
    return render_page(f"Review of {output.trace.title}", sections, subtitle=describe_trace(output))
