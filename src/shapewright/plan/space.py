"""The space of plans: which splits of the devices, micro-batches and schedules there are.

A *frame* is what decides the operations of a pass: tensor, pipeline, data, context and expert degrees, sequence
parallelism and micro-batch. Recomputation, ZeRO stage, schedule and what the host keeps come on top and change no other
part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.hardware.nodes import fills_units
from shapewright.integers import divisors
from shapewright.workload import RECOMPUTE_MODES

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.plan.request import PlanRequest

_ZERO_STAGES = (0, 1, 2, 3)
# Limits of what is tried unless a value is asked for. Rings over more devices, or of shorter pieces, cost more than
# they hide; larger micro-batches gain nothing once products fill the device.
MOST_CONTEXT_PARALLEL = 64
FEWEST_TOKENS_PER_RANK = 1024
MOST_MICRO_BATCH = 256


class Frame(NamedTuple):
    """Degrees and micro-batch of a plan."""

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
        """Degrees of its axes and sequence parallelism, by field of a layout."""
        return {name: value for name, value in self._asdict().items() if name.endswith("_parallel")}


class Mode(NamedTuple):
    """What layers do with what they save for the backward pass."""

    recompute: str
    offload_activations: bool


class Sharding(NamedTuple):
    """Who keeps weights, gradients and optimiser states."""

    zero_stage: int
    offload_optimizer: bool


class Order(NamedTuple):
    """Order of a pipeline's passes."""

    virtual_pipeline: int
    pipeline_schedule: str


def modes(request: PlanRequest) -> tuple[Mode, ...]:
    """Ways to keep activations; without the host unless it is asked for."""
    return tuple(
        Mode(word, offloads)
        for offloads in sorted(set(request.kept.get("offload_activations", (False,))))
        for word in RECOMPUTE_MODES
        if request.allows("recompute", word)
    )


def shardings(request: PlanRequest) -> tuple[Sharding, ...]:
    """Ways to keep states, by stage; without the host unless it is asked for."""
    return tuple(
        Sharding(stage, offloads)
        for stage in _ZERO_STAGES
        if request.allows("zero_stage", stage)
        for offloads in sorted(set(request.kept.get("offload_optimizer", (False,))))
    )


def device_counts(device: Device, request: PlanRequest) -> list[int]:
    """Numbers of devices to look at: all, or for the least cost also halves of them that fill nodes."""
    counts = [request.num_devices]
    while request.objective == "cost" and counts[-1] % 2 == 0:
        half = counts[-1] // 2
        if not fills_units(half, device):
            break
        counts.append(half)
    return counts


