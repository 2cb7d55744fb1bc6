"""Fused attention through torch's scaled_dot_product_attention, forward and backward."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from shapewright.bench.prepared import Prepared, normal, num_input_sets, relative_error, some_indices
from shapewright.errors import BenchError

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend
    from shapewright.operations import Attention

_CHECKED_QUERIES = 16


def prepare_attention(operation: Attention, backend: Backend, variant: str) -> Prepared:
    """Make one attention call ready; layout of the tensors: batch, heads, tokens, width.

    Args:
        operation: The call.
        backend: Where it runs.
        variant: Torch's backend, ``flash``, ``cudnn``, ``efficient`` or ``math``; empty to leave the choice to torch.

    Raises:
        BenchError: torch has no fused form of it, or it does not fit.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    require_plain(operation)
    torch.set_float32_matmul_precision("high" if operation.dtype == "tf32" else "highest")
    batch, queries, keys = int(operation.batch_size), int(operation.query_len), int(operation.kv_len)
    heads, kv_heads = int(operation.num_heads), int(operation.num_kv_heads)
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    # A single query sees every key; torch's own causal mask is aligned at the first key, so equal lengths alone are it.
    is_causal = operation.causal and queries == keys and queries > 1
    grouped = {"enable_gqa": True} if kv_heads != heads else {}

    def tensor(num_heads: int, tokens: int, width: int) -> Any:
        return normal(backend, batch, num_heads, tokens, width, dtype=operation.dtype)

    def forward(q: Any, k: Any, v: Any) -> Any:
        with _chosen_kernel(variant):
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, **grouped)

    def make() -> tuple[Any, ...]:
        q = tensor(heads, queries, int(operation.head_dim))
        k = tensor(kv_heads, keys, int(operation.head_dim))
        v = k[..., : int(operation.v_head_dim)] if operation.values_in_keys else None
        return q, k, v if v is not None else tensor(kv_heads, keys, int(operation.v_head_dim))

    kernel = f"sdpa {variant}".strip()
    if not operation.is_backward:

        def check_forward(found: Any, arguments: tuple[Any, ...]) -> float:
            return _check_forward(found, arguments, is_causal=is_causal)

        inputs = [make() for _ in range(count)]
        return Prepared(inputs=inputs, call=forward, check=check_forward, kernel=kernel, set_bytes=set_bytes)

    def backward(out: Any, leaves: tuple[Any, ...], gradient: Any) -> Any:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    def make_backward() -> tuple[Any, ...]:
        leaves = tuple(part.detach().requires_grad_() for part in make())
        out = forward(*leaves)
        return out, leaves, tensor(heads, queries, int(operation.v_head_dim))

    def check_backward(found: Any, arguments: tuple[Any, ...]) -> float:
        return _check_backward(found, arguments[1], arguments[2], is_causal=is_causal)

    # The engine runs a gradient on the stream of its forward pass: that is the one that is captured, for there is one.
    return Prepared(
        inputs=[make_backward() for _ in range(count)],
        call=backward,
        check=check_backward,
        kernel=f"{kernel} backward",
        set_bytes=set_bytes,
    )


def require_plain(operation: Attention) -> None:
    """Refuse what torch's fused call has no form for.

    Raises:
        BenchError: it has none.
    """
    if int(operation.window_size) > 0:
        raise BenchError("attention with a window has no fused form in scaled_dot_product_attention")
    if operation.causal and 1 < int(operation.query_len) != int(operation.kv_len):
        raise BenchError("causal attention of several queries after a cache has no fused form here")
    if operation.kv_cache_dtype not in (None, operation.dtype):
        raise BenchError(
            f"scaled_dot_product_attention takes no {operation.kv_cache_dtype} cache for {operation.dtype}"
        )
    if operation.writes_cache:
        raise BenchError("scaled_dot_product_attention does not copy keys and values into a cache")


def _chosen_kernel(variant: str) -> AbstractContextManager[Any]:
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
    """Rows of softmax(Q K^T / sqrt(d)) of one head, float64."""
    import torch

    scores = q[rows] @ k.t() / math.sqrt(q.shape[-1])
    if is_causal:
        keys = torch.arange(k.shape[0])
        scores = scores.masked_fill(keys[None, :] > torch.tensor(rows)[:, None], -math.inf)
    return scores.softmax(-1)


def _last_head(tensors: tuple[Any, ...]) -> list[Any]:
    """The last sequence's last head of each tensor, float64 on the host; the last query head uses the last key head."""
    return [tensor[-1, -1].detach().double().cpu() for tensor in tensors]


def _check_forward(found: Any, arguments: tuple[Any, ...], *, is_causal: bool) -> float:
    if not bool(found.isfinite().all()):
        return float("nan")
    q, k, v = _last_head(arguments)
    rows = some_indices(q.shape[0], _CHECKED_QUERIES)
    return relative_error(found[-1, -1][rows], _probabilities(q, k, rows, is_causal=is_causal) @ v)


def _check_backward(found: tuple[Any, ...], leaves: tuple[Any, ...], gradient: Any, *, is_causal: bool) -> float:
    """Compare rows of dQ; of dK and dV, which sum over all queries, only that they are finite."""
    if not all(bool(part.isfinite().all()) for part in found):
        return float("nan")
    q, k, v = _last_head(leaves)
    rows = some_indices(q.shape[0], _CHECKED_QUERIES)
    probabilities = _probabilities(q, k, rows, is_causal=is_causal)
    d_probabilities = gradient[-1, -1].double().cpu()[rows] @ v.t()
    d_scores = probabilities * (d_probabilities - (d_probabilities * probabilities).sum(-1, keepdim=True))
    return relative_error(found[0][-1, -1][rows], d_scores @ k / math.sqrt(q.shape[-1]))
