"""Errors where no plan is left (what does not divide, how much memory is missing), and descriptions of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import LayoutError
from shapewright.core.numeric import divisors
from shapewright.core.units import format_bytes
from shapewright.hardware.nodes import is_whole_allocation
from shapewright.optimize.plan.engine import explore
from shapewright.optimize.plan.request import LARGEST_JOB, offload_choices

if TYPE_CHECKING:
    from shapewright.optimize.plan.findings import Choice, Findings
    from shapewright.optimize.plan.request import PlanJob, PlanRequest
    from shapewright.workload import ParallelLayout


def describe_choice(choice: Choice) -> str:
    """Return a plan in one phrase: ``tp 8, pp 4, dp 16, zero 1, micro-batch 2, full recompute``."""
    return describe_layout(choice.layout, choice.chosen_workload)


def describe_layout(layout: ParallelLayout, workload: Mapping[str, Any]) -> str:
    """Return degrees above 1, sharding, schedule, micro-batch, recomputation and offload in one phrase.

    Args:
        layout: The layout.
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


def refuse_if_none_fits(job: PlanJob, findings: Findings) -> None:
    """Raise an error that says why no plan is left, if none is.

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
        f"{_suggest_offload(job)}{_suggest_devices(job)}"
    )


def _suggest_offload(job: PlanJob) -> str:
    """Return a plan that fits with offload to the host, if there is one and offload was not tried."""
    tried = offload_choices(job.request.kept, job.scenario.workload)
    has_link = job.scenario.device.host_bandwidth_bytes_per_s or job.scenario.device.pcie_bandwidth_bytes_per_s
    if tried == dict(job.request.kept) or not has_link:
        return ""
    fitting = _describe_smallest(job, kept=tried)
    return f"with try_offload it fits ({fitting}); " if fitting else ""


def _suggest_devices(job: PlanJob) -> str:
    """Return the fewest devices, in doublings, on which a plan fits."""
    most = job.request.num_devices
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        count = job.request.num_devices << doubling
        if count > LARGEST_JOB or not is_whole_allocation(count, job.scenario.device):
            continue
        most = count
        fitting = _describe_smallest(job, num_devices=count)
        if fitting:
            return f"the fewest devices that fit are {count} ({fitting})"
    return f"nothing fits on up to {most} either: give a shorter seq_len, or devices with more memory"


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
                f"{what}: {name} must divide num_devices={request.num_devices}; "
                f"{name} may be {_nearest_divisors(values[0], request)}"
            )
    batch = job.scenario.workload.global_batch_size
    others = _batches_that_divide(job)
    if others:
        refused = findings.tally.refused.most_common(1)
        reason = f" ({refused[0][0].partition(';')[0]})" if refused else ""
        return (
            f"{what}: no number of replicas that divides global_batch_size={batch} leaves allowed "
            f"degrees{reason}; give global_batch_size {' or '.join(map(str, others))}"
        )
    if findings.tally.refused:
        return f"{what}: {findings.tally.refused.most_common(1)[0][0]}"
    return (
        f"{what}: the replicas must share global_batch_size={batch} evenly, in micro-batches "
        f"that are kept, and stages of {job.scenario.config.num_layers} layers must not be empty; change num_devices, "
        f"global_batch_size or the kept values"
    )


def _batches_that_divide(job: PlanJob) -> list[int]:
    """Return the nearest global batch sizes that divide over all devices, if the given one does not."""
    batch, num_devices = job.scenario.workload.global_batch_size, job.request.num_devices
    assert batch is not None
    if batch % num_devices == 0:
        return []
    return [
        each
        for each in (batch // num_devices * num_devices, -(-batch // num_devices) * num_devices)
        if each
        and explore(replace(job, scenario=job.scenario.replace(global_batch_size=each)), memory_only=True).smallest
    ]


def _nearest_divisors(value: int, request: PlanRequest) -> str:
    """Return the divisors of the number of devices next to a value."""
    allowed = divisors(request.num_devices)
    near = [each for each in allowed if each < value][-1:] + [each for each in allowed if each > value][:1]
    return " or ".join(map(str, near))
