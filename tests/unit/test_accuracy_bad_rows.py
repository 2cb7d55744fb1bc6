"""Judging tables with rows, files and folders that cannot be judged: what is left out, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from measured_tables import PUBLISHED_ROW, gemm_columns, paper_layer, write_csv, write_parquet
from shapewright.accuracy import judge_folder
from shapewright.errors import MeasuredFileError


def test_bad_rows_are_counted_and_the_rest_judged(tmp_path: Path) -> None:
    """A negative time, a size of 0, a missing time, an unknown device and an unknown dtype leave their rows out."""
    columns = gemm_columns()
    bad = {key: list(values) * 2 for key, values in columns.items()}
    bad["latency_s"][5], bad["m"][6], bad["latency_s"][7] = -1.0, 0, None
    bad["device"][8], bad["dtype"][9] = "abacus", "fp3"
    write_parquet(tmp_path / "gemm.parquet", bad)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [5]
    reasons = judgement.skipped["gemm"]
    assert sum(reasons.values()) == 5
    for words in ("latency_s is not a number above 0", "m is not a whole number of at least 1", "'abacus'", "'fp3'"):
        assert any(words in reason for reason in reasons), words


def test_rate_that_a_device_lacks_is_a_reason(tmp_path: Path) -> None:
    """bf16 rows of a device without such products are counted with the reason, others judged."""
    columns = gemm_columns(dtype=["fp16", "fp16", "fp16", "bf16", "bf16"], device=["v100"] * 5)
    write_parquet(tmp_path / "gemm.parquet", columns)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [3]
    assert [(count, "no bf16 rate" in reason) for reason, count in judgement.skipped["gemm"].items()] == [(2, True)]


def test_a_broken_file_does_not_stop_the_others(tmp_path: Path) -> None:
    """It is named with its reason; alone it is an error."""
    (tmp_path / "moe.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(MeasuredFileError, match=r"moe\.parquet cannot be read as parquet"):
        judge_folder(tmp_path)
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    judgement = judge_folder(tmp_path)

    assert [row.table for row in judgement.rows] == ["gemm"]
    assert "cannot be read" in judgement.unreadable["moe"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"m": None}, "gemm.parquet lacks column m"),
        ({"m": ["a"] * 5}, "m is not a whole number of at least 1 .such as 'a'."),
        ({"m": [[1]] * 5}, "column 'm' holds"),
        ({"device": ["abacus"] * 5}, "no device file for 'abacus'"),
    ],
)
def test_nothing_to_judge(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """A file without its columns, with words for numbers, or of unknown devices only is one error that says so."""
    columns = {key: values for key, values in (gemm_columns() | change).items() if values is not None}
    write_parquet(tmp_path / "gemm.parquet", columns)

    with pytest.raises(MeasuredFileError, match=words):
        judge_folder(tmp_path)


def test_folders_without_files(tmp_path: Path) -> None:
    """A folder that is not there, an empty one, a table that is not there and an unknown one are errors."""
    with pytest.raises(MeasuredFileError, match="is not a folder"):
        judge_folder(tmp_path / "nowhere")
    with pytest.raises(MeasuredFileError, match="no measured file"):
        judge_folder(tmp_path)
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    with pytest.raises(MeasuredFileError, match=r"has no moe\.parquet"):
        judge_folder(tmp_path, tables=["moe"])
    with pytest.raises(MeasuredFileError, match="did you mean 'gemm'"):
        judge_folder(tmp_path, tables=["gem"])
    with pytest.raises(MeasuredFileError, match="--by 'colour' is not known"):
        judge_folder(tmp_path, by=["colour"])


def test_times_stuck_at_a_floor_are_left_out(tmp_path: Path) -> None:
    """Two dozen layers of one log that take the same 289 ms at every size say nothing of their size; one apart does."""
    columns = [
        paper_layer(num_heads=1, hidden_size=128 * (1 + index), layer_s=0.2888, layer_tflops=2.0) for index in range(24)
    ]
    columns.append(paper_layer(num_heads=64, hidden_size=8192, layer_s=0.4, layer_tflops=50.0))
    write_csv(tmp_path / "paper_layers.csv", columns)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows if row.table == "paper_layers/layer"] == [1]
    assert (
        judgement.skipped["paper_layers"][
            "layer_s is the floor of its log, whatever the size: a slow start in the slowest iteration"
        ]
        == 24
    )


def test_words_and_fractions_among_numbers_cost_their_rows_alone(tmp_path: Path) -> None:
    """A csv cell with a word, or half a token, leaves its row out under a reason that names the column."""
    rows = [paper_layer(mlp_up_tflops=220.0) for _ in range(4)]
    rows[0]["hidden_size"], rows[1]["seq_len"], rows[2]["mlp_up_tflops"] = "wide", 2048.5, "n/a"
    write_csv(tmp_path / "paper_layers.csv", rows)
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [1]
    reasons = " ".join(judgement.skipped["paper_layers"])
    for words in ("hidden_size is not a whole number", "seq_len is not a whole number", "mlp_up_tflops holds 'n/a'"):
        assert words in reasons


def test_expert_blocks_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    """More chosen experts than there are, or more devices than experts, are counted; the other block is judged."""
    block = {
        "device": "h100_sxm", "library": "vllm 0.24.0", "kernel": "fused", "dtype": "bf16", "distribution": "balanced",
        "num_tokens": 64, "hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8, "moe_tp_size": 1,
        "moe_ep_size": 1, "latency_s": 1e-3,
    }  # fmt: skip
    blocks = [block, {**block, "topk": 9}, {**block, "moe_ep_size": 16}]
    write_parquet(tmp_path / "moe.parquet", {name: [each[name] for each in blocks] for name in block})
    judgement = judge_folder(tmp_path)

    assert [row.rows for row in judgement.rows] == [1]
    assert judgement.skipped["moe"] == {"topk or moe_ep_size is above num_experts": 2}


def test_published_rows_with_impossible_numbers_are_named(tmp_path: Path) -> None:
    """An endless sequence and half a micro-batch are named with their value; the whole row is judged."""
    row = PUBLISHED_ROW | {"tokens_per_s_per_gpu": 8000.0}
    rows = [row, row | {"seq_len": "inf"}, row | {"micro_batch": 1.5}]
    write_csv(tmp_path / "published_training_throughput.csv", rows)
    judgement = judge_folder(tmp_path)

    assert judgement.rows[0].rows == 1
    assert judgement.skipped["published_training_throughput"] == {
        "seq_len=inf is no whole number from 1 to 1e+09": 1,
        "micro_batch=1.5 is no whole number from 1 to 1e+09": 1,
    }
