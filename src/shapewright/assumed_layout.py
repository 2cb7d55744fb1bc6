"""A layout for a job of which only the number of devices is known: the fastest plain one that fits.

Tensor parallelism stays inside a node, and states are sharded over replicas (ZeRO stage 1 or 3). It is a guess to
explain a measurement with, not a plan: no interleaving, no context or expert axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shapewright.errors import LayoutError, ShapewrightError
from shapewright.layout import ParallelLayout
from shapewright.lowering import num_microbatches, validate_layout
from shapewright.memory import estimate_memory
from shapewright.predict import predict

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.workload import Workload

_DEGREES = ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel")
_LARGEST_ASSUMED_MICRO_BATCH = 4


@dataclass(frozen=True)
class AssumedJob:
    """A workload and a layout, completed.

    Attributes:
        workload: The workload, its micro-batch filled in.
        layout: The layout; None where no layout divides model and batch.
        notes: What was assumed, one line each.
    """

    workload: Workload
    layout: ParallelLayout | None
    notes: tuple[str, ...]


def assume_layout(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    num_devices: int,
    given: Mapping[str, Any],
    *,
    keep_micro_batch: bool,
) -> AssumedJob:
    """Complete a layout for a number of devices.

    Args:
        config: The model.
        device: The device.
        workload: Training, with its global batch.
        num_devices: Devices of the job.
        given: Fields of ParallelLayout that are known; a missing data_parallel takes the devices that are left.
        keep_micro_batch: Whether the workload's micro-batch is known, and not to be chosen.

    Raises:
        LayoutError: the known degrees do not divide the devices.
    """
    if any(given.get(name) is not None for name in _DEGREES):
        layout = _complete(num_devices, given)
        chosen = workload if keep_micro_batch else _largest_micro_batch(config, device, workload, layout)
        return AssumedJob(chosen, layout, () if keep_micro_batch else (_say_micro_batch(chosen),))
    refusal = f"no split of {num_devices} devices is possible"
    found: list[tuple[tuple[float, float], Workload, ParallelLayout]] = []
    for layout in _candidates(config, device, num_devices, given):
        try:
            validate_layout(config, workload, layout)
            chosen = workload if keep_micro_batch else _largest_micro_batch(config, device, workload, layout)
            num_microbatches(chosen, layout)
            missing_bytes = max(estimate_memory(config, chosen, layout).total_bytes - device.memory_bytes, 0.0)
            fits = missing_bytes == 0.0
            step_s = predict(config, device=device, workload=chosen, layout=layout).step_time_s if fits else 0.0
        except ShapewrightError as error:
            refusal = str(error)
            continue
        found.append(((missing_bytes, step_s), chosen, layout))
    if not found:
        return AssumedJob(
            workload, None, (f"no waterfall, for no layout of {num_devices} devices can run the step: {refusal}",)
        )
    _, chosen, layout = min(found, key=lambda entry: entry[0])
    return AssumedJob(chosen, layout, (_say_layout(layout, chosen),))


def _complete(num_devices: int, given: Mapping[str, Any]) -> ParallelLayout:
    """Give the data axis the devices that other axes leave."""
    fields = {name: value for name, value in given.items() if value is not None}
    if "data_parallel" not in fields:
        of_experts = ("expert_parallel", "expert_tensor_parallel")
        without_data = ParallelLayout(**{name: value for name, value in fields.items() if name not in of_experts})
        data_parallel, rest = divmod(num_devices, without_data.num_devices)
        if rest:
            raise LayoutError(
                f"gpus={num_devices} must be a multiple of tensor * pipeline * context = {without_data.num_devices}; "
                f"change --gpus or the degrees"
            )
        fields["data_parallel"] = data_parallel
    return ParallelLayout(**fields)


def _candidates(
    config: TransformerConfig, device: Device, num_devices: int, given: Mapping[str, Any]
) -> Iterator[ParallelLayout]:
    """Every split of the devices into tensor parallelism inside a node, pipeline stages and replicas."""
    fields = {name: value for name, value in given.items() if value is not None}
    pairs = [
        (tensor, pipeline)
        for tensor in range(1, min(device.node_size, num_devices) + 1)
        if num_devices % tensor == 0
        for pipeline in range(1, min(config.num_layers, num_devices // tensor) + 1)
        if num_devices // tensor % pipeline == 0
    ]
    for tensor, pipeline in pairs:
        replicas = num_devices // (tensor * pipeline)
        stages = (1, 3) if replicas > 1 else (0,)
        for zero_stage in (fields["zero_stage"],) if "zero_stage" in fields else stages:
            degrees = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "data_parallel": replicas}
            try:
                yield ParallelLayout(**{**fields, **degrees, "zero_stage": zero_stage})
            except LayoutError:
                continue


def _largest_micro_batch(
    config: TransformerConfig, device: Device, workload: Workload, layout: ParallelLayout
) -> Workload:
    """The largest micro-batch up to 4 that divides a replica's share and fits in memory; 1 where none does."""
    share = (workload.global_batch_size or layout.data_parallel) // layout.data_parallel
    for size in range(min(_LARGEST_ASSUMED_MICRO_BATCH, share), 1, -1):
        candidate = replace(workload, micro_batch_size=size)
        if share % size == 0 and estimate_memory(config, candidate, layout).total_bytes <= device.memory_bytes:
            return candidate
    return replace(workload, micro_batch_size=1)


def _say_micro_batch(workload: Workload) -> str:
    return f"assumed micro_batch_size={workload.micro_batch_size}; give --micro-batch-size if it was another"


def _say_layout(layout: ParallelLayout, workload: Workload) -> str:
    degrees = ", ".join(f"{name}={getattr(layout, name)}" for name in _DEGREES[:3])
    return (
        f"assumed for the waterfall: {degrees}, zero_stage={layout.zero_stage}, "
        f"micro_batch_size={workload.micro_batch_size}; give --tp, --pp, --zero-stage, --micro-batch-size for yours"
    )
