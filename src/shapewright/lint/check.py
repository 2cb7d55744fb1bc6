"""check_scenario: run every rule on a scenario, predict the cost of each violation, and apply exact fixes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from shapewright.core.errors import ShapewrightError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Refusal
from shapewright.lint.better_shapes import BetterShape, find_better_shapes
from shapewright.lint.combined import CombinedFix, combine_fixes, name_changes
from shapewright.lint.layout_fixes import NEARLY_BEST
from shapewright.lint.rule import SEVERITIES, Finding, Suggestion, list_rules, select_rules
from shapewright.lowering import num_microbatches
from shapewright.models import Model
from shapewright.prediction.scenario import Scenario
from shapewright.workload.images import has_tower, tower_job

if TYPE_CHECKING:
    from shapewright.lint.rule import Fix, Rule, Violation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

QUIET_BELOW_FRACTION = 0.002
"""Violations with a smaller predicted cost are not reported: a tenth of the run-to-run noise of a training step."""

WARNING_FROM_FRACTION = 0.01
ERROR_FROM_FRACTION = 0.10

MOST_SUGGESTIONS = 3

_VISIBLE_SLOWDOWN = 1.02  # smaller slowdowns of a single operation are not reported


@dataclass(frozen=True)
class _PricedFix:
    suggestion: Suggestion
    gain_fraction: float
    before: Prediction
    after: Prediction


def evaluate(rule: Rule, violation: Violation, scenario: Scenario) -> Finding | None:
    """Cost a violation and return its finding; None where the cost is negligible."""
    if not scenario.is_possible:
        own = violation.field.rpartition(".")[2]
        possible = tuple(kept for fix in violation.fixes if (kept := _suggest_if_possible(fix, scenario, own)))
        return _finding(rule, violation, violation.severity, suggestions=possible) if violation.severity else None
    # Slower fixes are valid where the finding is not about time.
    keep_slower = violation.severity == "error" or not violation.has_cost
    own = violation.field.rpartition(".")[2]
    priced = [found for fix in violation.fixes if (found := _price(fix, scenario, own, keep_slower=keep_slower))]
    _sort(priced)
    suggestions = tuple(found.suggestion for found in priced[: 1 if violation.only_best else MOST_SUGGESTIONS])
    best = priced[0] if priced else None
    cost_fraction = max(0.0, *(found.gain_fraction for found in priced)) if best and violation.has_cost else 0.0
    cost_fraction = min(cost_fraction, violation.max_cost_fraction)
    severity = rate_severity(violation.severity, cost_fraction, violation.max_severity)
    if severity is None:
        return None
    if best is None or cost_fraction < QUIET_BELOW_FRACTION:
        return _finding(rule, violation, severity, suggestions=suggestions)
    return _finding(
        rule,
        violation,
        severity,
        suggestions=suggestions,
        slowest=_slowest_operation(best.before, best.after),
        cost_s=cost_fraction * scenario.predict().step_time_s,
        cost_fraction=cost_fraction,
    )


def rate_severity(least: str | None, cost_fraction: float, most: str | None = None) -> str | None:
    """Return the severity of a cost, limited to ``least`` and ``most``; None where it is not reported."""
    by_cost = None
    if cost_fraction >= QUIET_BELOW_FRACTION:
        by_cost = "info"
    if cost_fraction >= WARNING_FROM_FRACTION:
        by_cost = "warning"
    if cost_fraction >= ERROR_FROM_FRACTION:
        by_cost = "error"
    found = [severity for severity in (least, by_cost) if severity]
    if not found:
        return None
    severity = max(found, key=SEVERITIES.index)
    return min(severity, most, key=SEVERITIES.index) if most else severity


def _suggest_if_possible(fix: Fix, scenario: Scenario, own: str) -> Suggestion | None:
    """Return the suggestion of a fix if the fixed step can run, or fails for another reason; otherwise None."""
    fixed = scenario.try_replace(fix.changes)
    if fixed is None or str(fixed.outcome) == str(scenario.outcome):
        return None
    return Suggestion(kind=fix.kind, title=_title(fix, scenario, own), changes=dict(fix.changes))


def _title(fix: Fix, scenario: Scenario, own: str) -> str:
    """Return the title of a fix with every field that it sets; the field of the violation needs no name."""
    named = [text.partition("=") for text in name_changes(scenario.config, fix.changes).split(", ") if text]
    silent = [f"{name}={value}" for name, _, value in named if name != own and name not in fix.title]
    return ", ".join([fix.title, *silent])


def _sort(priced: list[_PricedFix]) -> None:
    """Sort fixes by gain; among those that change the model and gain about as much, the smallest change comes first."""
    least_ratio = min((1.0 - found.gain_fraction for found in priced), default=1.0)

    def key(found: _PricedFix) -> tuple[bool, float, float]:
        is_tied = found.suggestion.kind == "retrain" and 1.0 - found.gain_fraction <= NEARLY_BEST * least_ratio
        return not is_tied, abs(found.suggestion.parameters_change_fraction) * is_tied, -found.gain_fraction

    priced.sort(key=key)


def _price(fix: Fix, scenario: Scenario, own: str, *, keep_slower: bool) -> _PricedFix | None:
    """Predict the gain of a fix; None where it is impossible, does not fit in memory, or is not faster.

    Where the scenario itself does not fit, a change of layout or batch must not need more memory (405 billion
    parameters are faster on one stage than on 16, and fit on no device), while a change of the model may.
    """
    before = scenario.try_replace(fix.common_changes) if fix.common_changes else scenario
    after = scenario.try_replace({**fix.common_changes, **fix.changes})
    if before is None or after is None or not before.is_possible or not after.is_possible:
        return None
    if not after.fits and (scenario.fits or (fix.kind == "runtime" and _needs_more(after, scenario))):
        return None
    ratio = after.time_per_token_s / before.time_per_token_s
    parameters = before.predict().parameters, after.predict().parameters
    gain_fraction = 1.0 - ratio
    if fix.kind == "retrain":
        # Time is proportional to the parameters used per token.
        gain_fraction = 1.0 - ratio * parameters[0].active / parameters[1].active
    if not keep_slower and (ratio > 1.0 or gain_fraction <= 0.0):
        return None
    suggestion = Suggestion(
        kind=fix.kind,
        title=_title(fix, scenario, own),
        changes=dict(fix.changes),
        parameters_change_fraction=parameters[1].total / parameters[0].total - 1.0,
        predicted_gain_fraction=None if keep_slower else gain_fraction,
        compared_at=dict(fix.common_changes),
    )
    return _PricedFix(suggestion, gain_fraction, before.predict(), after.predict())


def _needs_more(after: Scenario, before: Scenario) -> bool:
    return after.predict().memory.total_bytes > before.predict().memory.total_bytes


def _slowest_operation(before: Prediction, after: Prediction) -> str:
    """Describe the operation that loses the most time to the violation, with its slowdown.

    Empty where the fix changes stages, chunks or the batch: operations then differ in number of executions.
    """
    if before.tokens_per_step != after.tokens_per_step or _stages_of(before) != _stages_of(after):
        return ""
    fixed_s = {(priced.operation.name, priced.operation.pass_name): priced.total_time_s for priced in after.operations}
    worst_loss_s, worst = 0.0, ""
    for priced in before.operations:
        if priced.operation.kind == "pointwise":  # its time follows from its bytes
            continue
        other_s = fixed_s.get((priced.operation.name, priced.operation.pass_name))
        if (
            other_s
            and priced.total_time_s - other_s > worst_loss_s
            and priced.total_time_s > _VISIBLE_SLOWDOWN * other_s
        ):
            worst_loss_s = priced.total_time_s - other_s
            worst = f"{priced.operation.name} predicted {priced.total_time_s / other_s:.2f}x slower"
    return worst


def _stages_of(prediction: Prediction) -> tuple[int, int]:
    return prediction.layout.pipeline_parallel, prediction.layout.virtual_pipeline


def _finding(
    rule: Rule,
    violation: Violation,
    severity: str,
    *,
    suggestions: tuple[Suggestion, ...],
    slowest: str = "",
    cost_s: float | None = None,
    cost_fraction: float | None = None,
) -> Finding:
    message = f"{violation.field.rpartition('.')[2]}={violation.actual} {violation.problem}"
    if slowest:
        message += f": {slowest}"
    if suggestions:
        message += "; " + " or ".join(suggestion.title for suggestion in suggestions)
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        field=violation.field,
        actual=violation.actual,
        wanted=violation.wanted,
        message=message,
        cost_s=cost_s,
        cost_fraction=cost_fraction,
        suggestions=suggestions,
        slowest=slowest,
        least_severity=violation.severity,
        most_severity=violation.max_severity,
    )


class HasFindings(Protocol):
    """A result with findings."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings."""


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckReport(NotebookDisplay):
    """Result of a check.

    Attributes:
        prediction: The predicted step; None where it cannot run, which a finding explains.
        findings: Findings, first those that prevent the step from running, then by predicted cost.
        num_suppressed: Number of findings of ignored rules.
        better_shapes: Similar shapes that are better, with almost the same parameter count, best first.
        refusal: Why there is no prediction; None where there is one.
        combined_fix: The fixes of all findings that save time together; None where none does.
        assumed_changes: Where the step cannot run: the changes with which it can, and with which the findings after the
            errors and the combined fix are predicted; empty otherwise.
        scenario: What was checked.
    """

    prediction: Prediction | None
    findings: tuple[Finding, ...]
    num_suppressed: int = 0
    better_shapes: tuple[BetterShape, ...] = ()
    refusal: Refusal | None = None
    combined_fix: CombinedFix | None = None
    assumed_changes: Mapping[str, Any] = field(default_factory=dict)
    scenario: Scenario | None = field(default=None, repr=False)


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
    of_tower = _check_tower(scenario)
    outcome = scenario.outcome
    combined: CombinedFix | None = None
    assumed: dict[str, Any] = {}
    if isinstance(outcome, ShapewrightError):
        if not any(finding.severity == "error" for finding in found):
            raise outcome
        prediction, refusal = None, Refusal.of(outcome)
        possible, assumed = _make_possible(scenario, found)
        if possible is not None:
            codes = {finding.code for finding in found}
            others = [finding for finding in run_rules(possible) if finding.code not in codes]
            others = [each for each in others if each.field.rpartition(".")[2] not in assumed]
            others, combined = _attribute(possible, others, ignored)
            found += [replace(finding, is_assumed=True) for finding in others]
    else:
        prediction, refusal = outcome, None
        found, combined = _attribute(scenario, found, ignored)
    found = sorted([*found, *of_tower], key=_sort_key, reverse=True)
    return CheckReport(
        prediction=prediction,
        findings=tuple(finding for finding in found if finding.code not in ignored),
        num_suppressed=sum(finding.code in ignored for finding in found),
        better_shapes=find_better_shapes(scenario) if look_around and prediction else (),
        refusal=refusal,
        combined_fix=combined,
        assumed_changes=assumed,
        scenario=scenario,
    )


