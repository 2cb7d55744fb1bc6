"""A check for a person: verdict, findings by cost, the slowest operations, nearest better shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.report.prediction_text import describe, operations_table, verdict_table
from shapewright.units import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shapewright.lint import BetterShape, CheckReport, Finding

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_OPERATIONS_SHOWN = 8


def print_check(report: CheckReport, console: Console, *, notes: tuple[str, ...] = ()) -> None:
    """Print a whole check.

    Args:
        report: What was found.
        console: Where to.
        notes: What the reader of the config had to say.
    """
    prediction = report.prediction
    if prediction is not None:
        console.print(describe(prediction), style="bold")
        console.print(verdict_table(prediction))
        console.print()
    for finding in report.findings:
        print_finding(finding, console)
    if not report.findings:
        console.print("nothing to find fault with", style="green")
    if report.num_suppressed:
        console.print(f"{report.num_suppressed} findings left out by --ignore", style="dim")
    if prediction is not None:
        console.print()
        console.print(operations_table(prediction, top=_OPERATIONS_SHOWN))
        console.print(
            f"slowest {_OPERATIONS_SHOWN} of {len(prediction.operations)} operations; 'shapewright predict' lists more",
            style="dim",
        )
        if report.better_shapes:
            console.print()
            console.print(
                "nearest better shapes of almost the same size (another model: to be trained anew)", style="bold"
            )
            console.print(better_shapes_table(report.better_shapes))
    shown = (*notes, *(prediction.warnings if prediction is not None else ()))
    for line in shown:
        console.print(f"note: {line}", style="yellow", soft_wrap=True)


def print_finding(finding: Finding, console: Console) -> None:
    """One finding: code, message, cost, suggestions."""
    cost = ""
    if finding.cost_s is not None and finding.cost_fraction is not None:
        cost = f" [costs {format_seconds(finding.cost_s)}, {format_percent(finding.cost_fraction)} of the step]"
    console.print(
        f"{finding.severity}: {finding.code} {finding.name}: {finding.message}{cost}",
        style=_STYLES[finding.severity],
        soft_wrap=True,
    )
    for suggestion in finding.suggestions:
        facts = [suggestion.kind]
        if suggestion.predicted_gain_fraction is not None:
            facts.append(f"{format_percent(suggestion.predicted_gain_fraction)} faster")
        if suggestion.parameters_change_fraction:
            facts.append(f"{100.0 * suggestion.parameters_change_fraction:+.2g} % parameters")
        console.print(f"    -> {suggestion.title} ({', '.join(facts)})", soft_wrap=True)


def better_shapes_table(shapes: tuple[BetterShape, ...]) -> Table:
    """Alternatives, best first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("change", overflow="fold")
    for name in ("step", "speed-up", "parameters"):
        table.add_column(name, justify="right")
    for shape in shapes:
        change = f"{100.0 * shape.parameters_change_fraction:+.2g} %" if shape.parameters_change_fraction else "same"
        table.add_row(shape.title, format_seconds(shape.step_time_s), f"{shape.speedup:.3f}x", change)
    return table
