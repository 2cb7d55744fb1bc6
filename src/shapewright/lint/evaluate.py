"""Cost of a violation, which is the predicted saving of its best fix, and the severity that follows from the cost."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.lint.combined import describe_changes, drop_unchanged, independent_changes
from shapewright.lint.layout_fixes import NEARLY_BEST
from shapewright.lint.rule import SEVERITIES, Finding, Suggestion, list_rules
from shapewright.prediction.composition.stages import index_operations

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Any

    from shapewright.lint.rule import Fix, Rule, Violation
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

INFO_FROM_FRACTION = 0.002
"""Violations with a smaller predicted cost are not reported: a tenth of the run-to-run noise of a training step."""

WARNING_FROM_FRACTION = 0.01
ERROR_FROM_FRACTION = 0.10

MOST_SUGGESTIONS = 3

_VISIBLE_SLOWDOWN = 1.02  # smaller slowdowns of a single operation are not reported


@dataclass(frozen=True)
class _PricedFix:
    """A suggestion with the predictions that its gain is from."""

    suggestion: Suggestion
    gain_fraction: float
    before: Prediction
    after: Prediction


def evaluate(rule: Rule, violation: Violation, scenario: Scenario) -> Finding | None:
    """Predict the cost of a violation and return its finding; None where the cost is negligible."""
    own_field = violation.field.rpartition(".")[2]
    if not scenario.is_possible:
        possible = tuple(kept for fix in violation.fixes if (kept := _suggest_if_possible(fix, scenario, own_field)))
        return (
            _finding(rule, violation, violation.least_severity, suggestions=possible)
            if violation.least_severity
            else None
        )
    # Slower fixes are valid where the finding is not about time.
    keep_slower = violation.least_severity == "error" or not violation.has_cost
    priced = [found for fix in violation.fixes if (found := _price(fix, scenario, own_field, keep_slower=keep_slower))]
    _sort_by_gain(priced)
    suggestions = tuple(found.suggestion for found in priced[: 1 if violation.only_best else MOST_SUGGESTIONS])
    best = priced[0] if priced else None
    cost_fraction = max(0.0, *(found.gain_fraction for found in priced)) if best and violation.has_cost else 0.0
    cost_fraction = min(cost_fraction, violation.max_cost_fraction)
    severity = rate_severity(violation.least_severity, cost_fraction, violation.most_severity)
    if severity is None:
        return None
    if best is None or cost_fraction < INFO_FROM_FRACTION:
        return _finding(rule, violation, severity, suggestions=suggestions)
    return _finding(
        rule,
        violation,
        severity,
        suggestions=suggestions,
        slowest=slowest_operation(best.before, best.after),
        cost_s=cost_fraction * scenario.predict().step_time_s,
        cost_fraction=cost_fraction,
    )


def rate_severity(least: str | None, cost_fraction: float, most: str | None = None) -> str | None:
    """Return the severity of a cost, limited to ``least`` and ``most``; None where it is not reported."""
    by_cost = None
    if cost_fraction >= INFO_FROM_FRACTION:
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


def _suggest_if_possible(fix: Fix, scenario: Scenario, own_field: str) -> Suggestion | None:
    """Return the suggestion of a fix if the fixed step can run, or fails for another reason; otherwise None."""
    fixed = scenario.try_replace(fix.changes)
    if fixed is None or str(fixed.outcome) == str(scenario.outcome):
        return None
    return Suggestion(
        kind=fix.kind, title=_title(fix, scenario, own_field), changes=drop_unchanged(scenario, fix.changes)
    )


def _title(fix: Fix, scenario: Scenario, own_field: str) -> str:
    """Return the title of a fix with every field that it sets, except the field of the violation."""
    changes = describe_changes(scenario.config, drop_unchanged(scenario, fix.changes))
    named = [text.partition("=") for text in changes.split(", ") if text]
    missing = [f"{name}={value}" for name, _, value in named if name != own_field and name not in fix.title]
    return ", ".join([fix.title, *missing])


def _sort_by_gain(priced: list[_PricedFix]) -> None:
    """Sort fixes by gain; among those that change the model and gain about as much, the smallest change comes first."""
    least_ratio = min((1.0 - found.gain_fraction for found in priced), default=1.0)

    def key(found: _PricedFix) -> tuple[bool, float, float]:
        is_tied = found.suggestion.kind == "retrain" and 1.0 - found.gain_fraction <= NEARLY_BEST * least_ratio
        return not is_tied, abs(found.suggestion.parameters_change_fraction) * is_tied, -found.gain_fraction

    priced.sort(key=key)


def _price(fix: Fix, scenario: Scenario, own_field: str, *, keep_slower: bool) -> _PricedFix | None:
    """Predict the gain of a fix; None where it is impossible, does not fit in memory, or is not faster.

    Where the scenario itself does not fit, a change of layout or batch must not need more memory (405 billion
    parameters are faster on one stage than on 16, but fit on no single device), while a change of the model may.
    """
    before = scenario.try_replace(fix.common_changes) if fix.common_changes else scenario
    after = scenario.try_replace({**fix.common_changes, **fix.changes})
    if before is None or after is None or not before.is_possible or not after.is_possible:
        return None
    if not after.fits and (scenario.fits or (fix.kind == "runtime" and _needs_more_memory(after, scenario))):
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
        title=_title(fix, scenario, own_field),
        changes=drop_unchanged(scenario, fix.changes),
        parameters_change_fraction=parameters[1].total / parameters[0].total - 1.0,
        predicted_gain_fraction=None if keep_slower else gain_fraction,
        compared_at=dict(fix.common_changes),
    )
    return _PricedFix(suggestion, gain_fraction, before.predict(), after.predict())


def _needs_more_memory(after: Scenario, before: Scenario) -> bool:
    return after.predict().memory.total_bytes > before.predict().memory.total_bytes


def slowest_operation(before: Prediction, after: Prediction) -> str:
    """Describe the operation that loses the most time to the violation, with its slowdown.

    Empty where the fix changes stages, chunks or the batch: operations then differ in number of executions.
    """
    if before.tokens_per_step != after.tokens_per_step or _stages_of(before) != _stages_of(after):
        return ""
    fixed = index_operations(after.operations)
    worst_loss_s, worst = 0.0, ""
    for key, priced in index_operations(before.operations).items():
        if priced.operation.kind == "pointwise":  # its time follows from its bytes
            continue
        other_s = fixed[key].total_time_s if key in fixed else 0.0
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
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=severity,
        field=violation.field,
        actual=violation.actual,
        wanted=violation.wanted,
        subject=violation.field.rpartition(".")[2],
        problem=violation.problem,
        cost_s=cost_s,
        cost_fraction=cost_fraction,
        suggestions=suggestions,
        slowest=slowest,
        least_severity=violation.least_severity,
        most_severity=violation.most_severity,
        max_cost_fraction=violation.max_cost_fraction,
    )


def run_rules(scenario: Scenario) -> list[Finding]:
    """Run every rule and predict the cost of each violation alone.

    Findings that prevent the step from running come first, then those with the largest cost.
    """
    found = [
        _drop_shape_changes(finding, scenario)
        for rule in list_rules()
        for violation in rule.check(scenario)
        if (finding := evaluate(rule, violation, scenario)) is not None
    ]
    return sorted(found, key=by_cost, reverse=True)


def _drop_shape_changes(finding: Finding, scenario: Scenario) -> Finding:
    """Drop suggestions that change the shape where the weights are given.

    A finding with a cost that is left without suggestions becomes an ``info``.
    """
    if not scenario.workload.has_given_weights:
        return finding
    kept = [one for one in finding.suggestions if one.kind != "retrain" or not _changes_shape(one, scenario)]
    if len(kept) == len(finding.suggestions):
        return finding
    changed = replace(finding, suggestions=tuple(kept))
    can_stay = kept or finding.cost_s is None
    return changed if can_stay else replace(changed, severity="info", most_severity="info")


def _changes_shape(suggestion: Suggestion, scenario: Scenario) -> bool:
    return any(hasattr(scenario.config, name) for name in suggestion.changes)


def by_cost(finding: Finding) -> tuple[bool, float, int]:
    """Sort key: findings by rising cost, those that prevent the step from running last."""
    cannot_run = finding.severity == "error" and finding.cost_s is None
    return cannot_run, finding.cost_s or 0.0, SEVERITIES.index(finding.severity)


def find_hidden_findings(
    scenario: Scenario, changes: Mapping[str, Any], known: Collection[tuple[str, str]]
) -> list[Finding]:
    """Find violations that cost nothing until other fields are changed.

    With an unaligned hidden size, for example, padding the vocabulary saves no time: both must be aligned.

    Args:
        scenario: The scenario with the violations; its step can run.
        changes: The changes of a combined fix.
        known: Codes and fields of findings whose cost is known without the changes.
    """
    changed = scenario.try_replace(changes)
    if changed is None or not changed.is_possible:
        return []
    found, new_values = [], drop_unchanged(scenario, changes)
    for rule in list_rules():
        present = {violation.field: violation.actual for violation in rule.check(scenario) if violation.has_cost}
        for name, actual in present.items():
            if (rule.code, name) in known or name.rpartition(".")[2] in new_values:
                continue
            finding = _evaluate_with(changed, rule, name, actual)
            if finding is not None:
                condition = f"only with {describe_changes(scenario.config, changes)}"
                only_with = independent_changes(scenario.config, changes)
                found.append(replace(finding, condition=condition, only_with=only_with))
    return found


def _evaluate_with(changed: Scenario, rule: Rule, name: str, actual: object) -> Finding | None:
    """The finding of a rule on a field with its old value in a changed scenario; None where it costs no time."""
    for violation in rule.check(changed):
        if (violation.field, violation.actual) == (name, actual):
            finding = evaluate(rule, violation, changed)
            return _drop_shape_changes(finding, changed) if finding is not None and finding.cost_s is not None else None
    return None
