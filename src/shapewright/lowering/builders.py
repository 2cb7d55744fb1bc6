"""Builders of the operations that every block of a transformer has: weight GEMMs and memory-bound operations.

A memory-bound operation is one kernel that reads its inputs once and writes its outputs once, as PyTorch's own kernels
and the fused ones of Megatron-LM and vLLM do. Small per-row or per-column vectors (means, weights of a norm) are left
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.parameters import stream_weights
from shapewright.workload.finetuning import QUANTIZATION

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard

_FP32_BYTES = get_dtype("fp32").num_bytes
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
        is_training=shard.workload.is_training,
    )


def activation_gemm(
    shard: Shard,
    block: Block,
    role: str,
    repeats: int,
    *,
    m: int,
    n: int,
    k: int,
    batch: int,
    layout: str,
    dtype: str | None = None,
) -> Gemm:
    """Build a batch of GEMMs of two activations, in the wide format unless another one is given."""
    return Gemm(
        name=display_name(shard, block, role),
        block=block,
        role=role,
        repeats=repeats,
        dtype=dtype or shard.wide_dtype,
        m=m,
        n=n,
        k=k,
        batch=batch,
        layout=layout,
    )


def pointwise(
    shard: Shard,
    block: Block,
    role: str,
    operation: str,
    repeats: Count,
    *,
    read: Numeric,
    written: Numeric,
    written_bytes: Numeric = 0.0,
    num_kernels: int = 1,
    stage: str = "every",
) -> Pointwise:
    """Build one memory-bound operation from the activations that it reads and writes.

    Args:
        block: Part of the model that it belongs to.
        operation: One of POINTWISE_KINDS.
        read: Elements read. [element]
        written: Elements written. [element]
        written_bytes: Bytes written in addition, in another format. [byte]
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
    fused = pointwise(shard, block, role, operation, repeats, read=elements, written=elements, stage=stage)
    return as_chain(shard, fused) if operation == "norm" else fused


# What PyTorch's chain reads and writes for each element that a fused kernel writes, and its kernels: elements of the
# model's format, and bytes in fp32. An RMS norm is a cast, square, mean, inverse root, product, cast back and product
# with the weight; a rotary embedding two products, a negated half, a concatenation and a sum, for queries and for keys;
# a gated activation an activation and a product. Source: huggingface/transformers 5.23, modeling_llama.py.
_CHAINS = {
    "norm": ((2.0, 16.0), (2.0, 12.0), 8),
    "rotary": ((5.5, 0.0), (4.5, 0.0), 10),
    "activation": ((3.0, 0.0), (2.0, 0.0), 2),
}


def as_chain(shard: Shard, fused: Pointwise) -> Pointwise:
    """Return the chain of PyTorch's kernels for a fused one where the workload runs those; otherwise the fused one."""
    if shard.workload.kernels != "torch":
        return fused
    elements = fused.written_bytes / shard.width_bytes
    read_bytes, written_bytes = _chain_bytes(fused.operation, shard.width_bytes)
    return fused.changed(
        is_chain=True,
        is_gated=bool(fused.is_gated),
        read_bytes=elements * read_bytes,
        written_bytes=elements * written_bytes,
        num_kernels=_CHAINS[fused.operation][-1],
    )


def _chain_bytes(operation: str, width_bytes: float) -> tuple[float, float]:
    """Bytes that a chain reads and writes for each element; in fp32 there are no casts."""
    read, written, _ = _CHAINS[operation]
    read_bytes, written_bytes = (
        wide + (0.0 if wide and width_bytes >= _FP32_BYTES else own * width_bytes) for own, wide in (read, written)
    )
    return read_bytes, written_bytes


def without_weight_gradient(norm: Pointwise, gradient: Pointwise) -> Pointwise:
    """Leave the gradient of the weights out of that of a norm: the second kernel, or the last two of a chain.

    Those of a chain multiply the gradient by the normalized rows (two read, one written) and add up the products.
    """
    if not norm.is_chain:
        return gradient.changed(read_bytes=norm.read_bytes + norm.written_bytes, num_kernels=1)
    width_bytes = get_dtype(norm.dtype).num_bytes
    moved = norm.written_bytes / _chain_bytes(norm.operation, width_bytes)[1] * width_bytes
    return gradient.changed(
        read_bytes=gradient.read_bytes - 3.0 * moved,
        written_bytes=gradient.written_bytes - moved,
        num_kernels=gradient.num_kernels - 2,
    )


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


