"""Output of ``design``."""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.loss import ExperimentsOutput
from shapewright.app.report.outputs.model import Output, described, optional, plain, take
from shapewright.app.report.outputs.plan import PlanDevice, PlanOutput, plan_output
from shapewright.app.report.outputs.search import Change, VerdictOutput, changes_output, verdict_output
from shapewright.core.records import dataclass
from shapewright.core.units import format_percent
from shapewright.models.parameters import count_parameters
from shapewright.models.transformer import TransformerConfig
from shapewright.models.write import to_config_json
from shapewright.optimize.design.result import Estimate, FrontRun
from shapewright.optimize.plan.request import PLAN_FIELDS
from shapewright.prediction.training_run import RunCost, RunSchedule

if TYPE_CHECKING:
    from shapewright.optimize.design.result import Design, DesignResult

# Smaller relative differences are not given as a reason.
_SAME_FRACTION = 0.001


@dataclass(frozen=True, kw_only=True)
class DesignRequestOutput:
    """Request of a design, with size and tokens as they were chosen."""

    num_devices: int = described("devices of the job")
    num_parameters: int = described("parameters wanted; chosen for the budget where none were given")
    train_tokens: int = described("tokens of the run; as many as the budget pays for where none were given")
    budget_device_hours: float | None = described("hours summed over all devices; null without a budget")
    usd_per_hour: float | None
    keep_plan: dict[str, list[Any]] = described("values that a field of the plan may take")
    keep_shape: dict[str, int] = described("values that fields of the shape must have")
    tolerance_fraction: float = described("largest deviation from `num_parameters`")
    guard: str = described("quality guard of the shapes")
    headroom_fraction: float = described("share of the device's memory that plans must leave free")
    straggler_factor: float = described("expected over predicted step time")


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """A training run, without evaluation, checkpoints and failures."""

    train_tokens: int = described("tokens of the run")
    num_steps: int = described("optimizer steps")
    schedule: RunSchedule = described("steps and learning rate, as public models of the size had them")
    hours: Estimate = described("wall time")
    cost: RunCost = described("device hours, energy and price at the expected step time")
    cost_low: RunCost = described("the same at the lower end of the step time")
    cost_high: RunCost = described("the same at the upper end of the step time")


@dataclass(frozen=True, kw_only=True)
class DesignedShape:
    """One shape with its best plan and its run, compared with the shape of the family."""

    rank: int = described("its place, 1 for the answer")
    is_baseline: bool = described("whether it is the shape of the family")
    config: TransformerConfig
    parameters: int
    changes: dict[str, Change] = described("fields of the shape that differ from that of the family")
    plan: PlanOutput = described("the plan that `shapewright plan` gives this shape")
    mfu: Estimate = described("model FLOP/s over the dense peak of the dtype")
    run: RunOutput = described("its training run")
    speedup: Estimate = described("throughput over that of the family's shape, each on its own plan")
    is_free: bool = described("whether the change keeps the loss, as other head widths and padded vocabularies do")
    loss_difference_nats: Estimate = described(
        "expected loss minus that of the family's shape, after the same tokens and at its size"
    )
    tokens_ratio: float | None = described(
        "tokens needed for the loss of the family's shape, over its tokens; null where that loss is out of reach"
    )
    net_speedup: Estimate = described("speed-up to the loss of the family's shape: speed and tokens together")
    chance_better: float = described("probability that `net_speedup` is above 1")
    why: str = described("why it is not the answer; empty for the answer")


@dataclass(frozen=True, kw_only=True)
class DesignOutput(Output):
    """A shape, its plan and its run."""

    verdict: VerdictOutput = described("the answer compared with the family's shape")
    source: str
    device: PlanDevice
    workload: dict[str, Any] = described("fields of Workload, except those that each plan chooses")
    request: DesignRequestOutput = described("size, tokens, budget and limits")
    designs: list[DesignedShape] = described("the answer, then the runners-up; the family's shape is among them")
    config_json: dict[str, Any] = described("the answer as a config.json object, in the form of the family's")
    front: list[FrontRun] = described("runs of the family's shapes around the size and tokens of the design")
    num_shapes: int = described("shapes that the searches looked at")
    num_planned: int = described("shapes whose plans were searched")
    num_plans: int = described("plans of all of them")
    elapsed_s: float
    is_complete: bool
    notes: list[str]
    experiments: ExperimentsOutput | None = optional("small models that would decide; with `--experiments` only")


def design_output(result: DesignResult, experiments: ExperimentsOutput | None = None) -> DesignOutput:
    """Output of a design, with the experiments that would decide between its shapes."""
    best = result.best
    return take(
        DesignOutput,
        result,
        verdict=verdict_output(result.verdict),
        source=result.model.source,
        device=take(PlanDevice, best.prediction.device),
        workload={name: value for name, value in plain(best.workload).items() if name not in PLAN_FIELDS},
        request=take(DesignRequestOutput, result.request),
        designs=[_shape(one, result) for one in result.designs],
        config_json=to_config_json(result.model, best.config),
        front=list(result.front),
        experiments=experiments,
    )


def _shape(design: Design, result: DesignResult) -> DesignedShape:
    speedup, effect, net = design.speedup, design.effect, design.net_speedup
    return take(
        DesignedShape,
        design,
        parameters=count_parameters(design.config).total,
        changes=changes_output(design.changes),
        plan=plan_output(design.plan),
        run=take(RunOutput, design.run),
        speedup=Estimate(mean=speedup.factor, low=speedup.low, high=speedup.high),
        loss_difference_nats=Estimate(
            mean=effect.difference_nats, low=effect.difference_low_nats, high=effect.difference_high_nats
        ),
        tokens_ratio=effect.tokens_ratio if isfinite(effect.tokens_ratio) else None,
        net_speedup=Estimate(mean=net.factor, low=net.low, high=net.high),
        chance_better=net.probability_faster,
        why=_why(design, result.best),
    )


def _why(design: Design, best: Design) -> str:
    """Why a design is not the answer, in one phrase; empty for the answer."""
    if design.rank == best.rank:
        return ""
    parts = []
    speed = design.speedup.factor / best.speedup.factor - 1.0
    if abs(speed) > _SAME_FRACTION:
        part = ""
        if speed < 0.0 and design.difference is not None and design.difference.part != "memory":
            part = f" ({design.difference.part})"
        parts.append(f"{format_percent(abs(speed))} {'faster' if speed > 0.0 else 'slower'} per token{part}")
    size = design.effect.size_ratio / best.effect.size_ratio - 1.0
    if abs(size) > _SAME_FRACTION:
        parts.append(f"{format_percent(abs(size))} {'larger' if size > 0.0 else 'smaller'}")
    needed, answer = (1.0 if one.is_free else one.effect.tokens_ratio for one in (design, best))
    if not isfinite(needed):
        parts.append("never reaches the loss of the family's shape")
    elif abs(tokens := needed / answer - 1.0) > _SAME_FRACTION:
        parts.append(f"needs {format_percent(abs(tokens))} {'more' if tokens > 0.0 else 'fewer'} tokens")
    if design.net_speedup.factor > best.net_speedup.factor:
        parts.append(f"better with {format_percent(design.net_speedup.probability_faster)} certainty only")
    return ", ".join(parts) or "as good within 0.1 %"
