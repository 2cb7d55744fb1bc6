"""check_scenario: run every rule on a scenario, predict the cost of each violation, and apply exact fixes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

from shapewright.core.errors import ShapewrightError, WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Refusal
from shapewright.core.ranges import check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.lint.better_shapes import BetterShape, find_better_shapes
from shapewright.lint.combined import CombinedFix, combine_fixes
from shapewright.lint.evaluate import (
    INFO_FROM_FRACTION,
    by_cost,
    find_hidden_findings,
    rate_severity,
    run_rules,
    slowest_operation,
)
from shapewright.lint.rule import SEVERITIES, Finding, select_rules
from shapewright.lowering.counts import num_microbatches
from shapewright.models.read import Model
from shapewright.prediction.scenario import Scenario
from shapewright.prediction.training_run import FEWEST_TOKENS, MOST_TOKENS
from shapewright.workload.images import has_tower, tower_job

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction


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
        train_tokens: Tokens after which their losses are compared, as given; None for 20 per parameter.
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
    train_tokens: float | None = None
    refusal: Refusal | None = None
    combined_fix: CombinedFix | None = None
    assumed_changes: Mapping[str, Any] = field(default_factory=dict)
    scenario: Scenario | None = field(default=None, repr=False)


def check_scenario(
    scenario: Scenario, *, ignore: Iterable[str] = (), search_shapes: bool = True, train_tokens: float | None = None
) -> CheckReport:
    """Check a scenario against every rule, and search similar shapes for better ones.

    Args:
        ignore: Rules to ignore, by code, name or family; their findings are counted.
        search_shapes: Whether to search similar shapes for better ones.
        train_tokens: Tokens of the training run, after which their losses are compared; default: 20 per parameter.

    Raises:
        ShapewrightError: the step cannot be predicted, and no rule explains why; or the tokens are out of range or
            given outside training.
        UnknownRuleError: an ignored rule does not exist.
    """
    ignored = select_rules(ignore)
    if train_tokens is not None:
        check_number("train_tokens", train_tokens, FEWEST_TOKENS, MOST_TOKENS, error=WorkloadError)
        if not scenario.workload.is_training:
            raise WorkloadError(
                with_fields("{train_tokens} has no effect in {phase}", phase=scenario.workload.phase),
                advice="omit it or use phase='train'",
            )
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
            others, combined = _share_gain(possible, others, ignored)
            combined = combined.with_changes(scenario.config, assumed) if combined is not None else None
            found += [replace(finding, is_assumed=True) for finding in others]
    else:
        prediction, refusal = outcome, None
        found, combined = _share_gain(scenario, found, ignored)
    # Findings of the scenario itself come before those with the assumed changes.
    found = sorted([*found, *of_tower], key=lambda finding: (not finding.is_assumed, *by_cost(finding)), reverse=True)
    return CheckReport(
        prediction=prediction,
        findings=tuple(finding for finding in found if finding.code not in ignored),
        num_suppressed=sum(finding.code in ignored for finding in found),
        better_shapes=find_better_shapes(scenario, train_tokens=train_tokens) if search_shapes and prediction else (),
        train_tokens=train_tokens,
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
    if not tower.is_possible:  # without a prediction of its own, nothing in it has a cost
        return []
    step_s = scenario.predict().step_time_s
    share = tower.predict().step_time_s / step_s
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
                predicted_gain_fraction=None if gain is None else gain * share,
            )
            for suggestion in finding.suggestions
            for gain in (suggestion.predicted_gain_fraction,)
        ]
        findings.append(
            replace(
                finding,
                field=f"{_TOWER_PATH}.{name}",
                subject=f"{_TOWER_PATH}.{finding.subject}",
                severity=severity,
                cost_fraction=fraction,
                suggestions=tuple(suggestions),
            )
        )
    return findings


def _make_possible(scenario: Scenario, errors: Sequence[Finding]) -> tuple[Scenario | None, dict[str, Any]]:
    """Apply one suggestion of each error until the step can run; None and no changes where it never does."""
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


def _share_gain(
    scenario: Scenario,
    findings: list[Finding],
    ignored: Collection[str],
    dropped: frozenset[tuple[str, str]] = frozenset(),
) -> tuple[list[Finding], CombinedFix | None]:
    """Divide the gain of the combined fix among the findings that are not ignored, and drop those with next to none.

    The combined fix is that of the findings that remain: where one is dropped, the gain of the others is divided again.
    So it is where violations are added that cost time only with the combined fix.

    Args:
        dropped: Codes and fields of findings that were dropped before.
    """
    counted = [finding for finding in findings if finding.code not in ignored]
    combined, shares, compared = combine_fixes(scenario, counted)
    if combined is not None:
        known = {(finding.code, finding.field): finding.cost_s is not None for finding in findings}
        hidden = find_hidden_findings(scenario, combined.changes, [key for key, has_cost in known.items() if has_cost])
        hidden = [one for one in hidden if one.code not in ignored and (one.code, one.field) not in dropped]
        if hidden:
            replaced = {(finding.code, finding.field) for finding in hidden}
            others = [finding for finding in findings if (finding.code, finding.field) not in replaced]
            return _share_gain(scenario, [*others, *hidden], ignored, dropped)
    # Fewer stages save a bubble too, for example: that part of the gain belongs to no finding.
    shares = {index: min(share, counted[index].max_cost_fraction) for index, share in shares.items()}
    step_s = scenario.predict().step_time_s
    kept = [finding for finding in findings if finding.code in ignored]
    minor = {
        (finding.code, finding.field)
        for index, finding in enumerate(counted)
        if index in shares and rate_severity(finding.least_severity, shares[index], finding.most_severity) is None
    }
    if minor:
        others = [finding for finding in findings if (finding.code, finding.field) not in minor]
        return _share_gain(scenario, others, ignored, dropped | minor)
    for index, finding in enumerate(counted):
        share = shares.get(index)
        if share is None:
            kept.append(finding)
            continue
        severity = rate_severity(finding.least_severity, share, finding.most_severity)
        assert severity is not None, "findings of next to no cost are dropped above"
        cost_s, cost_fraction = (share * step_s, share) if share >= INFO_FROM_FRACTION else (None, None)
        slowest = slowest_operation(*compared[index]) if index in compared else finding.slowest
        kept.append(replace(finding, severity=severity, slowest=slowest, cost_s=cost_s, cost_fraction=cost_fraction))
    return sorted(kept, key=by_cost, reverse=True), combined


def exit_code(report: HasFindings, fail_on: str = "warning") -> int:
    """Exit code of a check: 1 if a finding is at least as severe as ``fail_on``, otherwise 0.

    Args:
        fail_on: One of SEVERITIES, or ``never``.
    """
    if fail_on == "never":
        return 0
    least = SEVERITIES.index(fail_on)
    return int(any(SEVERITIES.index(finding.severity) >= least for finding in report.findings))


def exact_changes(report: CheckReport) -> dict[str, Any]:
    """Collect the changes of the first exact suggestion of each finding.

    Findings that cost time only with changes which are not among those collected are left out.
    """
    changes: dict[str, Any] = {}
    for finding in report.findings:
        exact = [suggestion for suggestion in finding.suggestions if suggestion.kind == "exact"]
        if exact and finding.only_with.keys() <= changes.keys():
            changes = {**exact[0].changes, **changes}
    return changes


def fix_config(config: TransformerConfig, report: CheckReport) -> TransformerConfig:
    """Apply every exact suggestion to a config; without one, return the same object."""
    changes = exact_changes(report)
    return replace(config, **changes) if changes else config
