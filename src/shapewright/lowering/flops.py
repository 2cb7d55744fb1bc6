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
from shapewright.lowering.model import lower_parts, lower_passes
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
    one_pass = replace(workload, recompute="none", recompute_layers=None, global_batch_size=workload.micro_batch_size)
    total = skipped = 0.0
    for one in lower_passes(lower_parts(config, one_pass, _SINGLE), config, one_pass, _SINGLE):
        if one.pass_name not in ("forward", "backward"):
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
    """FLOPs of one micro-batch on one device, times the micro-batches of all replicas."""
    recomputed = workload.recompute_layers
    if recomputed is not None:  # of each stage
        recomputed = min(recomputed * layout.pipeline_parallel, config.num_layers)
    one_pass = replace(workload, global_batch_size=workload.micro_batch_size, recompute_layers=recomputed)
    num_passes = num_microbatches(workload, layout) * layout.data_parallel
    return {pass_name: num_passes * flops for pass_name, flops in _flops_of_one_pass(config, one_pass)}


@lru_cache(maxsize=64)
def _flops_of_one_pass(config: TransformerConfig, workload: Workload) -> tuple[tuple[str, float], ...]:
    passes = lower_passes(lower_parts(config, workload, _SINGLE), config, workload, _SINGLE)
    flops = dict.fromkeys(PASSES, 0.0)
    for operation in passes:
        flops[operation.pass_name] += float(operation.flops * operation.repeats)
    return tuple(flops.items())
