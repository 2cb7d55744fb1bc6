"""Cases that the tests of the bench measure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.store.record import Case


def attention(**changes: Any) -> Attention:
    """A small attention call with grouped-query heads."""
    lengths = {"batch_size": 2, "query_len": 24, "kv_len": 24}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16}
    return Attention(name="x", dtype="fp32", **{**lengths, **heads, **changes})


def pointwise(kind: str, reads: float, writes: float) -> Pointwise:
    """32 rows of 24 elements in fp32."""
    size_bytes = 32 * 24 * 4
    return Pointwise(
        name=kind, dtype="fp32", operation=kind, read_bytes=reads * size_bytes, written_bytes=writes * size_bytes
    )


CASES = [
    *(Case(operation=Gemm(name="x", dtype=dtype, m=17, n=33, k=21, batch=batch, layout=layout))
      for dtype in ("fp32", "bf16") for layout in ("NT", "NN", "TN", "TT") for batch in (1, 3)),
    *(Case(operation=Gemm(name="x", dtype=dtype, m=32, n=48, k=64)) for dtype in ("int8", "fp8")),
    *(Case(operation=GroupedGemm(name="x", dtype="fp32", m=19, n=8, k=23, groups=3, layout=layout))
      for layout in ("NT", "NN", "TN")),
    *(Case(operation=attention(**changes))
      for changes in ({}, {"causal": False}, {"is_backward": True}, {"is_backward": True, "causal": False},
                      {"query_len": 1}, {"num_kv_heads": 4, "v_head_dim": 8}, {"num_kv_heads": 1, "head_dim": 8})),
    *(Case(operation=pointwise(kind, reads, writes), row_width=24)
      for kind, reads, writes in (("norm", 1, 1), ("activation", 1, 1), ("activation", 2, 1), ("residual", 2, 1),
                                  ("softmax", 1, 1), ("dropout", 1, 1.25), ("bias", 1, 1), ("optimizer", 4, 3))),
    Case(operation=pointwise("norm", 1, 1), row_width=24, variant="rms_norm"),
]  # fmt: skip

# Operations that are one kernel in torch and a chain of kernels elsewhere, and the reverse.
CHAINS = [
    *(Case(operation=replace(pointwise("cross_entropy", traffic, traffic), num_kernels=traffic), row_width=24)
      for traffic in (2, 3)),
    *(Case(operation=GroupedGemm(name="x", dtype="bf16", m=32, n=48, k=64, groups=3, layout=layout), variant="grouped")
      for layout in ("NT", "NN", "TN")),
]  # fmt: skip
