"""Pointwise operations: kernels of torch that move exactly the bytes that the operation counts.

A lowered operation knows its bytes alone, so each kind has a stand-in of one torch kernel with the same traffic, on
rows of a given width. A gated activation is ``glu`` (a sigmoid for the gate), since a product of silu and up is two
kernels. The loss is the chain that lowering lists: two kernels forward, three backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.bench.prepared import Prepared, normal, num_input_sets, relative_error, some_indices
from shapewright.dtypes import get_dtype
from shapewright.errors import BenchError

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend
    from shapewright.operations import Pointwise

_CHECKED_ROWS = 64
_DROPPED_FRACTION = 0.1
# A prime, so that targets are spread over all columns.
_TARGET_STEP = 7919
RMS_NORM, ADAMW = "rms_norm", "adamw"
LOSS, LOSS_BACKWARD = "cross_entropy", "cross_entropy_backward"
# Large, so that what one step changes can be seen beside the weights.
_ADAMW = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
# Kernels of a kind of operation, as suites and lowering name it, where they are called otherwise.
_USUAL_KERNELS = {
    "activation": ("gelu", "glu"), "norm": ("layer_norm",), "layernorm": ("layer_norm",), "rmsnorm": (RMS_NORM,),
    "optimizer": (ADAMW,), LOSS: (LOSS, LOSS_BACKWARD),
}  # fmt: skip
# Room for the rounding of byte counts that come from other widths.
_SAME_FRACTION = 0.01


@dataclass(frozen=True, kw_only=True)
class _StandIn:
    """A torch kernel with known traffic, for each element of the rows.

    Attributes:
        reads: Elements read.
        make_inputs: Builds one set of inputs of (rows, width).
        call: Runs it; given a set, or the same rows of it in float64.
        mask_bytes: Bytes written besides. [byte]
        writes: Elements written.
        wide_read_bytes: Bytes read besides. [byte]
        num_kernels: Kernels that it is a chain of.
    """

    reads: float
    make_inputs: Callable[[Callable[..., Any], int, int], tuple[Any, ...]]
    call: Callable[..., Any]
    mask_bytes: float = 0.0
    writes: float = 1.0
    wide_read_bytes: float = 0.0
    num_kernels: int = 1


def prepare_pointwise(operation: Pointwise, backend: Backend, row_width: int, variant: str = "") -> Prepared:
    """Make a stand-in ready.

    Args:
        operation: Kind and bytes.
        backend: Where it runs.
        row_width: Elements of one row, over which norms and softmax go.
        variant: Which kernel, where a kind has several; empty for the usual one.

    Raises:
        BenchError: no single torch kernel has this traffic, or it does not fit.
    """
    import torch

    if row_width < 1:
        raise BenchError(f"pointwise {operation.operation} needs a row_width of at least 1, got {row_width}")
    element_bytes = get_dtype(operation.dtype).num_bytes
    name, stand_in, elements = _choose(operation, element_bytes, variant)
    num_rows = round(elements / row_width)
    if num_rows < 1:
        raise BenchError(f"{elements:.0f} elements are less than one row of {row_width}")
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)

    def tensor(*shape: int) -> Any:
        return normal(backend, *shape, dtype=operation.dtype)

    def check(found: Any, arguments: tuple[Any, ...]) -> float:
        out = found[0] if isinstance(found, tuple) else found
        if not bool(out.isfinite().all()):
            return float("nan")
        rows = some_indices(num_rows, _CHECKED_ROWS)
        if name == "dropout":
            kept = out[rows] != 0
            return relative_error(out[rows], arguments[0][rows] * kept / (1.0 - _DROPPED_FRACTION))
        if name == LOSS_BACKWARD:
            leaf, targets = arguments[1][rows].detach().double(), arguments[2][rows]
            return relative_error(out[rows], leaf.softmax(-1) - torch.nn.functional.one_hot(targets, row_width))
        if name == ADAMW:
            return relative_error(out[rows], _adamw_from_rest(*(part[rows].double() for part in arguments[4:])))
        # Rows are independent in all kinds; an operand without rows (bias, table) is taken whole.
        taken = [part[rows].cpu() if part.shape[0] == num_rows else part.cpu() for part in arguments]
        reference = stand_in.call(*(part.double() if part.is_floating_point() else part for part in taken))
        return relative_error(out[rows], reference)

    inputs = [stand_in.make_inputs(tensor, num_rows, row_width) for _ in range(count)]
    return Prepared(inputs=inputs, call=stand_in.call, check=check, kernel=name, set_bytes=set_bytes)


def _adamw_from_rest(gradient: Any, weight: Any) -> Any:
    """A first step, from moments of zero: both are unbiased to the gradient itself and its square."""
    step = gradient / (gradient.abs() + _ADAMW["eps"])
    return weight * (1.0 - _ADAMW["lr"] * _ADAMW["weight_decay"]) - _ADAMW["lr"] * step


def require_stand_in(operation: Pointwise) -> None:
    """Refuse what no single torch kernel stands for.

    Raises:
        BenchError: there is none with this traffic.
    """
    _choose(operation, get_dtype(operation.dtype).num_bytes)


def _choose(operation: Pointwise, element_bytes: float, variant: str = "") -> tuple[str, _StandIn, float]:
    """Name, stand-in and number of elements of its rows."""
    known = _stand_ins()
    names = _USUAL_KERNELS.get(operation.operation, (operation.operation,))
    for name in (variant,) if variant else names:
        if name not in known or int(operation.num_kernels) != known[name].num_kernels:
            continue
        stand_in = known[name]
        elements = float(operation.written_bytes) / (stand_in.writes * element_bytes + stand_in.mask_bytes)
        expected_bytes = elements * (stand_in.reads * element_bytes + stand_in.wide_read_bytes)
        read_bytes = float(operation.read_bytes)
        if elements > 0.0 and abs(expected_bytes - read_bytes) <= _SAME_FRACTION * read_bytes:
            return name, stand_in, elements
    raise BenchError(
        f"no single torch kernel stands for this {operation.operation} (reads {float(operation.read_bytes):.3g} B, "
        f"writes {float(operation.written_bytes):.3g} B)"
    )


def _stand_ins() -> dict[str, _StandIn]:
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
        """What is written to, then the step count, the gradient, and the weights as they were."""
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
        "layer_norm": _StandIn(reads=1.0, make_inputs=row_and_vector, call=normalize),
        RMS_NORM: _StandIn(reads=1.0, make_inputs=row_and_vector, call=normalize_rms),
        # Two moments are written beside the weights.
        ADAMW: _StandIn(reads=4.0, make_inputs=optimizer_state, call=step, mask_bytes=8.0),
        "gelu": _StandIn(reads=1.0, make_inputs=one, call=functional.gelu),
        "glu": _StandIn(
            reads=2.0, make_inputs=lambda tensor, rows, width: (tensor(rows, 2 * width),), call=functional.glu
        ),
        "residual": _StandIn(reads=2.0, make_inputs=two, call=torch.add),
        "bias": _StandIn(reads=1.0, make_inputs=row_and_vector, call=torch.add),
        "softmax": _StandIn(reads=1.0, make_inputs=one, call=lambda x: torch.softmax(x, -1)),
        "dropout": _StandIn(reads=1.0, make_inputs=one, call=drop, mask_bytes=1.0),
        # Logits become fp32, their log-softmax is written beside; backward goes the same way in three kernels.
        LOSS: _StandIn(
            reads=1.0, wide_read_bytes=4.0, writes=0.0, mask_bytes=8.0, num_kernels=2, make_inputs=targets, call=loss
        ),
        LOSS_BACKWARD: _StandIn(
            reads=0.0, wide_read_bytes=12.0, mask_bytes=8.0, num_kernels=3, make_inputs=loss_graph, call=loss_gradient
        ),
    }
