"""The space of plans: splits of the devices, and the activation policies, shardings and schedules of each split.

A *split* has the degrees of all axes, sequence parallelism and the micro-batch size; it determines the operations of a
pass. It is combined with an activation policy (recomputation, offload), a sharding (ZeRO stage, offload) and a pipeline
schedule, which add to its time and memory independently of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.core.numeric import divisors
from shapewright.hardware.nodes import is_whole_allocation
from shapewright.workload.workload import RECOMPUTE_MODES

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.prediction.scenario import Scenario

_ZERO_STAGES = (0, 1, 2, 3)
# Limits of the values that are tried unless the field is kept. With more devices in a ring, or fewer tokens on each,
# attention no longer hides the communication; larger micro-batches gain nothing once GEMMs fill the device.
MOST_CONTEXT_PARALLEL = 64
FEWEST_TOKENS_PER_RANK = 1024
MOST_MICRO_BATCH = 256


class Split(NamedTuple):
    """Degrees and micro-batch size of a plan."""

    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    context_parallel: int
    expert_parallel: int
    sequence_parallel: bool
    micro_batch_size: int
    num_microbatches: int
    expert_tensor_parallel: int | None = None

    @property
    def degrees(self) -> dict[str, Any]:
        """Degrees and sequence parallelism, by field of a layout."""
        return {name: value for name, value in self._asdict().items() if name.endswith("_parallel")}


class ActivationPolicy(NamedTuple):
    """How activations for the backward pass are stored: recomputed, offloaded or kept."""

    recompute: str
    offload_activations: bool


class Sharding(NamedTuple):
    """How weights, gradients and optimizer states are sharded over replicas, or offloaded."""

    zero_stage: int
    offload_optimizer: bool


class Schedule(NamedTuple):
    """Order of the passes of a pipeline."""

    virtual_pipeline: int
    pipeline_schedule: str


def list_activation_policies(request: PlanRequest) -> tuple[ActivationPolicy, ...]:
    """Return the activation policies to try; offload only if it is kept."""
    return tuple(
        ActivationPolicy(recompute, offload)
        for offload in sorted(set(request.kept.get("offload_activations", (False,))))
        for recompute in RECOMPUTE_MODES
        if request.allows("recompute", recompute)
    )


def list_shardings(request: PlanRequest) -> tuple[Sharding, ...]:
    """Return the shardings to try, by ZeRO stage; offload only if it is kept."""
    return tuple(
        Sharding(stage, offload)
        for stage in _ZERO_STAGES
        if request.allows("zero_stage", stage)
        for offload in sorted(set(request.kept.get("offload_optimizer", (False,))))
    )


def list_device_counts(device: Device, request: PlanRequest) -> list[int]:
    """Return the numbers of devices to try: all of them; for the lowest cost also halves that fill whole nodes."""
    counts = [request.num_devices]
    while request.objective == "cost" and counts[-1] % 2 == 0:
        half = counts[-1] // 2
        if not is_whole_allocation(half, device):
            break
        counts.append(half)
    return counts


def list_splits(
    scenario: Scenario, request: PlanRequest, *, num_devices: int, global_batch_size: int
) -> Iterator[Split]:
    """Yield the splits of the devices, with their micro-batch sizes.

    The tensor axis stays inside a node, no stage is empty, the data axis takes the remaining devices, and replicas
    share the global batch evenly. Lowering decides later whether a split divides the model.
    """
    config, device, seq_len = scenario.config, scenario.device, scenario.workload.query_len
    batches: dict[int, list[int]] = {}
    for tensor in divisors(num_devices):
        if not _fits_node(tensor, device, request) or not request.allows("tensor_parallel", tensor):
            continue
        for context in divisors(num_devices // tensor):
            if not _allows_context(context, seq_len, request):
                continue
            for pipeline in divisors(num_devices // (tensor * context)):
                data = num_devices // (tensor * context * pipeline)
                if not _has_no_empty_stage(config, pipeline) or global_batch_size % data:
                    continue
                if not request.allows("pipeline_parallel", pipeline) or not request.allows("data_parallel", data):
                    continue
                share = global_batch_size // data
                if share not in batches:
                    batches[share] = _list_micro_batches(share, request)
                for expert, expert_tensor in _list_expert_degrees(config, tensor, data * context, request):
                    for sequence in _list_sequence_parallel(tensor, request):
                        if expert_tensor is not None and not sequence:
                            continue  # without it, devices of the tensor axis hold the same tokens: none to exchange
                        for size in batches[share]:
                            yield Split(
                                tensor_parallel=tensor,
                                pipeline_parallel=pipeline,
                                data_parallel=data,
                                context_parallel=context,
                                expert_parallel=expert,
                                sequence_parallel=sequence,
                                micro_batch_size=size,
                                num_microbatches=share // size,
                                expert_tensor_parallel=expert_tensor,
                            )


def list_schedules(config: TransformerConfig, pipeline_parallel: int, request: PlanRequest) -> list[Schedule]:
    """Return the schedules of a pipeline to try; chunks divide the layers of a stage."""
    if pipeline_parallel == 1:
        single = Schedule(1, "1f1b")
        return [single] if _allows_schedule(request, single) else []
    found = [Schedule(1, name) for name in ("1f1b", "gpipe", "zero-bubble")]
    if "dualpipe" in request.kept.get("pipeline_schedule", ()) and pipeline_parallel % 2 == 0:
        # Only DeepSeek's own stack has it, so it is tried only if it is kept.
        found.append(Schedule(1, "dualpipe"))
    per_stage = -(-config.num_layers // pipeline_parallel)
    found += [
        Schedule(chunks, "1f1b")
        for chunks in divisors(per_stage)[1:]
        if pipeline_parallel * chunks <= config.num_layers
    ]
    return [schedule for schedule in found if _allows_schedule(request, schedule)]


def _allows_schedule(request: PlanRequest, schedule: Schedule) -> bool:
    return request.allows("virtual_pipeline", schedule.virtual_pipeline) and request.allows(
        "pipeline_schedule", schedule.pipeline_schedule
    )


def _fits_node(tensor: int, device: Device, request: PlanRequest) -> bool:
    """Return whether a tensor degree stays inside a node; kept degrees may be larger."""
    return tensor <= device.node_size or "tensor_parallel" in request.kept


def _allows_context(context: int, seq_len: int, request: PlanRequest) -> bool:
    """Return whether a context degree is tried: it divides the sequence, and leaves each device enough tokens."""
    if "context_parallel" in request.kept:
        return request.allows("context_parallel", context)
    is_excessive = context > MOST_CONTEXT_PARALLEL or seq_len < context * FEWEST_TOKENS_PER_RANK
    return context == 1 or not (is_excessive or seq_len % context)


def _has_no_empty_stage(config: TransformerConfig, pipeline: int) -> bool:
    per_stage = -(-config.num_layers // pipeline)
    return per_stage * (pipeline - 1) < config.num_layers


def _list_micro_batches(share: int, request: PlanRequest) -> list[int]:
    """Return the micro-batch sizes that divide a replica's share of the batch."""
    if "micro_batch_size" in request.kept:
        return [size for size in request.kept["micro_batch_size"] if size >= 1 and share % size == 0]
    return [size for size in divisors(share) if size <= MOST_MICRO_BATCH]


