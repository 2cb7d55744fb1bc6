"""Sparse attention: an indexer scores all cached tokens, the best are selected, and attention reads those alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from shapewright.core.records import dataclass
from shapewright.lowering.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric

_SCORE_BYTES = 4.0  # scores of the indexer and selected positions have 32 bits
_KEY_BYTES = 1.0  # the indexer's queries and keys have 8 bits
_LATENT_BYTES = 656.0 / 576.0
"""Width of an element of a latent in DeepSeek's 8-bit cache: 512 bytes, 4 scales in fp32, 64 positions in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class SparseAttention(OperationBase):
    """One of the three kernels of sparse attention over latents in serving.

    Attributes:
        part: ``logits`` scores every cached token, ``selection`` finds the best, ``attention`` attends to those.
        batch_size: Sequences.
        query_len: New tokens of each.
        kv_len: Keys that the last one may attend to: tokens, or compressed entries.
        num_heads: Heads of the indexer, or query heads of the attention on this device.
        head_dim: Width of an indexer's head, or of a latent with its rotary part. [element]
        v_head_dim: Width of the attended latent. [element]
        selected: Most tokens that a query attends to.
        compress_ratio: Tokens that one key of the indexer stands for.
        window: Latest tokens among the selected ones, which compressed attention reads one by one; 0 in attention over
            latents.

    Source: DeepSeek-V3.2 technical report, section 2.1; deepseek-ai/FlashMLA (flash_mla_sparse_fwd).
    """

    part: Literal["logits", "selection", "attention"]
    batch_size: Count
    query_len: Count
    kv_len: Count
    num_heads: Count
    head_dim: Count
    v_head_dim: Count
    selected: Count
    compress_ratio: Count = 1
    window: Count = 0

    kind = "sparse_attention"

    @property
    def flops(self) -> Numeric:
        """Scores of all tokens, or scores and values of the selected ones. [flop]

        >>> SparseAttention(name="x", part="logits", batch_size=1, query_len=2, kv_len=8, num_heads=4, head_dim=16,
        ...                 v_head_dim=0, selected=4).flops
        2048.0
        """
        rows = 2.0 * self.batch_size * self.num_heads * self.query_len
        if self.part == "logits":
            return rows * self.kv_len * self.head_dim
        if self.part == "selection":
            return 0.0 * rows
        return rows * np.minimum(self.kv_len, self.selected) * (self.head_dim + self.v_head_dim)

    @property
    def num_bytes(self) -> Numeric:
        """Traffic with each key of the indexer read once for all queries, each selected latent for its query. [byte]"""
        queries = 1.0 * self.batch_size * self.query_len
        scores = _SCORE_BYTES * queries * self.kv_len
        if self.part == "logits":
            keys = self.batch_size * self.kv_len + queries * self.num_heads
            return scores + _KEY_BYTES * self.head_dim * keys
        if self.part == "selection":
            return scores + _SCORE_BYTES * queries * self.selected
        latents = queries * np.minimum(self.kv_len, self.selected) * self.head_dim * _LATENT_BYTES
        return latents + 2.0 * queries * self.num_heads * (self.head_dim + self.v_head_dim)
