"""Fused attention in a trace: one operation each for the forward and the backward pass.

On the meta device PyTorch would decompose scaled_dot_product_attention into GEMMs that save all scores, and flex
attention into pointwise operations. While a trace runs, both are replaced by one operator that has the shapes, the
saved tensors and the gradients of a fused kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from shapewright.lowering.operations import Attention, Operation, Pointwise
from shapewright.lowering.torch_trace.operators import dtype_of

_recorders: list[Any] = []

# Operators of fused attention by the positions of query, key and value, and of the causal flag where they have one.
_FUSED = {
    "_scaled_dot_product_flash_attention": (0, 4),
    "_scaled_dot_product_efficient_attention": (0, 6),
    "_scaled_dot_product_cudnn_attention": (0, 6),
    "_scaled_dot_product_flash_attention_backward": (1, 10),
    "_scaled_dot_product_efficient_attention_backward": (1, 10),
    "_scaled_dot_product_cudnn_attention_backward": (1, 13),
}


def read_attention(name: str, args: Sequence[Any], dtype_of: Any) -> Operation | None:
    """Read a call of one of PyTorch's own fused kernels; None for other operators."""
    if name not in _FUSED:
        return None
    first, flag = _FUSED[name]
    query, key, value = args[first : first + 3]
    causal = bool(args[flag]) if len(args) > flag else False
    return _attention(
        query, key, value, dtype_of(query), causal=causal, is_training=True, is_backward=name.endswith("_backward")
    )


def _attention(
    query: Any,
    key: Any,
    value: Any,
    dtype: str,
    *,
    causal: bool,
    window_size: int = 0,
    is_backward: bool = False,
    is_training: bool,
) -> Attention:
    """Attention over tensors of shape [..., heads, tokens, head dim]."""
    heads, query_len, head_dim = (*(1,) * (3 - query.dim()), *query.shape)[-3:]
    kv_heads, kv_len = (*(1,) * (3 - key.dim()), *key.shape)[-3:-1]
    batch_size = 1
    for size in query.shape[:-3]:
        batch_size *= size
    return Attention(
        name="",
        batch_size=batch_size,
        query_len=query_len,
        kv_len=kv_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=value.shape[-1],
        causal=causal and query_len <= kv_len and query_len > 1,
        window_size=window_size if window_size < kv_len else 0,
        is_backward=is_backward,
        is_training=is_training,
        dtype=dtype,
    )


@cache
def _function() -> Any:
    """The operator as an autograd function."""
    import torch

    class FusedAttention(torch.autograd.Function):  # type: ignore[misc]
        """Shapes and saved tensors of fused attention."""

        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, options: dict[str, Any]) -> Any:
            """Record the call and return an output without values; a kernel keeps fp32 logarithms of row sums."""
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, output, sums)
            ctx.options = options
            work = _attention(query, key, value, dtype_of(query), **options)
            sources = [query, key, value] if mask is None else [query, key, value, mask]
            _recorders[-1].add("scaled_dot_product_attention", work, sources, [output, sums])
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            """Record the gradients of queries, keys and values."""
            query, key, value, output, sums = ctx.saved_tensors
            gradients = [torch.empty_like(one) for one in (query, key, value)]
            work = _attention(query, key, value, dtype_of(query), is_backward=True, **ctx.options)
            _recorders[-1].add(
                "scaled_dot_product_attention", work, [query, key, value, output, sums, gradient], gradients
            )
            return (*gradients, None, None)

    return FusedAttention


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  (the signature is PyTorch's)
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: int = 0,
    has_sinks: bool = False,
) -> Any:
    """Stand-in for torch.nn.functional.scaled_dot_product_attention.

    A mask is a tensor without values: all query-key pairs then count, as the kernels that take a mask compute them.
    """
    import torch

    del dropout_p, scale, enable_gqa
    options = {
        "causal": is_causal,
        "window_size": window_size,
        "is_training": torch.is_grad_enabled() and not has_sinks,
    }
    return _function().apply(query, key, value, attn_mask, options)


def attend_as_transformers(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Any, None]:
    """Attention function for transformers with the interface of its flash attention: windows instead of masks."""
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window") or 0
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        is_causal=bool(causal) and attention_mask is None,
        window_size=window,
        has_sinks=options.get("s_aux") is not None,  # kernels of training frameworks have none
    )
    return output.transpose(1, 2).contiguous(), None


def _flex(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, *args: Any, **options: Any
) -> Any:
    """Body of PyTorch's function while a trace runs: it has other globals, so that it imports what it calls."""
    from shapewright.lowering.torch_trace.fused_kernels import flex_attention

    del score_mod
    returns_sums = options.get("return_lse") or (len(args) > 2 and args[2])
    return flex_attention(query, key, value, block_mask, return_lse=bool(returns_sums))


