"""Texts about plans: their descriptions, notes on the best ones, and the reason if no plan is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from math import gcd
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import LayoutError
from shapewright.core.numeric import divisors, round_up
from shapewright.core.texts import FieldName, with_fields
from shapewright.core.units import format_bytes, format_seconds
from shapewright.hardware.nodes import is_whole_allocation
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION
from shapewright.optimize.plan.engine import explore
from shapewright.optimize.plan.request import LARGEST_JOB, offload_choices
from shapewright.prediction.predict import predict
from shapewright.pricing.software import TUNED
from shapewright.workload.layout import MAX_ZERO_STAGE_IN_PIPELINES

if TYPE_CHECKING:
    from shapewright.optimize.plan.findings import Choice, Findings
    from shapewright.optimize.plan.request import PlanJob, PlanRequest
    from shapewright.optimize.plan.result import Plan
    from shapewright.prediction.predict import Prediction
    from shapewright.workload.layout import ParallelLayout


def describe_choice(choice: Choice) -> str:
    """Return a plan in one phrase: ``tp 8, pp 4, dp 16, zero 1, micro-batch 2, full recompute``."""
    return describe_layout(choice.layout, choice.chosen_workload)


def describe_layout(layout: ParallelLayout, workload: Mapping[str, Any]) -> str:
    """Return degrees above 1, sharding, schedule, micro-batch, recomputation and offload in one phrase.

    Args:
        workload: Fields of the workload that a plan chooses.
    """
    degrees = {
        "tp": layout.tensor_parallel,
        "pp": layout.pipeline_parallel,
        "vpp": layout.virtual_pipeline,
        "dp": layout.data_parallel,
        "cp": layout.context_parallel,
        "ep": layout.expert_parallel,
    }
    parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    parts += [f"etp {layout.expert_tensor_degree}"] * layout.has_own_expert_degree
    parts += [f"zero {layout.zero_stage}"] * (layout.zero_stage > 0)
    parts += ["no sp"] * (layout.tensor_parallel > 1 and not layout.sequence_parallel)
    parts += [layout.pipeline_schedule] * (layout.pipeline_schedule != "1f1b")
    parts.append(f"micro-batch {workload['micro_batch_size']}")
    parts += [f"{workload['recompute']} recompute"] * (workload["recompute"] != "none")
    parts += ["activations on host"] * workload["offload_activations"]
    parts += ["optimizer on host"] * workload["offload_optimizer"]
    return ", ".join(parts)


_MOST_DOUBLINGS = 12


def raise_if_none_fits(job: PlanJob, findings: Findings) -> None:
    """Raise an error with the reason if no plan is left.

    Raises:
        LayoutError: nothing divides, or nothing fits.
    """
    if findings.tally.num_fitting:
        return
    if findings.smallest is None:
        raise LayoutError(_explain_no_split(job, findings))
    needed, choice = findings.smallest
    raise LayoutError(
        f"no plan fits {job.request.num_devices} {job.scenario.device.name}: the smallest needs "
        f"{format_bytes(needed)} of {format_bytes(job.limit_bytes)} ({describe_choice(choice)}); "
        + _suggest_offload(job)
        + _suggest_devices(job)
    )


def _suggest_offload(job: PlanJob) -> str:
    """Return advice to offload to the host, if that was not tried and a plan then fits; else an empty string."""
    with_offload = offload_choices(job.request.kept, job.scenario.workload)
    has_link = job.scenario.device.host_bandwidth_bytes_per_s or job.scenario.device.pcie_bandwidth_bytes_per_s
    if with_offload == dict(job.request.kept) or not has_link:
        return ""
    fitting = _describe_smallest(job, kept=with_offload)
    return with_fields("with {try_offload} it fits ({fitting}); ", fitting=fitting) if fitting else ""


def _suggest_devices(job: PlanJob) -> str:
    """Return the fewest devices on which a plan fits, of the given number doubled repeatedly; or that none fits."""
    most = job.request.num_devices
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        count = job.request.num_devices << doubling
        if count > LARGEST_JOB or not is_whole_allocation(count, job.scenario.device):
            continue
        most = count
        fitting = _describe_smallest(job, num_devices=count)
        if fitting:
            return f"the fewest devices that fit are {count} ({fitting})"
    return with_fields(
        "nothing fits on up to {most} either: give a shorter {seq_len}, or devices with more memory", most=most
    )


def _describe_smallest(job: PlanJob, **changes: Any) -> str:
    """Return the plan of least memory under a changed request, with its bytes; empty if it does not fit."""
    other = replace(job, request=replace(job.request, objective="memory", **changes))
    smallest = explore(other, memory_only=True).smallest
    if smallest is None or smallest[0] > other.limit_bytes:
        return ""
    return f"{describe_choice(smallest[1])}, {format_bytes(smallest[0])}"


def _explain_no_split(job: PlanJob, findings: Findings) -> str:
    """Return why no split of the devices is possible."""
    request = job.request
    kept = ", ".join(f"{name}={'|'.join(map(str, values))}" for name, values in request.kept.items())
    what = f"no plan of {request.num_devices} {job.scenario.device.name}{f' with {kept}' if kept else ''}"
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"):
        values = request.kept.get(name, ())
        if values and all(request.num_devices % value for value in values):
            return (
                f"{what}: "
                + with_fields(
                    "{name} must divide num_devices={number}", name=FieldName(name), number=request.num_devices
                )
                + with_fields("; {name} may be ", name=FieldName(name))
                + _nearest_divisors(values[0], request)
            )
    batch = job.scenario.workload.global_batch_size
    others = _batches_that_divide(job)
    if others:
        refused = findings.tally.refused.most_common(1)
        reason = " (" + refused[0][0].fact + ")" if refused else ""
        return (
            f"{what}: no number of replicas that divides global_batch_size={batch} leaves allowed "
            f"degrees" + reason + with_fields("; give {global_batch_size} ") + " or ".join(map(str, others))
        )
    if findings.tally.refused:
        return f"{what}: " + findings.tally.refused.most_common(1)[0][0].text
    return (
        f"{what}: the replicas must share global_batch_size={batch} evenly, in micro-batches "
        f"that are kept, and stages of {job.scenario.config.num_layers} layers must not be empty; "
        + with_fields("change {num_devices}, {global_batch_size} or the kept values")
    )


def _batches_that_divide(job: PlanJob) -> list[int]:
    """Return the nearest global batch sizes that divide over all devices, if the given one does not."""
    batch, num_devices = job.scenario.workload.global_batch_size, job.request.num_devices
    assert batch is not None
    if batch % num_devices == 0:
        return []
    return [
        each
        for each in (batch // num_devices * num_devices, round_up(batch, num_devices))
        if each
        and explore(replace(job, scenario=job.scenario.replace(global_batch_size=each)), memory_only=True).smallest
    ]


def _nearest_divisors(value: int, request: PlanRequest) -> str:
    """Return the divisors of the number of devices next below and above a value."""
    allowed = divisors(request.num_devices)
    near = [each for each in allowed if each < value][-1:] + [each for each in allowed if each > value][:1]
    return " or ".join(map(str, near))


_SHARDING_SOFTWARE, _SHARDING_SOFTWARE_TITLE = "fsdp-2024", "PyTorch FSDP of 2024"
"""The newest software whose published steps shard weights over replicas, and its name in notes."""

_SHARDS_GRADIENTS = 2
"""ZeRO stage from which gradients are sharded."""

_MOST_BATCH_CHANGE_FRACTION = 0.25
"""Largest relative change of the batch size that a note proposes."""


def plan_notes(job: PlanJob, plans: Sequence[Plan], num_with_tower: int) -> Iterator[str]:
    """Yield the notes on plans, one line each.

    Args:
        num_with_tower: Plans that were predicted with the vision tower.
    """
    if not plans:
        return
    request, best = job.request, plans[0]
    predictions = [plan.prediction for plan in plans]
    if job.scenario.workload.images:
        yield (
            f"{num_with_tower} plans, all that can be among the best, were predicted with the vision tower, which is "
            f"on the first stage; counts of plans are those of the language model"
        )
    yield from _note_memory(job, plans)
    if request.objective == "cost":
        yield "cost: half, a quarter and so on of the devices are tried too; the device time of a token is minimized"
    yield from _note_software(predictions, job.scenario.software.name)
    if request.objective != "cost":
        yield from _note_batch(predictions, best.workload.global_batch_size or 0, request.num_devices)
    if request.straggler_factor > 1.0:
        yield (
            f"expected steps, and the tokens/s and costs of plans, are with slow devices: {request.straggler_factor:g} "
            "times the predicted steps"
        )
    else:
        yield (
            "slow devices and links are not included: large jobs that had them took 1.34 times as long on average "
            "(GREYHOUND, USENIX ATC 2025); " + with_fields("set {straggler_factor} to include them")
        )
    if "zero_stage" not in request.kept and any(plan.layout.pipeline_parallel > 1 for plan in plans):
        yield (
            f"under a pipeline, ZeRO stages up to {MAX_ZERO_STAGE_IN_PIPELINES} are tried: DeepSpeed and "
            "Megatron-LM shard no weights there; " + with_fields("{keep} zero_stage=0,1,2,3 to try stage 3 too")
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
            "have; " + with_fields("{keep} pipeline_schedule=1f1b to leave it out")
        )


def _note_memory(job: PlanJob, plans: Sequence[Plan]) -> Iterator[str]:
    """Yield notes if the best plan leaves little memory free, and if it uses memory of the host."""
    device, best = job.scenario.device, plans[0]
    if best.is_tight:
        roomy = next((plan.rank for plan in plans if not plan.is_tight), None)
        advice = with_fields("set {headroom_fraction} {band:g} for plans that leave them", band=ALLOCATOR_BAND_FRACTION)
        yield (
            f"rank 1 is tight: allocator and buffers may take {100.0 * ALLOCATOR_BAND_FRACTION:.0f} % in addition, "
            f"more than {device.name} has left; " + (f"rank {roomy} leaves them" if roomy else advice)
        )
    host_bytes = best.prediction.memory.host_bytes
    if host_bytes:
        sharing = min(best.layout.num_devices, device.node_size)
        yield (
            f"rank 1 offloads {format_bytes(host_bytes)} of each device to the host, "
            f"{format_bytes(host_bytes * sharing)} for {sharing} of them: device files do not give the host's memory"
        )


def _note_software(plans: Sequence[Prediction], software: str) -> Iterator[str]:
    """Yield a note on the software assumed; if the best plan shards weights, also the step of older software."""
    if software != TUNED:
        return
    best = plans[0]
    if best.layout.zero_stage < 3:
        yield (
            "steps are those of a tuned stack of today; PyTorch FSDP of 2023 and 2024 took 1.1 to 1.7 times as long, "
            "which the interval includes; " + with_fields("set {software} for another stack")
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
        + with_fields("set {choice} to plan for it", choice=FieldName("software", _SHARDING_SOFTWARE))
        + ("" if unsharded is None else f"; rank {unsharded} gathers no weights")
    )


def _note_gradient_reduction(plans: Sequence[Prediction]) -> Iterator[str]:
    """Yield a note if the best plan reduces gradients in each micro-batch of a pipeline, which few stacks do."""
    best = plans[0].layout
    if best.zero_stage != _SHARDS_GRADIENTS or best.pipeline_parallel == 1:
        return
    once = next((rank for rank, plan in enumerate(plans, 1) if plan.layout.zero_stage < _SHARDS_GRADIENTS), None)
    yield (
        "rank 1 shards gradients (ZeRO 2) and so reduces them in each micro-batch, as torchtitan does under a "
        "pipeline; "
        + with_fields("{keep} zero_stage=0,1 to reduce them once per step, as Megatron-LM does")
        + ("" if once is None else f"; so does rank {once}")
    )


def _note_batch(plans: Sequence[Prediction], global_batch_size: int, num_devices: int) -> Iterator[str]:
    """Yield a note with a similar batch size that allows more replicas, if the batch limits those of the best plan."""
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


def describe_plan(plan: Plan) -> str:
    """Return the layout and the chosen workload fields of a plan in one phrase."""
    return describe_layout(plan.layout, asdict(plan.workload))
