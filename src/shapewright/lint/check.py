"""check_model: every rule on one model, device, workload and layout, with what each finding costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import ShapewrightError
from shapewright.layout import ParallelLayout
from shapewright.lint.finding import SEVERITIES, Finding
from shapewright.lint.judge import judge
from shapewright.lint.nearest import BetterShape, find_better_shapes
from shapewright.lint.registry import list_rules, select_rules
from shapewright.lint.what_if import WhatIf
from shapewright.perf.software import TUNED
from shapewright.shown import ShownInNotebook

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.predict import Prediction
    from shapewright.workload import Workload


@dataclass(frozen=True, kw_only=True)
class CheckReport(ShownInNotebook):
    """What a check found.

    Attributes:
        prediction: The step as it is; None where it cannot run, which a finding then explains.
        findings: What is wrong: first what cannot run, then by predicted cost.
        num_suppressed: Findings left out because their rules were ignored.
        better_shapes: Nearest faster shapes of almost the same parameter count, best first.
        problem: Why there is no prediction; empty where there is one.
    """

    prediction: Prediction | None
    findings: tuple[Finding, ...]
    num_suppressed: int = 0
    better_shapes: tuple[BetterShape, ...] = ()
    problem: str = ""


def check_model(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout | None = None,
    ignore: Iterable[str] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
    look_around: bool = True,
) -> CheckReport:
    """Check a model against every rule, and look around for better shapes.

    Args:
        config: The model.
        device: The device.
        workload: What is run.
        layout: How it is spread; by default one device.
        ignore: Rules to leave out, by code, name or family; their findings are counted.
        uncalibrated: Price by the data sheet alone.
        software: Training software that runs it, as predict takes it.
        look_around: Whether to look for better shapes.

    Raises:
        ShapewrightError: there can be no prediction, and no rule explains why.
        UnknownRuleError: an ignored rule does not exist.
    """
    ignored = select_rules(ignore)
    case = WhatIf(config, device, workload, layout or ParallelLayout(), uncalibrated=uncalibrated, software=software)
    found = find_violations(case)
    outcome = case.outcome
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
        better_shapes=find_better_shapes(case) if look_around and prediction else (),
        problem=problem,
    )


def find_violations(case: WhatIf) -> list[Finding]:
    """Run every rule and judge what it saw; the costliest first, after what cannot run."""
    found = [
        finding
        for rule in list_rules()
        for violation in rule.check(case)
        if (finding := judge(rule, violation, case)) is not None
    ]
    return sorted(found, key=_weight, reverse=True)


def _weight(finding: Finding) -> tuple[bool, float, int]:
    cannot_run = finding.severity == "error" and finding.cost_s is None
    return cannot_run, finding.cost_s or 0.0, SEVERITIES.index(finding.severity)


def exit_code(report: CheckReport, fail_on: str = "warning") -> int:
    """Exit code of a check: 1 if a finding is at least as severe as ``fail_on``, otherwise 0.

    Args:
        report: What was found.
        fail_on: One of SEVERITIES, or ``never``.
    """
    if fail_on == "never":
        return 0
    least = SEVERITIES.index(fail_on)
    return int(any(SEVERITIES.index(finding.severity) >= least for finding in report.findings))
