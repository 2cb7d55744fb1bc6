"""Collectives of the tensor, context, expert, pipeline and data axes.

Ranks are numbered with the tensor axis innermost, then context, then data, then pipeline: an axis whose stride fits in
a node keeps that many ranks inside it. Experts number the ranks of a stage anew: those that share an expert's matrices
innermost, then those that share a layer's experts, then copies.

Source: arXiv 1909.08053 section 3 (tensor), 2205.05198 section 4.2.2 (sequence), 2104.04473 section 3 (pipeline),
1910.02054 section 7 (ZeRO), 2310.01889 (ring of keys and values), 2412.19437 sections 3.2.2 and 3.3.3 (experts).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.operations import Collective

if TYPE_CHECKING:
    from shapewright.layout import ParallelLayout
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation
    from shapewright.operations.base import Count, Numeric

FP8_ELEMENT_BYTES = 1.0 + 4.0 / 128.0
"""An element of a routed row in FP8, with an fp32 scale for every 128. [byte] Source: arXiv 2412.19437, section 3.3.2
(tiles of 1 x 128) and 3.3.3 (activations are dispatched in FP8, and so are the gradients before the down projection;
what is combined stays in bf16, forward and backward)."""


def ranks_per_node(num_ranks: Count, stride: Count, node_size: int) -> Any:
    """Ranks of one group that share a node, when neighbours of the group are ``stride`` devices apart.

    Numbers or arrays.

    >>> ranks_per_node(8, 1, 8), ranks_per_node(4, 4, 8), ranks_per_node(2, 8, 8)
    (8, 2, 1)
    """
    local = node_size // stride
    if hasattr(local, "shape") or hasattr(num_ranks, "shape"):
        import numpy as np

        return np.minimum(num_ranks, np.maximum(local, 1))
    return min(num_ranks, max(1, local))


def num_ranks_of(layout: ParallelLayout, axis: str) -> int:
    """Devices of one group along an axis; gradients are reduced over data and context together."""
    if axis == "data":
        return layout.data_parallel * layout.context_parallel
    degree: int = getattr(layout, f"{axis}_parallel")
    return degree


def stride_of(layout: ParallelLayout, axis: str) -> int:
    """Devices between neighbours of one group along an axis."""
    if axis == "tensor":
        return 1
    if axis == "pipeline":
        return layout.devices_per_stage
    return layout.tensor_degree_of_experts if axis == "expert" else layout.tensor_parallel


def collective(
    shard: Shard,
    name: str,
    op_name: str,
    axis: str,
    repeats: Count,
    *,
    message_bytes: Numeric,
    num_ranks: Count | None = None,
    stride: Count | None = None,
    stage: str = "every",
    pass_name: str = "forward",
    overlaps: bool = False,
) -> list[Operation]:
    """Build one collective, or nothing where its group is a single device; numbers may be arrays of one shape.

    Args:
        shard: Sizes of this device.
        name: Module path without the stack's prefix.
        op_name: One of COLLECTIVE_OPS.
        axis: One of AXES.
        repeats: Executions per step.
        message_bytes: Size of the whole buffer, as Collective counts it. [byte]
        num_ranks: Devices that take part, if not all of the axis.
        stride: Devices between neighbours, if not that of the axis.
        stage: Pipeline stages that run it.
        pass_name: One of PASSES.
        overlaps: Whether computation can hide it.
    """
    ranks = num_ranks_of(shard.layout, axis) if num_ranks is None else num_ranks
    if _is(ranks, 1) or _is(repeats, 0):
        return []
    step = stride_of(shard.layout, axis) if stride is None else stride
    return [
        Collective(
            name=shard.prefix + name,
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
        )
    ]


def _is(number: Any, value: int) -> bool:
    """Whether a number has a value; of an array no one can say, and a group of one device costs nothing."""
    return not hasattr(number, "shape") and bool(number == value)


def gather_tokens(
    shard: Shard,
    name: str,
    repeats: int,
    *,
    tokens: int,
    width: int | None = None,
    stage: str = "every",
    overlaps: bool = False,
    num_ranks: int | None = None,
) -> list[Operation]:
    """Bring the tokens together before a column-parallel GEMM; needed only where the tensor axis splits them.

    They are as wide as the residual stream unless ``width`` says otherwise. ``num_ranks`` are the devices that share
    the matrix, where those are not the tensor axis; each has its own tokens.
    """
    if not shard.splits_sequence and num_ranks is None:
        return []
    message_bytes = 1.0 * tokens * (width or shard.config.hidden_size) * shard.width_bytes
    return collective(
        shard,
        f"{name}.all_gather",
        "all_gather",
        "tensor",
        repeats,
        message_bytes=message_bytes,
        num_ranks=num_ranks,
        stride=None if num_ranks is None else 1,
        stage=stage,
        overlaps=overlaps,
    )


def reduce_tokens(
    shard: Shard,
    name: str,
    repeats: int,
    *,
    tokens: int,
    width: int | None = None,
    stage: str = "every",
    num_ranks: int | None = None,
) -> list[Operation]:
    """Add the partial sums of a row-parallel GEMM; where the tensor axis splits tokens, each device keeps its own.

    They are as wide as the residual stream unless ``width`` says otherwise. ``num_ranks`` are the devices that share
    the matrix, where those are not the tensor axis; each keeps its own tokens.
    """
    op_name = "all_reduce" if num_ranks is None and not shard.splits_sequence else "reduce_scatter"
    message_bytes = 1.0 * tokens * (width or shard.config.hidden_size) * shard.width_bytes
    return collective(
        shard,
        f"{name}.{op_name}",
        op_name,
        "tensor",
        repeats,
        message_bytes=message_bytes,
        num_ranks=num_ranks,
        stride=None if num_ranks is None else 1,
        stage=stage,
    )


def share_tokens(shard: Shard, name: str, repeats: int, *, tokens: int) -> list[Operation]:
    """Give every device of the tensor axis the tokens of all, where each had a share."""
    message_bytes = 1.0 * tokens * shard.config.hidden_size * shard.width_bytes
    return collective(shard, f"{name}.all_gather", "all_gather", "tensor", repeats, message_bytes=message_bytes)


def dispatch_experts(shard: Shard, repeats: int, *, rows: int) -> list[Operation]:
    """Send routed rows to the devices of their experts; their gradients come back as results do."""
    return _exchange_experts(
        shard, "moe.dispatch", repeats, rows=rows, widths=(_routed_bytes(shard), shard.width_bytes)
    )


def combine_experts(shard: Shard, repeats: int, *, rows: int) -> list[Operation]:
    """Send results of routed rows back, to be added up; their gradients go out as rows do."""
    return _exchange_experts(shard, "moe.combine", repeats, rows=rows, widths=(shard.width_bytes, _routed_bytes(shard)))


def _routed_bytes(shard: Shard) -> float:
    """Width of an element on its way to an expert. [byte]

    Products in FP8 read what was quantized before it left. Rows of other narrow formats travel as activations do, and
    are quantized where they arrive: DeepEP knows FP8 with block scales alone, and vllm 0.24.0 (deepep_ht.py,
    deepep_ll.py) dispatches int8 and, unless told otherwise, fp4 in 16 bits. Its NVLink exchange by FlashInfer sends
    fp4, which is not assumed. Megatron-LM sends 16 bits whatever the products read (megatron/core/transformer/moe/
    fused_a2a.py of 2025 and 2026: no fp8 dispatch).
    """
    is_narrow = shard.gemm_dtype == "fp8" and shard.workload.narrow_dispatch
    return FP8_ELEMENT_BYTES if is_narrow else shard.width_bytes


def _exchange_experts(
    shard: Shard, name: str, repeats: int, *, rows: int, widths: tuple[float, float]
) -> list[Operation]:
    """An alltoall of the expert axis, in which a token crosses to each node once, however many experts it has there.

    Args:
        shard: Sizes of this device.
        name: Module path without the stack's prefix.
        repeats: Executions per step.
        rows: Routed rows.
        widths: Bytes of an element in the forward and in the backward pass.
    """
    ranks, elements = shard.layout.expert_parallel, 1.0 * rows * shard.config.hidden_size
    num_nodes = ranks / ranks_per_node(ranks, stride_of(shard.layout, "expert"), shard.node_size)
    exchanges = collective(shard, f"{name}.alltoall", "alltoall", "expert", repeats, message_bytes=elements * widths[0])
    fraction = count_crossings(num_nodes, shard.config.num_experts_per_token)
    backward_bytes = None if widths[0] == widths[1] else elements * widths[1]
    return [each.changed(crossing_fraction=fraction, backward_bytes=backward_bytes) for each in exchanges]


def count_crossings(num_nodes: float, experts_per_token: int) -> float:
    """Rows that cross between nodes where a token goes to each node once, over those of one row per expert.

    N (1 - (1 - 1/N)^k_e) / k_e for k_e experts picked alike over N nodes. Groups that limit a token to fewer nodes
    (DeepSeek-V3: 4 of 8) are not counted.

    Source: arXiv 2412.19437, section 3.2.2 (a token is sent over InfiniBand once, then forwarded over NVLink).

    >>> count_crossings(1.0, 8), count_crossings(8.0, 1), round(count_crossings(8.0, 8), 3)
    (1.0, 1.0, 0.656)
    """
    if num_nodes <= 1.0 or experts_per_token <= 1:
        return 1.0
    return num_nodes * (1.0 - (1.0 - 1.0 / num_nodes) ** experts_per_token) / experts_per_token


def ring_keys_values(shard: Shard, repeats: int, *, elements_per_token: int) -> list[Operation]:
    """Pass keys and values around the context axis while attention works on those that are there."""
    steps = shard.layout.context_parallel - 1
    message_bytes = 1.0 * shard.num_tokens * elements_per_token * shard.width_bytes
    return collective(
        shard,
        "attention.ring",
        "send_recv",
        "context",
        repeats * steps,
        message_bytes=message_bytes,
        overlaps=True,
    )


def send_to_next_stage(shard: Shard, virtual_pipeline: int) -> list[Operation]:
    """Hand the residual stream of each micro-batch to the next pipeline stage, once per model chunk.

    Where every device of the tensor axis holds all of it, each sends its share and the next stage gathers them.
    Interleaving sends more often and hides it behind other chunks.

    Source: arXiv 2104.04473, section 4.1 (scatter and gather).
    """
    num_ranks = min(2, shard.layout.pipeline_parallel)
    if num_ranks == 1:
        return []
    repeats, copies = shard.num_passes * virtual_pipeline, shard.num_residual_copies
    message_bytes = 1.0 * shard.num_residual_tokens * shard.config.hidden_size * shard.width_bytes
    operations = collective(
        shard,
        "pipeline",
        "send_recv",
        "pipeline",
        repeats,
        message_bytes=message_bytes / copies,
        num_ranks=num_ranks,
        overlaps=virtual_pipeline > 1,
    )
    return operations + collective(
        shard,
        "pipeline.gather",
        "all_gather",
        "pipeline",
        repeats,
        message_bytes=message_bytes,
        num_ranks=copies,
        stride=1,
        overlaps=virtual_pipeline > 1,
    )
