"""The rules, one module each; a new rule is a module in one of the folders and an entry in MODULES."""

from shapewright.lint.rules.memory_and_config import (
    idle_window,
    large_logits,
    memory_exceeded,
    sequence_over_context_window,
)
from shapewright.lint.rules.parallel import (
    batched_heads_split_unevenly,
    heads_split_unevenly,
    kv_heads_replicated,
    layers_split_unevenly,
    mlp_width_split_unevenly,
    pipeline_bubble,
    shard_not_aligned,
    tensor_group_across_nodes,
    tensor_parallel_too_large,
)
from shapewright.lint.rules.serving import block_scale_split, cache_blocks_unlike_layers, vocab_split_unevenly
from shapewright.lint.rules.tensor_core import (
    adapter_rank_not_aligned,
    dtype_unsupported,
    fp32_outside_matrix_units,
    fused_attention_unsupported,
    head_dim_not_aligned,
    hidden_size_not_aligned,
    mlp_width_not_aligned,
    small_heads,
    swiglu_width_not_aligned,
    vocab_not_aligned,
)
from shapewright.lint.rules.waves import few_tokens_per_expert, micro_batch_too_small, tile_tail, wave_tail

MODULES = (
    vocab_not_aligned,
    hidden_size_not_aligned,
    head_dim_not_aligned,
    small_heads,
    mlp_width_not_aligned,
    mlp_width_split_unevenly,
    swiglu_width_not_aligned,
    dtype_unsupported,
    fp32_outside_matrix_units,
    fused_attention_unsupported,
    micro_batch_too_small,
    wave_tail,
    tile_tail,
    few_tokens_per_expert,
    heads_split_unevenly,
    batched_heads_split_unevenly,
    kv_heads_replicated,
    shard_not_aligned,
    tensor_parallel_too_large,
    layers_split_unevenly,
    pipeline_bubble,
    tensor_group_across_nodes,
    memory_exceeded,
    large_logits,
    sequence_over_context_window,
    idle_window,
    block_scale_split,
    vocab_split_unevenly,
    cache_blocks_unlike_layers,
    adapter_rank_not_aligned,
)
