"""What to say where no plan is left: what does not divide, or how much is missing and how many devices would do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError
from shapewright.hardware.nodes import fills_units
from shapewright.integers import divisors
from shapewright.memory import find_recipe
from shapewright.plan.engine import explore
from shapewright.plan.findings import Findings
from shapewright.plan.request import LARGEST_JOB, PlanRequest, offload_choices
from shapewright.plan.words import describe_choice
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.memory import TrainingRecipe
    from shapewright.workload import Workload

_MOST_DOUBLINGS = 12


def refuse_if_none_fits(
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
        raise LayoutError(_say_why_nothing(config, device, workload, request, findings))
    needed, choice = findings.smallest
    capacity = device.memory_bytes * (1.0 - request.headroom_fraction)
    raise LayoutError(
        f"no plan fits {request.num_devices} {device.name}: the smallest needs {format_bytes(needed)} of "
        f"{format_bytes(capacity)} ({describe_choice(choice)}); "
        f"{_suggest_offload(config, device, workload, request, optimizer)}"
        f"{_suggest_devices(config, device, workload, request, optimizer)}"
    )


def _suggest_offload(
    config: TransformerConfig, device: Device, workload: Workload, request: PlanRequest, optimizer: str
) -> str:
    """A plan that fits these devices with the host's memory, where there is one and it was not looked at."""
    tried = offload_choices(request.kept, workload)
    if tried == dict(request.kept) or not device.pcie_bandwidth_bytes_per_s:
        return ""
    larger = replace(request, kept=tried, objective="memory")
    smallest = explore(
        config, device, workload, larger, recipe=_recipe_of(workload, optimizer), memory_only=True
    ).smallest
    if smallest is None or smallest[0] > device.memory_bytes * (1.0 - request.headroom_fraction):
        return ""
    return f"with --try-offload it fits ({describe_choice(smallest[1])}, {format_bytes(smallest[0])}); "


def _recipe_of(workload: Workload, optimizer: str) -> TrainingRecipe | None:
    return None if optimizer == "adamw" else find_recipe(optimizer, workload.dtype)


def _suggest_devices(
    config: TransformerConfig, device: Device, workload: Workload, request: PlanRequest, optimizer: str
) -> str:
    """The fewest devices, in doublings, on which a plan fits."""
    recipe = _recipe_of(workload, optimizer)
    most = request.num_devices
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        count = request.num_devices << doubling
        if count > LARGEST_JOB or not fills_units(count, device):
            continue
        most = count
        larger = replace(request, num_devices=count, objective="memory")
        smallest = explore(config, device, workload, larger, recipe=recipe, memory_only=True).smallest
        if smallest is not None and smallest[0] <= device.memory_bytes * (1.0 - request.headroom_fraction):
            return f"the fewest that fit are {count} ({describe_choice(smallest[1])}, {format_bytes(smallest[0])})"
    return f"nothing fits on up to {most} either: take a shorter --seq-len, or devices with more memory"


def _say_why_nothing(
    config: TransformerConfig, device: Device, workload: Workload, request: PlanRequest, findings: Findings
) -> str:
    """Why no split of the devices is possible at all."""
    kept = ", ".join(f"{name}={'|'.join(map(str, values))}" for name, values in request.kept.items())
    what = f"no plan of {request.num_devices} {device.name}{f' with {kept}' if kept else ''}"
    for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"):
        values = request.kept.get(name, ())
        if values and all(request.num_devices % value for value in values):
            return f"{what}: {name} must divide gpus={request.num_devices}; {name} may be {_near(values[0], request)}"
    if findings.tally.refused:
        return f"{what}: {findings.tally.refused.most_common(1)[0][0]}"
    return (
        f"{what}: the replicas must share global_batch_size={workload.global_batch_size} evenly, in micro-batches that "
        f"are kept, and stages of {config.num_layers} layers must not be empty; change --gpus, --global-batch or what "
        f"is kept"
    )


def _near(value: int, request: PlanRequest) -> str:
    """Divisors of the devices next to a value."""
    allowed = divisors(request.num_devices)
    near = [each for each in allowed if each < value][-1:] + [each for each in allowed if each > value][:1]
    return " or ".join(map(str, near))
