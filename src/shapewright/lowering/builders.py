"""Builders of the operations that every block of a transformer has: weight GEMMs and memory-bound operations.

A memory-bound operation is one kernel that reads its inputs once and writes its outputs once, as PyTorch's own kernels
and the fused ones of Megatron-LM and vLLM do. Small per-row or per-column vectors (means, weights of a norm) are left
out.

A GEMM C[m,n] = A[m,k] B[k,n] has two gradients: dA[m,k] = dC[m,n] B^T and dB[k,n] = A^T dC. For a linear layer (layout
NT, B stored as W[n,k]) the second is computed in the layout of W: dW[n,k] = dC^T A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.operations import (
    Attention,
    CausalConv,
    Collective,
    Gemm,
    GroupedGemm,
    Pointwise,
    Scan,
    SparseAttention,
)
from shapewright.workload.finetuning import INPUT_ROLES, QUANTIZATION, is_target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.operations import Operation
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.shard import Shard
    from shapewright.workload import Workload

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
    *traffic, num_kernels = _CHAINS[fused.operation]
    # In fp32 there are no casts.
    read_bytes, written_bytes = (
        wide + (0.0 if wide and shard.width_bytes >= _FP32_BYTES else own * shard.width_bytes) for own, wide in traffic
    )
    return fused.changed(
        is_chain=True, read_bytes=elements * read_bytes, written_bytes=elements * written_bytes, num_kernels=num_kernels
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


# Backward counterparts of collectives; the others are their own counterpart.
_BACKWARD_OP_NAMES = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
# Forward collectives of the tensor axis whose counterpart reduces the input gradients of column-parallel GEMMs, which
# overlaps with the weight gradients. Source: arXiv 2205.05198, section 4.2.2; Megatron-LM, tensor_parallel/layers.py.
_OVERLAPPED_IN_BACKWARD = ("all_gather", "all_reduce")

# Layouts of dA and dB, and whether dB is computed transposed, by the forward layout.
_GRADIENT_LAYOUTS = {"NT": ("NN", "TN", True), "NN": ("NT", "TN", False)}


def lower_backward(forward: Iterable[Operation], workload: Workload | None = None) -> list[Operation]:
    """Lower the gradients of forward operations, in reverse order.

    Args:
        workload: States which weights are frozen; None if all are trained.
    """
    backward: list[Operation] = []
    freezes = workload is not None and workload.has_adapters
    for operation in reversed(list(forward)):
        gradients = backward_of(operation)
        if freezes:
            assert workload is not None
            gradients = _without_frozen_gradients(operation, gradients, workload)
        backward += gradients
    return backward


def _without_frozen_gradients(forward: Operation, gradients: list[Operation], workload: Workload) -> list[Operation]:
    """Leave out what frozen weights do not need in the backward pass: their gradients, and inputs that only they read.

    A stored weight is converted again, and constants of weights have no gradient.
    """
    if forward.is_weight_constant:
        return []
    if forward.role.endswith(QUANTIZATION):
        return []
    if forward.is_conversion:
        return [forward.changed(gradient="backward", pass_name="backward", name=f"{forward.name}.backward")]
    if isinstance(forward, Gemm | GroupedGemm):
        if forward.is_adapter or forward.is_attention_core:
            return gradients
        kept = [one for one in gradients if one.gradient != "wgrad"]
        if get_dtype(forward.dtype).bits > MAX_NARROW_BITS or not is_target("all-linear", forward.block, forward.role):
            return kept
        elements = 1.0 * forward.m * forward.n
        width_bytes = get_dtype(_WIDE_DTYPE).num_bytes
        return [
            quantization(forward, width_bytes, read=elements, written=elements).changed(
                name=f"{forward.name}.quantize.backward", gradient="backward", pass_name="backward"
            ),
            *kept,
        ]
    if isinstance(forward, Collective):
        # Gathered inputs are gathered again for weight gradients only.
        needs_input = any(workload.adapts(forward.block, role) for role in INPUT_ROLES)
        return gradients if needs_input else [one for one in gradients if not one.name.endswith(_GATHER_AGAIN)]
    if isinstance(forward, Pointwise) and forward.operation in ("norm", "layernorm"):
        # One kernel reads x and dy and writes dx; the other one is the gradient of the norm's weights.
        read_bytes = forward.read_bytes + forward.written_bytes
        return [one.changed(read_bytes=read_bytes, num_kernels=1) for one in gradients]
    return gradients


MAX_NARROW_BITS = 8
"""Widest format that operands are quantized to from 16 bits before a GEMM. [bit]"""
_WIDE_DTYPE = "bf16"


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
        dtype=_WIDE_DTYPE,
        operation="activation",
        read_bytes=read * width_bytes,
        written_bytes=written * get_dtype(gemm.dtype).num_bytes,
    )


_GATHER_AGAIN = ".gather_again"


def backward_of(operation: Operation) -> list[Operation]:
    """Lower the gradient of one forward operation."""
    if isinstance(operation, Gemm | GroupedGemm):
        return list(gemm_gradients(operation))
    if isinstance(operation, Attention | Scan | CausalConv):
        return [
            operation.changed(
                name=f"{operation.name}.backward", gradient="backward", pass_name="backward", is_backward=True
            )
        ]
    if isinstance(operation, Collective):
        return _collective_gradient(operation)
    if isinstance(operation, SparseAttention):
        raise TypeError("sparse attention has no lowered gradient; training attends to all tokens")
    return [_pointwise_gradient(operation)]


def gemm_gradients(gemm: Gemm | GroupedGemm) -> tuple[Gemm | GroupedGemm, Gemm | GroupedGemm]:
    """Lower the gradients of a GEMM's first operand (dgrad) and second operand (wgrad).

    >>> dgrad, wgrad = gemm_gradients(Gemm(name="x", m=2, n=3, k=5))
    >>> (dgrad.m, dgrad.n, dgrad.k, dgrad.layout), (wgrad.m, wgrad.n, wgrad.k, wgrad.layout)
    ((2, 5, 3, 'NN'), (3, 5, 2, 'TN'))
    """
    m, n, k = gemm.m, gemm.n, gemm.k
    first_layout, second_layout, transposed = _GRADIENT_LAYOUTS[gemm.layout]
    second_m, second_n = (n, k) if transposed else (k, n)
    dgrad = gemm.changed(
        name=f"{gemm.name}.dgrad", gradient="dgrad", pass_name="backward", m=m, n=k, k=n, layout=first_layout
    )
    wgrad = gemm.changed(
        name=f"{gemm.name}.wgrad",
        gradient="wgrad",
        pass_name="backward",
        m=second_m,
        n=second_n,
        k=m,
        layout=second_layout,
    )
    return dgrad, wgrad


def _collective_gradient(forward: Collective) -> list[Operation]:
    """Lower the gradient of a collective.

    Sequence parallelism does not save gathered tokens: they are gathered again for wgrad, overlapped with dgrad.
    """
    if forward.axis == "pipeline":
        return [forward.changed(name=f"{forward.name}.backward", gradient="backward", pass_name="backward")]
    op_name = _BACKWARD_OP_NAMES.get(forward.op_name, forward.op_name)
    name = f"{forward.name.removesuffix(f'.{forward.op_name}')}.backward"
    overlaps = forward.overlaps or (forward.op_name in _OVERLAPPED_IN_BACKWARD and forward.axis == "tensor")
    sent_bytes = forward.message_bytes if forward.backward_bytes is None else forward.backward_bytes
    gradients: list[Operation] = [
        forward.changed(
            name=f"{name}.{op_name}",
            gradient="backward",
            pass_name="backward",
            op_name=op_name,
            overlaps=overlaps,
            message_bytes=sent_bytes,
            backward_bytes=None,
        )
    ]
    if forward.op_name == "all_gather" and forward.axis == "tensor" and not forward.keeps_result:
        gradients.append(
            forward.changed(name=f"{name}{_GATHER_AGAIN}", gradient="backward", pass_name="backward", overlaps=True)
        )
    return gradients


def _pointwise_gradient(forward: Pointwise) -> Pointwise:
    """Lower the gradient of a memory-bound operation that reads x and writes y in the forward pass.

    norm: two kernels, one for dx and one for the weights, which each read x and dy; a chain of kernels has about two
    for each of its own. activation: reads x and dy, writes dx. softmax: reads y and dy, writes dx. residual: adds the
    gradients of both branches, with the traffic of forward; if it fuses dropout, another kernel computes the gradient
    of its branch. All others are linear: they read dy (and the mask of dropout) and write dx.
    """
    x, y = forward.read_bytes, forward.written_bytes
    read, written, num_kernels = y, x, forward.num_kernels
    if forward.operation in ("norm", "layernorm"):
        read, num_kernels = 2.0 * (x + y), 2 * num_kernels
    elif forward.operation == "activation":
        read = x + y
    elif forward.operation == "softmax":
        read = 2.0 * y
    elif forward.fuses_dropout:
        # The second kernel reads the gradient of the sum and the mask, and writes the gradient of the branch.
        branch = x / 2.0
        read, written, num_kernels = x + y, 2.0 * branch, 2
    elif forward.operation == "residual":
        read, written = x, y
    return forward.changed(
        name=f"{forward.name}.backward",
        gradient="backward",
        pass_name="backward",
        read_bytes=read,
        written_bytes=written,
        num_kernels=num_kernels,
    )
