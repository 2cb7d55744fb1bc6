"""Projections of attention blocks: queries, keys and values with their norms and positions, and the output.

Legend: T tokens of this device, h hidden size, a and a_kv heads of this device, d and d_v head widths, s keys.

Multi-head latent attention (MLA) projects through low-rank latents. Training and prefill expand them to full heads; in
decode the expansion is absorbed into queries and outputs, so that attention reads only the cached latents.
Source: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.attention.core import absorbs_latents, write_cache
from shapewright.lowering.builders import (
    activation,
    as_chain,
    bias_gradients,
    display_name,
    move,
    norm,
    pointwise,
    weight_gemm,
)
from shapewright.lowering.collectives import gather_tokens, reduce_tokens
from shapewright.lowering.operations.gemm import Gemm

if TYPE_CHECKING:
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard


def lower_inputs(shard: Shard, repeats: int, rotary_repeats: int) -> list[Operation]:
    """Lower queries, keys and values of self-attention with their norms and rotary positions.

    Args:
        rotary_repeats: Executions per step in layers with rotary positions.
    """
    config, tokens = shard.config, shard.num_tokens
    if config.kv_lora_rank:
        operations = _lower_latent_projections(shard, repeats)
    else:
        operations = gather_tokens(shard, "attention", repeats, tokens=tokens) + _lower_projections(shard, repeats)
    operations += _lower_positions(shard, repeats, rotary_repeats)
    if not shard.workload.is_training and shard.causal:  # an encoder keeps no cache
        operations.append(_write_cache(shard, repeats))
    return operations


def lower_cross_inputs(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the queries of the decoder and the keys and values of the encoder output, or of images."""
    config, tokens = shard.config, shard.num_tokens
    source_tokens = shard.batch_size * shard.source_len
    operations = gather_tokens(shard, "cross_attention", repeats, tokens=tokens)
    operations.append(
        weight_gemm(
            shard,
            "cross_attention",
            "q",
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
                weight_gemm(shard, "cross_attention", letter, repeats, m=source_tokens, n=width, k=config.hidden_size)
            )
    if config.attends_to_images:  # norms of the heads of queries, and of keys where they are new
        rows = {"q_norm": (shard.num_heads, tokens), "k_norm": (shard.num_kv_heads, source_tokens)}
        for role, (heads, count) in rows.items():
            if role == "q_norm" or shard.encodes_source:
                width = heads * config.head_dim
                operations.append(norm(shard, "cross_attention", role, repeats, width=width, tokens=count))
    return operations


def lower_output(shard: Shard, block: Block, repeats: int) -> list[Operation]:
    """Lower the output projection, (T x a d_v)(a d_v x h), and its reduction over the tensor axis."""
    config, tokens = shard.config, shard.num_tokens
    operations: list[Operation] = []
    if config.attention_output_gate and block == "attention":
        width = shard.num_heads * config.v_head_dim
        operations.append(activation(shard, block, repeats, width=width, tokens=tokens, gated=True, role="gate"))
    if shard.workload.attention == "unfused":
        # The batched GEMMs return heads as the outermost dimension; a copy makes tokens outermost.
        merged = 1.0 * tokens * shard.num_heads * config.v_head_dim
        operations.append(move(shard, block, "merge_heads", repeats, read=merged, written=merged))
    operations.append(
        weight_gemm(
            shard,
            block,
            "out",
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
    """Lower the gradients of self-attention's biases, which are sums over the tokens."""
    config = shard.config
    queries = shard.num_heads * config.head_dim * (1 + config.attention_output_gate)
    inner = queries + shard.num_kv_heads * (config.head_dim + config.v_head_dim)
    widths = [inner] * config.qkv_bias + [config.hidden_size] * config.attention_out_bias
    return bias_gradients(shard, "attention", repeats, widths=widths, tokens=shard.num_tokens)


def _lower_projections(shard: Shard, repeats: int) -> list[Operation]:
    """Lower queries, keys and values: (T x h)(h x a d), (h x a_kv d), (h x a_kv d_v), in one GEMM or three."""
    config, tokens = shard.config, shard.num_tokens
    widths = {
        "q": shard.num_heads * config.head_dim * (1 + config.attention_output_gate),
        "k": shard.num_kv_heads * config.head_dim,
        "v": shard.num_kv_heads * config.v_head_dim,
    }
    if config.fused_qkv:
        widths = {"qkv": sum(widths.values())}
    return [
        weight_gemm(shard, "attention", letters, repeats, m=tokens, n=width, k=config.hidden_size)
        for letters, width in widths.items()
    ]


def _lower_latent_projections(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the projections of MLA; down-projections are complete on every device of the tensor axis.

    With sequence parallelism each device projects its own tokens, and the axis gathers the narrow latents.

    Source: NVIDIA/Megatron-LM, megatron/core/transformer/multi_latent_attention.py (get_query_key_value_tensors).
    """
    config, tokens, own_tokens = shard.config, shard.num_tokens, shard.num_residual_tokens
    h, q_rank, kv_rank, rope = (
        config.hidden_size,
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
    )
    query_width = shard.num_heads * config.head_dim
    operations: list[Operation] = []

    def gather(latent: str, width: int) -> list[Operation]:
        return gather_tokens(shard, "attention", repeats, tokens=tokens, width=width, name=f"attention.{latent}")

    if not q_rank or config.has_indexer:  # queries, or keys of the indexer, are projected from the residual stream
        operations += gather_tokens(shard, "attention", repeats, tokens=tokens)
    if q_rank:
        operations.append(weight_gemm(shard, "attention", "q_a", repeats, m=own_tokens, n=q_rank, k=h))
        operations.append(norm(shard, "attention", "q_a_norm", repeats, width=q_rank, tokens=own_tokens))
        operations += gather("q_latent", q_rank)
        operations.append(weight_gemm(shard, "attention", "q_b", repeats, m=tokens, n=query_width, k=q_rank))
    else:
        operations.append(weight_gemm(shard, "attention", "q", repeats, m=tokens, n=query_width, k=h))
    operations.append(weight_gemm(shard, "attention", "kv_a", repeats, m=own_tokens, n=kv_rank + rope, k=h))
    operations.append(norm(shard, "attention", "kv_a_norm", repeats, width=kv_rank, tokens=own_tokens))
    operations += gather("kv_latent", kv_rank + rope)
    if config.has_indexer:
        for role, n, k in (
            ("index_q", config.index_num_heads * config.index_head_dim, q_rank),
            ("index_k", config.index_head_dim, h),
            ("index_weights", config.index_num_heads, h),
        ):
            operations.append(weight_gemm(shard, "attention", role, repeats, m=tokens, n=n, k=k))
    nope = config.head_dim - rope
    if absorbs_latents(shard):
        # One GEMM per head: queries into the latent space, and attended latents out of it.
        for role, n, k in (("absorb_q", kv_rank, nope), ("absorb_out", config.v_head_dim, kv_rank)):
            operations.append(
                Gemm(
                    name=display_name(shard, "attention", role),
                    block="attention",
                    role=role,
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
        # Cached latents are expanded again together with the new ones.
        expanded = tokens + shard.batch_size * shard.workload.context_len // shard.layout.context_parallel
        width = shard.num_heads * (nope + config.v_head_dim)
        operations.append(weight_gemm(shard, "attention", "kv_b", repeats, m=expanded, n=width, k=kv_rank))
    return operations


def _lower_positions(shard: Shard, repeats: int, rotary_repeats: int) -> list[Operation]:
    """Lower norms of queries and keys and rotary positions, which each read and write queries and keys once.

    Source: transformers 5.23, modeling_llama4.py (``use_qk_norm and use_rope``).
    """
    config, tokens = shard.config, shard.num_tokens
    operations: list[Operation] = []
    heads = shard.num_heads + shard.num_kv_heads
    num_norms = rotary_repeats if config.qk_norm == "l2" else repeats
    if config.qk_norm != "none" and num_norms:
        operations.append(norm(shard, "attention", "qk_norm", num_norms, width=heads * config.head_dim, tokens=tokens))
    if rotary_repeats:
        # MLA rotates a part of each query head and one key that all heads share.
        rotated = (shard.num_heads + 1) * config.qk_rope_head_dim if config.kv_lora_rank else heads * config.head_dim
        elements = 1.0 * tokens * rotated
        fused = pointwise(shard, "attention", "rotary", "rotary", rotary_repeats, read=elements, written=elements)
        operations.append(as_chain(shard, fused))
    return operations


def _write_cache(shard: Shard, repeats: int) -> Operation:
    """Lower the copy of new keys and values (or latents) into the KV cache, in the cache's format."""
    config = shard.config
    if config.kv_lora_rank:
        width = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
    else:
        width = shard.num_kv_heads * (config.head_dim + config.v_head_dim)
    return write_cache(shard, width, repeats)
