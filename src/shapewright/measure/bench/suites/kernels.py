"""Suites of attention, pointwise operations and collectives, and the two that mix kinds: smoke and paper.

Legend: h hidden size, a attention heads, a_kv key-value heads, d head dimension, s tokens per sequence, b sequences,
v vocabulary size; C[m,n] = A[m,k] B[k,n].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import COLLECTIVE_OPS, Collective
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.bench.operations.pointwise import ADAMW, LOSS, LOSS_BACKWARD, RMS_NORM
from shapewright.measure.bench.suites.gemm import LINEAR_LAYOUTS, gemm_case
from shapewright.measure.store.record import Case


def smoke_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """A few GEMMs, attention calls and pointwise operations, some of them twice to show the run-to-run spread."""
    top = 256 if small else 4096
    squares = [gemm_case("square", dtype, top // part, top // part, top // part) for part in (1, 2, 4)]
    widths = [gemm_case(f"linear.{layout}", dtype, top, top + extra, top, layout=layout)
              for layout in LINEAR_LAYOUTS for extra in (0, 1, 2, 4, 8, 64)]  # fmt: skip
    batched = [gemm_case("score", dtype, top // 2, top // 2, d, batch=8) for d in (32, 40, 64, 128)]
    attention = [
        _attention("attention", dtype, b=1, s=top // 2, a=8, a_kv=a_kv, d=d, backward=backward)
        for d in (32, 64) for a_kv in (8, 2) for backward in (False, True)
    ]  # fmt: skip
    kinds = ("norm", "activation", "glu", "residual", "softmax", "dropout", "bias")
    pointwise = [_pointwise(kind, kind, dtype, top, width) for kind in kinds for width in (top, 4 * top)]
    return [_measured_twice(squares), _measured_twice(widths[::6]), _measured_twice(attention[:2]),
            _measured_twice(pointwise[::5]), widths, batched, attention, pointwise]  # fmt: skip


def paper_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """The sweeps of arXiv 2401.14489, figures 5 to 11 and 16 to 20, with its sizes in BLAS letters."""
    scale = 16 if small else 1
    steps = range(64 // min(scale, 8), 8192 // scale + 1, 128 // min(scale, 8))
    long, middle, square = 27648 // scale, 4096 // scale, 2304 // scale
    sweeps = [
        [gemm_case("paper.k", dtype, long, middle, k, layout="NN") for k in steps],
        [gemm_case("paper.n", dtype, square, n, middle, layout="NN") for n in steps],
        [gemm_case("paper.m", dtype, m, middle, middle, layout="NN") for m in steps],
        [gemm_case("paper.batched", dtype, 2048 // scale, 2048 // scale, k, batch=batch, layout="NN")
         for batch in (4, 32, 128) for k in (16, 32, 48, 60, 64, 72, 80, 96, 100, 128, 192, 256)],
        [gemm_case("paper.vocabulary", dtype, 8192 // scale, v // scale + extra, 2560 // scale)
         for v in (32000, 50176, 51200) for extra in (0, 1, 2, 4, 8, 16, 17, 32, 48, 63, 64, 81)],
    ]  # fmt: skip
    tokens, sequences = 2048 // scale, 4
    for a in (8, 12, 16, 20, 24, 32, 40, 64, 80):
        score, value, fused = [], [], []
        for h in range(128 * a // scale, 8192 // scale + 1, max(a, (512 // scale) // a * a)):
            if h % a == 0:
                d = h // a
                score.append(gemm_case(f"paper.score.a{a}", dtype, tokens, tokens, d, batch=sequences * a))
                value.append(gemm_case(f"paper.value.a{a}", dtype, tokens, d, tokens, batch=sequences * a, layout="NN"))
                if d <= 256 and d % 8 == 0:
                    fused.append(_attention(f"paper.flash.a{a}", dtype, b=sequences, s=tokens, a=a, a_kv=a, d=d))
        sweeps += [score, value, fused]
    return [sweep for sweep in sweeps if sweep]


def attention_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Kernels of scaled_dot_product_attention by head dimension, length and key-value heads, forward and backward."""
    sweeps = []
    s, h, b = (64, 256, 1) if small else (2048, 4096, 4)
    for variant in ("", "math") if small else ("flash", "cudnn", "efficient"):
        # The memory-efficient kernel does not support grouped-query attention.
        query_heads_per_kv_head = (1,) if variant == "efficient" else (1, 2 if small else 4)
        for backward in (False, True):
            name = f"attention.{variant or 'default'}{'.backward' if backward else ''}"
            heads = [(d, max(1, h // d)) for d in range(32, 257, 32 if small else 8)]
            sweeps.append([_attention(name, dtype, b=b, s=s, a=a, a_kv=a, d=d, variant=variant, backward=backward)
                           for d, a in heads])  # fmt: skip
            lengths = (32, 64, 128) if small else (512, 1024, 4096, 8192, 16384)
            sweeps.append([_attention(name, dtype, b=max(1, b * s // length), s=length, a=h // d,
                                      a_kv=h // d // group, d=d, variant=variant, backward=backward)
                           for length in lengths for d in (64, 128)
                           for group in query_heads_per_kv_head])  # fmt: skip
            sweeps.append([_attention(name, dtype, b=b, s=s, a=h // 64, a_kv=h // 64, d=64, causal=False,
                                      variant=variant, backward=backward)])  # fmt: skip
    cached_lengths = (64, 256) if small else (512, 2048, 8192, 32768)
    for group in (1, 4):
        sweeps.append([_attention("attention.decode", dtype, b=8, s=cached, a=h // 64, a_kv=h // 64 // group, d=64,
                                  query_len=1) for cached in cached_lengths])  # fmt: skip
    return sweeps


def pointwise_suite(dtype: str, *, small: bool) -> list[list[Case]]:
    """Achieved bandwidth of pointwise operations by kind, rows and width."""
    rows = (16, 128, 512) if small else (64, 512, 2048, 8192, 32768)
    widths = (64, 256, 1000, 1024) if small else (768, 1024, 2048, 2560, 4096, 5120, 8192, 11008, 16384)
    kinds = ("norm", RMS_NORM, "activation", "glu", "residual", "softmax", "dropout", "bias", ADAMW)
    sweeps = [[_pointwise(kind, kind, dtype, count, width) for count in rows for width in widths] for kind in kinds]
    vocabularies = (331, 1000) if small else (32000, 50257, 50304, 128256, 151936)
    loss_rows = (16, 64) if small else (1024, 8192)
    losses = (LOSS, LOSS_BACKWARD)
    # Scores of unfused attention: one row per query, as wide as there are keys, which may be an odd number.
    keys = (63, 64, 127) if small else (1000, 1023, 1024, 2047, 2048, 4096, 8192)
    queries = (64, 256) if small else (8192, 65536)
    return [
        *sweeps,
        *(
            [_pointwise(kind, kind, dtype, count, width) for count in loss_rows for width in vocabularies]
            for kind in losses
        ),
        [_pointwise("softmax.scores", "softmax", dtype, count, width) for count in queries for width in keys],
    ]


def collective_sweeps(dtypes: Sequence[str], *, num_ranks: int, small: bool) -> list[list[Case]]:
    """Every collective over messages of 1 KiB to 1 GiB (4 MiB on a CPU)."""
    sizes = [2**power for power in range(10, 23 if small else 31, 2 if small else 1)]
    return [
        [
            Case(
                operation=Collective(
                    name=op_name,
                    dtype=dtype,
                    op_name=op_name,
                    axis="data",
                    message_bytes=float(size),
                    num_ranks=num_ranks,
                    ranks_per_node=num_ranks,
                )
            )
            for size in sizes
        ]
        for dtype in dtypes
        for op_name in COLLECTIVE_OPS
    ]


def _attention(
    name: str, dtype: str, *, b: int, s: int, a: int, a_kv: int, d: int, variant: str = "",
    causal: bool = True, backward: bool = False, query_len: int | None = None,
) -> Case:  # fmt: skip
    operation = Attention(
        name=name,
        dtype=dtype,
        batch_size=b,
        query_len=query_len or s,
        kv_len=s,
        num_heads=a,
        num_kv_heads=a_kv,
        head_dim=d,
        v_head_dim=d,
        causal=causal,
        is_backward=backward,
    )
    return Case(operation=operation, variant=variant)


def _pointwise(name: str, kind: str, dtype: str, rows: int, width: int) -> Case:
    """A pointwise case that reads and writes the bytes that the lowering counts for its kind."""
    element_bytes, backward = get_dtype(dtype).num_bytes, kind == LOSS_BACKWARD
    operation = {"glu": "activation", RMS_NORM: "norm", LOSS_BACKWARD: LOSS, ADAMW: "optimizer"}.get(kind, kind)
    if kind == ADAMW:  # gradient, weight and two moments in fp32; all but the gradient are written again
        dtype, read_bytes, written_bytes = "fp32", 16.0, 12.0
    elif operation == LOSS:  # as lowering.head counts them
        read_bytes, written_bytes = 12.0 if backward else element_bytes + 4.0, 8.0 + element_bytes * backward
    else:
        read_bytes = element_bytes * (2.0 if kind in ("residual", "glu") else 1.0)
        written_bytes = element_bytes + (1.0 if kind == "dropout" else 0.0)
    moved = Pointwise(
        name=name,
        dtype=dtype,
        operation=operation,
        read_bytes=rows * width * read_bytes,
        written_bytes=rows * width * written_bytes,
        num_kernels={LOSS: 2, LOSS_BACKWARD: 3}.get(kind, 1),
    )
    return Case(operation=moved, row_width=width, variant=kind if kind == RMS_NORM else "")


def _measured_twice(cases: list[Case]) -> list[Case]:
    """Each case with one repetition, so that a single run shows how much medians vary."""
    return cases + [replace(case, repetition=1) for case in cases]
