"""check_scenario: run every rule on a scenario, cost the findings, and apply exact fixes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ShapewrightError
from shapewright.core.notebook import NotebookDisplay
from shapewright.lint.better_shapes import BetterShape, find_better_shapes
from shapewright.lint.evaluate import evaluate
from shapewright.lint.registry import list_rules, select_rules
from shapewright.lint.rule import SEVERITIES, Finding
from shapewright.prediction.scenario import Scenario

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction


@dataclass(frozen=True, kw_only=True)
class CheckReport(NotebookDisplay):
    """Result of a check.

    Attributes:
        prediction: The predicted step; None where it cannot run, which a finding explains.
        findings: Findings, first those that prevent the step from running, then by predicted cost.
        num_suppressed: Number of findings of ignored rules.
        better_shapes: Similar shapes that are faster, with almost the same parameter count, best first.
        problem: Why there is no prediction; empty otherwise.
    """

    prediction: Prediction | None
    findings: tuple[Finding, ...]
    num_suppressed: int = 0
    better_shapes: tuple[BetterShape, ...] = ()
    problem: str = ""


def check_scenario(scenario: Scenario, *, ignore: Iterable[str] = (), look_around: bool = True) -> CheckReport:
    """Check a scenario against every rule, and search similar shapes for better ones.

    Args:
        scenario: The scenario.
        ignore: Rules to ignore, by code, name or family; their findings are counted.
        look_around: Whether to search for better shapes.

    Raises:
        ShapewrightError: the step cannot be predicted, and no rule explains why.
        UnknownRuleError: an ignored rule does not exist.
    """
    ignored = select_rules(ignore)
    found = run_rules(scenario)
    outcome = scenario.outcome
    if isinstance(outcome, ShapewrightError):
        if not any(finding.severity == "error" for finding in found):
            raise outcome
        prediction, problem = None, str(outcome)
    else:
        prediction, problem = outcome, ""
    return CheckReport(
        prediction=prediction,
        findings=tuple(finding for finding in found if finding.code not in ignored),
        num_suppressed=sum(finding.code in ignored for finding in found),
        better_shapes=find_better_shapes(scenario) if look_around and prediction else (),
        problem=problem,
    )


def run_rules(scenario: Scenario) -> list[Finding]:
    """Run every rule and cost its violations; findings that prevent the step come first, then the costliest."""
    found = [
        finding
        for rule in list_rules()
        for violation in rule.check(scenario)
        if (finding := evaluate(rule, violation, scenario)) is not None
    ]
    return sorted(found, key=_sort_key, reverse=True)


def _sort_key(finding: Finding) -> tuple[bool, float, int]:
    cannot_run = finding.severity == "error" and finding.cost_s is None
    return cannot_run, finding.cost_s or 0.0, SEVERITIES.index(finding.severity)


def exit_code(report: CheckReport, fail_on: str = "warning") -> int:
    """Exit code of a check: 1 if a finding is at least as severe as ``fail_on``, otherwise 0.

    Args:
        report: The report.
        fail_on: One of SEVERITIES, or ``never``.
    """
    if fail_on == "never":
        return 0
    least = SEVERITIES.index(fail_on)
    return int(any(SEVERITIES.index(finding.severity) >= least for finding in report.findings))


def exact_changes(report: CheckReport) -> dict[str, Any]:
    """Collect the field changes of the first exact suggestion of each finding."""
    changes: dict[str, Any] = {}
    for finding in report.findings:
        exact = [suggestion for suggestion in finding.suggestions if suggestion.kind == "exact"]
        if exact:
            changes = {**exact[0].changes, **changes}
    return changes


def fix_config(config: TransformerConfig, report: CheckReport) -> TransformerConfig:
    """Apply every exact suggestion to a config; without one, return the same object."""
    changes = exact_changes(report)
    return replace(config, **changes) if changes else config
