"""Notes on plans for the reader: the assumptions behind the best plan, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING

from shapewright.core.numeric import divisors
from shapewright.core.units import format_bytes, format_seconds
from shapewright.memory import ALLOCATOR_BAND_FRACTION
from shapewright.prediction.predict import predict
from shapewright.pricing.software import TUNED
from shapewright.workload.layout import MAX_ZERO_STAGE_IN_PIPELINES

if TYPE_CHECKING:
    from shapewright.optimize.plan.request import PlanJob
    from shapewright.optimize.plan.result import Plan
    from shapewright.prediction.predict import Prediction

_SHARDING_SOFTWARE, _SHARDING_SOFTWARE_TITLE = "fsdp-2024", "PyTorch FSDP of 2024"
"""The newest software whose published steps shard weights over replicas, and its name in notes."""

_SHARDS_GRADIENTS = 2
"""ZeRO stage from which gradients are sharded."""

_MOST_BATCH_CHANGE_FRACTION = 0.25
"""Largest relative change of the batch size that a note proposes."""


def plan_notes(job: PlanJob, plans: Sequence[Plan]) -> Iterator[str]:
    """Yield the notes on plans, one line each.

    Args:
        job: The planned job.
        plans: Its plans, best first.
    """
    if not plans:
        return
    request, best = job.request, plans[0]
    predictions = [plan.prediction for plan in plans]
    yield from _note_memory(job, plans)
    if request.objective == "cost":
        yield "cost: half, a quarter and so on of the devices are tried too; the device time of a token is minimized"
    yield from _note_software(predictions, job.scenario.software.name)
    if request.objective != "cost":
        yield from _note_batch(predictions, best.workload.global_batch_size or 0, request.num_devices)
    if request.straggler_factor > 1.0:
        yield f"expected steps are {request.straggler_factor:g} times the predicted ones, for slow devices"
    else:
        yield (
            "slow devices and links are not included: large jobs that had them took 1.34 times as long on average "
            "(GREYHOUND, USENIX ATC 2025); set straggler_factor to include them"
        )
    if "zero_stage" not in request.kept and any(plan.layout.pipeline_parallel > 1 for plan in plans):
        yield (
            f"under a pipeline, ZeRO stages up to {MAX_ZERO_STAGE_IN_PIPELINES} are tried: DeepSpeed and "
            f"Megatron-LM shard no weights there; keep zero_stage=0,1,2,3 to try stage 3 too"
        )
        yield from _note_gradient_reduction(predictions)
    if best.layout.pipeline_schedule == "dualpipe":
        yield (
            "dualpipe exists in DeepSeek's own stack only (arXiv 2412.19437), not in Megatron-LM or DeepSpeed; it is "
            "priced by a formula that leaves out the sum of a stage's gradients over its two devices"
        )
    if best.layout.pipeline_schedule == "zero-bubble":
        yield (
            "zero-bubble is ZB-H1 (arXiv 2401.10241), which upstream Megatron-LM, torchtitan and DeepSpeed do not "
            "have; keep pipeline_schedule=1f1b to leave it out"
        )


def _note_memory(job: PlanJob, plans: Sequence[Plan]) -> Iterator[str]:
    """Note if the best plan leaves little memory free, and how much of the host's memory it uses."""
    device, best = job.scenario.device, plans[0]
    if best.is_tight:
        roomy = next((plan.rank for plan in plans if not plan.is_tight), None)
        other = f"set headroom_fraction {ALLOCATOR_BAND_FRACTION:g} for plans that leave them"
        if roomy:
            other = f"rank {roomy} leaves them"
        yield (
            f"rank 1 is tight: allocator and buffers may take {100.0 * ALLOCATOR_BAND_FRACTION:.0f} % in addition, "
            f"more than {device.name} has left; {other}"
        )
    host_bytes = best.prediction.memory.host_bytes
    if host_bytes:
        sharing = min(best.layout.num_devices, device.node_size)
        yield (
            f"rank 1 offloads {format_bytes(host_bytes)} of each device to the host, "
            f"{format_bytes(host_bytes * sharing)} for {sharing} of them: device files do not give the host's memory"
        )


def _note_software(plans: Sequence[Prediction], software: str) -> Iterator[str]:
    """Note which software the steps are of; if the best plan shards weights, how long older software takes for it."""
    if software != TUNED:
        return
    best = plans[0]
    if best.layout.zero_stage < 3:
        yield (
            "steps are those of a tuned stack of today; PyTorch FSDP of 2023 and 2024 took 1.1 to 1.7 times as long, "
            "which the interval includes; set software for another stack"
        )
        return
    measured = predict(
        best.config,
        device=best.device,
        workload=best.workload,
        layout=best.layout,
        software=_SHARDING_SOFTWARE,
    )
    unsharded = next((rank for rank, plan in enumerate(plans, 1) if plan.layout.zero_stage < 3), None)
    yield (
        f"steps are those of a tuned stack of today, which overlaps the gathers of rank 1's sharded weights; "
        f"{_SHARDING_SOFTWARE_TITLE}, which does not, takes {format_seconds(measured.step_time_s)} for rank 1; "
        f"set software={_SHARDING_SOFTWARE} to plan for it"
        + ("" if unsharded is None else f"; rank {unsharded} gathers no weights")
    )


def _note_gradient_reduction(plans: Sequence[Prediction]) -> Iterator[str]:
    """Note if the best plan reduces gradients in each micro-batch of a pipeline, which few stacks do."""
    best = plans[0].layout
    if best.zero_stage != _SHARDS_GRADIENTS or best.pipeline_parallel == 1:
        return
    once = next((rank for rank, plan in enumerate(plans, 1) if plan.layout.zero_stage < _SHARDS_GRADIENTS), None)
    yield (
        "rank 1 shards gradients (ZeRO 2) and so reduces them in each micro-batch, as torchtitan does under a "
        "pipeline; keep zero_stage=0,1 to reduce them once per step, as Megatron-LM does"
        + ("" if once is None else f"; so does rank {once}")
    )


def _note_batch(plans: Sequence[Prediction], global_batch_size: int, num_devices: int) -> Iterator[str]:
    """Note a similar batch size that allows more replicas, if the best plan has as many as the batch allows."""
    most = gcd(global_batch_size, num_devices)
    if plans[0].layout.data_parallel < most or most == plans[0].layout.num_devices:
        return
    for replicas in reversed(divisors(num_devices)):
        if replicas <= most:
            return
        below = global_batch_size // replicas * replicas
        nearest = min(
            (batch for batch in (below, below + replicas) if batch), key=lambda batch: abs(batch - global_batch_size)
        )
        if abs(nearest - global_batch_size) <= _MOST_BATCH_CHANGE_FRACTION * global_batch_size:
            yield (
                f"global_batch_size={global_batch_size} and {num_devices} devices allow at most {most} replicas, as in "
                f"rank 1; a batch of {nearest} allows {gcd(nearest, num_devices)}"
            )
            return
