"""Fused attention: softmax(Q K^T) V in one kernel without scores in memory (FlashAttention, cuDNN).

Unfused attention is lowered to two batched GEMMs with pointwise operations between them instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.records import dataclass
from shapewright.lowering.operations.base import OperationBase

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool

    from shapewright.core.numeric import Count, Numeric


@dataclass(frozen=True, kw_only=True)
class Attention(OperationBase):
    """One fused attention call over ``batch_size`` sequences.

    Attributes:
        batch_size: Sequences.
        query_len: Query tokens per sequence.
        kv_len: Key and value tokens per sequence (cached ones included).
        num_heads: Query heads on this device.
        num_kv_heads: Key-value heads on this device.
        head_dim: Width of a query and key head. [element]
        v_head_dim: Width of a value head. [element]
        causal: Whether a query attends only to positions up to its own; the last query attends to the last key.
        window_size: Most recent positions that a query attends to; 0 means all.
        is_backward: Whether this is the gradient (dQ, dK, dV; scores recomputed). If sizes are arrays, one flag for
            all calls or one for each.
        kv_cache_dtype: Element format of keys and values in memory; None means ``dtype``.
        values_in_keys: Whether values are the first v_head_dim elements of the keys, so that they are not read
            separately (attention on MLA's latents).
        writes_cache: Whether the call also copies the new keys and values into the cache, as in measurements of
            serving libraries; otherwise the copy is a separate operation, or there is no cache.
        is_training: Whether a training framework runs it, whose kernels differ from those of serving libraries.
        is_deterministic: Whether its gradients are added in a fixed order.
    """

    batch_size: Count
    query_len: Count
    kv_len: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    causal: bool = True
    window_size: Count = 0
    is_backward: bool | Bool[np.ndarray, "*calls"] = False
    kv_cache_dtype: str | None = None
    values_in_keys: bool = False
    writes_cache: bool = False
    is_training: bool = False
    is_deterministic: bool = False

    kind = "attention"

    @property
    def flops(self) -> Numeric:
        """FLOPs by the usual convention: all query-key pairs, causal or not. [flop]

        Forward is two GEMMs. Backward counts four (dV, dP, dQ, dK) but not the recomputed scores, so that it is twice
        forward, as for every other layer (arXiv 2205.05198 eq. 7).
        """
        square = 1.0 * self.batch_size * self.num_heads * self.query_len * self.kv_len
        return (1.0 + self.is_backward) * 2.0 * square * (self.head_dim + self.v_head_dim)

    @property
    def attended_pairs(self) -> Numeric:
        """Number of query-key pairs that the mask allows, over all sequences and heads.

        >>> Attention(name="x", batch_size=1, query_len=4, kv_len=4, num_heads=1, num_kv_heads=1,
        ...           head_dim=8, v_head_dim=8).attended_pairs
        10.0
        """
        import numpy as np

        query, keys = 1.0 * np.asarray(self.query_len), 1.0 * np.asarray(self.kv_len)
        window = np.where(np.asarray(self.window_size) > 0, self.window_size, keys)
        if self.causal:
            # Query i (from 0) attends to keys 0 .. keys - query + i, of which the window keeps the latest `window`.
            first = keys - query + 1.0
            clipped = np.minimum(np.maximum(window - first + 1.0, 0.0), query)
            growing = clipped * first + clipped * (clipped - 1.0) / 2.0
            seen = growing + (query - clipped) * window
        else:
            seen = query * np.minimum(window, keys)
        pairs = seen * self.batch_size * self.num_heads
        return float(pairs) if pairs.ndim == 0 else pairs

    @property
    def executed_flops(self) -> Numeric:
        """FLOPs over unmasked pairs; backward also recomputes the scores (five GEMMs, forward has two). [flop]"""
        over_head_dim, over_v_head_dim = 1.0 + 2.0 * self.is_backward, 1.0 + self.is_backward
        return 2.0 * self.attended_pairs * (over_head_dim * self.head_dim + over_v_head_dim * self.v_head_dim)

    @property
    def num_bytes(self) -> Numeric:
        """Traffic with each tensor read or written once: Q, K, V, O, and in backward their gradients. [byte]"""
        width = get_dtype(self.dtype).num_bytes
        kv_width = get_dtype(self.kv_cache_dtype or self.dtype).num_bytes
        rows = 1.0 * self.batch_size * self.query_len * self.num_heads
        q_and_o = rows * (self.head_dim + self.v_head_dim) * width
        import numpy as np

        # Keys outside the window of every query are not read.
        reach = np.where(
            np.asarray(self.window_size) > 0, np.minimum(self.kv_len, self.window_size + self.query_len), self.kv_len
        )
        kv_head_width = self.head_dim + (0 if self.values_in_keys else self.v_head_dim)
        keys_and_values = 1.0 * self.batch_size * reach * self.num_kv_heads * kv_head_width * kv_width
        total = (1.0 + self.is_backward) * (q_and_o + keys_and_values)
        return float(total) if np.ndim(total) == 0 else total
