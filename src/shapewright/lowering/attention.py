"""Attention blocks: the projections before and after the attention core.

Legend: T tokens of this device, h hidden size, a and a_kv heads of this device, d and d_v head widths.

Multi-head latent attention (MLA) projects through low-rank latents. Training and prefill expand them to full heads; in
decode the expansion is absorbed into queries and outputs, so that attention reads the cached latents alone.
Source: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype
from shapewright.lowering.attention_core import absorbs_latents
from shapewright.lowering.communication import gather_tokens, reduce_tokens
from shapewright.lowering.gemms import weight_gemm
from shapewright.lowering.pointwise import bias_gradients, move, norm, pointwise
from shapewright.operations import Gemm

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation


def lower_inputs(shard: Shard, repeats: int, rotary_repeats: int) -> list[Operation]:
    """Queries, keys and values of self-attention, with their norms and positions.

    Args:
        shard: Sizes of this device.
        repeats: Executions per step.
        rotary_repeats: Those of layers with rotary positions.
    """
    config, tokens = shard.config, shard.num_tokens
    operations = gather_tokens(shard, "attention", repeats, tokens=tokens)
    operations += (
        _lower_latent_projections(shard, repeats) if config.kv_lora_rank else _lower_projections(shard, repeats)
    )
    operations += _lower_positions(shard, repeats, rotary_repeats)
    if not shard.workload.is_training:
        operations.append(_write_cache(shard, repeats))
    return operations


def lower_output(shard: Shard, block: str, repeats: int) -> list[Operation]:
    """Project what attention returns, (T x a d_v)(a d_v x h), and add it up over the tensor axis."""
    config, tokens = shard.config, shard.num_tokens
    operations: list[Operation] = []
    if shard.workload.attention == "unfused":
        # The batched products leave heads outermost; a copy brings tokens there.
        merged = 1.0 * tokens * shard.num_heads * config.v_head_dim
        operations.append(move(shard, f"{block}.merge_heads", repeats, read=merged, written=merged))
    operations.append(
        weight_gemm(
            shard,
            f"{block}.out",
            repeats,
            m=tokens,
            n=config.hidden_size,
            k=shard.num_heads * config.v_head_dim,
        )
    )
    if not config.parallel_attention_mlp:
        operations += reduce_tokens(shard, block, repeats, tokens=tokens)
    return operations


def lower_bias_gradients(shard: Shard, repeats: int) -> list[Operation]:
    """Sums over the tokens that make the gradients of self-attention's biases."""
    config = shard.config
    inner = shard.num_heads * config.head_dim + shard.num_kv_heads * (config.head_dim + config.v_head_dim)
    widths = [inner] * config.qkv_bias + [config.hidden_size] * config.attention_out_bias
    return bias_gradients(shard, "attention", repeats, widths=widths, tokens=shard.num_tokens)


def lower_cross_inputs(shard: Shard, repeats: int) -> list[Operation]:
    """Inputs of cross attention: queries of the decoder, keys and values of the encoder output."""
    config, tokens = shard.config, shard.num_tokens
    source_tokens = shard.batch_size * shard.source_len
    operations = gather_tokens(shard, "cross_attention", repeats, tokens=tokens)
    operations.append(
        weight_gemm(
            shard,
            "cross_attention.q",
            repeats,
            m=tokens,
            n=shard.num_heads * config.head_dim,
            k=config.hidden_size,
        )
    )
    if shard.encodes_source:
        widths = {"k": shard.num_kv_heads * config.head_dim, "v": shard.num_kv_heads * config.v_head_dim}
        for letter, width in widths.items():
            operations.append(
                weight_gemm(shard, f"cross_attention.{letter}", repeats, m=source_tokens, n=width, k=config.hidden_size)
            )
    return operations


def _lower_projections(shard: Shard, repeats: int) -> list[Operation]:
    """Queries, keys and values: (T x h)(h x a d), (h x a_kv d), (h x a_kv d_v), in one GEMM or three."""
    config, tokens = shard.config, shard.num_tokens
    widths = {
        "q": shard.num_heads * config.head_dim,
        "k": shard.num_kv_heads * config.head_dim,
        "v": shard.num_kv_heads * config.v_head_dim,
    }
    if config.fused_qkv:
        widths = {"qkv": sum(widths.values())}
    return [
        weight_gemm(shard, f"attention.{letters}", repeats, m=tokens, n=width, k=config.hidden_size)
        for letters, width in widths.items()
    ]


