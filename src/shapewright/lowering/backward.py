"""The backward pass, derived from the forward operations one by one.

A product C[m,n] = A[m,k] B[k,n] has two gradients: dA[m,k] = dC[m,n] B^T and dB[k,n] = A^T dC. For a layer with
weights (layout NT, B stored as W[n,k]) the second is written the way W lies in memory: dW[n,k] = dC^T A.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.pointwise import WITH_DROPOUT
from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.operations import Operation

# What undoes the forward collective for the gradient; the others are their own mirror image.
_MIRRORED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
# Whose mirror image on the tensor axis adds up the gradient towards the inputs of column-parallel products: it runs
# beside the gradient of their weights. Source: arXiv 2205.05198, section 4.2.2; Megatron-LM, tensor_parallel/layers.py.
_TOWARDS_INPUTS = ("all_gather", "all_reduce")

# Layout of dA and of dB, and whether dB is computed transposed, by the forward layout.
_GRADIENT_LAYOUTS = {"NT": ("NN", "TN", True), "NN": ("NT", "TN", False)}


# Products of attention without weights (attention_core.py): both of their gradients are of activations.
_WEIGHTLESS = (".score.wgrad", ".over_value.wgrad")


def is_weight_gradient(operation: Operation) -> bool:
    """Whether an operation computes the gradient of weights, which nothing later in the backward pass waits for."""
    return operation.name.endswith(".wgrad") and not operation.name.endswith(_WEIGHTLESS)


def lower_backward(forward: Iterable[Operation]) -> list[Operation]:
    """Gradients of forward operations, last one first."""
    backward: list[Operation] = []
    for operation in reversed(list(forward)):
        backward += backward_of(operation)
    return backward


def backward_of(operation: Operation) -> list[Operation]:
    """Operations that compute the gradient of one forward operation."""
    if isinstance(operation, Gemm | GroupedGemm):
        return list(gemm_gradients(operation))
    if isinstance(operation, Attention):
        return [operation.changed(name=f"{operation.name}.backward", pass_name="backward", is_backward=True)]
    if isinstance(operation, Collective):
        return _mirror(operation)
    return [_pointwise_gradient(operation)]


def gemm_gradients(product: Gemm | GroupedGemm) -> tuple[Gemm | GroupedGemm, Gemm | GroupedGemm]:
    """Gradients of a forward product: towards its first operand (dgrad) and towards its second (wgrad).

    >>> dgrad, wgrad = gemm_gradients(Gemm(name="x", m=2, n=3, k=5))
    >>> (dgrad.m, dgrad.n, dgrad.k, dgrad.layout), (wgrad.m, wgrad.n, wgrad.k, wgrad.layout)
    ((2, 5, 3, 'NN'), (3, 5, 2, 'TN'))
    """
    m, n, k = product.m, product.n, product.k
    first_layout, second_layout, transposed = _GRADIENT_LAYOUTS[product.layout]
    second_m, second_n = (n, k) if transposed else (k, n)
    dgrad = product.changed(name=f"{product.name}.dgrad", pass_name="backward", m=m, n=k, k=n, layout=first_layout)
    wgrad = product.changed(
        name=f"{product.name}.wgrad", pass_name="backward", m=second_m, n=second_n, k=m, layout=second_layout
    )
    return dgrad, wgrad


def _mirror(forward: Collective) -> list[Operation]:
    """Collective of the gradient; gathered tokens are gathered once more for wgrad, which hides behind dgrad."""
    if forward.axis == "pipeline":
        return [forward.changed(name=f"{forward.name}.backward", pass_name="backward")]
    op_name = _MIRRORED.get(forward.op_name, forward.op_name)
    name = f"{forward.name.removesuffix(f'.{forward.op_name}')}.backward"
    overlaps = forward.overlaps or (forward.op_name in _TOWARDS_INPUTS and forward.axis == "tensor")
    sent_bytes = forward.message_bytes if forward.backward_bytes is None else forward.backward_bytes
    mirrored: list[Operation] = [
        forward.changed(
            name=f"{name}.{op_name}",
            pass_name="backward",
            op_name=op_name,
            overlaps=overlaps,
            message_bytes=sent_bytes,
            backward_bytes=None,
        )
    ]
    if forward.op_name == "all_gather" and forward.axis == "tensor" and not forward.keeps_result:
        mirrored.append(forward.changed(name=f"{name}.gather_again", pass_name="backward", overlaps=True))
    return mirrored


def _pointwise_gradient(forward: Pointwise) -> Pointwise:
    """Gradient of a memory-bound operation, in terms of what the forward one reads (x) and writes (y).

    norm: two kernels, one for dx and one for the weights, each reads x and dy. activation: reads x and dy, writes dx.
    softmax: reads y and dy, writes dx. residual: the gradients of both branches are added, as much traffic as forward;
    where it drops elements, the gradient of its branch is a kernel besides.
    The rest is linear: reads dy (dropout and mask: with the mask) and writes dx.
    """
    x, y = forward.read_bytes, forward.written_bytes
    read, written, num_kernels = y, x, forward.num_kernels
    if forward.operation in ("norm", "layernorm"):
        read, num_kernels = 2.0 * (x + y), 2
    elif forward.operation == "activation":
        read = x + y
    elif forward.operation == "softmax":
        read = 2.0 * y
    elif forward.name.endswith(WITH_DROPOUT):
        # Written beside the sum: the mask. The branch's gradient (sum and mask in, as much as the sum out) is a kernel.
        branch = x / 2.0
        read, written, num_kernels = x + y, 2.0 * branch, 2
    elif forward.operation == "residual":
        read, written = x, y
    return forward.changed(
        name=f"{forward.name}.backward",
        pass_name="backward",
        read_bytes=read,
        written_bytes=written,
        num_kernels=num_kernels,
    )
