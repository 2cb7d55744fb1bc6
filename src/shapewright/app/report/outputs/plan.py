"""Output of ``plan``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import DeviceSummary, JobLayout, Output, described, job_layout, plain, take
from shapewright.core.records import dataclass
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.plan.notes import describe_choice, describe_plan
from shapewright.optimize.plan.request import PLAN_FIELDS
from shapewright.optimize.plan.result import Difference

if TYPE_CHECKING:
    from shapewright.core.notes import Refusal
    from shapewright.optimize.plan.result import FrontPoint, Plan, PlanResult


@dataclass(frozen=True, kw_only=True)
class PlanDevice(DeviceSummary):
    """A device, its nodes and its memory."""

    memory_bytes: float = described("memory of the device")


@dataclass(frozen=True, kw_only=True)
class PlanRequestOutput:
    """Request of the plans."""

    num_devices: int = described("devices of the job")
    objective: str = described("`time`, `cost` or `memory`")
    kept: dict[str, list[Any]] = described("values that a searched field may take")
    usd_per_hour: float | None
    straggler_factor: float = described("expected over predicted step time")
    headroom_fraction: float = described("share of the device's memory that plans must leave free")
    optimizer: str = described("name of the optimizer")


@dataclass(frozen=True, kw_only=True)
class FrontPointOutput:
    """One plan of the Pareto front."""

    plan: str = described("the plan in one line")
    layout: JobLayout
    micro_batch_size: int = described("sequences of a micro-batch")
    recompute: str = described("activation recomputation")
    offload_activations: bool = described("whether saved activations are kept in host memory")
    offload_optimizer: bool = described("whether optimizer states are kept in host memory")
    step_time_s: float
    total_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlanOutput(FrontPointOutput):
    """One plan."""

    rank: int = described("its place, 1 for the best")
    software: str
    step_time_low_s: float
    step_time_high_s: float
    expected_step_time_s: float = described("step time with the straggler factor")
    tokens_per_s: float = described("tokens per second of the whole job, with the straggler factor")
    tokens_per_s_per_device: float
    mfu: float
    hfu: float
    tight: bool = described("whether the memory left is less than the allocator may take")
    device_s_per_million_tokens: float = described("device time per million tokens")
    usd_per_million_tokens: float | None = described("cost per million tokens; null without a price")
    breakdown_s: Mapping[str, float] = described(
        "parts of the step, which add up to it; communication is the exposed part, by axis and link"
    )
    exposed_communication_s: float = described("sum of the exposed communication in `breakdown_s`")
    hidden_communication_s: Mapping[str, float] = described("communication hidden by computation, by axis and link")
    loss: Difference | None = described("why it is worse than the best plan; null for the best")
    warnings: list[str] = described("warnings of the prediction, one line each")


@dataclass(frozen=True, kw_only=True)
class PlanSpace:
    """Number of plans."""

    num_plans: int = described("plans of the space", key="size")
    priced: int = described("plans that fit; their steps were predicted")
    refused: Mapping[str, int] = described("splits that do not divide the model, by reason")


@dataclass(frozen=True, kw_only=True)
class PlansOutput(Output):
    """Training plans. `--trace FILE` writes rank 1 in the trace event format of chrome://tracing and Perfetto."""

    config: TransformerConfig
    device: PlanDevice
    workload: dict[str, Any] = described("fields of Workload, except those that each plan chooses")
    request: PlanRequestOutput = described("devices, objective and limits")
    plans: list[PlanOutput] = described("the best plans, best first")
    pareto: list[FrontPointOutput] = described("Pareto front over step time, memory and devices")
    space: PlanSpace = described("plans considered")
    elapsed_s: float
    is_complete: bool
    notes: list[str]


def plans_output(result: PlanResult) -> PlansOutput:
    """Output of a search for plans."""
    request, tally = result.request, result.tally
    return take(
        PlansOutput,
        result,
        device=take(PlanDevice, result.device),
        workload={name: value for name, value in plain(result.workload).items() if name not in PLAN_FIELDS},
        request=take(PlanRequestOutput, request, optimizer=result.optimizer),
        plans=[plan_output(plan) for plan in result.plans],
        pareto=[_front_point(point) for point in result.front],
        space=PlanSpace(num_plans=tally.num_plans, priced=tally.num_fitting, refused=_by_text(tally.refused)),
    )


def _by_text(refused: Mapping[Refusal, int]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for refusal, count in refused.items():
        counts[refusal.text] = counts.get(refusal.text, 0) + count
    return counts


def plan_output(plan: Plan) -> PlanOutput:
    """One plan."""
    prediction = plan.prediction
    return take(
        PlanOutput,
        plan,
        prediction,
        plan.workload,
        plan=describe_plan(plan),
        layout=job_layout(plan.layout),
        expected_step_time_s=plan.expected_step_s,
        tokens_per_s=prediction.tokens_per_step / plan.expected_step_s,
        tokens_per_s_per_device=prediction.tokens_per_step / plan.expected_step_s / plan.layout.num_devices,
        tight=plan.is_tight,
        breakdown_s=plan.breakdown.parts,
        exposed_communication_s=sum(plan.breakdown.exposed.values()),
        hidden_communication_s=plan.breakdown.hidden,
    )


def _front_point(point: FrontPoint) -> FrontPointOutput:
    choice = point.choice
    return FrontPointOutput(
        plan=describe_choice(choice),
        layout=job_layout(choice.layout),
        step_time_s=point.step_s,
        total_bytes=point.total_bytes,
        **choice.chosen_workload,
    )