def _lower_latent_projections(shard: Shard, repeats: int) -> list[Operation]:
    """Queries, keys and values of MLA; the narrow projections are whole on every device of the tensor axis."""
    config, tokens = shard.config, shard.num_tokens
    h, q_rank, kv_rank, rope = (
        config.hidden_size,
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    query_width = shard.num_heads * config.head_dim
    operations: list[Operation] = []
    if q_rank:
        operations.append(weight_gemm(shard, "attention.q_a", repeats, m=tokens, n=q_rank, k=h))
        operations.append(norm(shard, "attention.q_a_norm", repeats, width=q_rank, tokens=tokens))
        operations.append(weight_gemm(shard, "attention.q_b", repeats, m=tokens, n=query_width, k=q_rank))
    else:
        operations.append(weight_gemm(shard, "attention.q", repeats, m=tokens, n=query_width, k=h))
    operations.append(weight_gemm(shard, "attention.kv_a", repeats, m=tokens, n=kv_rank + rope, k=h))
    operations.append(norm(shard, "attention.kv_a_norm", repeats, width=kv_rank, tokens=tokens))
    nope = config.head_dim - rope
    if absorbs_latents(shard):
        # One product per head: queries into the latent space, and attended latents out of it.
        for name, n, k in (("absorb_q", kv_rank, nope), ("absorb_out", config.v_head_dim, kv_rank)):
            operations.append(
                Gemm(
                    name=f"{shard.prefix}attention.{name}",
                    repeats=repeats,
                    dtype=shard.gemm_dtype,
                    m=tokens,
                    n=n,
                    k=k,
                    batch=shard.num_heads,
                    layout="NN",
                    weight_dtype=shard.weight_dtype,
                )
            )
    else:
        # Latents that are cached already are expanded again with the new ones.
        expanded = tokens + shard.batch_size * shard.workload.context_len // shard.layout.context_parallel
        width = shard.num_heads * (nope + config.v_head_dim)
        operations.append(weight_gemm(shard, "attention.kv_b", repeats, m=expanded, n=width, k=kv_rank))
    return operations


def _lower_positions(shard: Shard, repeats: int, rotary_repeats: int) -> list[Operation]:
    """Norms of queries and keys, and rotary positions: each reads and writes queries and keys once.

    Source: transformers 5.23, modeling_llama4.py (``use_qk_norm and use_rope``).
    """
    config, tokens = shard.config, shard.num_tokens
    operations: list[Operation] = []
    heads = shard.num_heads + shard.num_kv_heads
    num_norms = rotary_repeats if config.qk_norm == "l2" else repeats
    if config.qk_norm != "none" and num_norms:
        operations.append(norm(shard, "attention.qk_norm", num_norms, width=heads * config.head_dim, tokens=tokens))
    if rotary_repeats:
        # MLA turns a part of each query head and one key that all heads share.
        turned = (shard.num_heads + 1) * config.qk_rope_head_dim if config.kv_lora_rank else heads * config.head_dim
        elements = 1.0 * tokens * turned
        operations.append(
            pointwise(shard, "attention.rotary", "rotary", rotary_repeats, read=elements, written=elements)
        )
    return operations


def _write_cache(shard: Shard, repeats: int) -> Operation:
    """Copy of new keys and values (or latents) into the KV cache, in its own format."""
    config = shard.config
    if config.kv_lora_rank:
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = shard.num_kv_heads * (config.head_dim + config.v_head_dim)
    elements = 1.0 * shard.num_tokens * width
    cache_dtype = get_dtype(shard.workload.kv_cache_dtype or shard.gemm_dtype)
    written_bytes = elements * cache_dtype.num_bytes
    return pointwise(
        shard, "attention.cache_write", "permute", repeats, read=elements, written=0.0, written_bytes=written_bytes
    )
