"""Biases and clamps of routed experts where training software runs kernels of their own for them.

Megatron-LM's grouped experts add the second product's bias, scaled by the routing weight in fp32, expert by expert
(megatron/core/transformer/moe/experts.py of 2025, ``_apply_bias``), and clamp both halves of a gate's input before the
fused activation (megatron/core/fusions/fused_bias_geglu.py): passes over the widest tensors of a layer, of which other
stacks make none.

An element of a result, forward: bias times weight (4 bytes written), sum in fp32 (6 read, 4 written), a tensor of all
experts (4, 4), cast to 16 bits (4, 2): 28 bytes. Backward: cast (2, 4), gradients of the sum (4, 2) and of the split
(2, 2), then the gradient times the bias, and times the weight, each summed (8, 4): 40 bytes, of which the mirror image
of the forward operation counts 28 and an operation beside it the rest.
A clamped element is read and written by the clamp and once more by the concatenation of both halves: 8 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.pointwise import pointwise
from shapewright.operations import Pointwise

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation

_BIAS_READ_BYTES = _BIAS_WRITTEN_BYTES = 14.0
_GRADIENT_READ_BYTES, _GRADIENT_WRITTEN_BYTES = 8.0, 4.0
_KERNELS_PER_EXPERT = 2


def _runs_apart(shard: Shard) -> bool:
    return shard.workload.is_training and not shard.workload.fused_experts


def lower_clamp(shard: Shard, repeats: int, *, elements: float) -> list[Operation]:
    """Clamp both halves of what experts activate, and lay them side by side again; nothing where a kernel does both."""
    if not (shard.config.expert_clamp and _runs_apart(shard)):
        return []
    num_kernels = 3 if shard.config.gated_mlp else 1
    return [
        pointwise(
            shard, "moe.clamp", "bias", repeats, read=2.0 * elements, written=2.0 * elements, num_kernels=num_kernels
        )
    ]


def lower_biases(shard: Shard, repeats: int, *, elements: float, num_experts: int) -> list[Operation]:
    """Add the scaled bias of the second product, expert by expert; nothing where the product or the sum does it."""
    if not (shard.config.expert_bias and _runs_apart(shard)):
        return []
    return [
        Pointwise(
            name=f"{shard.prefix}moe.bias",
            repeats=repeats,
            dtype=shard.dtype,
            operation="bias",
            read_bytes=_BIAS_READ_BYTES * elements,
            written_bytes=_BIAS_WRITTEN_BYTES * elements,
            num_kernels=_KERNELS_PER_EXPERT * num_experts + 2,
        )
    ]


def lower_scaled_bias_gradients(shard: Shard, repeats: int, *, elements: float) -> list[Operation]:
    """Gradients of that bias and of the routing weights that scale it."""
    return [
        Pointwise(
            name=f"{shard.prefix}moe.scaled_bias_gradient",
            pass_name="backward",
            repeats=repeats,
            dtype=shard.dtype,
            operation="bias",
            read_bytes=_GRADIENT_READ_BYTES * elements,
            written_bytes=_GRADIENT_WRITTEN_BYTES * elements,
            num_kernels=2 * _KERNELS_PER_EXPERT * (shard.config.num_experts // shard.layout.expert_parallel),
        )
    ]
