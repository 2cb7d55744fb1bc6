"""Small measured tables whose answers are known, for tests of judging."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.evaluate import Accuracy, evaluate_folder
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.price import price_gemm

pa = pytest.importorskip("pyarrow", reason="parquet needs the fit extra")
pq = pytest.importorskip("pyarrow.parquet", reason="parquet needs the fit extra")

H100 = load_device("h100-sxm-80gb")
GEMM_SHAPES = [(1, 4096, 4096), (64, 8192, 1024), (2048, 4096, 4096), (4096, 11008, 4096), (8192, 8192, 8192)]


def write_parquet(path: Path, columns: Mapping[str, Any]) -> Path:
    """Write a table."""
    pq.write_table(pa.table(dict(columns)), path)
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def gemm_columns(latency_s: Any = None, **others: Any) -> dict[str, Any]:
    """Rows of gemm.parquet; as fast as predicted if no times are given."""
    m, n, k = (list(letters) for letters in zip(*GEMM_SHAPES, strict=True))
    if latency_s is None:
        dims = {"m": np.array(m), "n": np.array(n), "k": np.array(k)}
        price = price_gemm(Gemm(name="x", dtype="bf16", **dims), H100, load_record("gemm", H100), library="lib 1")
        latency_s = price.time_s
    words = {"device": "h100_sxm", "library": "lib 1", "kernel": "k", "dtype": "bf16"}
    columns = {"m": m, "n": n, "k": k, "latency_s": latency_s, **{key: [word] * len(m) for key, word in words.items()}}
    return columns | others


def only_row(folder: Path, **keywords: Any) -> Accuracy:
    """Judge a folder that gives one row."""
    rows = evaluate_folder(folder, **keywords).rows
    assert len(rows) == 1
    return rows[0]


def paper_layer(**changes: Any) -> dict[str, Any]:
    """A row of paper_layers.csv, empty but for its shape."""
    shape = {"num_heads": 20, "hidden_size": 2560, "micro_batch_size": 4, "seq_len": 2048, "tensor_parallel": 1}
    empty = dict.fromkeys(
        [f"{name}_tflops" for name in ("qkv", "score", "aov", "proj", "mlp_up", "mlp_down")]
        + [f"{name}_{unit}" for name in ("attention", "mlp", "layer") for unit in ("s", "tflops")],
        "",
    )
    return {"log": "l", "gpu": "a100", "flash_attention": 0, **shape, **empty, **changes}


# A row of published_training_throughput.csv, complete but for what was measured.
PUBLISHED_ROW = {
    "source": "lab report", "model": "m", "gpu": "H100-SXM-80GB", "dtype": "bf16", "fsdp_zero": "FSDP",
    "activation_checkpointing": "full", "flash_attention": 1, "num_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 14336, "gated_mlp": 1, "moe": 0,
    "vocab_size": 128256, "seq_len": 4096, "micro_batch": 1, "global_batch": 32, "num_gpus": 16, "tp": 2, "pp": 1,
    "vp": "", "cp": "", "ep": "", "sequence_parallel": "", "iter_time_s": "",
    "tflops_per_gpu": "",
}  # fmt: skip
