"""What to say where no plan is left: what does not divide, or how much is missing and how many devices would do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.errors import LayoutError
from shapewright.hardware.nodes import fills_units
from shapewright.integers import divisors
from shapewright.plan.engine import explore
from shapewright.plan.request import LARGEST_JOB, offload_choices
from shapewright.plan.words import describe_choice
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.plan.findings import Findings
    from shapewright.plan.job import PlanJob
    from shapewright.plan.request import PlanRequest

_MOST_DOUBLINGS = 12


def refuse_if_none_fits(job: PlanJob, findings: Findings) -> None:
    """Say what stands in the way where no plan is left.

    Raises:
        LayoutError: nothing divides, or nothing fits.
    """
    if findings.tally.num_fitting:
        return
    if findings.smallest is None:
        raise LayoutError(_say_why_nothing(job, findings))
    needed, choice = findings.smallest
    raise LayoutError(
        f"no plan fits {job.request.num_devices} {job.device.name}: the smallest needs {format_bytes(needed)} of "
        f"{format_bytes(job.limit_bytes)} ({describe_choice(choice)}); {_suggest_offload(job)}{_suggest_devices(job)}"
    )


def _suggest_offload(job: PlanJob) -> str:
    """A plan that fits these devices with the host's memory, where there is one and it was not looked at."""
    tried = offload_choices(job.request.kept, job.workload)
    has_link = job.device.host_bandwidth_bytes_per_s or job.device.pcie_bandwidth_bytes_per_s
    if tried == dict(job.request.kept) or not has_link:
        return ""
    fitting = _describe_smallest(job, kept=tried)
    return f"with --try-offload it fits ({fitting}); " if fitting else ""


def _suggest_devices(job: PlanJob) -> str:
    """The fewest devices, in doublings, on which a plan fits."""
    most = job.request.num_devices
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        count = job.request.num_devices << doubling
        if count > LARGEST_JOB or not fills_units(count, job.device):
            continue
        most = count
        fitting = _describe_smallest(job, num_devices=count)
        if fitting:
            return f"the fewest that fit are {count} ({fitting})"
    return f"nothing fits on up to {most} either: take a shorter --seq-len, or devices with more memory"


def _describe_smallest(job: PlanJob, **changes: Any) -> str:
    """The plan that needs least memory where the request is another, and its bytes; empty where it does not fit."""
    other = replace(job, request=replace(job.request, objective="memory", **changes))
    smallest = explore(other, memory_only=True).smallest
    if smallest is None or smallest[0] > other.limit_bytes:
        return ""
    return f"{describe_choice(smallest[1])}, {format_bytes(smallest[0])}"


def _say_why_nothing(job: PlanJob, findings: Findings) -> str:
    """Why no split of the devices is possible at all."""
    request = job.request
    kept = ", ".join(f"{name}={'|'.join(map(str, values))}" for name, values in request.kept.items())
    what = f"no plan of {request.num_devices} {job.device.name}{f' with {kept}' if kept else ''}"
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"):
        values = request.kept.get(name, ())
        if values and all(request.num_devices % value for value in values):
            return f"{what}: {name} must divide gpus={request.num_devices}; {name} may be {_near(values[0], request)}"
    batch = job.workload.global_batch_size
    others = _batches_that_divide(job)
    if others:
        refused = findings.tally.refused.most_common(1)
        reason = f" ({refused[0][0].partition(';')[0]})" if refused else ""
        return (
            f"{what}: no number of replicas that divides global_batch_size={batch} leaves degrees that may be "
            f"chosen{reason}; give --global-batch {' or '.join(map(str, others))}"
        )
    if findings.tally.refused:
        return f"{what}: {findings.tally.refused.most_common(1)[0][0]}"
    return (
        f"{what}: the replicas must share global_batch_size={batch} evenly, in micro-batches "
        f"that are kept, and stages of {job.config.num_layers} layers must not be empty; change --gpus, --global-batch "
        f"or what is kept"
    )


def _batches_that_divide(job: PlanJob) -> list[int]:
    """The nearest global batches that all devices share evenly, where that is what is missing."""
    batch, num_devices = job.workload.global_batch_size, job.request.num_devices
    assert batch is not None
    if batch % num_devices == 0:
        return []
    return [
        each
        for each in (batch // num_devices * num_devices, -(-batch // num_devices) * num_devices)
        if each
        and explore(replace(job, workload=replace(job.workload, global_batch_size=each)), memory_only=True).smallest
    ]


def _near(value: int, request: PlanRequest) -> str:
    """Divisors of the devices next to a value."""
    allowed = divisors(request.num_devices)
    near = [each for each in allowed if each < value][-1:] + [each for each in allowed if each > value][:1]
    return " or ".join(map(str, near))