_TOWER_PATH = "vision_config"


def _check_tower(scenario: Scenario) -> list[Finding]:
    """Check the vision tower as a model of its own; costs are shares of the whole step, and no fix is combined."""
    if not has_tower(scenario.config, scenario.workload) or not scenario.is_possible:
        return []
    passes = num_microbatches(scenario.workload, scenario.layout)
    config, workload, layout = tower_job(scenario.config, scenario.workload, scenario.layout, passes)
    model = Model(config=config, raw=None, source=_TOWER_PATH)
    tower = Scenario(model=model, device=scenario.device, workload=workload, layout=layout, software=scenario.software)
    step_s = scenario.predict().step_time_s
    share = tower.predict().step_time_s / step_s if tower.is_possible else 0.0
    findings = []
    for finding in run_rules(tower):
        if not finding.field.startswith("config.") or finding.cost_s is None:
            continue  # batch, layout and memory are those of the whole model
        fraction = finding.cost_s / step_s
        severity = rate_severity(finding.least_severity, fraction, finding.most_severity)
        if severity is None:
            continue
        name = finding.field.removeprefix("config.")
        suggestions = [
            replace(
                suggestion,
                kind="retrain",
                changes={f"{_TOWER_PATH}.{field}": value for field, value in suggestion.changes.items()},
                predicted_gain_fraction=(suggestion.predicted_gain_fraction or 0.0) * share,
            )
            for suggestion in finding.suggestions
        ]
        findings.append(
            replace(
                finding,
                field=f"{_TOWER_PATH}.{name}",
                message=f"{_TOWER_PATH}.{finding.message}",
                severity=severity,
                cost_fraction=fraction,
                suggestions=tuple(suggestions),
            )
        )
    return findings


