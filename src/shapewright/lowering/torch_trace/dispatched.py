"""What a dispatched operator is: facts that its name tells, its GEMMs, and the tensors among its arguments.

Meta tensors have no autocast of their own, so its casts are made here too. Source: PyTorch, "Automatic Mixed Precision
package", CUDA op-specific behaviour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from shapewright.core.records import dataclass
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import LOG_SOFTMAX, Pointwise
from shapewright.lowering.torch_trace.operators import (
    FREE,
    FUSIBLE_KINDS,
    FUSIBLE_NAMES,
    UNKNOWN,
    dtype_of,
    kind_of,
    read_collective,
    read_convolution,
    read_gemm,
)


@dataclass
class Operator:
    """Facts about an operator that do not depend on its arguments."""

    name: str
    label: str
    kind: str
    is_mutable: bool
    is_free: bool
    is_composite: bool
    is_fusible: bool


def read_compute(facts: Operator, args: Sequence[Any], output: Any) -> list[tuple[str, Operation]]:
    """GEMMs, attention or collectives of a call; empty for a memory-bound one."""
    gemm = read_gemm(facts.name, args, dtype_of)
    if gemm is not None:
        return [("", gemm)]
    if "convolution" in facts.name:
        return read_convolution(facts.name, args, output, dtype_of)
    if facts.label.startswith(("_c10d_functional", "c10d")):
        sizes = [one for one in args if isinstance(one, int) and not isinstance(one, bool)]
        num_bytes = max(map(count_bytes, [*list_tensors(args), output]))
        found = read_collective(facts.name, _group_size(sizes, args), float(num_bytes))
        return [] if found is None else [("", found)]
    if "attention" in facts.name:
        from shapewright.lowering.torch_trace.fused_kernels import read_attention

        attention = read_attention(facts.name, args, dtype_of)
        return [] if attention is None else [("", attention)]
    return []


def _group_size(sizes: Sequence[int], args: Sequence[Any]) -> int:
    """Ranks of the group of a collective: an argument, or those of the group that the last argument names."""
    if sizes:
        return int(sizes[0])
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return int(dist.get_world_size(_resolve_process_group(args[-1])))
    except Exception:
        return int(dist.get_world_size()) if dist.is_initialized() else 1


def make_pointwise(facts: Operator, sources: Sequence[Any], written: Sequence[Any]) -> Pointwise:
    """Memory-bound operation of a call, whose bytes are noted later."""
    floating = [one for one in (*written, *sources) if one.dtype.is_floating_point]
    dtype = dtype_of((floating or list(written))[0])
    role = LOG_SOFTMAX if LOG_SOFTMAX in facts.name else ""
    work = Pointwise(name="", role=role, operation=facts.kind, read_bytes=0.0, written_bytes=0.0, dtype=dtype)
    # A product may be that with a gate, as its bytes tell. Gradients and comparisons read as much, and have none.
    return work if facts.name in ("mul", "mul_") else work.changed(is_gated=False)


def describe_operator(func: Any) -> Operator:
    """Look up what is known of an operator."""
    import torch

    schema = func._schema
    space, _, name = schema.name.partition("::")
    # Gradients and in-place forms of elementwise operators are elementwise, with or without the tag.
    forward = getattr(torch.ops.aten, name.removesuffix("_backward").rstrip("_"), func)
    tagged = (func, *(getattr(forward, overload) for overload in getattr(forward, "overloads", list)()))
    is_pointwise = any(torch.Tag.pointwise in one.tags for one in tagged)
    kind = kind_of(name, is_pointwise=is_pointwise) if space in ("aten", "prims") else UNKNOWN
    if "convolution" in name:
        kind = "other"  # depthwise: memory traffic
    return Operator(
        name=name,
        label=name if space == "aten" else schema.name,
        kind=kind,
        is_mutable=schema.is_mutable,
        is_free=name in FREE or space == "prim",
        is_composite=space == "aten"
        and name not in FREE
        and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        is_fusible=kind in FUSIBLE_KINDS or name in FUSIBLE_NAMES,
    )


def count_bytes(tensor: Any) -> int:
    """Bytes of the distinct elements of a tensor: expanded dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 or size == 0 else 1
    return int(elements * tensor.element_size())


