"""A traced module as text: prediction, findings, memory by module, and a measured step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.app.report.check import print_finding
from shapewright.app.report.columns import Column, columns_of, print_facts, print_notes, print_table
from shapewright.app.report.predict import operation_columns
from shapewright.app.report.traced.outputs import TracedPart, traced_memory_output
from shapewright.core.units import (
    format_bytes,
    format_count,
    format_percent,
    format_rate,
    format_seconds,
)

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.traced.outputs import TracedMemoryOutput, TracedMfuOutput
    from shapewright.lint.traced import TracedCheck
    from shapewright.lowering.torch_trace import Trace
    from shapewright.prediction.traced import TracedPrediction, TracedUtilization

_OPERATIONS_SHOWN = 8
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


def describe_trace(prediction: TracedPrediction) -> str:
    """One line: module, device, inputs, format."""
    trace = prediction.trace
    trainable = (
        "" if trace.num_trainable == trace.num_parameters else f", {format_count(trace.num_trainable)} trainable"
    )
    fused = ", pointwise chains merged" if trace.is_fused else ", eager"
    return (
        f"{trace.title} ({format_count(trace.num_parameters)} parameters{trainable}) on {prediction.device.title}: "
        f"{trace.phase}, {trace.inputs}, {trace.dtype}{fused}; one device"
    )


def prediction_facts(prediction: TracedPrediction) -> dict[str, str]:
    """Main results as texts by name."""
    times = (prediction.step_time_s, prediction.step_time_low_s, prediction.step_time_high_s)
    middle, low, high = map(format_seconds, times)
    facts = {
        "step" if prediction.trace.is_training else "forward pass": f"{middle} ({low} to {high})",
        "tokens/s": f"{prediction.tokens_per_s:,.0f}",
        "model rate": format_rate(prediction.model_flops / prediction.step_time_s if prediction.step_time_s else 0.0),
        "MFU": format_percent(prediction.mfu),
    }
    if prediction.hardware_flops > prediction.model_flops:
        facts["HFU"] = format_percent(prediction.hfu)
    facts["memory"] = _memory_words(prediction)
    return facts


def _memory_words(prediction: TracedPrediction) -> str:
    words = f"{format_bytes(prediction.total_bytes)} of {format_bytes(prediction.device.memory_bytes)}"
    return words if prediction.fits else f"{words} (does not fit)"


def _print_heading(prediction: TracedPrediction, console: Console) -> None:
    console.print(describe_trace(prediction), style="bold", soft_wrap=True)
    print_facts(prediction_facts(prediction), console)


def print_trace(trace: Trace, console: Console) -> None:
    """Print a trace without a device: its linear layers."""
    console.print(f"{trace.title}: {trace.phase}, {trace.inputs}", style="bold", soft_wrap=True)
    print_table(columns_of(trace.linears, _LINEAR_COLUMNS), console)
    print_notes(trace.notes, console)


def print_traced_prediction(prediction: TracedPrediction, console: Console, *, top: int | None = 20) -> None:
    """Print a prediction of a trace.

    Args:
        prediction: The prediction.
        console: Console to print on.
        top: Operations to list, slowest first; None for all.
    """
    _print_heading(prediction, console)
    console.print()
    print_table(operation_columns(prediction, top=top), console)
    hidden = 0 if top is None else max(0, len(prediction.operations) - top)
    if hidden:
        console.print(f"{hidden} more operations; --all lists them", style="dim")
    print_notes(prediction.warnings, console)


def print_traced_check(report: TracedCheck, console: Console) -> None:
    """Print findings and the slowest operations."""
    prediction = report.prediction
    _print_heading(prediction, console)
    console.print()
    for finding in report.findings:
        print_finding(finding, console)
    if not report.findings:
        console.print("no findings", style="green")
    if report.num_suppressed:
        console.print(f"{report.num_suppressed} findings suppressed by --ignore", style="dim")
    console.print()
    print_table(operation_columns(prediction, top=_OPERATIONS_SHOWN), console)
    repeated = {"does-not-fit"} if any(finding.code == "ME101" for finding in report.findings) else set()
    print_notes([note for note in prediction.warnings if note.code not in repeated], console)


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


def print_memory_of_trace(prediction: TracedPrediction, console: Console) -> None:
    """Print the memory of a trace: components, peak, and modules."""
    output = traced_memory_output(prediction)
    console.print(describe_trace(prediction), style="bold", soft_wrap=True)
    console.print(_memory_words(prediction), style="green" if prediction.fits else "bold red")
    print_facts(component_facts(output), console)
    console.print(
        f"peak at {output.memory.peak_operation or 'the forward pass'}; saved between the passes "
        f"{format_bytes(output.memory.saved_bytes)}",
        soft_wrap=True,
    )
    console.print()
    print_table(memory_columns(output), console)
    print_notes(prediction.warnings, console)


def print_traced_mfu(found: TracedUtilization, output: TracedMfuOutput, console: Console) -> None:
    """Print a measured step of a trace."""
    console.print(describe_trace(found.prediction), style="bold", soft_wrap=True)
    print_facts(
        {
            "measured": format_seconds(output.measured_time_s),
            "MFU": format_percent(output.mfu),
            "HFU": format_percent(output.hfu),
            "predicted": f"{format_seconds(output.step_time_s)} ({format_seconds(output.step_time_low_s)} to "
            f"{format_seconds(output.step_time_high_s)})",
            "reachable MFU": format_percent(output.reachable_mfu),
            "unexplained": format_seconds(max(output.unexplained_s, 0.0)),
        },
        console,
    )
    console.print()
    print_table(part_columns(output), console)
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
