"""Plan a training job: the best ways to spread it over devices, and why the others lose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError
from shapewright.memory import ALLOCATOR_BAND_FRACTION, find_recipe
from shapewright.plan.breakdown import Breakdown, Difference, break_down, explain_loss
from shapewright.plan.engine import Choice, Findings, Tally, explore
from shapewright.plan.request import PlanRequest, check_job
from shapewright.predict import Prediction, predict
from shapewright.shown import ShownInNotebook
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.plan.engine import Table
    from shapewright.workload import Workload

    Progress = Callable[[int, int], None]

_SECONDS_PER_HOUR = 3600.0
_MOST_DOUBLINGS = 12


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run the job.

    Attributes:
        rank: Its place, 1 for the best.
        prediction: Its step, as ``predict`` says; workload and layout are there.
        breakdown: Where the step's time goes.
        loss: Why it is worse than the best one; None for the best.
        total_bytes: Memory of the fullest device, with the request's optimiser. [byte]
        expected_step_s: The predicted step times the request's straggler factor. [s]
        usd_per_million_tokens: Cost at the request's price; None without one. [USD]
    """

    rank: int
    prediction: Prediction
    breakdown: Breakdown
    loss: Difference | None
    total_bytes: float
    expected_step_s: float
    usd_per_million_tokens: float | None

    @property
    def layout(self) -> ParallelLayout:
        """How it is spread."""
        return self.prediction.layout

    @property
    def workload(self) -> Workload:
        """What is run."""
        return self.prediction.workload

    @property
    def is_tight(self) -> bool:
        """Whether what allocator and buffers may take on top is more than the device has left."""
        return self.total_bytes * (1.0 + ALLOCATOR_BAND_FRACTION) > self.prediction.device.memory_bytes

    @property
    def device_s_per_million_tokens(self) -> float:
        """Device time of a million tokens. [s]"""
        return 1e6 * self.layout.num_devices * self.prediction.step_time_s / self.prediction.tokens_per_step


