"""Operations that only move bytes: norms, activations, residuals, rotary, softmax, dropout.

Each is counted as one kernel that reads its inputs once and writes its outputs once, as PyTorch's own kernels and the
fused ones of Megatron-LM and vLLM do. Small per-row or per-column vectors (means, weights of a norm) are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.operations import Pointwise

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation

WITH_DROPOUT = "_dropout"
"""End of the name of a residual addition that drops elements of its branch in the same kernel."""

MASK_BYTES = 1.0
"""Width of one element of a stored dropout mask, a torch.bool. [byte]"""


def pointwise(
    shard: Shard,
    name: str,
    operation: str,
    repeats: int,
    *,
    read: float,
    written: float,
    written_bytes: float = 0.0,
    num_kernels: int = 1,
    stage: str = "every",
) -> Pointwise:
    """Build one memory-bound operation from the activations that it reads and writes.

    Args:
        shard: Sizes of this device.
        name: Module path without the stack's prefix.
        operation: One of POINTWISE_KINDS.
        repeats: Executions per step.
        read: Elements read. [element]
        written: Elements written. [element]
        written_bytes: Bytes written besides, in another format. [byte]
        num_kernels: Launches.
        stage: Pipeline stages that run it.
    """
    return Pointwise(
        name=shard.prefix + name,
        stage=stage,
        repeats=repeats,
        dtype=shard.dtype,
        operation=operation,
        read_bytes=read * shard.width_bytes,
        written_bytes=written * shard.width_bytes + written_bytes,
        num_kernels=num_kernels,
    )


def norm(shard: Shard, name: str, repeats: int, *, width: int, tokens: int, stage: str = "every") -> Pointwise:
    """Normalise ``tokens`` rows of ``width`` elements."""
    elements = 1.0 * tokens * width
    operation = "layernorm" if shard.config.norm == "layernorm" else "norm"
    return pointwise(shard, name, operation, repeats, read=elements, written=elements, stage=stage)


def residual(shard: Shard, name: str, repeats: int) -> Pointwise:
    """Add a branch to the residual stream, with its bias; one kernel, which drops elements too where a model does."""
    elements = 1.0 * shard.num_residual_tokens * shard.config.hidden_size
    if not shard.workload.is_training or not shard.config.hidden_dropout:
        return pointwise(shard, name, "residual", repeats, read=2.0 * elements, written=elements)
    return pointwise(
        shard,
        f"{name}{WITH_DROPOUT}",
        "residual",
        repeats,
        read=2.0 * elements,
        written=elements,
        written_bytes=elements * MASK_BYTES,
    )


def dropout(shard: Shard, name: str, repeats: int, *, elements: float, stage: str = "every") -> Pointwise:
    """Drop elements and keep the mask for the backward pass."""
    mask_bytes = elements * MASK_BYTES
    return pointwise(
        shard, name, "dropout", repeats, read=elements, written=elements, written_bytes=mask_bytes, stage=stage
    )


def activation(
    shard: Shard, name: str, repeats: int, *, width: int, tokens: int, gated: bool, stage: str = "every"
) -> Pointwise:
    """Activate ``tokens`` rows of ``width`` elements; a gate is read besides and multiplied in the same kernel."""
    elements = 1.0 * tokens * width
    inputs = 2.0 if gated else 1.0
    return pointwise(shard, name, "activation", repeats, read=inputs * elements, written=elements, stage=stage)


def move(shard: Shard, name: str, repeats: int, *, read: float, written: float) -> Pointwise:
    """Copy, gather or scatter rows."""
    return pointwise(shard, name, "permute", repeats, read=read, written=written)


def bias_gradients(shard: Shard, block: str, repeats: int, *, widths: list[int], tokens: int) -> list[Operation]:
    """Sum the gradient of each biased product over its tokens, one kernel each."""
    if not widths:
        return []
    elements = 1.0 * tokens * sum(widths)
    sums = pointwise(
        shard, f"{block}.bias_gradient", "bias", repeats, read=elements, written=0.0, num_kernels=len(widths)
    )
    return [sums.changed(pass_name="backward")]
