"""A check as text (verdict, findings by cost, slowest operations, nearest better shapes), and as SARIF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shapewright import __version__
from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.optimize.search_rows import describe_loss, describe_net
from shapewright.app.report.outputs.check import finding_output
from shapewright.app.report.outputs.effect import effect_output
from shapewright.app.report.outputs.model import plain
from shapewright.app.report.predict import operation_columns, print_verdict
from shapewright.core.units import format_percent, format_seconds
from shapewright.lint.registry import get_rule, list_rules, rule_page

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.core.notes import Note
    from shapewright.lint import BetterShape, CheckReport, Finding

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_OPERATIONS_SHOWN = 8
# Rules whose findings repeat a warning of the prediction, with the code of that warning.
_WARNING_OF_RULE = {"ME101": "does-not-fit", "CF101": "overlong"}


def print_check(report: CheckReport, console: Console, *, notes: tuple[str, ...] = ()) -> None:
    """Print a whole check.

    Args:
        report: The check.
        console: Console to print on.
        notes: Notes of the scenario.
    """
    prediction = report.prediction
    if prediction is not None:
        print_verdict(prediction, console)
        console.print()
    for finding in report.findings:
        print_finding(finding, console)
    if not report.findings:
        if prediction is not None:
            console.print("no findings", style="green")
        else:
            # Shown even if the rule that explains it is ignored.
            console.print(f"cannot run: {report.refusal}", style=_STYLES["error"], soft_wrap=True)
    if report.num_suppressed:
        console.print(f"{report.num_suppressed} findings suppressed by --ignore", style="dim")
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
                "nearest better shapes of almost the same size, after 20 tokens per parameter (except for a padded "
                "vocabulary, they need retraining)",
                style="bold",
            )
            print_table(better_shape_columns(report.better_shapes), console)
    print_notes((*notes, *_other_warnings(report)), console)


def _other_warnings(report: CheckReport) -> list[Note]:
    """Warnings of the prediction that no finding repeats."""
    repeated = {_WARNING_OF_RULE.get(finding.code) for finding in report.findings}
    warnings = report.prediction.warnings if report.prediction is not None else ()
    return [note for note in warnings if note.code not in repeated]


def finding_words(finding: Finding) -> dict[str, Any]:
    """Texts of one finding: message, cost, and a line for each suggestion."""
    cost = ""
    if finding.cost_s is not None and finding.cost_fraction is not None:
        cost = f"costs {format_seconds(finding.cost_s)}, {format_percent(finding.cost_fraction)} of the step"
    # The message ends with the suggestions, which are printed on lines of their own.
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
    """Print one finding: code, message, cost, suggestions."""
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
    effects = [effect_output(shape.effect) for shape in shapes]
    rows = [
        [
            shape.title,
            format_seconds(shape.step_time_s),
            f"{shape.speedup:.3f}x",
            describe_loss(effect),
            describe_net(effect),
            f"{100.0 * shape.parameters_change_fraction:+.2g} %" if shape.parameters_change_fraction else "same",
        ]
        for shape, effect in zip(shapes, effects, strict=True)
    ]
    headings = (
        Column("change", is_text=True),
        Column("step", rank=2),
        Column("speed-up"),
        Column("loss (nats)", rank=3, is_text=True),
        Column("to the same loss", rank=1, is_text=True),
        Column("parameters", rank=1),
    )
    return columns_of(rows, headings)


SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_SARIF_LEVELS = {"info": "note", "warning": "warning", "error": "error"}


def to_sarif(report: CheckReport, artifact: str) -> dict[str, Any]:
    """Convert the report to a SARIF log with one run.

    Args:
        report: The report.
        artifact: Path, URL or name of the checked config.

    Source: OASIS, Static Analysis Results Interchange Format 2.1.0, sections 3.13 (log), 3.14 (run), 3.19 (tool
    component), 3.27 (result), 3.49 (rule).
    """
    artifact_uri = quote(artifact, safe="/:?#&=%@+~")
    rules = list_rules()
    index_of = {rule.code: index for index, rule in enumerate(rules)}
    driver = {
        "name": "shapewright",
        "version": __version__,
        "rules": [_sarif_rule(rule.code) for rule in rules],
    }
    results = [_sarif_result(finding, index_of[finding.code], artifact_uri) for finding in report.findings]
    run = {"tool": {"driver": driver}, "artifacts": [{"location": {"uri": artifact_uri}}], "results": results}
    return {"$schema": SARIF_SCHEMA, "version": SARIF_VERSION, "runs": [run]}


def _sarif_rule(code: str) -> dict[str, Any]:
    rule = get_rule(code)
    page = rule_page(code)
    return {
        "id": rule.code,
        "name": "".join(word.capitalize() for word in rule.name.split("-")),
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": page.partition("## What it does")[2].partition("\n## ")[0].strip()},
        "help": {"text": page, "markdown": page},
        "properties": {"family": rule.family, "since": rule.since, "reads": list(rule.reads)},
    }


def _cost(finding: Finding) -> str:
    if finding.cost_s is None or finding.cost_fraction is None:
        return ""
    return f" (predicted cost {format_seconds(finding.cost_s)}, {format_percent(finding.cost_fraction)} of the step)"


def _sarif_result(finding: Finding, rule_index: int, artifact_uri: str) -> dict[str, Any]:
    location = {
        "physicalLocation": {"artifactLocation": {"uri": artifact_uri, "index": 0}},
        "logicalLocations": [{"fullyQualifiedName": finding.field, "kind": "property"}],
    }
    details = plain(finding_output(finding))
    return {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": finding.message + _cost(finding)},
        "locations": [location],
        "properties": {name: details[name] for name in ("cost_s", "cost_fraction", "wanted", "suggestions")},
    }
