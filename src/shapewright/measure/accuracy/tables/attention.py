"""Evaluate tables of attention.

- attention_prefill.parquet, attention_decode.parquet: fused causal attention of serving libraries.
- attention_training.csv, attention_encoder.parquet, mla.parquet: kernels of training, encoders and MLA.
- linear_attention.parquet, sparse_attention.parquet: kernels and modules of hybrid models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.accuracy.chunk import Chunk, prices_of, split_chunks
from shapewright.measure.accuracy.context import read_stored_format
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.kernels import KernelTable, need
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.kernels.attention import encoder_work, latent_attention_work, latent_bmm_work, training_work
from shapewright.pricing.kernels.hybrids import convolution_work, scan_work, sparse_work
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context, ElementFormat
    from shapewright.measure.accuracy.tables.kernels import KernelGroup
    from shapewright.pricing.kernels.work import KernelWork

_SIZES = {"batch_size": 1, "query_len": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 1, "window_size": 0}
_LABELS = ("device", "library", "kernel", "dtype", "kv_cache_dtype")
PREFILL_FORMAT = Format(numbers=_SIZES, labels=_LABELS, positive=("latency_s",))
DECODE_FORMAT = Format(numbers={**_SIZES, "context_len": 1}, labels=_LABELS, positive=("latency_s",))


def price(columns: Columns, context: Context, *, table: str, keys: str) -> Iterator[Chunk]:
    """Price causal attention over whole sequences, or of one new token with a cache; parts are kernels.

    Args:
        keys: Column of the number of keys.
    """

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        sizes = rows.numbers
        form, cache = context.read_format(words[1], device), _read_cache(words[3], words[1], context)
        dtype = form.dtype
        operation = Attention(
            name="attention",
            dtype=dtype,
            kv_cache_dtype=cache.dtype,
            batch_size=sizes["batch_size"],
            query_len=sizes["query_len"],
            kv_len=sizes[keys],
            num_heads=sizes["num_heads"],
            num_kv_heads=sizes["num_kv_heads"],
            head_dim=sizes["head_dim"],
            v_head_dim=sizes["head_dim"],
            window_size=sizes["window_size"],
            writes_cache=True,  # these libraries time the copy into the cache with the call
        )
        record = context.record("attention", device)
        context.note_library("attention", words[2], record)
        price = price_attention(operation, device, record, hot_cache=True, library=words[2], kernel=words[4])
        floor = roofline_s(operation.executed_flops, operation.num_bytes, device, dtype)
        return cache.widen(form.widen(prices_of(price, floor)))

    wrong = columns.numbers["num_heads"] % columns.numbers["num_kv_heads"] != 0.0
    columns = context.skip_rows(columns, wrong, "num_heads is not a multiple of num_kv_heads")
    by = ("device", "dtype", "library", "kv_cache_dtype", "kernel")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        form, cache = context.read_format(words[1], device), _read_cache(words[3], words[1], context)
        stored = get_dtype(cache.dtype)
        dtype = f"{words[1]}+{stored.name}kv" if stored.bits < get_dtype(form.dtype).bits else words[1]
        names = (device.name, dtype, words[2])
        yield from split_chunks(table, names, rows.labels["kernel"], rows.numbers["latency_s"], prices)


def _read_cache(word: str, arithmetic: str, context: Context) -> ElementFormat:
    """Return the element format of the cache: that of the GEMMs if a library names it ``auto``, or not at all."""
    return context.read_stored_format(arithmetic if word.strip().casefold() in ("", "auto") else word)


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
    masks, direction = rows.labels["mask"].values, words["pass"]
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
    suffix="csv",
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
KERNEL_TABLES = (TRAINING, ENCODER, LATENT, LINEAR, SPARSE)
