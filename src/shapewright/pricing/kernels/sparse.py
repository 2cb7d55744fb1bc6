"""Price of the kernels of sparse attention, by those measured of GLM-5 (DeepSeek's form) and of DeepSeek-V4.

The measured attention has 64 query heads, to which fewer are padded; that of compressed attention is DeepSeek-V4's, to
a window of 128 tokens and to one entry for 128 tokens. Scores of a prompt are those of GLM-5, whose
indexer has 32 heads. Scores of a few new tokens against a paged cache are those of DeepSeek-V4, whose indexer has 64
heads and one key for 4 tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.kernels.hybrids import sparse_work
from shapewright.pricing.kernels.price import LABEL_SEPARATOR, KernelMatch, kernel_rates, price_kernel
from shapewright.pricing.price import Price, single_price

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.sparse import SparseAttention
    from shapewright.pricing.calibration.records import CalibrationRecord

_OPERATIONS = {"logits": "glm5_mqa_logits", "selection": "glm5_topk", "attention": "glm5_dsa_attn"}
_PAGED_LOGITS, _PAGED_RATIO, _PAGED_INDEX_HEADS = "dsv4_paged_mqa_logits", 4.0, 64.0
_COMPRESSED = "dsv4_hca_attn"
_COMPRESSED_RATIO, _COMPRESSED_WINDOW, _COMPRESSED_SELECTED = 128.0, 128.0, 640.0
"""Tokens of an entry and of the window of the measured attention to entries, and most keys that its work counts."""
_MOST_PAGED_TOKENS = 8.0  # new tokens of a sequence in decode, with those of speculation
# Top-k depends on the data; in a causal prompt the latest scores are mostly the best.
_SCORE_MODE = "top_last"
_MEASURED_HIDDEN_SIZE, _MEASURED_HEADS, _MEASURED_INDEX_HEADS = 6144.0, 64.0, 32.0
OTHER_MODEL_ERROR = 1.25
"""Error of another model's kernel and of data-dependent selection, as a factor: top-k of flat scores takes 1.1 to 2.7
times as long."""
_SIZES = ("batch_size", "query_len", "kv_len", "num_heads", "selected", "compress_ratio", "window")


def price_sparse_attentions(
    operations: Sequence[SparseAttention], device: Device, record: CalibrationRecord
) -> list[Price]:
    """Price many scalar calls, in their order."""
    return [single_price(price_sparse_attention(operation, device, record)) for operation in operations]


def price_sparse_attention(operation: SparseAttention, device: Device, record: CalibrationRecord) -> Price:
    """Price one kernel; its sizes may be arrays of one length.

    Args:
        record: A record of kind ``sparse_attention``.

    Raises:
        CalibrationError: no record has such a kernel.
    """
    arrays = np.broadcast_arrays(*(np.asarray(getattr(operation, name), dtype=float) for name in _SIZES))
    sizes: dict[str, Any] = {name: np.atleast_1d(array) for name, array in zip(_SIZES, arrays, strict=True)}
    is_attention = operation.part == "attention"
    is_paged = operation.part == "logits" and bool(np.all(sizes["query_len"] <= _MOST_PAGED_TOKENS))
    has_window = is_attention and bool(np.all(sizes["window"] > 0))
    wanted = _PAGED_LOGITS if is_paged else _COMPRESSED if has_window else _OPERATIONS[operation.part]
    record, name = _find_kernel(wanted, device, record)
    heads, selected = sizes["num_heads"], float(np.max(sizes["selected"]))
    ratio = np.full_like(heads, _PAGED_RATIO) if is_paged else sizes["compress_ratio"]
    context_len = ratio * sizes["kv_len"]
    if has_window:
        # The context with as many entries, beside the measured window, as the keys that a query reads.
        entries = np.maximum(sizes["selected"] - _COMPRESSED_WINDOW, 0.0)
        ratio, selected = np.full_like(heads, _COMPRESSED_RATIO), _COMPRESSED_SELECTED
        context_len = ratio * entries + sizes["query_len"]
    work = sparse_work(
        device,
        kernel_rates(device, record),
        batch_size=sizes["batch_size"],
        query_len=sizes["query_len"],
        context_len=context_len,
        num_heads=np.maximum(heads, _MEASURED_HEADS) if is_attention else np.full_like(heads, _MEASURED_HEADS),
        compress_ratio=ratio,
        hidden_size=_MEASURED_HIDDEN_SIZE,
        selected=selected,
        is_module=False,
        gemm_dtype="fp8",
        cache_dtype="fp8",
    )
    moved_s = np.atleast_1d(operation.num_bytes) / device.memory_bandwidth_bytes_per_s
    bounded = replace(work, roofline_s=moved_s + 0.0 * heads)
    price = price_kernel(bounded, device, record, KernelMatch(name, is_same=True))
    if operation.part == "logits":
        measured = _PAGED_INDEX_HEADS if is_paged else _MEASURED_INDEX_HEADS
        price = price.scaled(max(float(np.max(heads)) / measured, 1.0 if is_paged else 0.0))
    return replace(price.widened(OTHER_MODEL_ERROR), shared_error=np.zeros_like(price.time_s))


def _find_kernel(wanted: str, device: Device, own: CalibrationRecord) -> tuple[CalibrationRecord, str]:
    """Find the record and name of the kernel of an operation; a device without it borrows one."""
    record, lacking = own, []
    while True:
        for name in record.parameters["kernels"]:
            _, operation, phase, _, _, _, _, score_mode, _ = name.split(LABEL_SEPARATOR)
            if operation == wanted and phase == "kernel" and score_mode in ("", _SCORE_MODE):
                return record, name
        lacking.append(record.device)
        record = load_record(own.kind, device, without=tuple(lacking))