def _make_possible(scenario: Scenario, errors: Sequence[Finding]) -> tuple[Scenario | None, dict[str, Any]]:
    """Apply the first suggestion of each error until the step can run; None and no changes where it never does."""
    changes: dict[str, Any] = {}
    for finding in errors:
        for suggestion in finding.suggestions:
            changed = scenario.try_replace({**changes, **suggestion.changes})
            if changed is not None:
                changes |= suggestion.changes
                if changed.is_possible:
                    return changed, changes
                break
    return None, {}


def _attribute(
    scenario: Scenario, findings: list[Finding], ignored: Collection[str]
) -> tuple[list[Finding], CombinedFix | None]:
    """Share what the combined fix saves among the findings that are not ignored, and drop those without a share."""
    counted = [finding for finding in findings if finding.code not in ignored]
    combined, shares, compared = combine_fixes(scenario, counted)
    step_s = scenario.predict().step_time_s
    kept = [finding for finding in findings if finding.code in ignored]
    for index, finding in enumerate(counted):
        share = shares.get(index)
        if share is None:
            kept.append(finding)
            continue
        severity = rate_severity(finding.least_severity, share, finding.most_severity)
        if severity is None:
            continue
        cost_s, cost_fraction = (share * step_s, share) if share >= QUIET_BELOW_FRACTION else (None, None)
        message = finding.message
        if index in compared:
            slowest = _slowest_operation(*compared[index])
            message = message.replace(f": {finding.slowest}", f": {slowest}" if slowest else "", 1)
        kept.append(replace(finding, severity=severity, message=message, cost_s=cost_s, cost_fraction=cost_fraction))
    return sorted(kept, key=_sort_key, reverse=True), combined


def run_rules(scenario: Scenario) -> list[Finding]:
    """Run every rule and cost each violation alone; findings that prevent the step come first, then the costliest."""
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


def exit_code(report: HasFindings, fail_on: str = "warning") -> int:
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
