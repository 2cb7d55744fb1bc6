"""What a violation costs: the step with the field repaired against the step as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.lint.finding import SEVERITIES, Finding, Suggestion

if TYPE_CHECKING:
    from shapewright.lint.rule import Repair, Rule, Violation
    from shapewright.lint.what_if import WhatIf
    from shapewright.predict import Prediction

QUIET_BELOW_FRACTION = 0.002
"""A violation predicted to cost less of the step stays quiet: a tenth of the run-to-run noise of a training step."""

WARNING_FROM_FRACTION = 0.01
ERROR_FROM_FRACTION = 0.10

MOST_SUGGESTIONS = 3

_VISIBLE_SLOWDOWN = 1.02  # below this, naming the operation that suffers says nothing


@dataclass(frozen=True)
class _PricedRepair:
    suggestion: Suggestion
    gain_fraction: float
    before: Prediction
    after: Prediction


def judge(rule: Rule, violation: Violation, case: WhatIf) -> Finding | None:
    """Turn what a rule saw into a finding with its cost, or into nothing where it costs nothing."""
    if not case.is_possible:
        possible = tuple(kept for repair in violation.repairs if (kept := _possible(repair, case)) is not None)
        return _finding(rule, violation, violation.severity, suggestions=possible) if violation.severity else None
    # Where time is not the matter, a slower repair is still one.
    keeps_slower = violation.severity == "error" or not violation.has_cost
    priced = [found for repair in violation.repairs if (found := _price(repair, case, keeps_slower=keeps_slower))]
    priced.sort(key=lambda found: -found.gain_fraction)
    suggestions = tuple(found.suggestion for found in priced[: 1 if violation.only_best else MOST_SUGGESTIONS])
    best = priced[0] if priced else None
    cost_fraction = max(0.0, best.gain_fraction) if best and violation.has_cost else 0.0
    cost_fraction = min(cost_fraction, violation.most_cost_fraction)
    severity = severity_of(violation.severity, cost_fraction, violation.severity_at_most)
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
        cost_s=cost_fraction * case.prediction.step_time_s,
        cost_fraction=cost_fraction,
    )


def severity_of(least: str | None, cost_fraction: float, most: str | None = None) -> str | None:
    """Severity of a cost, from ``least`` to ``most``; None for what stays quiet."""
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


def _possible(repair: Repair, case: WhatIf) -> Suggestion | None:
    """Keep a repair of a step that cannot run if the repaired one can, or is at least stopped by something else."""
    repaired = case.changed(repair.changes)
    if repaired is None or str(repaired.outcome) == str(case.outcome):
        return None
    return Suggestion(kind=repair.kind, title=repair.title, changes=dict(repair.changes))


def _price(repair: Repair, case: WhatIf, *, keeps_slower: bool) -> _PricedRepair | None:
    """Price a repair; None where it is impossible, does not fit in memory, or is not faster.

    Where nothing fits yet, a change of the layout or the batch may at least not need more memory: 405 billion
    parameters on one stage are faster than on 16, and run nowhere. A better shape is one before and after memory is
    seen to.
    """
    before = case.changed(repair.at_equal) if repair.at_equal else case
    after = case.changed({**repair.at_equal, **repair.changes})
    if before is None or after is None or not before.is_possible or not after.is_possible:
        return None
    if not after.fits and (case.fits or (repair.kind == "runtime" and _needs_more(after, case))):
        return None
    ratio = after.time_per_token_s / before.time_per_token_s
    parameters = before.prediction.parameters, after.prediction.parameters
    gain_fraction = 1.0 - ratio
    if repair.kind == "retrain":
        # Time goes with the parameters that a token uses.
        gain_fraction = 1.0 - ratio * parameters[0].active / parameters[1].active
    if not keeps_slower and (ratio > 1.0 or gain_fraction <= 0.0):
        return None
    suggestion = Suggestion(
        kind=repair.kind,
        title=repair.title,
        changes=dict(repair.changes),
        parameters_change_fraction=parameters[1].total / parameters[0].total - 1.0,
        predicted_gain_fraction=None if keeps_slower else gain_fraction,
    )
    return _PricedRepair(suggestion, gain_fraction, before.prediction, after.prediction)


def _needs_more(after: WhatIf, before: WhatIf) -> bool:
    return after.prediction.memory.total_bytes > before.prediction.memory.total_bytes


def _slowest_operation(before: Prediction, after: Prediction) -> str:
    """Name the operation that loses most time to the violation, and how many times slower it is.

    Other stages or chunks change how often each operation runs on a device, and another batch how much a step is:
    then no operation is to blame.
    """
    if before.tokens_per_step != after.tokens_per_step or _stages_of(before) != _stages_of(after):
        return ""
    repaired = {(priced.operation.name, priced.operation.pass_name): priced.total_time_s for priced in after.operations}
    worst_loss_s, worst = 0.0, ""
    for priced in before.operations:
        if priced.operation.kind == "pointwise":  # its time is its bytes, and no reason of its own
            continue
        other_s = repaired.get((priced.operation.name, priced.operation.pass_name))
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
    )
