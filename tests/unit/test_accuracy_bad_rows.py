"""Evaluation of folders with invalid rows, files or folders: what is skipped, and the reasons."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from measured_tables import PUBLISHED_ROW, gemm_columns, paper_layer, write_csv, write_parquet
from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.fit.loss_rows import read_own_losses


def test_bad_rows_are_counted_and_the_rest_evaluated(tmp_path: Path) -> None:
    """Rows with a negative time, a size of 0, no time, an unknown device or an unknown dtype are skipped."""
    columns = gemm_columns()
    bad = {key: list(values) * 2 for key, values in columns.items()}
    bad["latency_s"][5], bad["m"][6], bad["latency_s"][7] = -1.0, 0, None
    bad["device"][8], bad["dtype"][9] = "abacus", "fp3"
    write_parquet(tmp_path / "gemm.parquet", bad)
    evaluation = evaluate_folder(tmp_path)

    assert [row.rows for row in evaluation.rows] == [5]
    reasons = evaluation.skipped["gemm"]
    assert sum(reasons.values()) == 5
    for words in ("latency_s is not a number above 0", "m is not an integer of at least 1", "'abacus'", "'fp3'"):
        assert any(words in reason for reason in reasons), words


def test_rate_that_a_device_lacks_is_a_reason(tmp_path: Path) -> None:
    """bf16 rows of a device without bf16 GEMMs are counted with the reason, others are evaluated."""
    columns = gemm_columns(dtype=["fp16", "fp16", "fp16", "bf16", "bf16"], device=["v100"] * 5)
    write_parquet(tmp_path / "gemm.parquet", columns)
    evaluation = evaluate_folder(tmp_path)

    assert [row.rows for row in evaluation.rows] == [3]
    assert [(count, "no bf16 rate" in reason) for reason, count in evaluation.skipped["gemm"].items()] == [(2, True)]


def test_a_broken_file_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is named with its reason; alone it is an error."""
    (tmp_path / "moe.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(MeasuredFileError, match=r"moe\.parquet cannot be read as parquet"):
        evaluate_folder(tmp_path)
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    evaluation = evaluate_folder(tmp_path)

    assert [row.table for row in evaluation.rows] == ["gemm"]
    assert "cannot be read" in evaluation.unreadable["moe"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": None}, "gemm.parquet lacks column 'm'"),
        ({"m": ["a"] * 5}, "m is not an integer of at least 1 .such as 'a'."),
        ({"m": ["a" * 9000] * 5}, r"m is not an integer of at least 1 .such as 'a{35}\.\.\.\)"),
        ({"device": ["h" * 501] * 5}, r"column 'device' holds 'h{35}\.\.\. of 501 characters"),
        ({"m": [[1]] * 5}, "column 'm' holds"),
        ({"device": ["abacus"] * 5}, "no device file for 'abacus'"),
    ],
)
def test_empty_folder(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A file without its columns, with text for numbers, or with unknown devices only raises one error."""
    columns = {key: values for key, values in (gemm_columns() | change).items() if values is not None}
    write_parquet(tmp_path / "gemm.parquet", columns)

    with pytest.raises(MeasuredFileError, match=words):
        evaluate_folder(tmp_path)


def test_folders_without_files(tmp_path: Path) -> None:
    """A missing folder, an empty one, a missing table and an unknown one are errors."""
    with pytest.raises(MeasuredFileError, match="does not exist"):
        evaluate_folder(tmp_path / "nowhere")
    with pytest.raises(MeasuredFileError, match="no measured file"):
        evaluate_folder(tmp_path)
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    with pytest.raises(MeasuredFileError, match=r"has no moe\.parquet"):
        evaluate_folder(tmp_path, tables=["moe"])
    with pytest.raises(MeasuredFileError, match="did you mean 'gemm'"):
        evaluate_folder(tmp_path, tables=["gem"])
    with pytest.raises(MeasuredFileError, match="grouping 'colour' is not known"):
        evaluate_folder(tmp_path, by=["colour"])


def test_times_at_the_minimum_of_a_log_are_skipped(tmp_path: Path) -> None:
    """Two dozen layers of one log with the same 289 ms at every size are skipped; a different one is kept."""
    columns = [
        paper_layer(num_heads=1, hidden_size=128 * (1 + index), layer_s=0.2888, layer_tflops=2.0) for index in range(24)
    ]
    columns.append(paper_layer(num_heads=64, hidden_size=8192, layer_s=0.4, layer_tflops=50.0))
    write_csv(tmp_path / "paper_layers.csv", columns)
    evaluation = evaluate_folder(tmp_path)

    assert [row.rows for row in evaluation.rows if row.table == "paper_layers/layer"] == [1]
    assert (
        evaluation.skipped["paper_layers"][
            "layer_s is the minimum of its log at any size: a slow start in the slowest iteration"
        ]
        == 24
    )


def test_text_and_fractions_skip_their_rows_only(tmp_path: Path) -> None:
    """A csv cell with text or half a token skips its row, with a reason that names the column."""
    rows = [paper_layer(mlp_up_tflops=220.0) for _ in range(4)]
    rows[0]["hidden_size"], rows[1]["seq_len"], rows[2]["mlp_up_tflops"] = "wide", 2048.5, "n/a"
    write_csv(tmp_path / "paper_layers.csv", rows)
    evaluation = evaluate_folder(tmp_path)

    assert [row.rows for row in evaluation.rows] == [1]
    reasons = " ".join(evaluation.skipped["paper_layers"])
    for words in ("hidden_size is not an integer", "seq_len is not an integer", "mlp_up_tflops holds 'n/a'"):
        assert words in reasons


def test_impossible_expert_blocks_are_skipped(tmp_path: Path) -> None:
    """More chosen experts than there are, or more devices than experts, are counted; the other block is kept."""
    block = {
        "device": "h100_sxm", "library": "vllm 0.24.0", "kernel": "fused", "dtype": "bf16", "distribution": "balanced",
        "num_tokens": 64, "hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 1,
        "moe_ep_size": 1, "latency_s": 1e-3,
    }  # fmt: skip
    blocks = [block, {**block, "topk": 9}, {**block, "moe_ep_size": 16}]
    write_parquet(tmp_path / "moe.parquet", {name: [each[name] for each in blocks] for name in block})
    evaluation = evaluate_folder(tmp_path)

    assert [row.rows for row in evaluation.rows] == [1]
    assert evaluation.skipped["moe"] == {"topk or moe_ep_size is above num_experts": 2}


def test_published_rows_with_impossible_numbers_are_named(tmp_path: Path) -> None:
    """An infinite sequence and half a micro-batch are named with their value; the valid row is kept."""
    row = PUBLISHED_ROW | {"tokens_per_s_per_gpu": 8000.0}
    rows = [row, row | {"seq_len": "inf"}, row | {"micro_batch": 1.5}]
    write_csv(tmp_path / "published_training_throughput.csv", rows)
    evaluation = evaluate_folder(tmp_path)

    assert evaluation.rows[0].rows == 1
    assert evaluation.skipped["published_training_throughput"] == {
        "seq_len=inf is not an integer from 1 to 1e+09": 1,
        "micro_batch=1.5 is not an integer from 1 to 1e+09": 1,
    }


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    """A pipe with the name of a table is a broken file, not one to wait for."""
    os.mkfifo(tmp_path / "gemm.csv")

    with pytest.raises(MeasuredFileError, match=r"gemm\.csv cannot be read as csv .*not a regular file"):
        evaluate_folder(tmp_path)


@pytest.mark.parametrize("name", ["\ud800.csv", "a\0b.csv", "x" * 5000])
def test_names_that_are_no_paths(name: str) -> None:
    """Half of a surrogate pair, a zero byte and names that are too long are errors of the file, in words."""
    with pytest.raises(MeasuredFileError, match=r"cannot be read|does not exist"):
        read_own_losses(name, Counter())
