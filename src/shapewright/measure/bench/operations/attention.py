"""Fused attention with torch's scaled_dot_product_attention, forward and backward."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.measure.bench.operations.prepared import (
    PreparedCall,
    num_input_sets,
    random_normal,
    relative_error,
    set_precision,
    spread_indices,
)

if TYPE_CHECKING:
    from shapewright.lowering.operations.attention import Attention
    from shapewright.measure.bench.device.backend import Backend

_CHECKED_QUERIES = 16


def prepare_attention(operation: Attention, backend: Backend, variant: str) -> PreparedCall:
    """Prepare one attention call with tensors of (batch, heads, tokens, head_dim).

    Args:
        variant: Torch's kernel, ``flash``, ``cudnn``, ``efficient`` or ``math``; empty for torch's own choice.

    Raises:
        BenchError: scaled_dot_product_attention does not support it, or it does not fit.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    require_sdpa_support(operation)
    set_precision(operation.dtype)
    batch, queries, keys = int(operation.batch_size), int(operation.query_len), int(operation.kv_len)
    heads, kv_heads = int(operation.num_heads), int(operation.num_kv_heads)
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    # A single query attends to every key. torch aligns its causal mask at the first key, so the mask is correct only
    # for equal lengths.
    is_causal = operation.causal and queries == keys and queries > 1
    grouped = {"enable_gqa": True} if kv_heads != heads else {}

    def tensor(num_heads: int, tokens: int, width: int) -> Any:
        return random_normal(backend, batch, num_heads, tokens, width, dtype=operation.dtype)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with _select_kernel(variant):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, **grouped)

    def make() -> tuple[Any, ...]:
        q = tensor(heads, queries, int(operation.head_dim))
        k = tensor(kv_heads, keys, int(operation.head_dim))
        width = int(operation.v_head_dim)
        return q, k, k[..., :width] if operation.values_in_keys else tensor(kv_heads, keys, width)

    kernel = f"sdpa {variant}".strip()
    if not operation.is_backward:
        inputs, check = [make() for _ in range(count)], partial(_check_forward, is_causal=is_causal)
        return PreparedCall(inputs=inputs, call=forward, check=check, kernel=kernel, set_bytes=set_bytes)

    def backward(out: Any, leaves: tuple[Any, ...], gradient: Any) -> Any:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def make_backward() -> tuple[Any, ...]:
        leaves = tuple(part.detach().requires_grad_() for part in make())
        out = forward(*leaves)
        return out, leaves, tensor(heads, queries, int(operation.v_head_dim))

    # Autograd runs a gradient on the stream of its forward pass, which is the captured stream: there is only one.
    return PreparedCall(
        inputs=[make_backward() for _ in range(count)],
        call=backward,
        check=partial(_check_backward, is_causal=is_causal),
        kernel=f"{kernel} backward",
        set_bytes=set_bytes,
    )


def require_sdpa_support(operation: Attention) -> None:
    """Check that scaled_dot_product_attention supports an operation.

    Raises:
        BenchError: it does not.
    """
    if int(operation.window_size) > 0:
        raise BenchError(
            f"scaled_dot_product_attention does not support windows, got window_size={int(operation.window_size)}"
        )
    if operation.causal and 1 < int(operation.query_len) != int(operation.kv_len):
        raise BenchError(
            "scaled_dot_product_attention does not support causal attention of several queries after a cache"
        )
    if operation.kv_cache_dtype not in (None, operation.dtype):
        raise BenchError(
            f"scaled_dot_product_attention does not support kv_cache_dtype={operation.kv_cache_dtype} with "
            f"dtype={operation.dtype}"
        )
    if operation.writes_cache:
        raise BenchError(
            "scaled_dot_product_attention does not write keys and values to a cache, got writes_cache=True"
        )


def _select_kernel(variant: str) -> AbstractContextManager[Any]:
    if not variant:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }[variant]
    context: AbstractContextManager[Any] = sdpa_kernel(chosen)
    return context


def _probabilities(q: Any, k: Any, rows: list[int], *, is_causal: bool) -> Any:
    """Rows of softmax(Q K^T / sqrt(d)) of one head, in float64."""
    import torch

    scores = q[rows] @ k.t() / math.sqrt(q.shape[-1])
    if is_causal:
        keys = torch.arange(k.shape[0])
        scores = scores.masked_fill(keys[None, :] > torch.tensor(rows)[:, None], -math.inf)
    return scores.softmax(-1)


def _last_head(tensors: tuple[Any, ...]) -> list[Any]:
    """Last head of the last sequence of each tensor, in float64 on the host.

    The last query head uses the last key-value head.
    """
    return [tensor[-1, -1].detach().double().cpu() for tensor in tensors]


def _check_forward(found: Any, arguments: tuple[Any, ...], *, is_causal: bool) -> float:
    if not bool(found.isfinite().all()):
        return float("nan")
    q, k, v = _last_head(arguments)
    rows = spread_indices(q.shape[0], _CHECKED_QUERIES)
    return relative_error(found[-1, -1][rows], _probabilities(q, k, rows, is_causal=is_causal) @ v)


def _check_backward(found: tuple[Any, ...], arguments: tuple[Any, ...], *, is_causal: bool) -> float:
    """Error of some rows of dQ; dK and dV, which sum over all queries, must only be finite."""
    if not all(bool(part.isfinite().all()) for part in found):
        return float("nan")
    _, leaves, gradient = arguments
    q, k, v = _last_head(leaves)
    rows = spread_indices(q.shape[0], _CHECKED_QUERIES)
    probabilities = _probabilities(q, k, rows, is_causal=is_causal)
    d_probabilities = gradient[-1, -1].double().cpu()[rows] @ v.t()
    d_scores = probabilities * (d_probabilities - (d_probabilities * probabilities).sum(-1, keepdim=True))
    return relative_error(found[0][-1, -1][rows], d_scores @ k / math.sqrt(q.shape[-1]))
