"""The findings of a check as SARIF, the JSON format in which code hosts take findings of linters."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from shapewright import __version__
from shapewright.app.report.outputs.check import finding_output
from shapewright.app.report.outputs.model import plain
from shapewright.core.units import format_percent, format_seconds
from shapewright.lint.rule import get_rule, list_rules, rule_page

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.lint.check import CheckReport
    from shapewright.lint.rule import Finding

SARIF_VERSION = "2.1.0"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"

_SARIF_LEVELS = {"info": "note", "warning": "warning", "error": "error"}


def to_sarif(report: CheckReport, artifact: str, lines: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Convert the report to a SARIF log with one run.

    Args:
        artifact: Path, hub id or name of the checked config.
        lines: Line of each field of the model in the config; findings of other fields are placed at line 1.

    Source: OASIS, Static Analysis Results Interchange Format 2.1.0, sections 3.13 (log), 3.14 (run), 3.19 (tool
    component), 3.27 (result), 3.27.17 (partial fingerprints), 3.30 (region), 3.49
    (rule).
    """
    artifact_uri = quote(artifact, safe="/@+~", errors="surrogateescape")
    rules = list_rules()
    index_of = {rule.code: index for index, rule in enumerate(rules)}
    driver = {
        "name": "shapewright",
        "version": __version__,
        "rules": [_sarif_rule(rule.code) for rule in rules],
    }
    results = [_sarif_result(finding, index_of[finding.code], artifact_uri, lines or {}) for finding in report.findings]
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "artifacts": [{"location": {"uri": artifact_uri}}],
        "results": results,
    }
    if report.combined_fix is not None:
        run["properties"] = {"combined_fix": plain(report.combined_fix)}
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


def _sarif_result(finding: Finding, rule_index: int, artifact_uri: str, lines: Mapping[str, int]) -> dict[str, Any]:
    line = lines.get(finding.field.removeprefix("config."), 1)
    location = {
        "physicalLocation": {
            "artifactLocation": {"uri": artifact_uri, "index": 0},
            "region": {"startLine": line},
        },
        "logicalLocations": [{"fullyQualifiedName": finding.field, "kind": "property"}],
    }
    details = plain(finding_output(finding))
    return {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": finding.message + _cost(finding)},
        "locations": [location],
        # Without the value, so that a finding keeps its identity while it is worked on.
        "partialFingerprints": {
            "shapewrightFinding/v1": sha256(f"{finding.code} {artifact_uri} {finding.field}".encode()).hexdigest()[:32]
        },
        "properties": {name: details[name] for name in ("cost_s", "cost_fraction", "wanted", "suggestions")},
    }