def _list_expert_degrees(
    config: TransformerConfig, tensor: int, ranks: int, request: PlanRequest
) -> Iterator[tuple[int, int | None]]:
    """Yield expert degrees with the tensor degree of the experts, None if it is that of the tensor axis.

    Experts are split like other matrices, or left whole (expert_tensor_parallel_size 1 of Megatron-LM); other degrees
    are tried only if they are kept. A kept None is the degree of the tensor axis, as in a layout.
    """
    degrees = divisors(config.num_experts) if config.num_experts else [1]
    kept, tried = set[int](), set[int]()
    if config.num_experts:
        kept = {tensor if degree is None else degree for degree in request.kept.get("expert_tensor_parallel", ())}
        tried = {1, *kept}
    for expert_tensor in (tensor, *sorted(degree for degree in tried if degree != tensor)):
        if kept and expert_tensor not in kept:
            continue
        for expert in degrees:
            if tensor * ranks % (expert * expert_tensor) == 0 and request.allows("expert_parallel", expert):
                yield expert, None if expert_tensor == tensor else expert_tensor


def _list_sequence_parallel(tensor: int, request: PlanRequest) -> list[bool]:
    """Return whether sequence parallelism is tried on and off; without a tensor axis it has no effect."""
    if tensor > 1:
        return [choice for choice in (True, False) if request.allows("sequence_parallel", choice)]
    return [bool(request.kept.get("sequence_parallel", (True,))[0])]
