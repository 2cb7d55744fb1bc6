"""Keys and values kept for the tokens still to come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype
from shapewright.saved_tensors import ceil_div

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload


def count_cached_elements(config: TransformerConfig, tensor_parallel: int = 1) -> int:
    """Elements that one token leaves in the cache of one layer on one device.

    A key and a value of each key-value head; with MLA the latent and the rotated key that all heads share, whole on
    every tensor-parallel rank (arXiv 2405.04434, section 2.1.2).

    >>> from shapewright.config.transformer import TransformerConfig
    >>> llama = TransformerConfig(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, vocab_size=128256)
    >>> 2 * 32 * count_cached_elements(llama)  # bf16, 32 layers: bytes a token
    131072
    """
    if config.is_mla:
        return config.kv_lora_rank + config.qk_rope_head_dim
    return ceil_div(config.num_kv_heads, tensor_parallel) * (config.head_dim + config.v_head_dim)


def estimate_kv_cache(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, windows: Iterable[tuple[int, int]]
) -> float:
    """Bytes of the cache on one device at the end of the pass. [byte]

    Args:
        config: The model.
        workload: Sequences, cached and new tokens, dtype of the cache.
        layout: Degrees; the context axis splits the cached tokens.
        windows: Pairs of a window (0 for none) and the number of the stage's layers that have it.

    Assumes: A layer with a window drops what no later token can see. Of an encoder-decoder, the decoder has seen its
        start token and ``context_len`` more, and every layer also keeps keys and values of ``seq_len`` encoder tokens.
        A paged cache (kv_block_tokens above 1; arXiv 2309.06180, section 4) ends each sequence in a block of its own.
    """
    if workload.is_training or config.stack == "encoder":
        return 0.0
    length = workload.context_len + 1 if config.has_cross_attention else workload.kv_len
    tokens = 0
    for window, num_layers in windows:
        kept = min(window, length) if window else length
        tokens += num_layers * _round_up(ceil_div(kept, layout.context_parallel), workload.kv_block_tokens)
        if config.has_cross_attention:
            source_len = ceil_div(workload.seq_len, layout.context_parallel)
            tokens += num_layers * _round_up(source_len, workload.kv_block_tokens)
    width = get_dtype(workload.kv_cache_dtype or workload.dtype).num_bytes
    return width * workload.micro_batch_size * tokens * count_cached_elements(config, layout.tensor_parallel)


def _round_up(tokens: int, block_tokens: int) -> int:
    """Tokens of whole blocks; a block of one token leaves traced lengths as they are."""
    return tokens if block_tokens == 1 else ceil_div(tokens, block_tokens) * block_tokens