# Parallel residual streams (hyper-connections); T tokens of the residual stream on this device, n streams of width h.
# Before a block, a projection of all streams (T x n h)(n h x (2 + n) n) gives the weights; the streams are summed to
# the block's input. After it, streams are mixed with each other and the block's output is added to each. One kernel
# does each of the two; PyTorch multiplies the streams in a GEMM for each token. The iterations that balance the n x n
# weights, a few numbers of each token, are left out. Source: modeling_deepseek_v4.py of transformers 5.24
# (DeepseekV4HyperConnection); arXiv 2409.19606.


def lower_stream_start(shard: Shard) -> list[Operation]:
    """Lower the copy of the embedding to each stream."""
    copied, streams = _elements(shard), shard.config.residual_streams
    written = streams * copied
    return [
        pointwise(
            shard, "embedding", "streams", "permute", shard.num_passes, read=copied, written=written, stage="first"
        )
    ]


def lower_stream_mixing(shard: Shard, repeats: int) -> list[Operation]:
    """Lower what is around the blocks of the layers.

    Args:
        repeats: Number of blocks that run.
    """
    config, tokens, copied = shard.config, shard.num_residual_tokens, _elements(shard)
    streams = config.residual_streams
    every = streams * copied
    weights = weight_gemm(
        shard,
        "residual",
        "stream_weights",
        repeats,
        m=tokens,
        n=stream_weights(config),
        k=streams * config.hidden_size,
        dtype=_weights_dtype(shard),
    )
    collapse = pointwise(shard, "residual", "collapse", "residual", repeats, read=every, written=copied)
    expand = pointwise(shard, "residual", "expand", "residual", repeats, read=every + copied, written=every)
    if shard.workload.kernels != "torch":
        return [weights, collapse, expand]
    mixed = activation_gemm(
        shard, "residual", "mix", repeats, m=streams, n=config.hidden_size, k=streams, batch=tokens, layout="NN"
    )
    return [weights, collapse, mixed, expand]


def lower_stream_sum(shard: Shard) -> list[Operation]:
    """Lower the weighted sum of the streams after the last layer."""
    config, copied, repeats = shard.config, _elements(shard), shard.num_passes
    streams = config.residual_streams
    weights = weight_gemm(
        shard,
        "final_norm",
        "stream_weights",
        repeats,
        m=shard.num_residual_tokens,
        n=streams,
        k=streams * config.hidden_size,
        dtype=_weights_dtype(shard),
        stage="last",
    )
    every = streams * copied
    summed = pointwise(shard, "final_norm", "collapse", "residual", repeats, read=every, written=copied, stage="last")
    return [weights, summed]


def _weights_dtype(shard: Shard) -> str:
    """Format of the projection to the weights: PyTorch copies the streams to fp32, a fused kernel reads them as is."""
    return "fp32" if shard.workload.kernels == "torch" else shard.dtype


def _elements(shard: Shard) -> float:
    """Elements of one stream on this device."""
    return 1.0 * shard.num_residual_tokens * shard.config.hidden_size


def dropout(shard: Shard, block: Block, repeats: Count, *, elements: Numeric, stage: str = "every") -> Pointwise:
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
    fused = pointwise(shard, block, role, "activation", repeats, read=inputs * elements, written=elements, stage=stage)
    fused = fused.changed(is_gated=gated)
    return as_chain(shard, fused) if gated else fused


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


MAX_NARROW_BITS = 8
"""Widest format that operands are quantized to from 16 bits before a GEMM. [bit]"""
WIDE_DTYPE = "bf16"
"""Format of operands before that."""


def quantization(gemm: Gemm | GroupedGemm, width_bytes: float, *, read: Numeric, written: Numeric) -> Pointwise:
    """Build the quantization of an operand to the format of a GEMM.

    Args:
        width_bytes: Width of an element before quantization. [byte]
        read: Elements read. [element]
        written: Elements written. [element]
    """
    return Pointwise(
        name=f"{gemm.name}{QUANTIZATION}",
        block=gemm.block,
        role=f"{gemm.role}{QUANTIZATION}",
        stage=gemm.stage,
        repeats=gemm.repeats,
        dtype=WIDE_DTYPE,
        operation="activation",
        is_gated=False,
        read_bytes=read * width_bytes,
        written_bytes=written * get_dtype(gemm.dtype).num_bytes,
    )
