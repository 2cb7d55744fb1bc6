"""Evaluation of tables of kernels: rows with the predicted times have no error, unknown words are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from measured_tables import write_csv, write_parquet
from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.accuracy.tables.registry import TABLES

WORDS: dict[str, dict[str, Any]] = {
    "attention_training": {
        "device": "h200_sxm", "backend": "cudnn", "library": "cudnn 9.19.1", "dtype": "bf16", "mask": "causal",
        "window_size": 0, "batch_size": 1, "query_len": 4096, "kv_len": 4096, "num_heads": 64, "num_kv_heads": 8,
        "head_dim_qk": 128, "head_dim_v": 128, "pass": "backward", "deterministic": False,
    },
    "norms": {
        "device": "h200_sxm", "backend": "cudnn", "operation": "rms_norm", "dtype": "bf16", "rows": 8192,
        "columns": 4096, "pass": "forward",
    },
    "fused_ops": {
        "device": "h100_sxm", "kernel": "tvd", "provider": "liger", "pass": "full", "library": "liger 0.7.0",
        "dtype": "fp32", "x_name": "vocab_size", "batch_size": 8, "seq_len": 2048, "tokens": "", "hidden_size": "",
        "intermediate_size": "", "vocab_size": 65536, "num_heads": "", "num_kv_heads": "", "num_experts": "",
        "topk": "", "channels_in": "", "kernel_size": "",
    },
}  # fmt: skip
PARQUET: dict[str, dict[str, Any]] = {
    "attention_encoder": {
        "device": "h100_sxm", "library": "vllm 0.24.0", "kernel": "vllm_vit_flash_attn_fa3", "dtype": "bf16",
        "batch_size": 4, "seq_len": 1024, "num_heads": 16, "head_dim": 80,
    },
    "mla": {
        "device": "h200_sxm", "library": "trtllm 1.3.0rc20", "operation": "kernel", "phase": "generation",
        "kernel": "default", "dtype": "bf16", "kv_cache_dtype": "bf16", "gemm_dtype": None, "num_heads": 16,
        "batch_size": 8, "query_len": 1, "context_len": 4096, "num_tokens": None, "head_dim_qk": 576,
    },
    "quantize": {
        "device": "l40s", "library": "vllm 0.24.0", "operation": "static_quantize", "scale": "per_tensor",
        "dtype": "fp8", "rows": 4096, "columns": 8192,
    },
    "linear_attention": {
        "device": "h100_sxm", "library": "sglang 0.5.14", "operation": "gdn", "kernel": "chunk_gated_delta_rule",
        "phase": "context", "batch_size": 4, "seq_len": 4096, "d_conv": 4, "conv_channels": None, "num_k_heads": 16,
        "head_k_dim": 128, "num_v_heads": 32, "head_v_dim": 128,
    },
    "sparse_attention": {
        "device": "b200_sxm", "library": "vllm 0.24.0", "family": "csa", "operation": "dsv4_csa_context",
        "phase": "context", "kernel": "FLASHMLA_SPARSE_DSV4", "model": "DeepSeek-V4-Flash", "dtype": "bf16",
        "kv_cache_dtype": "fp8", "gemm_dtype": "fp8_block", "score_mode": None, "batch_size": 2, "query_len": 2048,
        "context_len": 2048, "num_heads": 32, "compress_ratio": 4,
    },
    "collectives_more": {
        "device": "h100_sxm", "library": "vllm 0.24.0", "op_name": "all_reduce", "kernel": "vLLM_custom_graph",
        "cuda_graph": True, "num_gpus": 4, "message_bytes": 65536,
    },
    "expert_exchange": {
        "device": "h100_sxm", "library": "sglang 0.5.12", "mode": "low_latency", "operation": "dispatch",
        "num_nodes": 1, "num_gpus": 8, "hidden_size": 7168, "topk": 8, "num_experts": 256, "num_tokens": 64,
        "num_sms": None,
    },
}  # fmt: skip


def write(folder: Path, name: str, latency_s: float, **changes: Any) -> None:
    """Write one row of a table."""
    if name in WORDS:
        write_csv(folder / f"{name}.csv", [WORDS[name] | {"latency_s": latency_s} | changes])
    else:
        row = PARQUET[name] | {"latency_s": latency_s} | changes
        write_parquet(folder / f"{name}.parquet", {key: [value] for key, value in row.items()})


@pytest.mark.parametrize("name", [*WORDS, *PARQUET])
def test_predicted_times_have_no_error(tmp_path: Path, name: str) -> None:
    """The error of a first row tells its prediction; a row with that time has none, and lies inside its interval."""
    write(tmp_path, name, 1.0)
    (first,) = evaluate_folder(tmp_path).rows
    write(tmp_path, name, 1.0 - first.mape)
    (row,) = evaluate_folder(tmp_path).rows

    assert (row.table, row.rows, row.coverage_90) == (name, 1, 1.0)
    assert row.mape == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("attention_training", {"mask": "prefix"}, "unknown mask 'prefix'; known are none and causal"),
        ("attention_training", {"pass": "both"}, "no measured kernel of attention_training resembles"),
        ("norms", {"pass": "sideways"}, "no measured kernel of norms resembles cudnn sideways"),
        ("fused_ops", {"kernel": "magic"}, "no measured kernel of fused_ops resembles liger magic"),
        ("mla", {"batch_size": None}, "batch_size is missing in rows that need it"),
        ("quantize", {"operation": "guess"}, "no measured kernel of quantize resembles"),
        ("linear_attention", {"num_v_heads": None}, "num_v_heads is missing in rows that need it"),
        ("collectives_more", {"op_name": "all_gather"}, "unknown op_name 'all_gather'; serving libraries' own"),
        ("expert_exchange", {"mode": "guess"}, "no measured kernel of expert_exchange resembles"),
        ("expert_exchange", {"mode": "high_throughput", "num_sms": None}, "num_sms is missing in rows that need it"),
        ("sparse_attention", {"model": "Guess-1"}, "unknown model 'Guess-1'; known are DeepSeek-V3.2, "),
    ],
)
def test_rows_without_a_price_are_counted(tmp_path: Path, name: str, change: dict[str, Any], reason: str) -> None:
    """A row that cannot be priced is skipped with the reason."""
    write(tmp_path, name, 1e-3, **change)

    with pytest.raises(MeasuredFileError, match=f"nothing to evaluate .*{reason}"):
        evaluate_folder(tmp_path)


def test_a_new_version_is_noted(tmp_path: Path) -> None:
    """Another library than the measured ones prices the row, and a note says so."""
    write(tmp_path, "quantize", 1e-4, library="newlib 1.0")
    evaluation = evaluate_folder(tmp_path)

    assert evaluation.rows[0].rows == 1
    assert any("quantize: newlib 1.0 static_quantize per_tensor fp8 is priced as" in note for note in evaluation.notes)


def test_every_kernel_table_is_registered() -> None:
    """The tables of kernels are known by the names of their files."""
    assert {*WORDS, *PARQUET} <= set(TABLES)
