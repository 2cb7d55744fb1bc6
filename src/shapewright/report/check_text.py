"""A check for a person: verdict, findings by cost, the slowest operations, nearest better shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.report.columns import Column, columns_of, print_notes, print_table
from shapewright.report.prediction_text import operation_columns, print_verdict
from shapewright.units import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.lint import BetterShape, CheckReport, Finding

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_OPERATIONS_SHOWN = 8
# What the prediction warns of and a finding says better.
_SAID_BY_FINDING = {"ME101": "does not fit", "CF101": "max_position_embeddings"}


def print_check(report: CheckReport, console: Console, *, notes: tuple[str, ...] = ()) -> None:
    """Print a whole check.

    Args:
        report: What was found.
        console: Where to.
        notes: What the reader of the config had to say.
    """
    prediction = report.prediction
    if prediction is not None:
        print_verdict(prediction, console)
        console.print()
    for finding in report.findings:
        print_finding(finding, console)
    if not report.findings:
        if prediction is not None:
            console.print("nothing to find fault with", style="green")
        else:
            # Whoever ignores the rule that explains it still has to know.
            console.print(f"cannot run: {report.problem}", style=_STYLES["error"], soft_wrap=True)
    if report.num_suppressed:
        console.print(f"{report.num_suppressed} findings left out by --ignore", style="dim")
    if prediction is not None:
        console.print()
        print_table(operation_columns(prediction, top=_OPERATIONS_SHOWN), console)
        shown = min(_OPERATIONS_SHOWN, len(prediction.operations))
        console.print(
            f"slowest {shown} of {len(prediction.operations)} operations; 'shapewright predict' lists more", style="dim"
        )
        if report.better_shapes:
            console.print()
            console.print(
                "nearest better shapes of almost the same size (but for a padded vocabulary, models to train anew)",
                style="bold",
            )
            print_table(better_shape_columns(report.better_shapes), console)
    print_notes((*notes, *_unsaid_warnings(report)), console)


def _unsaid_warnings(report: CheckReport) -> list[str]:
    """Warnings of the prediction that no finding repeats with its remedy."""
    found = {finding.code for finding in report.findings}
    said = tuple(text for code, text in _SAID_BY_FINDING.items() if code in found)
    warnings = report.prediction.warnings if report.prediction is not None else ()
    return [line for line in warnings if not any(text in line for text in said)]


def finding_words(finding: Finding) -> dict[str, Any]:
    """What is said of one finding: its heading, its cost, and a line for each suggestion."""
    cost = ""
    if finding.cost_s is not None and finding.cost_fraction is not None:
        cost = f"costs {format_seconds(finding.cost_s)}, {format_percent(finding.cost_fraction)} of the step"
    # The message of one line ends with the suggestions, which follow on lines of their own.
    message = finding.message.removesuffix("; " + " or ".join(suggestion.title for suggestion in finding.suggestions))
    suggestions = []
    for suggestion in finding.suggestions:
        facts: list[str] = [suggestion.kind]
        if suggestion.predicted_gain_fraction is not None:
            facts.append(f"saves {format_percent(suggestion.predicted_gain_fraction)}")
        if suggestion.parameters_change_fraction:
            facts.append(f"{100.0 * suggestion.parameters_change_fraction:+.2g} % parameters")
        suggestions.append(f"{suggestion.title} ({', '.join(facts)})")
    return {"message": message, "cost": cost, "suggestions": suggestions}


def print_finding(finding: Finding, console: Console) -> None:
    """One finding: code, message, cost, suggestions."""
    words = finding_words(finding)
    cost = f" [{words['cost']}]" if words["cost"] else ""
    console.print(
        f"{finding.severity}: {finding.code} {finding.name}: {words['message']}{cost}",
        style=_STYLES[finding.severity],
        soft_wrap=True,
    )
    for line in words["suggestions"]:
        console.print(f"    -> {line}", soft_wrap=True)


def better_shape_columns(shapes: tuple[BetterShape, ...]) -> list[Column]:
    """Alternatives, best first, as the columns of a table."""
    rows = [
        [
            shape.title,
            format_seconds(shape.step_time_s),
            f"{shape.speedup:.3f}x",
            f"{100.0 * shape.parameters_change_fraction:+.2g} %" if shape.parameters_change_fraction else "same",
        ]
        for shape in shapes
    ]
    headings = (
        Column("change", is_text=True),
        Column("step"),
        Column("speed-up"),
        Column("parameters", rank=1),
    )
    return columns_of(rows, headings)
