"""Lowering of collectives of the tensor, context, expert, pipeline and data axes.

Ranks are numbered with the tensor axis innermost, then context, data and pipeline, which determines the ranks of a
group that share a node. Expert groups have their own numbering inside a stage: devices that share an expert's matrices
innermost, then those that share the experts of a layer, then replicas.

Source: arXiv 1909.08053 section 3 (tensor), 2205.05198 section 4.2.2 (sequence), 2104.04473 section 3 (pipeline),
1910.02054 section 7 (ZeRO), 2310.01889 (ring of keys and values), 2412.19437 sections 3.2.2 and 3.3.3 (experts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.lowering.builders import display_name
from shapewright.lowering.operations.collective import Collective

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.workload.layout import ParallelLayout

FP8_ELEMENT_BYTES = 1.0 + 4.0 / 128.0
"""Width of one element of a routed row in FP8 with an fp32 scale per 128 elements. [byte]

Source: arXiv 2412.19437, section 3.3.2 (tiles of 1 x 128) and 3.3.3 (activations and the gradients before the down
projection are dispatched in FP8; combined results stay in bf16 in both passes)."""


def ranks_per_node(num_ranks: Count, stride: Count, node_size: int) -> Any:
    """Count the ranks of one group that share a node if neighbors in the group are ``stride`` devices apart.

    Arguments are scalars or arrays.

    >>> ranks_per_node(8, 1, 8), ranks_per_node(4, 4, 8), ranks_per_node(2, 8, 8)
    (8, 2, 1)
    """
    local = node_size // stride
    if hasattr(local, "shape") or hasattr(num_ranks, "shape"):
        import numpy as np

        return np.minimum(num_ranks, np.maximum(local, 1))
    return min(num_ranks, max(1, local))


def num_ranks_of(layout: ParallelLayout, axis: str) -> int:
    """Number of devices of a group along an axis; gradients are reduced over data and context axes together."""
    if axis == "data":
        return layout.data_parallel * layout.context_parallel
    degree: int = getattr(layout, f"{axis}_parallel")
    return degree


def stride_of(layout: ParallelLayout, axis: str) -> int:
    """Distance in devices between neighbors of a group along an axis."""
    if axis == "tensor":
        return 1
    if axis == "pipeline":
        return layout.devices_per_stage
    return layout.expert_tensor_degree if axis == "expert" else layout.tensor_parallel


def collective(
    shard: Shard,
    block: Block,
    role: str,
    op_name: str,
    axis: str,
    repeats: Count,
    *,
    name: str = "",
    message_bytes: Numeric,
    num_ranks: Count | None = None,
    stride: Count | None = None,
    stage: str = "every",
    pass_name: str = "forward",
    overlaps: bool = False,
) -> list[Operation]:
    """Build one collective, or nothing if its group is a single device. Sizes may be arrays of one shape.

    Args:
        block: Part of the model or of the step that it belongs to.
        op_name: One of COLLECTIVE_OPS.
        axis: One of AXES.
        name: Displayed name without the stack, if not block and role.
        message_bytes: Size of the whole buffer, as Collective counts it. [byte]
        num_ranks: Number of participating devices, if not all of the axis.
        stride: Distance in devices between neighbors, if not that of the axis.
        pass_name: One of PASSES.
        overlaps: Whether it can overlap with computation.
    """
    ranks = num_ranks_of(shard.layout, axis) if num_ranks is None else num_ranks
    if _is_scalar(ranks, 1) or _is_scalar(repeats, 0):
        return []
    step = stride_of(shard.layout, axis) if stride is None else stride
    return [
        Collective(
            name=shard.prefix + name if name else display_name(shard, block, role),
            block=block,
            role=role,
            pass_name=pass_name,
            stage=stage,
            repeats=repeats,
            dtype=shard.dtype,
            op_name=op_name,
            axis=axis,
            message_bytes=message_bytes,
            num_ranks=ranks,
            ranks_per_node=ranks_per_node(ranks, step, shard.node_size),
            overlaps=overlaps,
            is_served=op_name == "all_reduce" and axis == "tensor" and not shard.workload.is_training,
        )
    ]


def _is_scalar(number: Any, value: int) -> bool:
    """Whether a number is a scalar of this value; arrays are kept, as pricing gives groups of one device no time."""
    return not hasattr(number, "shape") and bool(number == value)


def gather_tokens(
    shard: Shard,
    block: Block,
    repeats: int,
    *,
    tokens: int,
    name: str = "",
    width: int | None = None,
    stage: str = "every",
    overlaps: bool = False,
    num_ranks: int | None = None,
) -> list[Operation]:
    """Gather the tokens before a column-parallel GEMM; needed only if the tensor axis splits them.

    Args:
        name: Displayed name without the operation, if not the block.
        width: Elements of a token, if not the hidden size.
        overlaps: Whether it can overlap with computation.
        num_ranks: Number of devices that share the matrix, if not the tensor axis; each has different tokens.
    """
    if not shard.splits_sequence and num_ranks is None:
        return []
    message_bytes = 1.0 * tokens * (width or shard.config.hidden_size) * shard.width_bytes
    return collective(
        shard,
        block,
        "all_gather",
        "all_gather",
        "tensor",
        repeats,
        name=f"{name or block}.all_gather",
        message_bytes=message_bytes,
        num_ranks=num_ranks,
        stride=None if num_ranks is None else 1,
        stage=stage,
        overlaps=overlaps,
    )


def reduce_tokens(
    shard: Shard,
    block: Block,
    repeats: int,
    *,
    tokens: int,
    name: str = "",
    width: int | None = None,
    stage: str = "every",
    num_ranks: int | None = None,
) -> list[Operation]:
    """Reduce the partial sums of a row-parallel GEMM; if the tensor axis splits tokens, each device gets its share.

    Args:
        name: Displayed name without the operation, if not the block.
        width: Elements of a token, if not the hidden size.
        num_ranks: Number of devices that share the matrix, if not the tensor axis; each gets different tokens.
    """
    op_name = "all_reduce" if num_ranks is None and not shard.splits_sequence else "reduce_scatter"
    message_bytes = 1.0 * tokens * (width or shard.config.hidden_size) * shard.width_bytes
    return collective(
        shard,
        block,
        op_name,
        op_name,
        "tensor",
        repeats,
        name=f"{name or block}.{op_name}",
        message_bytes=message_bytes,
        num_ranks=num_ranks,
        stride=None if num_ranks is None else 1,
        stage=stage,
    )


def all_reduce_partial(shard: Shard, block: Block, repeats: int, *, width: int) -> list[Operation]:
    """Reduce the partial sums of ``width`` elements of each token to every device of the tensor axis.

    Sequence parallelism does not change this: the channels of each device need the sums of all tokens.
    """
    return collective(
        shard,
        block,
        "all_reduce",
        "all_reduce",
        "tensor",
        repeats,
        message_bytes=1.0 * shard.num_tokens * width * shard.width_bytes,
    )


def gather_expert_outputs(shard: Shard, repeats: int, *, tokens: int) -> list[Operation]:
    """Gather the experts' results for the tokens of all devices of the tensor axis on each of them."""
    message_bytes = 1.0 * tokens * shard.config.hidden_size * shard.width_bytes
    return collective(
        shard,
        "moe",
        "outputs",
        "all_gather",
        "tensor",
        repeats,
        name="moe.outputs.all_gather",
        message_bytes=message_bytes,
    )


