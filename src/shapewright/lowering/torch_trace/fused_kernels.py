"""Fused kernels in a trace: one operation each for the forward and the backward pass.

On the meta device PyTorch would decompose scaled_dot_product_attention into GEMMs that save all scores, and flex
attention into pointwise operations. While a trace runs, both are replaced by one operator that has the shapes, the
saved tensors and the gradients of a fused kernel.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from shapewright.core.records import dataclass
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
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


@dataclass(frozen=True, kw_only=True)
class FusedCall:
    """A call of a kernel that does not run on the meta device.

    Attributes:
        operator: Name of the kernel.
        work: What it computes.
        backward_work: What its gradient computes.
        output: Its result, without values.
        kept: What else it writes, for its gradient.
        others: Tensors that it reads and that have no gradient.
        keeps_output: Whether its gradient reads the result.
        is_fusible: Whether torch.compile can merge it with operations around it.
    """

    operator: str
    work: Operation
    backward_work: Operation
    output: Any
    kept: tuple[Any, ...] = ()
    others: tuple[Any, ...] = ()
    keeps_output: bool = False
    is_fusible: bool = False

    def run(self, *tensors: Any) -> Any:
        """Record the call and return its result, which is differentiable in the tensors; some may be None."""
        return _function().apply(self, *tensors)


@cache
def _function() -> Any:
    """The autograd function of all kernels."""
    import torch

    class FusedKernel(torch.autograd.Function):  # type: ignore[misc]
        """Shapes, saved tensors and gradients of a fused kernel."""

        @staticmethod
        def forward(ctx: Any, call: FusedCall, *tensors: Any) -> Any:
            """Record the call."""
            # The call has the output, which must not keep itself.
            ctx.operator, ctx.work, ctx.is_fusible = call.operator, call.backward_work, call.is_fusible
            ctx.save_for_backward(*tensors, *call.kept, *([call.output] if call.keeps_output else []))
            reads = [one for one in (*tensors, *call.others) if one is not None]
            _recorders[-1].add(call.operator, call.work, reads, [call.output, *call.kept], is_fusible=call.is_fusible)
            return call.output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            """Record the gradients of the tensors that have one."""
            wanted, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
            results = [
                torch.empty_like(one) if is_wanted else None for one, is_wanted in zip(saved, wanted, strict=False)
            ]
            reads = [gradient, *(one for one in saved if one is not None)]
            writes = [one for one in results if one is not None]
            _recorders[-1].add(ctx.operator, ctx.work, reads, writes, is_fusible=ctx.is_fusible)
            return (None, *results)

    return FusedKernel


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
    output = query.new_empty(*query.shape[:-1], value.shape[-1])
    work = _attention(
        query,
        key,
        value,
        dtype_of(query),
        causal=is_causal,
        window_size=window_size,
        is_training=torch.is_grad_enabled() and not has_sinks,
    )
    return FusedCall(
        operator="scaled_dot_product_attention",
        work=work,
        backward_work=work.changed(is_backward=True),
        output=output,
        kept=(query.new_empty(query.shape[:-1], dtype=torch.float32),),  # logarithms of row sums
        others=(attn_mask,),
        keeps_output=True,
    ).run(query, key, value)


def attend_as_transformers(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
) -> tuple[Any, None]:
    """Attention function for transformers with the interface of its flash attention: windows instead of masks."""
    import torch

    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window") or 0
    settings: dict[str, Any] = {
        "is_causal": bool(causal) and attention_mask is None,
        # The window counts a token and those before it; without a causal mask there are as many after it.
        "window_size": window if causal or not window else 2 * window - 1,
        "has_sinks": options.get("s_aux") is not None,  # kernels of training frameworks have none
    }
    chunk, num_tokens = _chunk_of(module), query.shape[2]
    if not chunk or chunk >= num_tokens:
        output = scaled_dot_product_attention(query, key, value, attention_mask, **settings)
        return output.transpose(1, 2).contiguous(), None
    # Tokens attend within their chunk: chunks are sequences of their own, and the last one may be shorter.
    end = num_tokens - num_tokens % chunk
    chunks = (one[:, :, :end].unflatten(2, (-1, chunk)).transpose(1, 2) for one in (query, key, value))
    parts = [scaled_dot_product_attention(*chunks, **settings).transpose(2, 3).flatten(1, 2)]
    if end < num_tokens:
        rest = (one[:, :, end:] for one in (query, key, value))
        parts.append(scaled_dot_product_attention(*rest, **settings).transpose(1, 2))
    return torch.cat(parts, dim=1), None


def _chunk_of(module: Any) -> int:
    """Tokens of a chunk of a layer of transformers that attends within chunks; 0 for other layers."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None) or ()
    is_chunked = isinstance(layer, int) and layer < len(types) and types[layer] == "chunked_attention"
    return int(getattr(config, "attention_chunk_size", None) or 0) if is_chunked else 0


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
        if causal:
            # The window with as many pairs: that of the mask, or that of documents and chunks.
            seen, num_pairs = rows + 1 + kv_len - query_len, int(allowed.sum())
            window = bisect_left(range(kv_len), num_pairs, key=lambda width: int(seen.clamp(max=width).sum()))
            return True, 0 if window >= kv_len else window
        share = float(allowed.float().mean())
        return False, 0 if share >= 1.0 else max(1, round(share * kv_len))


