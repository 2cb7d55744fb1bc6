"""A check's report for machines: plain JSON, and SARIF 2.1.0 for code hosts and editors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shapewright import __version__
from shapewright.lint.registry import get_rule, list_rules, rule_page
from shapewright.units import format_percent, format_seconds

if TYPE_CHECKING:
    from shapewright.lint.check import CheckReport
    from shapewright.lint.finding import Finding, Suggestion
    from shapewright.lint.nearest import BetterShape

SCHEMA_VERSION = 1
"""Of the object that to_json makes; it grows when a key changes its meaning or goes."""

SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_SARIF_LEVELS = {"info": "note", "warning": "warning", "error": "error"}


def to_json(report: CheckReport) -> dict[str, Any]:
    """Findings and better shapes as plain objects; the prediction itself is printed by its own command."""
    prediction = report.prediction
    return {
        "schema_version": SCHEMA_VERSION,
        "step_time_s": prediction.step_time_s if prediction else None,
        "software": prediction.software if prediction else None,
        "problem": report.problem,
        "num_suppressed": report.num_suppressed,
        "findings": [_finding(finding) for finding in report.findings],
        "better_shapes": [_shape(shape) for shape in report.better_shapes],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "field": finding.field,
        "actual": _plain(finding.actual),
        "wanted": finding.wanted,
        "message": finding.message,
        "cost_s": finding.cost_s,
        "cost_fraction": finding.cost_fraction,
        "suggestions": [_suggestion(suggestion) for suggestion in finding.suggestions],
    }


def _suggestion(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "kind": suggestion.kind,
        "title": suggestion.title,
        "changes": _plain(suggestion.changes),
        "parameters_change_fraction": suggestion.parameters_change_fraction,
        "predicted_gain_fraction": suggestion.predicted_gain_fraction,
    }


def _shape(shape: BetterShape) -> dict[str, Any]:
    return {
        "title": shape.title,
        "changes": _plain(shape.changes),
        "step_time_s": shape.step_time_s,
        "speedup": shape.speedup,
        "gain_fraction": shape.gain_fraction,
        "parameters_change_fraction": shape.parameters_change_fraction,
    }


def _plain(value: object) -> Any:
    """Turn tuples and mappings into what json writes."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def to_sarif(report: CheckReport, artifact: str) -> dict[str, Any]:
    """The report as a SARIF log with one run.

    Args:
        report: What was found.
        artifact: Path or URL of the config that was checked, or its name.

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
    details = _finding(finding)
    return {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": finding.message + _cost(finding)},
        "locations": [location],
        "properties": {name: details[name] for name in ("cost_s", "cost_fraction", "wanted", "suggestions")},
    }
