"""The core of attention, between the input projections and the output projection.

Legend: T tokens of this device, a and a_kv heads of this device, d and d_v head widths, s keys.

Fused, the core is one kernel without scores in memory; unfused, it is two batched GEMMs with mask, softmax and dropout
between them. Operations whose names end in ``.ring`` are the steps of a context axis after the first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.builders import activation_gemm, display_name, dropout, move, pointwise
from shapewright.lowering.collectives import collective, exchange_keys_values
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.workload.finetuning import group_documents, pack_sequence

if TYPE_CHECKING:
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard


class Heads(NamedTuple):
    """Key-value heads of one attention call and the widths of query-key and value heads."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    values_in_keys: bool = False


def write_cache(shard: Shard, width: float, repeats: int) -> Operation:
    """Lower the copy of what new tokens add to the cache, in its format.

    Args:
        width: Elements of a token. [element]
    """
    elements = 1.0 * shard.num_tokens * width
    written_bytes = elements * get_dtype(shard.workload.kv_cache_dtype or shard.gemm_dtype).num_bytes
    return pointwise(
        shard, "attention", "cache_write", "permute", repeats, read=elements, written=0.0, written_bytes=written_bytes
    )


def absorbs_latents(shard: Shard) -> bool:
    """Whether attention reads MLA's latents instead of keys and values expanded from them."""
    return shard.config.kv_lora_rank > 0 and (shard.workload.phase == "decode" or selects_tokens(shard))


def selects_tokens(shard: Shard) -> bool:
    """Whether an indexer selects fewer tokens than there are; training and short contexts attend to all."""
    topk = shard.config.index_topk
    is_served = not shard.workload.is_training and shard.workload.attention != "unfused"
    return 0 < topk < shard.kv_len and is_served and shard.layout.context_parallel == 1


