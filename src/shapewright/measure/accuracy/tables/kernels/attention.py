"""Evaluate attention_training.csv, attention_encoder.parquet and mla.parquet: kernels of training, encoders and MLA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.context import read_stored_format
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.kernels.table import KernelTable, need
from shapewright.pricing.kernels.attention import encoder_work, latent_attention_work, latent_bmm_work, training_work

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.tables.kernels.table import KernelGroup
    from shapewright.pricing.kernels.work import KernelWork

# Format that a serving library names -> format of the GEMMs; a scale per block multiplies in 8 bits.
_GEMM_FORMATS = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
# Contracted and output width of a head's GEMM with its latent weight.
_LATENT_WEIGHTS = {"bmm_pre": (128.0, 512.0), "bmm_post": (512.0, 128.0)}
_ABSORBED_WIDTH = 576.0
# Generation of Nvidia's architectures whose libraries multiply in 8 bits with an 8-bit cache, and from which sglang
# expands latents in prefill.
_BLACKWELL_GENERATION = 4


def _encoder(rows: Columns, group: KernelGroup) -> KernelWork:
    batch, seq_len, heads, head_dim = need(rows, "batch_size", "seq_len", "num_heads", "head_dim")
    return encoder_work(
        group.device, group.rates, batch_size=batch, seq_len=seq_len, num_heads=heads, head_dim=head_dim
    )


def _latent(rows: Columns, group: KernelGroup) -> KernelWork:
    words, device, rates = group
    operation, phase = words["operation"], words["phase"]
    (heads,) = need(rows, "num_heads")
    if operation in _LATENT_WEIGHTS:
        (tokens,) = need(rows, "num_tokens")
        k, n = _LATENT_WEIGHTS[operation]
        dtype = _gemm_format(words["dtype"])
        return latent_bmm_work(device, rates, num_heads=heads, num_tokens=tokens, k=k, n=n, dtype=dtype)
    if operation not in ("kernel", "module") or phase not in ("context", "generation"):
        raise MeasuredFileError(
            f"unknown operation {operation!r} in phase {phase!r}; known are kernel and module in context and "
            f"generation, and bmm_pre and bmm_post"
        )
    batch, query, context = need(rows, "batch_size", "query_len", "context_len")
    is_blackwell = (device.architecture_facts.generation or 0) >= _BLACKWELL_GENERATION
    is_narrow = _gemm_format(words["dtype"]) == "fp8" or (words["kv_cache_dtype"] == "fp8" and is_blackwell)
    widths = rows.numbers["head_dim_qk"]
    absorbs_context = words["library"].startswith("sglang") and "wideep" not in words["library"] and not is_blackwell
    is_absorbed = bool((widths == _ABSORBED_WIDTH).any()) or phase == "generation" or absorbs_context
    return latent_attention_work(
        device,
        rates,
        batch_size=batch,
        query_len=query,
        context_len=context,
        num_heads=heads,
        is_decode=phase == "generation",
        is_absorbed=is_absorbed,
        dtype="fp8" if is_narrow else "bf16",
        cache_dtype=_gemm_format(words["kv_cache_dtype"] or "bf16"),
        projections=_gemm_format(words["gemm_dtype"] or "bf16") if operation == "module" else "",
    )


def _gemm_format(word: str) -> str:
    if word not in _GEMM_FORMATS:
        raise MeasuredFileError(f"unknown element format {word!r}; known are {', '.join(_GEMM_FORMATS)}")
    return _GEMM_FORMATS[word]


def _training(rows: Columns, group: KernelGroup) -> KernelWork:
    words, device, rates = group
    mask, direction = rows.labels["mask"], words["pass"]
    masks = np.array([mask[row] for row in range(rows.num_rows)])
    if unknown := sorted({*masks.tolist()} - {"none", "causal"}):
        raise MeasuredFileError(f"unknown mask {unknown[0]!r}; known are none and causal")
    if direction not in ("forward", "backward"):
        raise MeasuredFileError(f"unknown pass {direction!r}; known are forward and backward")
    sizes = need(
        rows,
        "batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v", "window_size",
    )  # fmt: skip
    batch, query, keys, heads, kv_heads, head_dim, v_head_dim, window = sizes
    return training_work(
        device,
        rates,
        batch_size=batch,
        query_len=query,
        kv_len=keys,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        window_size=window,
        is_causal=(masks == "causal").astype(float),
        is_backward=direction == "backward",
        dtype=read_stored_format(words["dtype"]).dtype,
    )


TRAINING = KernelTable(
    name="attention_training",
    columns=Format(
        numbers={
            "batch_size": 1, "query_len": 1, "kv_len": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim_qk": 1,
            "head_dim_v": 1, "window_size": 0, "deterministic": 0,
        },
        labels=("device", "backend", "library", "dtype", "mask", "pass"),
        positive=("latency_s",),
    ),
    labels=("library", "pass", "dtype", "deterministic"),
    build=_training,
    axes=(("keys",), ("keys", "mask"), ("queries x heads", "mask")),
    layout=("query_len", "num_heads", "head_dim_qk", "window_size", "batch_size"),
    part="pass",
    sizes_as_labels=("deterministic",),
    shapes_recur=True,
)  # fmt: skip
ENCODER = KernelTable(
    name="attention_encoder",
    columns=Format(
        numbers={"batch_size": 1, "seq_len": 1, "num_heads": 1, "head_dim": 1},
        labels=("device", "library", "kernel", "dtype"),
        positive=("latency_s",),
    ),
    labels=("library", "head_dim", "kernel", "dtype"),
    build=_encoder,
    axes=(("heads", "sequences", "keys"), ("heads", "sequences x heads", "keys")),
    layout=("num_heads",),
    sizes_as_labels=("head_dim",),
)
LATENT = KernelTable(
    name="mla",
    columns=Format(
        numbers={"num_heads": 1},
        labels=("device", "library", "operation", "phase", "kernel", "dtype", "kv_cache_dtype", "gemm_dtype"),
        positive=("latency_s",),
        optional=("batch_size", "query_len", "context_len", "num_tokens", "head_dim_qk"),
    ),
    labels=("library", "operation", "phase", "kernel", "dtype", "kv_cache_dtype", "gemm_dtype"),
    build=_latent,
    axes=(
        ("heads", "sequences", "keys"),
        ("heads", "sequences x heads", "keys"),
        ("heads", "tokens"),
        ("heads", "tokens x heads"),
    ),
    layout=("num_heads",),
    part="operation",
)
