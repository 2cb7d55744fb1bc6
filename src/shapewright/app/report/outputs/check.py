"""Output of ``check``, and the effect of a change of shape on the loss, which several outputs have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import (
    DeviceSummary,
    JobLayout,
    Output,
    described,
    job_layout,
    problem_keys,
    summarize_device,
    take,
    text_only,
)
from shapewright.app.report.outputs.predict import PredictOutput, predict_output
from shapewright.core.records import dataclass
from shapewright.lint.combined import CombinedFix
from shapewright.lint.rule import Suggestion
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.core.notes import Note
    from shapewright.lint.check import CheckReport
    from shapewright.lint.rule import Finding
    from shapewright.prediction.loss.effect import LossEffect
    from shapewright.prediction.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class EffectOutput:
    """What a change of shape does to the loss, and to the time in which it is reached."""

    is_free: bool = described("whether the change keeps the loss: other heads of 64 to 256, a padded vocabulary")
    loss_difference_nats: float | None = described(
        "loss above the baseline's after `train_tokens`, at equal size; null for a model that the loss law does not "
        "describe"
    )
    loss_difference_low_nats: float | None = described("lower end of its 90 % interval")
    loss_difference_high_nats: float | None = described("upper end of its 90 % interval")
    tokens_to_loss: float | None = described(
        "tokens needed for the loss that the baseline has after `train_tokens`; null where it is out of reach"
    )
    net_speedup: float | None = described(
        "time in which the baseline reaches that loss over the shape's, at equal size; null outside training"
    )
    net_speedup_low: float | None = described("lower end of its 90 % interval")
    net_speedup_high: float | None = described("upper end of its 90 % interval")
    chance_better: float | None = described("probability that the net speed-up is above 1")


def effect_output(effect: LossEffect | None) -> EffectOutput:
    """Effect of a change; without one, nothing is known about the loss."""
    net = effect.net_speedup if effect is not None else None
    tokens = effect.tokens_ratio * effect.train_tokens if effect is not None else None
    return EffectOutput(
        is_free=effect is not None and effect.is_free,
        loss_difference_nats=None if effect is None else effect.difference_nats,
        loss_difference_low_nats=None if effect is None else effect.difference_low_nats,
        loss_difference_high_nats=None if effect is None else effect.difference_high_nats,
        tokens_to_loss=tokens if tokens is not None and isfinite(tokens) else None,
        net_speedup=None if net is None else net.factor,
        net_speedup_low=None if net is None else net.low,
        net_speedup_high=None if net is None else net.high,
        chance_better=None if net is None else net.probability_faster,
    )


def describe_loss(effect: EffectOutput) -> str:
    """Difference of the loss with its interval, ``free``, or nothing where it is not known."""
    if effect.loss_difference_nats is None:
        return ""
    if effect.is_free:
        return "free"
    return (
        f"{effect.loss_difference_nats:+.3f} ({effect.loss_difference_low_nats:+.3f} to "
        f"{effect.loss_difference_high_nats:+.3f})"
    )


def describe_net(effect: EffectOutput) -> str:
    """Speed-up to the same loss with its interval, or nothing where it is not known."""
    if effect.net_speedup is None:
        return ""
    return f"{effect.net_speedup:.3f}x ({effect.net_speedup_low:.3f} to {effect.net_speedup_high:.3f})"


@dataclass(frozen=True, kw_only=True)
class FindingOutput:
    """One violation of a rule."""

    code: str = described("code of the rule")
    name: str = described("name of the rule")
    severity: str = described("`info`, `warning` or `error`")
    field: str = described("path of the field, such as `config.vocab_size`")
    actual: Any = described("value of the field")
    wanted: str = described("what the value should be")
    message: str = described("the finding in one line, with what to do")
    statement: str = described("what is wrong, without what to do")
    cost_s: float | None = described(
        "predicted cost per step: its share of what the combined fix saves, so that costs add up; null where it costs "
        "no time"
    )
    cost_fraction: float | None = described("the same as a fraction of the step")
    is_assumed: bool = described("whether it is predicted with `assumed_changes`")
    only_with: Mapping[str, Any] = described("changes of other findings without which it costs nothing; often empty")
    suggestions: list[Suggestion] = described("what to do, best first")


@dataclass(frozen=True, kw_only=True)
class BetterShapeOutput:
    """A better shape of almost the same number of parameters."""

    title: str = described("the fields that differ")
    changes: Mapping[str, Any] = described("new value by field")
    step_time_s: float
    speedup: float = described("step time of the checked shape over that of this one")
    gain_fraction: float = described(
        "share of the time to the same loss that it saves; outside training, of the time per token and parameter"
    )
    effect: EffectOutput = described("what the change does to the loss after `train_tokens`", is_flat=True)
    parameters_change_fraction: float = described("parameters gained or lost, as a fraction")


@dataclass(frozen=True, kw_only=True)
class CheckOutput(Output):
    """Findings with their predicted cost. `--format sarif` prints SARIF 2.1.0 instead."""

    step_time_s: float | None
    software: str | None = described("generation of the training software; null where the step cannot run")
    problem: str
    problem_code: str
    problem_field: str
    num_suppressed: int = described("findings suppressed by `--ignore`")
    findings: list[FindingOutput] = described("findings, the costliest first")
    combined_fix: CombinedFix | None = described("all fixes that save time together; null where none does")
    assumed_changes: Mapping[str, Any] = described(
        "where the step cannot run: the changes with which it can, and with which the combined fix and the findings "
        "with `is_assumed` are predicted"
    )
    better_shapes: list[BetterShapeOutput] = described("nearest better shapes of almost the same size")
    train_tokens: float | None = described("tokens after which their losses are compared; null for 20 per parameter")
    source: str
    notes: list[str]
    config: TransformerConfig
    device: DeviceSummary
    workload: Workload
    layout: JobLayout
    step: PredictOutput | None = text_only()
    other_warnings: list[str] = text_only()


# Rules whose findings repeat a warning of the prediction, with the code of that warning.
_WARNING_OF_RULE = {"ME101": "does-not-fit", "CF101": "overlong"}


_GIVEN_WEIGHTS_NOTE = "fine-tuning starts from given weights, so no change of shape is suggested that needs retraining"


def other_warnings(findings: Iterable[Finding], warnings: Iterable[Note]) -> list[str]:
    """Warnings of a prediction that no finding repeats."""
    repeated = {_WARNING_OF_RULE.get(finding.code) for finding in findings}
    return [note for note in warnings if note.code not in repeated]


def check_output(report: CheckReport, scenario: Scenario) -> CheckOutput:
    """Output of a check of a scenario."""
    prediction = report.prediction
    return take(
        CheckOutput,
        report,
        step_time_s=prediction.step_time_s if prediction else None,
        software=prediction.software if prediction else None,
        **problem_keys(report.refusal),
        findings=[finding_output(finding) for finding in report.findings],
        better_shapes=[
            take(BetterShapeOutput, shape, effect=effect_output(shape.effect)) for shape in report.better_shapes
        ],
        source=scenario.model.source,
        notes=(*scenario.notes, *((_GIVEN_WEIGHTS_NOTE,) if scenario.workload.has_given_weights else ())),
        config=scenario.config,
        device=summarize_device(scenario.device),
        workload=scenario.workload,
        layout=job_layout(scenario.layout),
        step=None if prediction is None else predict_output(prediction, scenario),
        other_warnings=[] if prediction is None else other_warnings(report.findings, prediction.warnings),
    )


def report_output(report: CheckReport) -> CheckOutput:
    """Output of a check of the scenario that it holds."""
    assert report.scenario is not None
    return check_output(report, report.scenario)


def finding_output(finding: Finding) -> FindingOutput:
    """One finding with its suggestions."""
    return take(FindingOutput, finding)
