"""The attention core: what happens between queries, keys and values and the projection after it.

Fused it is one kernel and scores never reach memory; unfused it is two batched GEMMs with mask, softmax and dropout
between them. Names ending in ``.ring`` are the steps of a context axis after the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.lowering.communication import collective, ring_keys_values
from shapewright.lowering.pointwise import dropout, move, pointwise
from shapewright.operations import Attention, Gemm

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation


class _Heads(NamedTuple):
    """Key-value heads of one attention call and the widths of a head."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    values_in_keys: bool = False


def absorbs_latents(shard: Shard) -> bool:
    """Whether attention works on MLA's latents themselves."""
    return shard.config.kv_lora_rank > 0 and shard.workload.phase == "decode"


def lower_core(shard: Shard, repeats: int, window: int) -> list[Operation]:
    """Self-attention itself, for the layers with one window."""
    config = shard.config
    if absorbs_latents(shard):
        heads = _Heads(1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank, values_in_keys=True)
    else:
        heads = _Heads(shard.num_kv_heads, config.head_dim, config.v_head_dim)
    kv_len = shard.kv_len
    if shard.splits_keys:
        # The one query's window is all that it reads: what is left of its chunk, or a rolling cache. The context axis
        # splits the rest.
        is_chunked = config.attention_window_kind == "chunked"
        seen = (kv_len - 1) % window + 1 if window and is_chunked else min(kv_len, window) if window else kv_len
        kv_len, window = -(-seen // shard.layout.context_parallel), 0
    if shard.workload.attention == "unfused":
        return _lower_unfused(shard, "attention", repeats, heads, kv_len=kv_len)
    return _lower_fused(shard, "attention", repeats, heads, kv_len=kv_len, window=window, causal=shard.causal)


def lower_context_exchange(shard: Shard, repeats: int) -> list[Operation]:
    """What the context axis sends: the ring of keys and values, or the partial outputs of one token."""
    config = shard.config
    heads_width = config.head_dim + config.v_head_dim
    if shard.splits_keys:
        return _join_partial_outputs(shard, "attention", repeats)
    return ring_keys_values(shard, repeats, elements_per_token=shard.num_kv_heads * heads_width)


def lower_cross_core(shard: Shard, repeats: int) -> list[Operation]:
    """Cross attention itself: every query sees the whole source, of which a context axis holds parts of one token."""
    heads = _Heads(shard.num_kv_heads, shard.config.head_dim, shard.config.v_head_dim)
    joined: list[Operation] = []
    source_len = shard.source_len * shard.layout.context_parallel
    if shard.splits_keys:
        source_len = shard.source_len
        joined = _join_partial_outputs(shard, "cross_attention", repeats)
    if shard.workload.attention == "unfused":
        return joined + _lower_unfused(shard, "cross_attention", repeats, heads, kv_len=source_len)
    call = _lower_fused(shard, "cross_attention", repeats, heads, kv_len=source_len, window=0, causal=False)
    return joined + call


def _join_partial_outputs(shard: Shard, block: str, repeats: int) -> list[Operation]:
    """Add up what one query got from each part of a cache that the context axis splits."""
    message_bytes = 1.0 * shard.num_tokens * shard.num_heads * shard.config.v_head_dim * shard.width_bytes
    return collective(shard, f"{block}.all_reduce", "all_reduce", "context", repeats, message_bytes=message_bytes)


def _lower_unfused(shard: Shard, block: str, repeats: int, heads: _Heads, *, kv_len: int) -> list[Operation]:
    """Scores (b a, s x d, d x s), mask, softmax, dropout, and attention over value (b a, s x s, s x d_v).

    The scale is folded into the score GEMM. Keys and values are repeated for every query head, as PyTorch does, and the
    whole square is computed, masked or not. Source: arXiv 2401.14489, table II; sizes as in Megatron-LM's layer.
    """
    # Where all heads share one key head and its values lie in it, heads are just more rows: nothing is repeated.
    rows_per_batch = shard.query_len * (shard.num_heads if heads.values_in_keys else 1)
    batch = shard.batch_size * (1 if heads.values_in_keys else shard.num_heads)
    scores = 1.0 * batch * rows_per_batch * kv_len
    operations: list[Operation] = []
    if heads.num_kv_heads < shard.num_heads and not heads.values_in_keys:
        keys_and_values = 1.0 * shard.batch_size * kv_len * (heads.head_dim + heads.v_head_dim)
        operations.append(
            move(
                shard,
                f"{block}.repeat_kv",
                repeats,
                read=keys_and_values * heads.num_kv_heads,
                written=keys_and_values * shard.num_heads,
            )
        )

    def product(role: str, n: int, k: int, layout: str) -> Gemm:
        return Gemm(
            name=f"{shard.prefix}{block}.{role}",
            repeats=repeats,
            dtype=shard.dtype,
            m=rows_per_batch,
            n=n,
            k=k,
            batch=batch,
            layout=layout,
        )

    operations.append(product("score", kv_len, heads.head_dim, "NT"))
    if shard.query_len > 1:  # a single query may see everything that is there
        operations.append(pointwise(shard, f"{block}.mask", "mask", repeats, read=scores, written=scores))
    operations.append(pointwise(shard, f"{block}.softmax", "softmax", repeats, read=scores, written=scores))
    if shard.workload.is_training and shard.config.attention_dropout > 0.0:
        operations.append(dropout(shard, f"{block}.dropout", repeats, elements=scores))
    operations.append(product("over_value", heads.v_head_dim, kv_len, "NN"))
    return operations


def _lower_fused(
    shard: Shard, block: str, repeats: int, heads: _Heads, *, kv_len: int, window: int, causal: bool
) -> list[Operation]:
    """One kernel; on a context axis one per ring step.

    Balanced rings give each device an early and a late piece of the sequence: its own keys make one causal square, and
    each of the other devices' keys half a square (arXiv 2311.09431). Windowed layers are left as one call, and chunked
    ones become shorter sequences.
    """
    if window and shard.config.attention_window_kind == "chunked":
        return _lower_chunks(shard, block, repeats, heads, chunk_len=window)
    whole = _call(shard, f"{block}.fused", repeats, heads, query_len=shard.query_len, kv_len=kv_len, causal=causal)
    ring_steps = 1 if shard.splits_keys else shard.layout.context_parallel
    if window:
        return [whole.changed(window_size=window)]
    if ring_steps == 1:
        return [whole]
    own_context = shard.workload.context_len // ring_steps
    own_new = kv_len // ring_steps - own_context
    ring = whole.changed(
        name=f"{whole.name}.ring",
        repeats=repeats * (ring_steps - 1),
        kv_len=own_context + (-(-own_new // 2) if causal else own_new),
        causal=False,
    )
    return [whole.changed(kv_len=own_context + own_new), ring]


def _lower_chunks(shard: Shard, block: str, repeats: int, heads: _Heads, *, chunk_len: int) -> list[Operation]:
    """Attention inside fixed chunks of the sequence: whole chunks as more sequences, then what is left over.

    New tokens that continue a chunk of cached ones see those too. Where a device of the context axis holds less than a
    chunk, its neighbours' keys go around as in a ring, which is as long as the chunk; pieces that are not whole parts
    of a chunk are counted as if a chunk began where each of them does.
    """
    new, cached = shard.query_len, shard.workload.context_len % chunk_len
    if new < chunk_len and shard.layout.context_parallel > 1:
        own = _call(shard, f"{block}.fused", repeats, heads, query_len=new, kv_len=new + cached, causal=True)
        ring_steps = min(-(-chunk_len // new), shard.layout.context_parallel) - 1
        half = own.changed(name=f"{own.name}.ring", repeats=repeats * ring_steps, kv_len=-(-new // 2), causal=False)
        return [own, half]
    first = min(chunk_len - cached, new) if cached else 0
    num_chunks, rest = divmod(new - first, chunk_len)
    operations: list[Operation] = []
    for name, count, length, seen in (
        ("fused.first", int(first > 0), first, cached + first),
        ("fused", num_chunks, chunk_len, chunk_len),
        ("fused.rest", int(rest > 0), rest, rest),
    ):
        if count:
            call = _call(shard, f"{block}.{name}", repeats, heads, query_len=length, kv_len=seen, causal=True)
            operations.append(call.changed(batch_size=shard.batch_size * count))
    return operations


def _call(
    shard: Shard, name: str, repeats: int, heads: _Heads, *, query_len: int, kv_len: int, causal: bool
) -> Attention:
    is_cached = not shard.workload.is_training
    return Attention(
        name=shard.prefix + name,
        repeats=repeats,
        dtype=shard.dtype,
        batch_size=shard.batch_size,
        query_len=query_len,
        kv_len=kv_len,
        num_heads=shard.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        v_head_dim=heads.v_head_dim,
        causal=causal,
        kv_cache_dtype=shard.workload.kv_cache_dtype or shard.gemm_dtype if is_cached else None,
        values_in_keys=heads.values_in_keys,
    )
