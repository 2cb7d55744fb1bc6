"""Evaluate linear_attention.parquet and sparse_attention.parquet: kernels and modules of hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.kernels.table import KernelTable, need
from shapewright.pricing.kernels.hybrids import convolution_work, scan_work, sparse_work

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.tables.kernels.table import KernelGroup
    from shapewright.pricing.kernels.work import KernelWork

_GEMM_FORMATS = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
# Width of the residual stream and most selected tokens of the measured models. Source: their config.json.
_MODELS = {
    "DeepSeek-V3.2": (7168.0, 2048.0),
    "GLM-5": (6144.0, 2048.0),
    "GLM-5.2": (6144.0, 2048.0),
    "MiniMax-M3": (6144.0, 2048.0),  # 16 blocks of 128
    "DeepSeek-V4-Flash": (4096.0, 640.0),  # 512, and a window of 128
    "DeepSeek-V4-Pro": (7168.0, 1152.0),
}


def _linear(rows: Columns, group: KernelGroup) -> KernelWork:
    batch, seq_len = need(rows, "batch_size", "seq_len")
    if "conv" in group.words["kernel"]:
        channels, width = need(rows, "conv_channels", "d_conv")
        return convolution_work(group.rates, batch_size=batch, seq_len=seq_len, channels=channels, width=width)
    k_heads, k_dim, v_heads, v_dim = need(rows, "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim")
    return scan_work(
        group.device,
        group.rates,
        batch_size=batch,
        seq_len=seq_len,
        num_k_heads=k_heads,
        num_v_heads=v_heads,
        k_head_dim=k_dim,
        v_head_dim=v_dim,
    )


def _sparse(rows: Columns, group: KernelGroup) -> KernelWork:
    words, device, rates = group
    batch, query, context, heads = need(rows, "batch_size", "query_len", "context_len", "num_heads")
    if words["model"] not in _MODELS:
        raise MeasuredFileError(f"unknown model {words['model']!r}; known are {', '.join(_MODELS)}")
    for column in ("gemm_dtype", "kv_cache_dtype"):
        if words[column] and words[column] not in _GEMM_FORMATS:
            raise MeasuredFileError(f"unknown {column} {words[column]!r}; known are {', '.join(_GEMM_FORMATS)}")
    hidden, selected = _MODELS[words["model"]]
    return sparse_work(
        device,
        rates,
        batch_size=batch,
        query_len=query,
        context_len=context,
        num_heads=heads,
        compress_ratio=np.nan_to_num(rows.numbers["compress_ratio"], nan=1.0),
        hidden_size=hidden,
        selected=selected,
        is_module=words["phase"] != "kernel",
        gemm_dtype=_GEMM_FORMATS[words["gemm_dtype"] or "bf16"],
        cache_dtype=_GEMM_FORMATS[words["kv_cache_dtype"] or "bf16"],
    )


LINEAR = KernelTable(
    name="linear_attention",
    columns=Format(
        numbers={"batch_size": 1, "seq_len": 1},
        labels=("device", "library", "operation", "kernel", "phase"),
        positive=("latency_s",),
        optional=("d_conv", "conv_channels", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim"),
    ),
    labels=("library", "kernel", "phase", "operation"),
    build=_linear,
    axes=(
        ("channels", "sequences", "tokens of a sequence"),
        ("channels", "tokens", "tokens of a sequence"),
        ("heads", "sequences", "tokens of a sequence"),
        ("heads", "sequences x heads", "tokens of a sequence"),
    ),
    layout=("num_k_heads", "num_v_heads", "conv_channels"),
    dtype="",
)
SPARSE = KernelTable(
    name="sparse_attention",
    columns=Format(
        numbers={"batch_size": 1, "query_len": 1, "context_len": 1, "num_heads": 1},
        labels=(
            "device", "library", "family", "operation", "phase", "kernel", "model", "dtype", "kv_cache_dtype",
            "gemm_dtype", "score_mode",
        ),
        positive=("latency_s",),
        optional=("compress_ratio",),
    ),
    labels=("library", "operation", "phase", "model", "kv_cache_dtype", "gemm_dtype", "kernel", "score_mode", "dtype"),
    build=_sparse,
    axes=(
        ("heads", "sequences", "keys"),
        ("heads", "sequences x heads", "keys"),
        ("heads", "sequences", "queries", "keys"),
        ("heads", "tokens", "keys"),
    ),
    layout=("num_heads",),
    part="operation",
)  # fmt: skip
