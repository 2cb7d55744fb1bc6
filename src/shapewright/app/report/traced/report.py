"""A traced module as text and as pages: prediction, findings, memory by module and over time, and a measured step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shapewright.app.figures.step import timeline_chart
from shapewright.app.report.check import OPERATIONS_SHOWN, finding_words, print_finding
from shapewright.app.report.columns import Column, columns_of, fill, print_facts, print_notes, print_table
from shapewright.app.report.mfu import print_trace_comparison
from shapewright.app.report.page import Figure, Section, Table, Words, render_page, table_of
from shapewright.app.report.predict import memory_words, operation_columns, print_operations
from shapewright.app.report.traced.outputs import TracedPart
from shapewright.core.units import (
    format_bytes,
    format_count,
    format_number_of,
    format_percent,
    format_rate,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.model import DeviceSummary
    from shapewright.app.report.traced.outputs import (
        TracedCheckOutput,
        TracedMemoryOutput,
        TracedMfuOutput,
        TracedPredictOutput,
        TraceSummary,
    )
    from shapewright.lowering.torch_trace.trace import Trace


_INTERVAL = "{step_time_s} ({step_time_low_s} to {step_time_high_s})"
_MODULE_COLUMNS = (
    Column("module", "{path}", is_text=True),
    Column("class", "{type_name}", rank=2, is_text=True),
    Column("modules", "{count}", rank=3),
    Column("parameters", lambda one: format_count(one.num_parameters) if one.num_parameters else "", rank=1),
    Column("weights", lambda one: _total_words(one.count, one.weights_bytes)),
    Column("saved", lambda one: _total_words(one.count, one.saved_bytes)),
    Column("at the peak", lambda one: _total_words(one.count, one.peak_bytes)),
)
_LINEAR_COLUMNS = (
    Column("linear layer", "{path}", is_text=True),
    Column("runs", "{count}"),
    Column("rows", "{num_rows}"),
    Column("in_features", "{in_features}"),
    Column("out_features", "{out_features}"),
)


def _total_words(count: int, value_bytes: float) -> str:
    return format_bytes(count * value_bytes) if value_bytes else ""


class TracedOutput(Protocol):
    """An output about a trace on a device."""

    @property
    def trace(self) -> TraceSummary:
        """What was traced."""

    @property
    def device(self) -> DeviceSummary:
        """The device."""


def describe_trace(output: TracedOutput) -> str:
    """One line: module, device, inputs, format."""
    trace = output.trace
    trainable = (
        "" if trace.num_trainable == trace.num_parameters else f", {format_count(trace.num_trainable)} trainable"
    )
    fused = ", pointwise chains merged" if trace.is_fused else ", eager"
    devices = f"one of {trace.num_ranks} ranks" if trace.num_ranks > 1 else "one device"
    return (
        f"{trace.title} ({format_count(trace.num_parameters)} parameters{trainable}) on {output.device.title}: "
        f"{trace.phase}, {trace.inputs}, {trace.dtype}{fused}; {devices}"
    )


def prediction_facts(output: TracedPredictOutput) -> dict[str, str]:
    """Main results as texts by name."""
    facts = {
        "step" if output.trace.phase == "train" else "forward pass": fill(_INTERVAL, output),
        "samples/s" if output.trace.counts_samples else "tokens/s": f"{output.tokens_per_s:,.0f}",
        "model rate": format_rate(output.model_flops / output.step_time_s if output.step_time_s else 0.0),
        "MFU": format_percent(output.mfu),
    }
    if output.hardware_flops > output.model_flops:
        facts["HFU"] = format_percent(output.hfu)
    facts["memory"] = memory_words(output.memory)
    return facts


def _print_heading(output: TracedPredictOutput, console: Console) -> None:
    console.print(describe_trace(output), style="bold", soft_wrap=True)
    print_facts(prediction_facts(output), console)


def print_trace(trace: Trace, console: Console) -> None:
    """Print a trace without a device: its linear layers."""
    console.print(f"{trace.title}: {trace.phase}, {trace.inputs}", style="bold", soft_wrap=True)
    print_table(columns_of(trace.linears, _LINEAR_COLUMNS), console)
    print_notes(trace.notes, console)


def print_traced_prediction(output: TracedPredictOutput, console: Console, *, top: int | None = 20) -> None:
    """Print a prediction of a trace.

    Args:
        top: Operations to list, slowest first; None for all.
    """
    _print_heading(output, console)
    console.print()
    print_operations(output, console, top=top)
    print_notes(output.warnings, console)


def print_traced_check(output: TracedCheckOutput, console: Console) -> None:
    """Print findings and the slowest operations."""
    _print_heading(output.step, console)
    console.print()
    for finding in output.findings:
        print_finding(finding, console)
    if not output.findings:
        console.print("no findings", style="green")
    if output.num_suppressed:
        console.print(f"{format_number_of(output.num_suppressed, 'finding')} suppressed by --ignore", style="dim")
    console.print()
    print_table(operation_columns(output.step, top=OPERATIONS_SHOWN), console)
    print_notes(output.other_warnings, console)


def memory_columns(output: TracedMemoryOutput) -> list[Column]:
    """Modules and their memory as the columns of a table."""
    return columns_of(output.modules, _MODULE_COLUMNS)


def component_facts(output: TracedMemoryOutput) -> dict[str, str]:
    """Memory by component as texts."""
    memory = output.memory
    parts = {
        "weights": memory.weights_bytes,
        "optimizer": memory.optimizer_bytes,
        "gradients": memory.gradients_bytes,
        "activations": memory.activations_bytes,
        "workspace": memory.workspace_bytes,
        "inputs": memory.inputs_bytes,
        "runtime": memory.runtime_bytes,
    }
    return {name: format_bytes(value) for name, value in parts.items() if value}


def print_memory_of_trace(output: TracedMemoryOutput, console: Console) -> None:
    """Print the memory of a trace: components, peak, and modules."""
    memory = output.memory
    console.print(describe_trace(output), style="bold", soft_wrap=True)
    console.print(memory_words(memory), style="green" if memory.fits else "bold red")
    print_facts(component_facts(output), console)
    console.print(
        f"peak at {memory.peak_operation or 'the forward pass'}; saved between the passes "
        f"{format_bytes(memory.saved_bytes)}",
        soft_wrap=True,
    )
    console.print()
    print_table(memory_columns(output), console)
    print_notes(output.warnings, console)


def print_traced_mfu(output: TracedMfuOutput, console: Console) -> None:
    """Print a measured step of a trace."""
    console.print(describe_trace(output), style="bold", soft_wrap=True)
    facts = {
        "measured": format_seconds(output.measured_time_s),
        "MFU": format_percent(output.mfu),
        "HFU": format_percent(output.hfu),
        "predicted": fill(_INTERVAL, output),
        "reachable MFU": format_percent(output.reachable_mfu),
        "unexplained": format_seconds(output.unexplained_s),
    }
    print_facts(facts, console)
    console.print()
    print_table(part_columns(output), console)
    print_trace_comparison(output.profile, console)
    print_notes(output.warnings, console)


def part_columns(output: TracedMfuOutput) -> list[Column]:
    """Parts of the predicted time as the columns of a table."""
    rest_s = output.unexplained_s
    rest = TracedPart(name="unexplained", time_s=rest_s, fraction=rest_s / output.measured_time_s)
    headings = (
        Column("predicted part", "{name}", is_text=True),
        Column("time", "{time_s}"),
        Column("of the measured time", "{fraction}"),
    )
    return columns_of([*output.parts, rest], headings)


def memory_page_of_trace(output: TracedMemoryOutput) -> str:
    """Render the memory of a trace as one HTML document."""
    return render_page("Memory of a traced module", _memory_sections(output), subtitle=describe_trace(output))


def _memory_sections(output: TracedMemoryOutput) -> list[Section]:
    facts = component_facts(output)
    return [
        Table(title="Peak memory", columns=tuple(facts), rows=(tuple(facts.values()),)),
        Figure(
            timeline_chart(output.timeline_bytes, output.backward_start),
            caption=f"Peak at {output.memory.peak_operation or 'the forward pass'}.",
        ),
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
