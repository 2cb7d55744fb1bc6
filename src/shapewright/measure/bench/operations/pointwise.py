"""Pointwise operations, measured as torch kernels that move exactly the bytes of the operation.

A lowered pointwise operation records its bytes only, so each kind has a proxy: one torch kernel with the same traffic
on rows of a given width. A gated activation is ``glu`` (with a sigmoid), since silu(gate) * up takes two kernels in
torch. The loss is the chain of kernels that the lowering lists: two forward, three backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass
from shapewright.measure.bench.operations.prepared import (
    PreparedCall,
    num_input_sets,
    random_normal,
    relative_error,
    spread_indices,
)

if TYPE_CHECKING:
    from shapewright.lowering.operations.pointwise import Pointwise
    from shapewright.measure.bench.device.backend import Backend

_CHECKED_ROWS = 64
_DROPPED_FRACTION = 0.1
# A prime, so that the targets cover all columns.
_TARGET_STEP = 7919
RMS_NORM, ADAMW = "rms_norm", "adamw"
LOSS, LOSS_BACKWARD = "cross_entropy", "cross_entropy_backward"
# A large learning rate, so that the change of one step is visible against the weights.
_ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
# Proxy kernels by kind of operation, where their names differ.
_KERNELS_BY_KIND = {
    "activation": ("gelu", "glu"), "norm": ("layer_norm",), "layernorm": ("layer_norm",), "rmsnorm": (RMS_NORM,),
    "optimizer": (ADAMW,), LOSS: (LOSS, LOSS_BACKWARD),
}  # fmt: skip
# Largest relative difference in bytes read, since byte counts of other widths may be rounded.
_BYTES_TOLERANCE_FRACTION = 0.01


@dataclass(frozen=True, kw_only=True)
class _ProxyKernel:
    """A torch kernel, or a chain of them, with its traffic per element of the rows.

    Attributes:
        reads: Elements read in the operation's format.
        make_inputs: Builds one set of inputs of (rows, width).
        call: Runs the kernel on a set of inputs, or on some of its rows in float64.
        writes: Elements written in the operation's format.
        extra_read_bytes: Further bytes read, in other formats. [byte]
        extra_written_bytes: Further bytes written, in other formats. [byte]
        num_kernels: Number of kernels in the chain.
    """

    reads: float
    make_inputs: Callable[[Callable[..., Any], int, int], tuple[Any, ...]]
    call: Callable[..., Any]
    writes: float = 1.0
    extra_read_bytes: float = 0.0
    extra_written_bytes: float = 0.0
    num_kernels: int = 1


def prepare_pointwise(operation: Pointwise, backend: Backend, row_width: int, variant: str = "") -> PreparedCall:
    """Prepare the proxy kernel of a pointwise operation.

    Args:
        operation: The operation, with its kind and bytes.
        row_width: Elements per row, the dimension that norms and softmax reduce.
        variant: Kernel, for kinds that have several; empty for the default.

    Raises:
        BenchError: no torch kernel has this traffic, or it does not fit.
    """
    import torch

    if row_width < 1:
        raise BenchError(f"pointwise {operation.operation} needs row_width of at least 1, got {row_width}")
    element_bytes = get_dtype(operation.dtype).num_bytes
    name, proxy, elements = _choose_proxy(operation, element_bytes, variant)
    num_rows = round(elements / row_width)
    if num_rows < 1:
        raise BenchError(f"{elements:.0f} elements are fewer than one row of row_width={row_width}")
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)

    def tensor(*shape: int) -> Any:
        return random_normal(backend, *shape, dtype=operation.dtype)

    def check(found: Any, arguments: tuple[Any, ...]) -> float:
        out = found[0] if isinstance(found, tuple) else found
        if not bool(out.isfinite().all()):
            return float("nan")
        rows = spread_indices(num_rows, _CHECKED_ROWS)
        if name == "dropout":
            kept = out[rows] != 0
            return relative_error(out[rows], arguments[0][rows] * kept / (1.0 - _DROPPED_FRACTION))
        if name == LOSS_BACKWARD:
            leaf, targets = arguments[1][rows].detach().double(), arguments[2][rows]
            return relative_error(out[rows], leaf.softmax(-1) - torch.nn.functional.one_hot(targets, row_width))
        if name == ADAMW:
            return relative_error(out[rows], _first_adamw_step(*(part[rows].double() for part in arguments[4:])))
        # Rows are independent in all kinds; an operand without rows (a bias or weight vector) is used whole.
        selected = [part[rows].cpu() if part.shape[0] == num_rows else part.cpu() for part in arguments]
        reference = proxy.call(*(part.double() if part.is_floating_point() else part for part in selected))
        return relative_error(out[rows], reference)

    inputs = [proxy.make_inputs(tensor, num_rows, row_width) for _ in range(count)]
    return PreparedCall(inputs=inputs, call=proxy.call, check=check, kernel=name, set_bytes=set_bytes)


def _first_adamw_step(gradient: Any, weight: Any) -> Any:
    """Weights after a first AdamW step, whose bias-corrected moments are the gradient and its square."""
    step = gradient / (gradient.abs() + _ADAMW["eps"])
    return weight * (1.0 - _ADAMW["lr"] * _ADAMW["weight_decay"]) - _ADAMW["lr"] * step


def require_proxy_kernel(operation: Pointwise) -> None:
    """Check that a torch kernel has the traffic of an operation.

    Raises:
        BenchError: no kernel has.
    """
    _choose_proxy(operation, get_dtype(operation.dtype).num_bytes)


def _choose_proxy(operation: Pointwise, element_bytes: float, variant: str = "") -> tuple[str, _ProxyKernel, float]:
    """Find the proxy kernel with the operation's traffic: its name, the kernel, and the number of elements."""
    proxies = _proxy_kernels()
    names = _KERNELS_BY_KIND.get(operation.operation, (operation.operation,))
    for name in (variant,) if variant else names:
        if name not in proxies or int(operation.num_kernels) != proxies[name].num_kernels:
            continue
        proxy = proxies[name]
        elements = float(operation.written_bytes) / (proxy.writes * element_bytes + proxy.extra_written_bytes)
        expected_bytes = elements * (proxy.reads * element_bytes + proxy.extra_read_bytes)
        read_bytes = float(operation.read_bytes)
        if elements > 0.0 and abs(expected_bytes - read_bytes) <= _BYTES_TOLERANCE_FRACTION * read_bytes:
            return name, proxy, elements
    raise BenchError(
        f"no torch kernel has the traffic of this {operation.operation} (reads {float(operation.read_bytes):.3g} B, "
        f"writes {float(operation.written_bytes):.3g} B)"
    )


