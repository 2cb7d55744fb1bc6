"""Plan a training job: the best ways to spread it over devices, and why the others lose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf, isclose
from typing import TYPE_CHECKING

from shapewright.layout import MOST_ZERO_STAGE_IN_PIPELINES
from shapewright.memory import ALLOCATOR_BAND_FRACTION
from shapewright.perf.software import TUNED, load_software
from shapewright.plan.breakdown import Breakdown, Difference, break_down, explain_loss
from shapewright.plan.engine import explore
from shapewright.plan.findings import Choice, Findings, Tally
from shapewright.plan.job import PlanJob
from shapewright.plan.refusal import refuse_if_none_fits
from shapewright.plan.remarks import say_batch, say_reduction, say_software
from shapewright.predict import Prediction, predict
from shapewright.shown import ShownInNotebook
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.plan.findings import Table
    from shapewright.plan.request import PlanRequest
    from shapewright.workload import Workload

    Progress = Callable[[int, int], None]

_SECONDS_PER_HOUR = 3600.0
_SAME_STEP = 1e-8  # sums of the same terms in another order differ by less


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
        optimizer: Name of the optimiser.
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
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
    progress: Progress | None = None,
) -> PlanResult:
    """Search the ways to spread a training job over devices.

    Args:
        config: The model.
        device: What it runs on.
        workload: The job: length, dtype, attention, optimiser and global batch; plans choose micro-batch and
            recomputation.
        request: Devices, objective, and what is kept as it is.
        notes: What the caller has to say, kept beside the result.
        uncalibrated: Price as if nobody had measured the device.
        software: Generation of the training software, one of ``shapewright.perf.software.software_names()``.
        progress: Told now and then how many splits of how many are done.

    Raises:
        LayoutError: the devices do not fill nodes, nothing divides, or no plan fits.
        WorkloadError: this is no training, or has no global batch.
        UnknownRateError: the device's sheet lacks a number that is needed.
        CalibrationError: the software is not known.
    """
    job = PlanJob(
        config=config,
        device=device,
        workload=workload,
        request=request,
        uncalibrated=uncalibrated,
        software=load_software(software),
    )
    started_s = time.perf_counter()
    findings = explore(job, progress=progress)
    if findings.is_complete:
        refuse_if_none_fits(job, findings)
    plans = _make_plans(job, findings)
    return PlanResult(
        config=config,
        device=device,
        workload=workload,
        request=request,
        optimizer=workload.optimizer,
        plans=plans,
        front=tuple(_front_points(findings)),
        tally=findings.tally,
        elapsed_s=time.perf_counter() - started_s,
        is_complete=findings.is_complete,
        notes=(*notes, *_describe(job, plans)),
    )


def _make_plans(job: PlanJob, findings: Findings) -> tuple[Plan, ...]:
    """Predict the best plans one by one, as ``predict`` does."""
    request = job.request
    plans: list[Plan] = []
    for choice, total_bytes in _listed(findings, request.top):
        prediction = predict(
            job.config,
            device=job.device,
            workload=replace(job.workload, **choice.chosen_workload),
            layout=choice.layout,
            uncalibrated=job.uncalibrated,
            software=job.software,
        )
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
    """The best plans, without variants of a listed one that need no less memory, or take as long with less."""
    table = findings.best
    least_bytes: dict[object, float] = {}
    listed_s: dict[object, float] = {}
    num_listed = 0
    for row in range(len(table.get("step_s", ()))):
        choice, needed, step_s = findings.choice(table, row), float(table["bytes"][row]), float(table["step_s"][row])
        split = choice.frame._replace(sequence_parallel=True)
        if needed >= least_bytes.get(split, inf):
            continue
        least_bytes[split] = needed
        if isclose(step_s, listed_s.get(split, inf), rel_tol=_SAME_STEP):
            continue
        listed_s[split] = step_s
        yield choice, needed
        num_listed += 1
        if num_listed == top:
            return


def _front_points(findings: Findings) -> Iterator[FrontPoint]:
    table: Table = findings.front
    for row in range(len(table.get("step_s", ()))):
        yield FrontPoint(findings.choice(table, row), float(table["step_s"][row]), float(table["bytes"][row]))


def _describe(job: PlanJob, plans: tuple[Plan, ...]) -> Iterator[str]:
    """What a reader must know beside the numbers."""
    request, device = job.request, job.device
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
    kept_bytes = plans[0].prediction.memory.host_bytes
    if kept_bytes:
        sharing = min(plans[0].layout.num_devices, device.node_size)
        yield (
            f"rank 1 keeps {format_bytes(kept_bytes)} of each device in the host's memory, "
            f"{format_bytes(kept_bytes * sharing)} for {sharing} of them: no device file says how much a host has"
        )
    if request.objective == "cost":
        yield "cost: fewer devices, in halves, are looked at too; device time of a token counts, not the step"
    predictions = [plan.prediction for plan in plans]
    yield from say_software(predictions, job.software.name, uncalibrated=job.uncalibrated)
    if request.objective != "cost":
        yield from say_batch(predictions, plans[0].workload.global_batch_size or 0, request.num_devices)
    if request.straggler_factor > 1.0:
        yield f"expected steps are {request.straggler_factor:g} times the predicted ones, for devices that fall behind"
    else:
        yield (
            "no stragglers: large jobs that met fail-slow devices or links took 1.34 times as long on average "
            "(GREYHOUND, USENIX ATC 2025); --straggler-factor takes a factor of your own"
        )
    if "zero_stage" not in request.kept and any(plan.layout.pipeline_parallel > 1 for plan in plans):
        yield (
            f"under a pipeline ZeRO stage {MOST_ZERO_STAGE_IN_PIPELINES} is the highest looked at: DeepSpeed and "
            f"Megatron-LM shard no weights there; --keep zero=0,1,2,3 looks at stage 3 too"
        )
        yield from say_reduction(predictions)
    if any(plan.layout.pipeline_schedule == "dualpipe" for plan in plans[:1]):
        yield (
            "dualpipe is DeepSeek's own (arXiv 2412.19437): Megatron-LM and DeepSpeed do not ship it; its price is a "
            "formula's, without the sum of a stage's gradients over its two devices"
        )
    if any(plan.layout.pipeline_schedule == "zero-bubble" for plan in plans[:1]):
        yield (
            "zero-bubble is ZB-H1 (arXiv 2401.10241): upstream Megatron-LM, torchtitan and DeepSpeed do not ship it; "
            "--keep schedule=1f1b leaves it out"
        )