def dispatch_experts(shard: Shard, repeats: int, *, rows: int) -> list[Operation]:
    """Send routed rows to the devices of their experts; in backward, their gradients return like results."""
    return _exchange_experts(shard, "dispatch", repeats, rows=rows, widths=(_routed_bytes(shard), shard.width_bytes))


def combine_experts(shard: Shard, repeats: int, *, rows: int) -> list[Operation]:
    """Return the results of routed rows; in backward, their gradients are dispatched like rows."""
    return _exchange_experts(shard, "combine", repeats, rows=rows, widths=(shard.width_bytes, _routed_bytes(shard)))


def _routed_bytes(shard: Shard) -> float:
    """Width of a dispatched element. [byte]

    Inputs of FP8 GEMMs are quantized before they are sent. Those of other narrow formats are sent as activations and
    quantized by the receiver: DeepEP supports only FP8 with block scales, and vllm 0.24.0 (deepep_ht.py, deepep_ll.py)
    dispatches int8, and by default fp4, in 16 bits. The fp4 dispatch of its FlashInfer backend over NVLink is not
    assumed. Megatron-LM always sends 16 bits (megatron/core/transformer/moe/fused_a2a.py of 2025 and 2026).
    """
    is_narrow = shard.gemm_dtype == "fp8" and shard.workload.narrow_dispatch
    return FP8_ELEMENT_BYTES if is_narrow else shard.width_bytes


