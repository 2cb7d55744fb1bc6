"""Sizes, FLOPs and bytes of operations, worked by hand."""

from __future__ import annotations

import pytest

from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm, contiguous_dims
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.scan import Scan
from shapewright.lowering.operations.sparse import SparseAttention


def test_gemm_by_hand() -> None:
    """Flops are 2 m n k batch, bytes the three matrices once."""
    gemm = Gemm(name="x", m=4, n=6, k=8, batch=3, dtype="bf16")
    assert gemm.flops == 2 * 4 * 6 * 8 * 3  # 1152
    # (4*8 + 8*6 + 4*6) * 3 * 2 bytes = (32 + 48 + 24) * 6
    assert gemm.num_bytes == 624


def test_gemm_of_gpt3() -> None:
    """The MLP's first GEMM of GPT-3 2.7B at b=4, s=2048: 2 * 8192 * 10240 * 2560 FLOPs."""
    gemm = Gemm(name="mlp.up", m=8192, n=10240, k=2560)
    assert gemm.flops == 429_496_729_600
    # 2 * (8192*2560 + 2560*10240 + 8192*10240) = 2 * (20,971,520 + 26,214,400 + 83,886,080)
    assert gemm.num_bytes == 262_144_000


@pytest.mark.parametrize("dtype", ["fp32", "fp8", "fp4"])
def test_gemm_bytes_follow_the_dtype(dtype: str) -> None:
    """Operands and result have the width of the dtype."""
    width = {"fp32": 4.0, "fp8": 1.0, "fp4": 0.5}[dtype]
    assert Gemm(name="x", m=4, n=6, k=8, dtype=dtype).num_bytes == 104 * width


@pytest.mark.parametrize(
    ("layout", "letters"),
    [
        ("NT", ("k", "k", "n")),  # forward: x[m,k] and W[n,k] are both rows of k
        ("NN", ("k", "n", "n")),  # dgrad
        ("TN", ("m", "n", "n")),  # wgrad
        ("TT", ("m", "k", "n")),
    ],
)
def test_contiguous_dims(layout: str, letters: tuple[str, str, str]) -> None:
    """N lies as written, rows first, so its last letter is contiguous; T its first."""
    assert contiguous_dims(layout) == letters
    assert Gemm(name="x", m=1, n=1, k=1, layout=layout).contiguous_dims == letters
    assert GroupedGemm(name="x", m=1, n=1, k=1, groups=1, layout=layout).contiguous_dims == letters


def test_grouped_gemm_by_hand() -> None:
    """Rows are spread over the groups: flops do not grow with them, weight bytes do."""
    experts = GroupedGemm(name="x", m=10, n=6, k=8, groups=4)
    assert experts.flops == 2 * 10 * 6 * 8
    # rows in and out 10 * (8 + 6) = 140, weights 4 * 8 * 6 = 192, 2 bytes each
    assert experts.num_bytes == 664


def test_grouped_gemm_weight_gradient_by_hand() -> None:
    """In wgrad the rows are contracted and every group writes its own matrix."""
    gradient = GroupedGemm(name="x", m=6, n=8, k=10, groups=4, layout="TN")
    assert gradient.flops == 2 * 10 * 6 * 8
    assert gradient.num_bytes == 664  # the same matrices as forward