class View(NamedTuple):
    """What a tensor shows of its storage: serial number of the storage, place in it, and the bytes of both."""

    serial: int
    place: tuple[int, tuple[int, ...], tuple[int, ...]]
    num_bytes: float
    storage_bytes: float


def view_of(tensor: Any, serial: int) -> View:
    """View of a tensor whose storage has this serial number."""
    place = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
    return View(serial, place, float(count_bytes(tensor)), float(tensor.untyped_storage().nbytes()))


def sum_views(views: Iterable[View]) -> dict[int, float]:
    """Bytes by storage: different views of it, such as the halves of a tensor, together; no byte twice."""
    sums: dict[int, float] = {}
    for one in dict.fromkeys(views):
        sums[one.serial] = min(sums.get(one.serial, 0.0) + one.num_bytes, one.storage_bytes)
    return sums


def is_meta(value: Any) -> bool:
    """Whether a value is a tensor on the meta device."""
    return bool(getattr(value, "is_meta", False))


def list_tensors(values: Any) -> Iterator[Any]:
    """Tensors in nested lists and tuples."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from list_tensors(value)


def move_to_meta(values: Any) -> Any:
    """Arguments of a call that mixes devices, all on the meta device: constants of a module may be on the CPU."""
    import torch

    is_mapping = isinstance(values, Mapping)
    found = list(list_tensors(values.values() if is_mapping else values))
    if not any(one.is_meta for one in found) or all(one.is_meta or one.dim() == 0 for one in found):
        return values

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if value.is_meta or value.dim() == 0 else torch.empty_like(value, device="meta")
        return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value

    return {name: moved(value) for name, value in values.items()} if is_mapping else tuple(map(moved, values))


# Functions that run in the format of autocast, and those that run in fp32.
_NARROW = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "mv", "addmv",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "chain_matmul",
    "scaled_dot_product_attention", "prelu",
}  # fmt: skip
_WIDE = {
    "layer_norm", "group_norm", "softmax", "log_softmax", "cross_entropy", "nll_loss", "mse_loss", "l1_loss",
    "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy_with_logits", "cosine_similarity", "cumsum",
    "cumprod", "exp", "expm1", "log", "log1p", "log2", "log10", "pow", "__pow__", "prod", "norm", "renorm", "rsqrt",
    "reciprocal", "sinh", "cosh", "tan", "acos", "asin", "erfinv", "softplus", "softmin", "sum", "cdist", "dist",
}  # fmt: skip


# Format that autocast was on with in the function of PyTorch that was called last; below the dispatcher it looks off.
_seen: list[Any] = [None]


def seen_autocast() -> Any:
    """Format that autocast is on with in the function of PyTorch that runs; None where it is off."""
    return _seen[0]


def _autocast_dtype() -> Any:
    """Format that autocast is on with; None where it is off."""
    import torch

    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


@contextmanager
def emulated_autocast() -> Iterator[None]:
    """Make the casts of autocast on meta tensors, also for ``torch.autocast("cuda")`` where there is no GPU."""
    import torch
    from torch.cuda.amp import common
    from torch.overrides import TorchFunctionMode

    class Casts(TorchFunctionMode):  # type: ignore[misc]
        """Casts the arguments of listed functions while autocast is on."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            dtype = _seen[0] = _autocast_dtype()
            if dtype is None or not (name in _NARROW or name in _WIDE):
                return func(*args, **(kwargs or {}))
            target = dtype if name in _NARROW else torch.float32
            return func(*_cast(args, target), **_cast(kwargs or {}, target))

    before = common.amp_definitely_not_available, torch.cuda.is_bf16_supported
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    try:
        with Casts():
            yield
    finally:
        _seen[0] = None
        common.amp_definitely_not_available, torch.cuda.is_bf16_supported = before


def _cast(values: Any, dtype: Any) -> Any:
    """Floating tensors among the arguments in another format; wider ones than fp32 stay."""
    import torch

    if isinstance(values, torch.Tensor):
        is_cast = values.is_meta and values.dtype in (torch.float32, torch.float16, torch.bfloat16)
        return values.to(dtype) if is_cast and values.dtype != dtype else values
    if isinstance(values, Mapping):
        return {name: _cast(one, dtype) for name, one in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_cast(one, dtype) for one in values) if type(values) in (list, tuple) else values
    return values
