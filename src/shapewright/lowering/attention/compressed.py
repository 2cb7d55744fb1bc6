"""Lowering of compressed attention: projections, compressors, indexer, core and grouped output projection.

Legend: T tokens of this device, m tokens of an entry, w window, d head width, g groups of output.

The core reads the window and the entries as keys and values of one head. In serving, where an indexer selects fewer
entries than there are, it is the kernels of sparse attention; else it is dense over all entries, as in transformers.
The indexer's choice of entries has no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.attention.core import Heads, fused_call, lower_unfused, write_cache
from shapewright.lowering.builders import activation_gemm, as_chain, display_name, move, norm, pointwise, weight_gemm
from shapewright.lowering.collectives import gather_tokens, reduce_tokens
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.models.compressed_attention import count_entries, make_compressed

if TYPE_CHECKING:
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.models.compressed_attention import CompressedAttention, Compressor

_SCORE_BYTES = get_dtype("fp32").num_bytes


def lower_compressed(shard: Shard, kind: str, repeats: int) -> list[Operation]:
    """Lower the attention of the layers of one kind.

    Args:
        kind: One of COMPRESSED_LAYERS.
    """
    config, tokens = shard.config, shard.num_tokens
    layer = make_compressed(config, kind, shard.layout.tensor_parallel)
    operations = gather_tokens(shard, "attention", repeats, tokens=tokens)
    *inputs, out = layer.projections
    for each in inputs:
        operations.append(weight_gemm(shard, "attention", each.role, repeats, m=tokens, n=each.outputs, k=each.inputs))
    operations.append(norm(shard, "attention", "q_a_norm", repeats, width=config.q_lora_rank, tokens=tokens))
    operations += _lower_positions(shard, repeats)
    if layer.compressor is not None:
        operations.append(_compress(shard, "attention", layer.compressor, repeats))
    operations += _lower_indexer(shard, layer, repeats)
    if not shard.workload.is_training:
        widths = [shard.config.head_dim, *(each.head_dim / each.ratio for each in layer.compressors)]
        operations.append(write_cache(shard, sum(widths), repeats))
    operations += _lower_core(shard, layer, repeats)
    if shard.workload.attention == "unfused":
        merged = 1.0 * tokens * shard.num_heads * config.head_dim
        operations.append(move(shard, "attention", "merge_heads", repeats, read=merged, written=merged))
    operations.append(_rotate(shard, "rotary_out", repeats, shard.num_heads))
    grouped = weight_gemm(
        shard, "attention", "out_a", repeats, m=tokens, n=layer.group_rank, k=layer.group_width
    ).changed(batch=layer.num_groups)
    operations += [
        grouped,
        weight_gemm(shard, "attention", out.role, repeats, m=tokens, n=out.outputs, k=out.inputs),
    ]
    return operations + reduce_tokens(shard, "attention", repeats, tokens=tokens)


def _lower_positions(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the norms of queries and of the key, and their rotary positions."""
    width = (shard.num_heads + 1) * shard.config.head_dim
    normed = norm(shard, "attention", "qk_norm", repeats, width=width, tokens=shard.num_tokens)
    return [normed, _rotate(shard, "rotary", repeats, shard.num_heads + 1)]


def _rotate(shard: Shard, role: str, repeats: int, heads: int) -> Operation:
    """Turn the rotary part of heads; that of the attention's output is turned back."""
    elements = 1.0 * shard.num_tokens * heads * shard.config.qk_rope_head_dim
    return as_chain(shard, pointwise(shard, "attention", role, "rotary", repeats, read=elements, written=elements))


def _compress(shard: Shard, block: Block, compressor: Compressor, repeats: int) -> Operation:
    """Sum the values of each group of tokens, weighted by a softmax of their gates, and normalize and turn the sum.

    One kernel that reads values and gates once; a server also keeps those of tokens that fill no entry yet.
    """
    inputs = 2.0 * shard.num_tokens * compressor.width
    entries = 1.0 * shard.num_tokens / compressor.ratio * compressor.head_dim
    kept = 0.0 if shard.workload.is_training else inputs
    return pointwise(shard, block, "compress", "softmax", repeats, read=inputs, written=entries + kept)