def frames(
    config: TransformerConfig,
    device: Device,
    *,
    num_devices: int,
    global_batch_size: int,
    seq_len: int,
    request: PlanRequest,
) -> Iterator[Frame]:
    """List the splits of the devices with their micro-batches.

    The tensor axis stays inside a node, stages are never empty, the data axis takes what is left, and replicas share
    the global batch evenly. Whether a split divides the model is left to the lowering.

    Args:
        config: The model.
        device: What it runs on.
        num_devices: Devices of the job.
        global_batch_size: Sequences of a step.
        seq_len: Tokens of a sequence.
        request: What is kept.
    """
    batches: dict[int, list[int]] = {}
    for tensor in divisors(num_devices):
        if not _fits_node(tensor, device, request) or not request.allows("tensor_parallel", tensor):
            continue
        for context in divisors(num_devices // tensor):
            if not _is_worth_a_ring(context, seq_len, request):
                continue
            for pipeline in divisors(num_devices // (tensor * context)):
                data = num_devices // (tensor * context * pipeline)
                if not _has_full_stages(config, pipeline) or global_batch_size % data:
                    continue
                if not request.allows("pipeline_parallel", pipeline) or not request.allows("data_parallel", data):
                    continue
                share = global_batch_size // data
                if share not in batches:
                    batches[share] = _micro_batches(share, request)
                for expert, cut in _expert_degrees(config, tensor, data * context, request):
                    for sequence in _sequence_choices(tensor, request):
                        if cut is not None and not sequence:
                            continue  # devices of the tensor axis have no tokens of their own to send
                        for size in batches[share]:
                            yield Frame(tensor, pipeline, data, context, expert, sequence, size, share // size, cut)


def orders(config: TransformerConfig, pipeline_parallel: int, request: PlanRequest) -> list[Order]:
    """Orders of the passes of a pipeline; chunks divide the layers of a stage."""
    if pipeline_parallel == 1:
        one = Order(1, "1f1b")
        return [one] if _allows(request, one) else []
    found = [Order(1, schedule) for schedule in ("1f1b", "gpipe", "zero-bubble")]
    if "dualpipe" in request.kept.get("pipeline_schedule", ()) and pipeline_parallel % 2 == 0:
        # One project has it (DeepSeek's own): looked at where it is asked for.
        found.append(Order(1, "dualpipe"))
    per_stage = -(-config.num_layers // pipeline_parallel)
    found += [
        Order(chunks, "1f1b") for chunks in divisors(per_stage)[1:] if pipeline_parallel * chunks <= config.num_layers
    ]
    return [order for order in found if _allows(request, order)]


def _allows(request: PlanRequest, order: Order) -> bool:
    return request.allows("virtual_pipeline", order.virtual_pipeline) and request.allows(
        "pipeline_schedule", order.pipeline_schedule
    )


def _fits_node(tensor: int, device: Device, request: PlanRequest) -> bool:
    """Tensor parallelism over the network between nodes is tried only where it is asked for."""
    return tensor <= device.node_size or "tensor_parallel" in request.kept


def _is_worth_a_ring(context: int, seq_len: int, request: PlanRequest) -> bool:
    if "context_parallel" in request.kept:
        return request.allows("context_parallel", context)
    is_short = context > MOST_CONTEXT_PARALLEL or seq_len < context * FEWEST_TOKENS_PER_RANK
    return context == 1 or not (is_short or seq_len % context)


def _has_full_stages(config: TransformerConfig, pipeline: int) -> bool:
    per_stage = -(-config.num_layers // pipeline)
    return per_stage * (pipeline - 1) < config.num_layers


def _micro_batches(share: int, request: PlanRequest) -> list[int]:
    """Micro-batches that divide a replica's share of the batch."""
    if "micro_batch_size" in request.kept:
        return [size for size in request.kept["micro_batch_size"] if size >= 1 and share % size == 0]
    return [size for size in divisors(share) if size <= MOST_MICRO_BATCH]


def _expert_degrees(
    config: TransformerConfig, tensor: int, ranks: int, request: PlanRequest
) -> Iterator[tuple[int, int | None]]:
    """Devices that share a layer's experts, and those that share each of their matrices; None for the tensor axis'.

    Experts are cut as other matrices are, or whole (Megatron-LM's expert_tensor_parallel_size 1); others if asked. A
    kept None is the tensor axis' degree, as in a layout.
    """
    degrees = divisors(config.num_experts) if config.num_experts else [1]
    kept, cuts = set[int](), set[int]()
    if config.num_experts:
        kept = {tensor if cut is None else cut for cut in request.kept.get("expert_tensor_parallel", ())}
        cuts = {1, *kept}
    for cut in (tensor, *sorted(cut for cut in cuts if cut != tensor)):
        if kept and cut not in kept:
            continue
        for degree in degrees:
            if tensor * ranks % (degree * cut) == 0 and request.allows("expert_parallel", degree):
                yield degree, None if cut == tensor else cut


def _sequence_choices(tensor: int, request: PlanRequest) -> list[bool]:
    """Without a tensor axis there is nothing to choose."""
    if tensor > 1:
        return [choice for choice in (True, False) if request.allows("sequence_parallel", choice)]
    return [bool(request.kept.get("sequence_parallel", (True,))[0])]