def lower_core(shard: Shard, repeats: int, window: int) -> list[Operation]:
    """Lower the core of self-attention for the layers with one attention window."""
    config = shard.config
    if absorbs_latents(shard):
        heads = Heads(1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank, values_in_keys=True)
    else:
        heads = Heads(shard.num_kv_heads, config.head_dim, config.v_head_dim)
    kv_len = shard.kv_len
    if shard.splits_keys:
        # The one query reads the keys of its window (the current chunk or a rolling cache), which the context axis
        # splits.
        is_chunked = config.attention_window_kind == "chunked"
        seen = (kv_len - 1) % window + 1 if window and is_chunked else min(kv_len, window) if window else kv_len
        kv_len, window = -(-seen // shard.layout.context_parallel), 0
    if shard.workload.attention == "unfused":
        return lower_unfused(shard, "attention", repeats, heads, kv_len=kv_len)
    if selects_tokens(shard):
        return _lower_sparse(shard, repeats, heads)
    return _lower_fused(shard, "attention", repeats, heads, kv_len=kv_len, window=window, causal=shard.causal)


def _lower_sparse(shard: Shard, repeats: int, heads: Heads) -> list[Operation]:
    """Lower the scores of the indexer, which every device of the tensor axis has, selection, and attention."""
    config = shard.config
    own = (shard.num_heads, heads.head_dim, heads.v_head_dim)
    indexer = (config.index_num_heads, config.index_head_dim, 0)
    parts: tuple[tuple[str, Literal["logits", "selection", "attention"], tuple[int, int, int]], ...] = (
        ("index_logits", "logits", indexer),
        ("index_topk", "selection", indexer),
        ("fused", "attention", own),
    )
    return [
        SparseAttention(
            name=display_name(shard, "attention", role),
            block="attention",
            role=role,
            repeats=repeats,
            dtype=shard.dtype,
            part=part,
            batch_size=shard.batch_size,
            query_len=shard.query_len,
            kv_len=shard.kv_len,
            num_heads=num_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            selected=config.index_topk,
        )
        for role, part, (num_heads, head_dim, v_head_dim) in parts
    ]


def lower_cross_core(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the core of cross-attention, in which every query attends to all source tokens.

    The context axis passes keys and values of the source tokens around; with one new token it splits them, and partial
    outputs are reduced.
    """
    heads = Heads(shard.num_kv_heads, shard.config.head_dim, shard.config.v_head_dim)
    source_len = shard.source_len * shard.layout.context_parallel
    if shard.splits_keys:
        source_len = shard.source_len
        reduced = _reduce_partial_outputs(shard, "cross_attention", repeats)
    else:
        elements = heads.num_kv_heads * (heads.head_dim + heads.v_head_dim)
        tokens = shard.batch_size * shard.source_len
        reduced = exchange_keys_values(
            shard, repeats, elements_per_token=elements, tokens=tokens, block="cross_attention"
        )
    if shard.workload.attention == "unfused":
        return reduced + lower_unfused(shard, "cross_attention", repeats, heads, kv_len=source_len)
    call = _lower_fused(shard, "cross_attention", repeats, heads, kv_len=source_len, window=0, causal=False)
    return reduced + call


def lower_pooling(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the attention of one query to all tokens of each sequence."""
    one, heads = replace(shard, query_len=1), Heads(shard.num_kv_heads, shard.config.head_dim, shard.config.v_head_dim)
    if shard.workload.attention == "unfused":
        return lower_unfused(one, "cross_attention", repeats, heads, kv_len=shard.kv_len)
    return [fused_call(one, "cross_attention", "fused", repeats, heads, query_len=1, kv_len=shard.kv_len, causal=False)]


def lower_context_exchange(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the context axis's communication: keys and values in a ring, or partial outputs for a single new token."""
    config = shard.config
    heads_width = config.head_dim + config.v_head_dim
    if shard.splits_keys:
        return _reduce_partial_outputs(shard, "attention", repeats)
    elements = shard.num_kv_heads * heads_width
    return exchange_keys_values(shard, repeats, elements_per_token=elements, tokens=shard.num_tokens)


def _lower_fused(
    shard: Shard, block: Block, repeats: int, heads: Heads, *, kv_len: int, window: int, causal: bool
) -> list[Operation]:
    """Lower fused attention: one call, or one per ring step of a context axis.

    In a balanced ring each device has an early and a late piece of the sequence: attention to its own keys is a causal
    square, and to the keys of each other device half a square (arXiv 2311.09431). Layers with a sliding window are one
    call, and layers with chunks attend inside shorter sequences.
    """
    if shard.workload.packed and block == "attention":
        return _lower_documents(shard, block, repeats, heads, window=window, causal=causal)
    if window and shard.config.attention_window_kind == "chunked":
        return _lower_chunks(shard, block, repeats, heads, chunk_len=window)
    whole = fused_call(shard, block, "fused", repeats, heads, query_len=shard.query_len, kv_len=kv_len, causal=causal)
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


def _lower_documents(
    shard: Shard, block: Block, repeats: int, heads: Heads, *, window: int, causal: bool
) -> list[Operation]:
    """Lower attention inside the documents that are packed into a sequence, as shorter sequences of one kernel."""
    assert shard.workload.packed is not None
    operations: list[Operation] = []
    for length, count in group_documents(pack_sequence(shard.workload.packed, shard.query_len)):
        call = fused_call(shard, block, "fused", repeats, heads, query_len=length, kv_len=length, causal=causal)
        operations.append(
            call.changed(batch_size=shard.batch_size * count, window_size=window if window < length else 0)
        )
    return operations


def _lower_chunks(shard: Shard, block: Block, repeats: int, heads: Heads, *, chunk_len: int) -> list[Operation]:
    """Lower attention inside fixed chunks of the sequence: full chunks as more sequences, then the remainder.

    New tokens that continue a cached chunk also attend to its cached tokens. If a device of the context axis has less
    than a chunk, keys are exchanged in a ring over the devices of the chunk; pieces that do not divide a chunk are
    counted as if a chunk began at each of them.
    """
    new, cached, causal = shard.query_len, shard.workload.context_len % chunk_len, shard.causal
    if new < chunk_len and shard.layout.context_parallel > 1:
        own = fused_call(shard, block, "fused", repeats, heads, query_len=new, kv_len=new + cached, causal=causal)
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
            call = fused_call(shard, block, name, repeats, heads, query_len=length, kv_len=seen, causal=causal)
            operations.append(call.changed(batch_size=shard.batch_size * count))
    return operations


def fused_call(
    shard: Shard, block: Block, part: str, repeats: int, heads: Heads, *, query_len: int, kv_len: int, causal: bool
) -> Attention:
    """Build one call of a fused kernel; ``part`` distinguishes the names of a layer's calls."""
    is_cached = not shard.workload.is_training
    return Attention(
        name=display_name(shard, block, part),
        block=block,
        role="fused",
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
        # Learned sinks are another kernel than the measured ones.
        is_training=shard.workload.is_training and not shard.config.attention_sinks,
        is_deterministic=shard.workload.deterministic_attention,
    )


def lower_unfused(shard: Shard, block: Block, repeats: int, heads: Heads, *, kv_len: int) -> list[Operation]:
    """Lower scores (b a, s x d, d x s), mask, softmax, dropout, and attention over values (b a, s x s, s x d_v).

    The score GEMM includes the scale. Keys and values are repeated for every query head, as in PyTorch, and all scores
    are computed, masked or not. Source: arXiv 2401.14489, table II; sizes as in Megatron-LM's layer.
    """
    # If all heads share one key head that contains the values, heads are more rows of one GEMM and nothing is repeated.
    rows_per_batch = shard.query_len * (shard.num_heads if heads.values_in_keys else 1)
    batch = shard.batch_size * (1 if heads.values_in_keys else shard.num_heads)
    scores = 1.0 * batch * rows_per_batch * kv_len
    operations: list[Operation] = []
    if heads.num_kv_heads < shard.num_heads and not heads.values_in_keys:
        keys_and_values = 1.0 * shard.batch_size * kv_len * (heads.head_dim + heads.v_head_dim)
        operations.append(
            move(
                shard,
                block,
                "repeat_kv",
                repeats,
                read=keys_and_values * heads.num_kv_heads,
                written=keys_and_values * shard.num_heads,
            )
        )

    def gemm(role: str, n: int, k: int, layout: str) -> Gemm:
        return activation_gemm(shard, block, role, repeats, m=rows_per_batch, n=n, k=k, batch=batch, layout=layout)

    operations.append(gemm("score", kv_len, heads.head_dim, "NT"))
    if shard.query_len > 1:  # a single query attends to all keys
        operations.append(pointwise(shard, block, "mask", "mask", repeats, read=scores, written=scores))
    operations.append(pointwise(shard, block, "softmax", "softmax", repeats, read=scores, written=scores))
    if shard.workload.is_training and shard.config.attention_dropout > 0.0:
        operations.append(dropout(shard, block, repeats, elements=scores))
    operations.append(gemm("over_value", heads.v_head_dim, kv_len, "NN"))
    return operations


def _reduce_partial_outputs(shard: Shard, block: Block, repeats: int) -> list[Operation]:
    """Reduce the partial outputs of a query over a cache that the context axis splits, latents where it reads those.

    Source: vllm-project/vllm, vllm/v1/attention/backends/mla/common.py (outputs are reduced before they are projected
    out of the latent space).
    """
    width = shard.config.kv_lora_rank if absorbs_latents(shard) else shard.config.v_head_dim
    message_bytes = 1.0 * shard.num_tokens * shard.num_heads * width * shard.width_bytes
    return collective(
        shard,
        block,
        "partial_outputs",
        "all_reduce",
        "context",
        repeats,
        name=f"{block}.all_reduce",
        message_bytes=message_bytes,
    )