def _lower_indexer(shard: Shard, layer: CompressedAttention, repeats: int) -> list[Operation]:
    """Lower the indexer's projections and entries, its scores of all entries, and the choice of the best."""
    config, tokens = shard.config, shard.num_tokens
    compressor = layer.index_compressor
    if compressor is None:
        return []
    operations: list[Operation] = [
        weight_gemm(shard, "indexer", each.role, repeats, m=tokens, n=each.outputs, k=each.inputs)
        for each in layer.indexer
    ]
    operations.append(_compress(shard, "indexer", compressor, repeats))
    entries = count_entries(compressor, shard.kv_len)
    if selects_entries(shard, layer):
        return operations + [_sparse(shard, part, repeats, entries) for part in ("logits", "selection")]
    # Kernels that run in one pass attend to all of a few entries without scores.
    if not entries or not (shard.workload.is_training or shard.workload.attention == "unfused"):
        return operations
    is_eager = shard.workload.kernels == "torch" or shard.workload.attention == "unfused"
    operations.append(
        activation_gemm(
            shard,
            "indexer",
            "index_logits",
            repeats,
            dtype="fp32" if is_eager else shard.wide_dtype,
            m=config.index_num_heads,
            n=entries,
            k=config.index_head_dim,
            batch=tokens,
            layout="NN",
        )
    )
    scores = _SCORE_BYTES * tokens * entries
    # The sum over the weighted heads, and the choice.
    summed = move(shard, "indexer", "index_topk", repeats, read=0.0, written=0.0)
    read_bytes = scores * (config.index_num_heads + 1.0)
    written_bytes = scores + _SCORE_BYTES * tokens * min(entries, config.index_topk)
    return [*operations, summed.changed(read_bytes=read_bytes, written_bytes=written_bytes, num_kernels=2)]


def selects_entries(shard: Shard, layer: CompressedAttention) -> bool:
    """Whether an indexer selects fewer entries than there are; training and unfused attention read all."""
    entries = count_entries(layer.index_compressor, shard.kv_len)
    is_served = not shard.workload.is_training and shard.workload.attention != "unfused"
    return is_served and shard.config.index_topk < entries


def _lower_core(shard: Shard, layer: CompressedAttention, repeats: int) -> list[Operation]:
    """Lower attention to the window and to the entries."""
    config, window = shard.config, shard.config.compressed_window
    # With a cache, the tokens of the window before the first new one are read as well.
    nearest = min(shard.kv_len, shard.query_len + window - 1)
    keys = nearest + count_entries(layer.compressor, shard.kv_len)
    heads = Heads(1, config.head_dim, config.head_dim)
    if shard.workload.attention == "unfused":
        return lower_unfused(shard, "attention", repeats, heads, kv_len=keys)
    # A query sees the window and the entries before it: on average those of the middle of the new tokens.
    first = count_entries(layer.compressor, shard.kv_len - shard.query_len + 1)
    last = count_entries(layer.compressor, shard.kv_len)
    entries = (first + last) // 2
    if layer.index_compressor is not None:
        entries = min(entries, config.index_topk) if selects_entries(shard, layer) else entries
    seen = window + entries
    if not shard.workload.is_training:
        return [_sparse(shard, "attention", repeats, keys, selected=min(seen, keys))]
    heads = heads._replace(values_in_keys=True)
    call = fused_call(
        shard, "attention", "fused", repeats, heads, query_len=shard.query_len, kv_len=keys, causal=shard.causal
    )
    return [call.changed(window_size=seen if seen < keys else 0)]


def _sparse(
    shard: Shard, part: Literal["logits", "selection", "attention"], repeats: int, kv_len: int, *, selected: int = 0
) -> SparseAttention:
    """Build one kernel of sparse attention over entries."""
    config, is_attention = shard.config, part == "attention"
    role = {"logits": "index_logits", "selection": "index_topk", "attention": "fused"}[part]
    block: Block = "attention" if is_attention else "indexer"
    head_dim = config.head_dim if is_attention else config.index_head_dim
    return SparseAttention(
        name=display_name(shard, block, role),
        block=block,
        role=role,
        repeats=repeats,
        dtype=shard.dtype,
        part=part,
        batch_size=shard.batch_size,
        query_len=shard.query_len,
        kv_len=kv_len,
        num_heads=shard.num_heads if is_attention else config.index_num_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if is_attention else 0,
        selected=selected or config.index_topk,
        compress_ratio=1 if is_attention else config.sparse_compress_ratio,
        window=config.compressed_window if is_attention else 0,
    )