def attention(**changes: object) -> Attention:
    """Return attention of 2 sequences, 4 heads over 2 key-value heads of 8, over 6 tokens."""
    fields = {"batch_size": 2, "query_len": 6, "kv_len": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return Attention(**{"name": "x", "v_head_dim": 8, **fields, **changes})


def test_attention_flops_by_hand() -> None:
    """The convention counts the whole square, the executed count only what the mask leaves."""
    forward, backward = attention(), attention(is_backward=True)
    # 2 sequences * 4 heads * 6 * 6 pairs = 288; times 2 flops * (8 + 8)
    assert forward.flops == 288 * 32
    assert backward.flops == 2 * forward.flops
    # causal: 6*7/2 = 21 pairs of 36, so 168; backward makes five products, three of head_dim and two of v_head_dim
    assert forward.attended_pairs == 168
    assert forward.executed_flops == 168 * 2 * 16
    assert backward.executed_flops == 168 * 2 * (3 * 8 + 2 * 8)


def test_attention_bytes_by_hand() -> None:
    """Each of Q, K, V and O once; a narrow cache only narrows K and V; backward moves all of it twice."""
    # Q and O: 2 * 6 * 4 rows * 16 = 768 elements; K and V: 2 * 6 * 2 rows * 16 = 384
    assert attention().num_bytes == (768 + 384) * 2
    assert attention(kv_cache_dtype="fp8").num_bytes == 768 * 2 + 384
    assert attention(is_backward=True).num_bytes == 2 * (768 + 384) * 2


def test_decode_reads_the_cache() -> None:
    """One query over 100 cached tokens sees all; with a window of 10 it reads no more than 11."""
    decode = attention(query_len=1, kv_len=100)
    assert decode.attended_pairs == 2 * 4 * 100
    # Q, O: 2 * 1 * 4 * 16 = 128; K, V: 2 * 100 * 2 * 16 = 6400
    assert decode.num_bytes == (128 + 6400) * 2
    windowed = attention(query_len=1, kv_len=100, window_size=10)
    assert windowed.attended_pairs == 2 * 4 * 10
    assert windowed.num_bytes <= (128 + 2 * 11 * 2 * 16) * 2


def test_pointwise_moves_bytes() -> None:
    """No FLOPs by convention, bytes read and written added."""
    operation = Pointwise(name="x", operation="norm", read_bytes=100.0, written_bytes=50.0)
    assert (operation.flops, operation.num_bytes) == (0.0, 150.0)


@pytest.mark.parametrize(
    ("op_name", "sent"),
    [
        ("all_reduce", 2 * 3 / 4 * 1000),  # ring: reduce-scatter and all-gather
        ("all_gather", 3 / 4 * 1000),
        ("reduce_scatter", 3 / 4 * 1000),
        ("alltoall", 3 / 4 * 1000),
        ("send_recv", 1000),
    ],
)
def test_collective_volume(op_name: str, sent: float) -> None:
    """Ring volumes per device for a buffer of 1000 bytes on four ranks."""
    operation = Collective(name="x", op_name=op_name, axis="tensor", message_bytes=1000, num_ranks=4, ranks_per_node=4)
    assert operation.num_bytes == sent
    assert operation.flops == 0.0


def test_traffic_of_sparse_attention_by_hand() -> None:
    """Three queries of 16 heads read 4 latents each, of 656 bytes for 576 elements, and write 512 elements."""
    attention = SparseAttention(
        name="x", part="attention", batch_size=1, query_len=3, kv_len=8, num_heads=16, head_dim=576, v_head_dim=512,
        selected=4,
    )  # fmt: skip
    assert attention.num_bytes == 3 * 4 * 656 + 3 * 16 * (576 + 512) * 2


def test_traffic_of_an_indexer_by_hand() -> None:
    """5 x 3 queries of 4 heads of 128 and 5 x 8 cached keys of 128, a byte each; 8 scores of 4 bytes for each query."""
    sizes = {"batch_size": 5, "query_len": 3, "kv_len": 8, "num_heads": 4, "head_dim": 128, "v_head_dim": 0}
    logits = SparseAttention(name="x", part="logits", selected=4, **sizes)
    selection = SparseAttention(name="x", part="selection", selected=4, **sizes)

    assert logits.num_bytes == (5 * 3 * 4 + 5 * 8) * 128 + 5 * 3 * 8 * 4
    assert selection.num_bytes == 5 * 3 * 8 * 4 + 5 * 3 * 4 * 4  # scores in, positions out


def test_traffic_of_a_scan_by_hand() -> None:
    """A key and a query of 4, values in and out of 2 heads of 8, in 16 bits; in serving states of 4 bytes both ways."""
    sizes = {"batch_size": 2, "seq_len": 3, "num_k_heads": 1, "num_v_heads": 2, "k_head_dim": 4, "v_head_dim": 8}
    once = Scan(name="x", rule="mamba2", **sizes).num_bytes
    served = Scan(name="x", rule="mamba2", has_cache=True, **sizes).num_bytes

    assert once == 2 * 3 * (2 * 4 + 2 * 2 * 8) * 2
    assert served - once == 2 * 2 * 2 * 4 * 8 * 4
    assert Scan(name="x", rule="mamba2", is_backward=True, **sizes).num_bytes == 2 * once


def test_scans_of_kimi_delta_attention_read_a_decay_of_each_channel() -> None:
    """A token of 2 heads of 8: queries, keys, decays, values and outputs, 5 x 16 elements; of a delta net 4 x 16."""
    sizes: dict[str, int] = {
        "batch_size": 3, "seq_len": 5, "num_k_heads": 2, "num_v_heads": 2, "k_head_dim": 8, "v_head_dim": 8
    }  # fmt: skip
    by_rule = {
        rule: Scan(name="x", rule=rule, **sizes).num_bytes for rule in ("kimi_delta_attention", "gated_delta_net")
    }
    assert by_rule == {"kimi_delta_attention": 15 * 5 * 16 * 2, "gated_delta_net": 15 * 4 * 16 * 2}
