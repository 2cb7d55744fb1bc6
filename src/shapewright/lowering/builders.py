"""Builders of the operations that every block of a transformer has: weight GEMMs and memory-bound operations.

A memory-bound operation is one kernel that reads its inputs once and writes its outputs once, as PyTorch's own kernels
and the fused ones of Megatron-LM and vLLM do. Small per-row or per-column vectors (means, weights of a norm) are left
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.operations import Gemm, Pointwise

if TYPE_CHECKING:
    from shapewright.lowering.operations import Operation
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.shard import Shard

MASK_BYTES = 1.0
"""Width of one element of a stored dropout mask, a torch.bool. [byte]"""

# Blocks whose displayed name is that of another one.
_DISPLAYED_AS = {"router": "moe"}


def display_name(shard: Shard, block: Block, role: str) -> str:
    """Displayed name of an operation: stack, block and role."""
    path = shard.prefix + _DISPLAYED_AS.get(block, block)
    return f"{path}.{role}" if role else path


def weight_gemm(
    shard: Shard,
    block: Block,
    role: str,
    repeats: int,
    *,
    m: int,
    n: int,
    k: int,
    dtype: str | None = None,
    stage: str = "every",
) -> Gemm:
    """Build the GEMM of activations x[m,k] with a weight W[n,k].

    A given ``dtype`` (of logits and router) is also that of the stored weight: quantization recipes leave those wide.
    """
    return Gemm(
        name=display_name(shard, block, role),
        block=block,
        role=role,
        stage=stage,
        repeats=repeats,
        dtype=dtype or shard.gemm_dtype,
        m=m,
        n=n,
        k=k,
        weight_dtype=None if dtype else shard.weight_dtype,
    )


def pointwise(
    shard: Shard,
    block: Block,
    role: str,
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
        block: Part of the model that it belongs to.
        role: Its task there.
        operation: One of POINTWISE_KINDS.
        repeats: Executions per step.
        read: Elements read. [element]
        written: Elements written. [element]
        written_bytes: Bytes written in addition, in another format. [byte]
        num_kernels: Launches.
        stage: Pipeline stages that run it.
    """
    return Pointwise(
        name=display_name(shard, block, role),
        block=block,
        role=role,
        stage=stage,
        repeats=repeats,
        dtype=shard.dtype,
        operation=operation,
        read_bytes=read * shard.width_bytes,
        written_bytes=written * shard.width_bytes + written_bytes,
        num_kernels=num_kernels,
    )


def norm(
    shard: Shard, block: Block, role: str, repeats: int, *, width: int, tokens: int, stage: str = "every"
) -> Pointwise:
    """Normalize ``tokens`` rows of ``width`` elements."""
    elements = 1.0 * tokens * width
    operation = "layernorm" if shard.config.norm == "layernorm" else "norm"
    return pointwise(shard, block, role, operation, repeats, read=elements, written=elements, stage=stage)


def residual(shard: Shard, repeats: int) -> Pointwise:
    """Add a branch with its bias to the residual stream; one kernel, which also applies dropout if the model has it."""
    elements = 1.0 * shard.num_residual_tokens * shard.config.hidden_size
    added = pointwise(shard, "residual", "", "residual", repeats, read=2.0 * elements, written=elements)
    if not shard.workload.is_training or not shard.config.hidden_dropout:
        return added
    return added.changed(
        name=f"{added.name}_dropout",
        fuses_dropout=True,
        written_bytes=added.written_bytes + elements * MASK_BYTES,
    )


def dropout(shard: Shard, block: Block, repeats: int, *, elements: float, stage: str = "every") -> Pointwise:
    """Drop elements and write the mask that the backward pass needs."""
    mask_bytes = elements * MASK_BYTES
    return pointwise(
        shard,
        block,
        "dropout",
        "dropout",
        repeats,
        read=elements,
        written=elements,
        written_bytes=mask_bytes,
        stage=stage,
    )


def activation(
    shard: Shard,
    block: Block,
    repeats: int,
    *,
    width: int,
    tokens: int,
    gated: bool,
    role: str = "activation",
    stage: str = "every",
) -> Pointwise:
    """Apply the activation to ``tokens`` rows of ``width`` elements; a gate is multiplied in the same kernel."""
    elements = 1.0 * tokens * width
    inputs = 2.0 if gated else 1.0
    return pointwise(shard, block, role, "activation", repeats, read=inputs * elements, written=elements, stage=stage)


def move(shard: Shard, block: Block, role: str, repeats: int, *, read: float, written: float) -> Pointwise:
    """Copy, gather or scatter rows."""
    return pointwise(shard, block, role, "permute", repeats, read=read, written=written)


def bias_gradients(shard: Shard, block: Block, repeats: int, *, widths: list[int], tokens: int) -> list[Operation]:
    """Sum the gradient of each biased GEMM over its tokens, one kernel each."""
    if not widths:
        return []
    elements = 1.0 * tokens * sum(widths)
    sums = pointwise(
        shard, block, "bias_gradient", "bias", repeats, read=elements, written=0.0, num_kernels=len(widths)
    )
    return [sums.changed(pass_name="backward")]