def _proxy_kernels() -> dict[str, _ProxyKernel]:
    import torch
    from torch.nn import functional

    def one(tensor: Callable[..., Any], rows: int, width: int) -> tuple[Any, ...]:
        return (tensor(rows, width),)

    def two(tensor: Callable[..., Any], rows: int, width: int) -> tuple[Any, ...]:
        return tensor(rows, width), tensor(rows, width)

    def row_and_vector(tensor: Callable[..., Any], rows: int, width: int) -> tuple[Any, ...]:
        return tensor(rows, width), tensor(1, width)

    def normalize(x: Any, weight: Any) -> Any:
        return functional.layer_norm(x, x.shape[-1:], weight[0])

    def normalize_rms(x: Any, weight: Any) -> Any:
        return functional.rms_norm(x, x.shape[-1:], weight[0], 1e-5)

    def optimizer_state(tensor: Callable[..., Any], rows: int, width: int) -> tuple[Any, ...]:
        """Weight, moments and step count, which the kernel updates, then the gradient and the initial weight."""
        weight, gradient = tensor(rows, width), tensor(rows, width)
        return weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight), weight.new_ones(()), gradient, weight

    def step(weight: Any, first: Any, second: Any, count: Any, gradient: Any, _before: Any) -> Any:
        torch._fused_adamw_(
            [weight], [gradient], [first], [second], [], [count], amsgrad=False, maximize=False, **_ADAMW
        )
        return weight

    def drop(x: Any) -> Any:
        return torch.native_dropout(x, _DROPPED_FRACTION, train=True)

    def targets(tensor: Callable[..., Any], rows: int, width: int) -> tuple[Any, ...]:
        logits = tensor(rows, width)
        return logits, torch.arange(rows, device=logits.device) * _TARGET_STEP % width

    def loss(logits: Any, wanted: Any) -> Any:
        return functional.cross_entropy(logits.float(), wanted, reduction="none")

    def loss_graph(tensor: Callable[..., Any], rows: int, width: int) -> tuple[Any, ...]:
        logits, wanted = targets(tensor, rows, width)
        leaf = logits.detach().requires_grad_()
        return loss(leaf, wanted).sum(), leaf, wanted

    def loss_gradient(total: Any, leaf: Any, _wanted: Any) -> Any:
        return torch.autograd.grad(total, leaf, retain_graph=True)

    return {
        "layer_norm": _ProxyKernel(reads=1.0, make_inputs=row_and_vector, call=normalize),
        RMS_NORM: _ProxyKernel(reads=1.0, make_inputs=row_and_vector, call=normalize_rms),
        # Both moments are written as well, in fp32.
        ADAMW: _ProxyKernel(reads=4.0, make_inputs=optimizer_state, call=step, extra_written_bytes=8.0),
        "gelu": _ProxyKernel(reads=1.0, make_inputs=one, call=functional.gelu),
        "glu": _ProxyKernel(
            reads=2.0, make_inputs=lambda tensor, rows, width: (tensor(rows, 2 * width),), call=functional.glu
        ),
        "residual": _ProxyKernel(reads=2.0, make_inputs=two, call=torch.add),
        "bias": _ProxyKernel(reads=1.0, make_inputs=row_and_vector, call=torch.add),
        "softmax": _ProxyKernel(reads=1.0, make_inputs=one, call=lambda x: torch.softmax(x, -1)),
        "dropout": _ProxyKernel(reads=1.0, make_inputs=one, call=drop, extra_written_bytes=1.0),
        # Forward converts the logits to fp32 and writes their log-softmax; backward reverses this in three kernels.
        LOSS: _ProxyKernel(
            reads=1.0,
            extra_read_bytes=4.0,
            writes=0.0,
            extra_written_bytes=8.0,
            num_kernels=2,
            make_inputs=targets,
            call=loss,
        ),
        LOSS_BACKWARD: _ProxyKernel(
            reads=0.0,
            extra_read_bytes=12.0,
            extra_written_bytes=8.0,
            num_kernels=3,
            make_inputs=loss_graph,
            call=loss_gradient,
        ),
    }
