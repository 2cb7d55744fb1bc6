"""Automatic mixed precision in a trace: meta tensors have no autocast of their own, so its casts are made here.

Source: PyTorch, "Automatic Mixed Precision package", CUDA op-specific behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
