"""Operations on arrays of shapes are operations on each shape, and their counts are those of brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm

dims = st.integers(1, 2**22)
small = st.integers(1, 24)
dtypes = st.sampled_from(("fp32", "bf16", "fp8", "fp4"))


@given(st.lists(st.tuples(dims, dims, dims, st.integers(1, 512)), min_size=1, max_size=5), dtypes)
def test_gemm_array_equals_scalars(shapes: list[tuple[int, int, int, int]], dtype: str) -> None:
    """One Gemm of arrays gives, place by place, what one Gemm per shape gives."""
    m, n, k, batch = np.array(shapes, dtype=np.int64).T
    together = Gemm(name="x", m=m, n=n, k=k, batch=batch, dtype=dtype)
    alone = [Gemm(name="x", m=m, n=n, k=k, batch=batch, dtype=dtype) for m, n, k, batch in shapes]
    assert np.asarray(together.flops).tolist() == [gemm.flops for gemm in alone]
    assert np.asarray(together.num_bytes).tolist() == [gemm.num_bytes for gemm in alone]


@given(dims, dims, dims, st.integers(1, 512), st.sampled_from(("NT", "NN", "TN")))
def test_grouped_gemm_array_equals_scalar(m: int, n: int, k: int, groups: int, layout: str) -> None:
    """The same for grouped GEMMs."""
    fields = {"m": m, "n": n, "k": k, "groups": groups}
    alone = GroupedGemm(name="x", layout=layout, **fields)
    arrays: Any = {name: np.array([value, value], dtype=np.int64) for name, value in fields.items()}
    together = GroupedGemm(name="x", layout=layout, **arrays)
    assert np.asarray(together.flops).tolist() == [alone.flops] * 2
    assert np.asarray(together.num_bytes).tolist() == [alone.num_bytes] * 2


@pytest.mark.parametrize("as_array", [False, True])
def test_extreme_gemm_does_not_overflow(as_array: bool) -> None:
    """2 * 2^22 * 2^21 * 2^21 = 2^65 is beyond int64 and comes out exact, also from arrays."""
    fields: Any = {"m": 2**22, "n": 2**21, "k": 2**21}
    if as_array:
        fields = {name: np.array([value], dtype=np.int64) for name, value in fields.items()}
    gemm = Gemm(name="x", **fields)
    assert float(np.asarray(gemm.flops).item()) == 2.0**65
    assert float(np.asarray(gemm.num_bytes).item()) == 2.0 * (2.0**43 + 2.0**42 + 2.0**43)


@pytest.mark.parametrize("as_array", [False, True])
def test_extreme_attention_does_not_overflow(as_array: bool) -> None:
    """A million tokens, 1024 heads, 4096 sequences: 2^12 * 2^10 * 2^40 pairs in full, 2^62, and half of it causal."""
    fields: Any = {"batch_size": 2**12, "query_len": 2**20, "kv_len": 2**20, "num_heads": 2**10, "num_kv_heads": 2**10}
    if as_array:
        fields = {name: np.array([value], dtype=np.int64) for name, value in fields.items()}
    operation = Attention(name="x", head_dim=128, v_head_dim=128, **fields)
    assert float(np.asarray(operation.flops).item()) == 2.0**62 * 2 * 256
    assert float(np.asarray(operation.attended_pairs).item()) == pytest.approx(2.0**61, rel=1e-5)
    # Q, K, V and O of 2^12 * 2^20 * 2^10 rows of 128 elements of 2 bytes
    assert float(np.asarray(operation.num_bytes).item()) == 4 * 2.0**42 * 128 * 2


def count_by_mask(query_len: int, kv_len: int, window: int, causal: bool) -> int:
    """Count the pairs of an explicit mask whose last query is aligned with the last key."""
    query = np.arange(query_len)[:, None] + kv_len - query_len
    key = np.arange(kv_len)[None, :]
    seen = np.ones((query_len, kv_len), dtype=bool)
    if causal:
        seen &= key <= query
        if window:
            seen &= key > query - window
    return int(seen.sum())


@given(small, small, st.integers(0, 40), st.integers(1, 3), st.integers(1, 5))
def test_causal_pairs_equal_a_mask(query_len: int, cached: int, window: int, batch: int, heads: int) -> None:
    """Attended pairs of causal attention, windowed or not, equal those of the mask drawn out."""
    kv_len = query_len + cached - 1
    operation = Attention(
        name="x",
        batch_size=batch,
        query_len=query_len,
        kv_len=kv_len,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=8,
        v_head_dim=8,
        window_size=window,
    )
    assert operation.attended_pairs == batch * heads * count_by_mask(query_len, kv_len, window, causal=True)


@given(small, small)
def test_bidirectional_pairs_equal_a_mask(query_len: int, kv_len: int) -> None:
    """Without a mask every query sees every key, whatever the lengths."""
    operation = Attention(
        name="x",
        batch_size=1,
        query_len=query_len,
        kv_len=kv_len,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        v_head_dim=8,
        causal=False,
    )
    assert operation.attended_pairs == count_by_mask(query_len, kv_len, 0, causal=False)


@given(st.lists(st.tuples(small, small, st.integers(0, 40)), min_size=1, max_size=5))
def test_attention_array_equals_scalars(shapes: list[tuple[int, int, int]]) -> None:
    """One Attention of arrays gives, place by place, what one per shape gives."""

    def build(query_len: Any, kv_len: Any, window: Any, is_backward: bool) -> Attention:
        return Attention(
            name="x",
            batch_size=2,
            query_len=query_len,
            kv_len=kv_len,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            v_head_dim=16,
            window_size=window,
            is_backward=is_backward,
        )

    query, extra, window = np.array(shapes, dtype=np.int64).T
    for is_backward in (False, True):
        together = build(query, query + extra, window, is_backward)
        alone = [build(q, q + more, width, is_backward) for q, more, width in shapes]
        for quantity in ("flops", "attended_pairs", "executed_flops", "num_bytes"):
            values = np.broadcast_to(getattr(together, quantity), query.shape).tolist()
            assert values == pytest.approx([getattr(operation, quantity) for operation in alone], rel=1e-12)


@given(st.integers(2, 2**16), st.floats(1, 1e15))
def test_all_reduce_is_scatter_and_gather(num_ranks: int, message_bytes: float) -> None:
    """Reducing moves as much as reduce-scatter and all-gather together, and never twice the buffer."""

    def volume(op_name: str) -> float:
        operation = Collective(
            name="x",
            op_name=op_name,
            axis="data",
            message_bytes=message_bytes,
            num_ranks=num_ranks,
            ranks_per_node=8,
        )
        return float(operation.num_bytes)

    assert volume("all_reduce") == pytest.approx(volume("reduce_scatter") + volume("all_gather"))
    assert message_bytes <= volume("all_reduce") * (1 + 1e-12) < 2 * message_bytes * (1 + 1e-9)