def _exchange_experts(
    shard: Shard, role: str, repeats: int, *, rows: int, widths: tuple[float, float]
) -> list[Operation]:
    """Lower an alltoall of the expert axis that sends a token to each node once, whatever its number of experts there.

    Args:
        widths: Width of an element in the forward and in the backward pass. [byte]
    """
    ranks, elements = shard.layout.expert_parallel, 1.0 * rows * shard.config.hidden_size
    num_nodes = ranks / ranks_per_node(ranks, stride_of(shard.layout, "expert"), shard.node_size)
    exchanges = collective(
        shard,
        "moe",
        role,
        "alltoall",
        "expert",
        repeats,
        name=f"moe.{role}.alltoall",
        message_bytes=elements * widths[0],
    )
    fraction = crossing_fraction_of(num_nodes, shard.config.num_experts_per_token)
    backward_bytes = None if widths[0] == widths[1] else elements * widths[1]
    return [each.changed(crossing_fraction=fraction, backward_bytes=backward_bytes) for each in exchanges]


def crossing_fraction_of(num_nodes: float, experts_per_token: int) -> float:
    """Share of the rows that cross the network if a token is sent to each node once instead of once per expert.

    N (1 - (1 - 1/N)^k_e) / k_e for k_e experts that are distributed evenly over N nodes. Node-limited routing
    (DeepSeek-V3: 4 of 8 nodes) is not modelled.

    Source: arXiv 2412.19437, section 3.2.2 (a token crosses InfiniBand once, then NVLink).

    >>> crossing_fraction_of(1.0, 8), crossing_fraction_of(8.0, 1), round(crossing_fraction_of(8.0, 8), 3)
    (1.0, 1.0, 0.656)
    """
    if num_nodes <= 1.0 or experts_per_token <= 1:
        return 1.0
    return num_nodes * (1.0 - (1.0 - 1.0 / num_nodes) ** experts_per_token) / experts_per_token


def exchange_keys_values(
    shard: Shard, repeats: int, *, elements_per_token: int, tokens: int, block: Block = "attention"
) -> list[Operation]:
    """Pass keys and values around the ring of the context axis, overlapped with attention on the present ones.

    In the backward pass they go around once more, and with them their gradients, to which each device adds its part.

    Source: arXiv 2310.01889, section 3; NVIDIA/TransformerEngine, context_parallel.py (buffers of keys and values in
    the forward pass, of those and their gradients in the backward pass).
    """
    steps = shard.layout.context_parallel - 1
    message_bytes = 1.0 * tokens * elements_per_token * shard.width_bytes
    exchanges = collective(
        shard,
        block,
        "ring",
        "send_recv",
        "context",
        repeats * steps,
        message_bytes=message_bytes,
        overlaps=True,
    )
    return [each.changed(backward_bytes=2.0 * message_bytes) for each in exchanges]


def send_to_next_stage(shard: Shard, virtual_pipeline: int) -> list[Operation]:
    """Send the residual stream of each micro-batch to the next pipeline stage, once per model chunk.

    If every device of the tensor axis has all of it, each sends a share and the next stage gathers the shares.
    Interleaved schedules send once per chunk and overlap it with other chunks.

    Source: arXiv 2104.04473, section 4.1 (scatter and gather).
    """
    num_ranks = min(2, shard.layout.pipeline_parallel)
    if num_ranks == 1:
        return []
    repeats, copies = shard.num_passes * virtual_pipeline, shard.num_residual_copies
    width = shard.config.residual_streams * shard.config.hidden_size
    message_bytes = 1.0 * shard.num_residual_tokens * width * shard.width_bytes
    operations = collective(
        shard,
        "pipeline",
        "",
        "send_recv",
        "pipeline",
        repeats,
        message_bytes=message_bytes / copies,
        num_ranks=num_ranks,
        overlaps=virtual_pipeline > 1,
    )
    return operations + collective(
        shard,
        "pipeline",
        "gather",
        "all_gather",
        "pipeline",
        repeats,
        message_bytes=message_bytes,
        num_ranks=copies,
        stride=1,
        overlaps=virtual_pipeline > 1,
    )