@contextmanager
def replaced_kernels(recorder: Any) -> Iterator[None]:
    """Replace the attention and dropout of PyTorch on meta tensors while a recorder records."""
    import torch
    from torch.nn.attention import flex_attention as flex
    from torch.nn.modules import transformer

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", scaled_dot_product_attention, "AutogradMeta")
    library.impl("dropout", _dropout, "AutogradMeta")
    library.impl("rms_norm", _rms_norm, "AutogradMeta")
    library.impl("silu_backward", _silu_backward, "AutogradMeta")
    # The function object is kept, since modules may have imported it by name or compiled it.
    function, code, defaults = flex.flex_attention, flex.flex_attention.__code__, flex.flex_attention.__defaults__
    function.__code__, function.__defaults__ = _flex.__code__, _flex.__defaults__
    keywords, function.__kwdefaults__ = function.__kwdefaults__, _flex.__kwdefaults__
    detect, transformer._detect_is_causal_mask = transformer._detect_is_causal_mask, _is_causal_by_size
    # In eval mode torch.nn.TransformerEncoder would pack padded sequences by the values of their mask.
    is_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(value=False)
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()
        transformer._detect_is_causal_mask = detect
        torch.backends.mha.set_fastpath_enabled(value=is_fast)
        function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, keywords
        library._destroy()


def _is_causal_by_size(mask: Any, is_causal: Any = None, seq_len: int | None = None) -> bool:
    """Whether a mask of torch.nn.Transformer is causal, which it decides by the mask's values."""
    if is_causal is not None or mask is None:
        return is_causal is True
    found: bool = mask.dim() == 2 and mask.shape[0] == mask.shape[1] == (seq_len or mask.shape[0])
    if found:
        _recorders[-1].notes["a square mask of torch.nn.Transformer is taken as causal: its values are unknown"] = None
    return found


def _dropout(source: Any, p: float, train: bool) -> Any:  # noqa: FBT001  (the signature is PyTorch's)
    """Dropout as one kernel with a mask, as GPUs run it."""
    import torch

    return torch.ops.aten.native_dropout(source, p, train)[0] if train and p > 0.0 else source.view_as(source)


def _rms_norm(source: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Any:
    """RMS norm as one kernel, as GPUs run it; it keeps the fp32 inverse deviation of each row."""
    import torch

    del eps
    output = torch.empty_like(source)
    rows = source.shape[: source.dim() - len(normalized_shape)]
    work = _memory_bound("norm", output)
    return FusedCall(
        operator="rms_norm",
        work=work,
        backward_work=work,
        output=output,
        kept=(source.new_empty(rows, dtype=torch.float32),),
        is_fusible=True,
    ).run(source, weight)


def _silu_backward(gradient: Any, source: Any) -> Any:
    """Gradient of SiLU as one kernel."""
    import torch

    result = torch.empty_like(source)
    work = _memory_bound("activation", result)
    _recorders[-1].add("silu_backward", work, [gradient, source], [result], is_fusible=True)
    return result


def _memory_bound(kind: str, result: Any) -> Pointwise:
    """Memory-bound kernel, whose bytes follow from its tensors."""
    return Pointwise(name="", operation=kind, read_bytes=0.0, written_bytes=0.0, dtype=dtype_of(result), is_gated=False)
