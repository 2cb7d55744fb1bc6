"""Gradients of forward operations: the backward pass of GEMMs, collectives and pointwise operations.

A GEMM C[m,n] = A[m,k] B[k,n] has two gradients: dA[m,k] = dC[m,n] B^T and dB[k,n] = A^T dC. For a linear layer (layout
NT, B stored as W[n,k]) the second is computed in the layout of W: dW[n,k] = dC^T A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.builders import MAX_NARROW_BITS, WIDE_DTYPE, quantization, without_weight_gradient
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import NORM_KINDS, Pointwise
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.workload.finetuning import INPUT_ROLES, QUANTIZATION, is_target

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.lowering.operations.operation import Operation
    from shapewright.workload.workload import Workload

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
        if operation.block == "indexer":  # no gradient passes through a choice
            continue
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
        if forward.is_adapter or forward.multiplies_activations:
            return gradients
        kept = [one for one in gradients if one.gradient != "wgrad"]
        if get_dtype(forward.dtype).bits > MAX_NARROW_BITS or not is_target("all-linear", forward.block, forward.role):
            return kept
        elements = 1.0 * forward.m * forward.n
        width_bytes = get_dtype(WIDE_DTYPE).num_bytes
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
    if isinstance(forward, Pointwise) and forward.operation in NORM_KINDS:
        return [without_weight_gradient(forward, one) for one in gradients if isinstance(one, Pointwise)]
    return gradients


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

    norm: reads x and dy, writes dx, and another kernel sums up parts of the gradient of its weights; a chain has about
    two kernels for each of its own, which together read x and dy twice. activation: reads x and dy, writes dx. softmax:
    reads y and dy, writes dx. residual: adds the gradients of both branches, with the traffic of forward; if it fuses
    dropout, another kernel computes the gradient of its branch. All others are linear: they read dy (and the mask of
    dropout) and write dx.
    """
    x, y = forward.read_bytes, forward.written_bytes
    read, written, num_kernels = y, x, forward.num_kernels
    is_norm = forward.operation in NORM_KINDS
    if is_norm:
        read, num_kernels = (2.0 if forward.is_chain else 1.0) * (x + y), 2 * num_kernels
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
        is_backward=is_norm,
    )