def flex_attention(query: Any, key: Any, value: Any, block_mask: Any, *, return_lse: bool) -> Any:
    """Stand-in for torch.nn.attention.flex_attention.flex_attention."""
    import torch

    causal, window_size = _shape_of_mask(block_mask, query.shape[-2], key.shape[-2])
    output = scaled_dot_product_attention(query, key, value, is_causal=causal, window_size=window_size)
    return (output, query.new_empty(query.shape[:-1], dtype=torch.float32)) if return_lse else output


# Positions at which the function of a block mask is evaluated: enough to tell causal masks and windows.
_PROBED_QUERIES = 64


def _shape_of_mask(block_mask: Any, query_len: int, kv_len: int) -> tuple[bool, int]:
    """Whether the function of a block mask is causal, and its window; all pairs where it cannot be evaluated."""
    import torch

    mask_mod = getattr(block_mask, "mask_mod", None)
    if mask_mod is None:
        return False, 0
    with torch.utils._python_dispatch._disable_current_modes(), torch.device("cpu"):
        rows = torch.unique(torch.linspace(0, query_len - 1, _PROBED_QUERIES).round().long())[:, None]
        columns = torch.arange(kv_len)[None, :]
        zero = torch.zeros((), dtype=torch.long)
        try:
            allowed = mask_mod(zero, zero, rows, columns)
            allowed = torch.as_tensor(allowed).expand(rows.shape[0], kv_len)
            if allowed.is_meta:
                return False, 0
        except Exception:
            _recorders[-1].notes["a block mask of flex attention needs values: all query-key pairs are counted"] = None
            return False, 0
        causal = not bool((allowed & (columns > rows + kv_len - query_len)).any())
        widest = int(allowed.sum(dim=1).max())
        if causal:
            return True, 0 if widest >= kv_len else widest
        share = float(allowed.float().mean())
        return False, 0 if share >= 1.0 else max(1, round(share * kv_len))


@contextmanager
def replaced_kernels(recorder: Any) -> Iterator[None]:
    """Replace the attention and dropout of PyTorch on meta tensors while a recorder records."""
    import torch
    from torch.nn.attention import flex_attention as flex

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradMeta")
    library.impl("dropout", _dropout, "AutogradMeta")
    library.impl("rms_norm", _rms_norm, "AutogradMeta")
    library.impl("silu_backward", _silu_backward, "AutogradMeta")
    # The function object is kept, since modules may have imported it by name or compiled it.
    function, code, defaults = flex.flex_attention, flex.flex_attention.__code__, flex.flex_attention.__defaults__
    function.__code__, function.__defaults__ = _flex.__code__, _flex.__defaults__
    keywords, function.__kwdefaults__ = function.__kwdefaults__, _flex.__kwdefaults__
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords
        library._destroy()


def _dropout(source: Any, p: float, train: bool) -> Any:  # noqa: FBT001  (the signature is PyTorch's)
    """Dropout as one kernel with a mask, as GPUs run it."""
    import torch

    return torch.ops.aten.native_dropout(source, p, train)[0] if train and p > 0.0 else source.view_as(source)


@cache
def _norm_function() -> Any:
    """RMS norm as an autograd function."""
    import torch

    class FusedNorm(torch.autograd.Function):  # type: ignore[misc]
        """Shapes and saved tensors of a fused RMS norm, which keeps the fp32 inverse deviation of each row."""

        @staticmethod
        def forward(ctx: Any, source: Any, weight: Any, num_dims: int) -> Any:
            """Record one kernel."""
            output = torch.empty_like(source)
            deviations = source.new_empty(source.shape[: source.dim() - num_dims], dtype=torch.float32)
            ctx.save_for_backward(source, weight, deviations)
            reads = [source] if weight is None else [source, weight]
            _add_kernel("rms_norm", "norm", reads, [output, deviations])
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            """Record one kernel for the gradients of input and weight."""
            source, weight, deviations = ctx.saved_tensors
            results = [torch.empty_like(one) for one in (source, weight) if one is not None]
            reads = [gradient, source, deviations] if weight is None else [gradient, source, weight, deviations]
            _add_kernel("rms_norm_backward", "norm", reads, results)
            return (results[0], results[1] if weight is not None else None, None)

    return FusedNorm


def _rms_norm(source: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """RMS norm as one kernel, as GPUs run it."""
    del eps
    return _norm_function().apply(source, weight, len(normalized_shape))


def _silu_backward(gradient: Any, source: Any) -> Any:
    """Gradient of SiLU as one kernel."""
    import torch

    result = torch.empty_like(source)
    _add_kernel("silu_backward", "activation", [gradient, source], [result])
    return result


def _add_kernel(operator: str, kind: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
    """Record a memory-bound kernel, whose bytes follow from its tensors."""
    work = Pointwise(name="", operation=kind, read_bytes=0.0, written_bytes=0.0, dtype=dtype_of(writes[0]))
    _recorders[-1].add(operator, work, reads, writes, is_fusible=True)
