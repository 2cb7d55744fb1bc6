"""FLOPs of a step by the conventions that published MFU and HFU use.

Model FLOPs are what the model's mathematics needs: matrix products of forward and backward pass, attention as the whole
square, recomputation not counted. Hardware FLOPs add the recomputation.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from shapewright.layout import ParallelLayout
from shapewright.lowering.counts import num_microbatches
from shapewright.lowering.model import lower_before_backward, lower_parts
from shapewright.operations import Attention
from shapewright.operations.base import PASSES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.config.transformer import TransformerConfig
    from shapewright.operations import Operation
    from shapewright.workload import Workload

_SINGLE = ParallelLayout()

# arXiv 2205.05198 eq. 9 has s/(3h) where eq. 7 has s/(6h): it adds the attention core three times over, although a
# selective recomputation runs its forward part once. Published HFU follow eq. 9.
_SELECTIVE_PASSES_BY_CONVENTION = 3.0
# dA = dC B^T and dB = A^T dC (lowering.backward) are each of 2 m n k FLOPs, as the product itself; attention likewise.
_GRADIENTS_OF_A_PRODUCT = 2.0


def count_model_flops(config: TransformerConfig, workload: Workload, layout: ParallelLayout = _SINGLE) -> float:
    """Count the model FLOPs of one step over all devices.

    For a GPT with f = 4h in training it is 72 B L s h^2 (1 + s/(6h) + v/(12 h L)). A layout says only how many
    sequences a step has; slicing changes nothing.

    Args:
        config: The model.
        workload: What is run; global_batch_size sequences per step, or one micro-batch per replica and stage.
        layout: How it is spread.

    Returns:
        FLOPs. [flop]

    Source: arXiv 2205.05198, eq. 7.
    """
    return count_step_flops(config, workload, layout)[0]


def count_hardware_flops(config: TransformerConfig, workload: Workload, layout: ParallelLayout = _SINGLE) -> float:
    """Count the FLOPs of one step over all devices with recomputation, as published HFU do.

    Full recomputation adds one forward pass of the layers: 96 B L s h^2 (1 + s/(6h) + v/(16 h L)) in all for a GPT.
    Selective recomputation: 72 B L s h^2 (1 + s/(3h) + v/(12 h L)), which is more than the lowered operations have,
    see the comment at the constant.

    Returns:
        FLOPs. [flop]

    Source: arXiv 2104.04473, eq. 3 (full); arXiv 2205.05198, eq. 9 (selective).
    """
    return count_step_flops(config, workload, layout)[1]


def count_step_flops(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout = _SINGLE
) -> tuple[float, float]:
    """Count model FLOPs and hardware FLOPs of one step over all devices, as the functions of those names do. [flop]"""
    flops = _count_by_pass(config, workload, layout)
    model_flops = flops["forward"] + flops["backward"]
    factor = _SELECTIVE_PASSES_BY_CONVENTION if workload.recompute == "selective" else 1.0
    return model_flops, model_flops + factor * flops["recompute"]


def count_masked_fraction(config: TransformerConfig, workload: Workload) -> float:
    """Share of a step's model FLOPs that are scores which masks and windows skip, and fused attention never computes.

    Counted on one device: ranks of the context axis that hold other parts of a sequence see blocks without a mask.
    """
    total = skipped = 0.0
    # The backward pass has the same share, twice.
    for one in _lower_on_one_device(config, workload):
        if one.pass_name != "forward":
            continue
        flops = float(one.flops * one.repeats)
        total += flops
        if isinstance(one, Attention):
            pairs = float(1.0 * one.batch_size * one.num_heads * one.query_len * one.kv_len)
            skipped += flops * (1.0 - float(one.attended_pairs) / pairs)
    return skipped / total if total > 0.0 else 0.0


def sum_flops(operations: Iterable[Operation], passes: tuple[str, ...]) -> float:
    """Add up the FLOPs of all executions of the operations of some passes."""
    return float(sum(operation.flops * operation.repeats for operation in operations if operation.pass_name in passes))


def _count_by_pass(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> dict[str, float]:
    """FLOPs of a step on one device, times the micro-batches of all replicas over those of that one."""
    own = workload
    if workload.recompute_layers is not None:  # of each stage
        recomputed = min(workload.recompute_layers * layout.pipeline_parallel, config.num_layers)
        own = replace(workload, recompute_layers=recomputed)
    flops = dict.fromkeys(PASSES, 0.0)
    for operation in _lower_on_one_device(config, own):
        flops[operation.pass_name] += float(operation.flops * operation.repeats)
    if workload.is_training:
        flops["backward"] = _GRADIENTS_OF_A_PRODUCT * flops["forward"]
    scale = num_microbatches(workload, layout) * layout.data_parallel / num_microbatches(workload, _SINGLE)
    return {pass_name: scale * amount for pass_name, amount in flops.items()}


@lru_cache(maxsize=64)
def _lower_on_one_device(config: TransformerConfig, workload: Workload) -> tuple[Operation, ...]:
    """Forward and recompute operations on one device; gradients of a product have its FLOPs and need no lowering."""
    return tuple(lower_before_backward(lower_parts(config, workload, _SINGLE), config, workload, _SINGLE))