@dataclass(frozen=True)
class FrontPoint:
    """A plan that no other beats in step time, memory and devices.

    Attributes:
        choice: The plan.
        step_s: Its step. [s]
        total_bytes: Memory of its fullest device. [byte]
    """

    choice: Choice
    step_s: float
    total_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlanResult(ShownInNotebook):
    """What a search of plans found.

    Attributes:
        config: The model.
        device: The device.
        workload: What is run; micro-batch and recomputation are each plan's own.
        request: What was asked for.
        optimizer: Name of the optimiser that memory is of.
        plans: The best ones, best first.
        front: The Pareto front, shortest step first.
        tally: How many plans went where.
        elapsed_s: Time of the search. [s]
        is_complete: Whether all of the space was looked at.
        notes: What needs to be said, one line each.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    request: PlanRequest
    optimizer: str
    plans: tuple[Plan, ...]
    front: tuple[FrontPoint, ...]
    tally: Tally
    elapsed_s: float
    is_complete: bool
    notes: tuple[str, ...]


def plan_job(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    request: PlanRequest,
    optimizer: str = "adamw",
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    progress: Progress | None = None,
) -> PlanResult:
    """Search the ways to spread a training job over devices.

    Args:
        config: The model.
        device: What it runs on.
        workload: The job: length, dtype, attention and global batch; plans choose micro-batch and recomputation.
        request: Devices, objective, and what is kept as it is.
        optimizer: A key of ``shapewright.memory.OPTIMIZERS``; counts for memory alone.
        notes: What the caller has to say, kept beside the result.
        uncalibrated: Price as if nobody had measured the device.
        progress: Told now and then how many splits of how many are done.

    Raises:
        LayoutError: the devices do not fill nodes, nothing divides, or no plan fits.
        WorkloadError: this is no training, or has no global batch.
        UnknownRateError: the device's sheet lacks a number that is needed.
    """
    check_job(device, workload, request)
    recipe = find_recipe(optimizer, workload.dtype)
    own_recipe = None if optimizer == "adamw" else recipe
    started_s = time.perf_counter()
    findings = explore(
        config, device, workload, request, recipe=own_recipe, uncalibrated=uncalibrated, progress=progress
    )
    if findings.is_complete:
        _refuse_nothing(config, device, workload, request, findings, optimizer)
    plans = _make_plans(findings, config, device, workload, request, uncalibrated)
    return PlanResult(
        config=config,
        device=device,
        workload=workload,
        request=request,
        optimizer=optimizer,
        plans=plans,
        front=tuple(_front_points(findings)),
        tally=findings.tally,
        elapsed_s=time.perf_counter() - started_s,
        is_complete=findings.is_complete,
        notes=(*notes, *_describe(plans, request, device)),
    )


def _make_plans(
    findings: Findings,
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    request: PlanRequest,
    uncalibrated: bool,
) -> tuple[Plan, ...]:
    """Predict the best plans one by one, as ``predict`` does."""
    plans: list[Plan] = []
    for choice, total_bytes in _listed(findings, request.top):
        own = replace(workload, micro_batch_size=choice.frame.micro_batch_size, recompute=choice.recompute)
        prediction = predict(config, device=device, workload=own, layout=choice.layout, uncalibrated=uncalibrated)
        breakdown = break_down(prediction)
        cost = None
        if request.usd_per_hour is not None:
            hours = prediction.layout.num_devices * prediction.step_time_s * request.straggler_factor
            cost = 1e6 * request.usd_per_hour * hours / _SECONDS_PER_HOUR / prediction.tokens_per_step
        plans.append(
            Plan(
                rank=len(plans) + 1,
                prediction=prediction,
                breakdown=breakdown,
                loss=explain_loss(plans[0].breakdown, breakdown) if plans else None,
                total_bytes=total_bytes,
                expected_step_s=prediction.step_time_s * request.straggler_factor,
                usd_per_million_tokens=cost,
            )
        )
    return tuple(plans)


def _listed(findings: Findings, top: int) -> Iterator[tuple[Choice, float]]:
    """The best plans, without variants of a listed one that need no less memory."""
    table = findings.best
    least_bytes: dict[object, float] = {}
    num_listed = 0
    for row in range(len(table.get("step_s", ()))):
        choice, needed = findings.choice(table, row), float(table["bytes"][row])
        if needed >= least_bytes.get(choice.frame, float("inf")):
            continue
        least_bytes[choice.frame] = needed
        yield choice, needed
        num_listed += 1
        if num_listed == top:
            return


def _front_points(findings: Findings) -> Iterator[FrontPoint]:
    table: Table = findings.front
    for row in range(len(table.get("step_s", ()))):
        yield FrontPoint(findings.choice(table, row), float(table["step_s"][row]), float(table["bytes"][row]))


def _refuse_nothing(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    request: PlanRequest,
    findings: Findings,
    optimizer: str,
) -> None:
    """Say what stands in the way where no plan is left.

    Raises:
        LayoutError: nothing divides, or nothing fits.
    """
    if findings.tally.num_fitting:
        return
    if findings.smallest is None:
        reason = findings.tally.refused.most_common(1)
        kept = ", ".join(f"{name}={'|'.join(map(str, values))}" for name, values in request.kept.items())
        raise LayoutError(
            f"no layout of {request.num_devices} {device.name} splits {config.name or 'the model'} and a global batch "
            f"of {workload.global_batch_size}{f' with {kept}' if kept else ''}"
            + (
                f": {reason[0][0]}"
                if reason
                else "; the replicas must share the global batch evenly, change --gpus, --global-batch or what is kept"
            )
        )
    needed, choice = findings.smallest
    capacity = device.memory_bytes * (1.0 - request.headroom_fraction)
    raise LayoutError(
        f"no plan fits {request.num_devices} {device.name}: the smallest needs {format_bytes(needed)} of "
        f"{format_bytes(capacity)} ({describe_choice(choice)}); "
        f"{_suggest_devices(config, device, workload, request, optimizer)}"
    )


def _suggest_devices(
    config: TransformerConfig, device: Device, workload: Workload, request: PlanRequest, optimizer: str
) -> str:
    """The fewest devices, in doublings, on which a plan fits."""
    recipe = None if optimizer == "adamw" else find_recipe(optimizer, workload.dtype)
    count = request.num_devices
    for _ in range(_MOST_DOUBLINGS):
        count *= 2
        if count > device.node_size and count % device.node_size:
            continue
        try:
            larger = replace(request, num_devices=count, objective="memory")
        except LayoutError:
            break
        smallest = explore(config, device, workload, larger, recipe=recipe, memory_only=True).smallest
        if smallest is not None and smallest[0] <= device.memory_bytes * (1.0 - request.headroom_fraction):
            return f"the fewest that fit are {count} ({describe_choice(smallest[1])}, {format_bytes(smallest[0])})"
    return f"nothing fits on up to {count} either: take a shorter --seq-len, or devices with more memory"


def describe_choice(choice: Choice) -> str:
    """A plan in one phrase: ``tp 8, pp 4, dp 16, zero 1, micro-batch 2, full recompute``."""
    return describe_layout(choice.layout, choice.frame.micro_batch_size, choice.recompute)


def describe_layout(layout: ParallelLayout, micro_batch_size: int, recompute: str) -> str:
    """Degrees above 1, sharding, schedule, micro-batch and recomputation in one phrase."""
    degrees = {
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "vpp": layout.virtual_pipeline,
        "dp": layout.data_parallel,
        "cp": layout.context_parallel,
        "ep": layout.expert_parallel,
    }
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    parts += [f"zero {layout.zero_stage}"] * (layout.zero_stage > 0)
    parts += ["no sp"] * (layout.tensor_parallel > 1 and not layout.sequence_parallel)
    parts += [layout.pipeline_schedule] * (layout.pipeline_schedule != "1f1b")
    parts.append(f"micro-batch {micro_batch_size}")
    parts += [f"{recompute} recompute"] * (recompute != "none")
    return ", ".join(parts)


def _describe(plans: tuple[Plan, ...], request: PlanRequest, device: Device) -> Iterator[str]:
    """What a reader must know beside the numbers."""
    if not plans:
        return
    band = f"{100.0 * ALLOCATOR_BAND_FRACTION:.0f} %"
    if plans[0].is_tight:
        roomy = next((plan.rank for plan in plans if not plan.is_tight), None)
        other = f"rank {roomy} leaves them" if roomy else f"--headroom {band.replace(' ', '')} asks for plans that do"
        yield (
            f"rank 1 is tight: allocator and buffers may take {band} on top, and {device.name} does not have them; "
            f"{other}"
        )
    if request.objective == "cost":
        yield "cost: fewer devices, in halves, are looked at too; device time of a token counts, not the step"
    if request.straggler_factor > 1.0:
        yield f"expected steps are {request.straggler_factor:g} times the predicted ones, for devices that fall behind"
    else:
        yield (
            "no stragglers: large jobs that met fail-slow devices or links took 1.34 times as long on average "
            "(GREYHOUND, USENIX ATC 2025); --straggler-factor takes a factor of your own"
        )
    if any(plan.layout.pipeline_schedule == "zero-bubble" for plan in plans[:1]):
        yield (
            "zero-bubble is ZB-H1 (arXiv 2401.10241): upstream Megatron-LM, torchtitan and DeepSpeed do not ship it; "
            "--keep schedule=1f1b leaves it out"
        )
