"""Evaluation of each measured table: rows with the predicted times have no error."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from measured_tables import H100, PUBLISHED_ROW, only_row, paper_layer, write_csv, write_parquet
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.accuracy.tables.gemm import section_of
from shapewright.measure.accuracy.tables.moe import _SIZES as MOE_SIZES
from shapewright.measure.accuracy.tables.pointwise import find_pointwise_launch, with_launch
from shapewright.prediction.build import build_scenario
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import FP32_GEMM, FP32_POINTWISE, load_record
from shapewright.pricing.collectives import price_collective
from shapewright.pricing.experts.price import read_idle_row_share
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.pointwise import price_pointwise


def test_attention_decode(tmp_path: Path) -> None:
    """Rows timed as the package prices fused attention with a cache write have no error; a narrow cache is named."""
    context = np.array([128, 4096, 65536])
    operation = Attention(
        name="x",
        batch_size=8,
        query_len=1,
        kv_len=context,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        kv_cache_dtype="fp8",
        writes_cache=True,
    )
    price = price_attention(operation, H100, load_record("attention", H100), hot_cache=True)
    same = {"batch_size": 8, "query_len": 1, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window_size": 0}
    words = {"device": "h100_sxm", "library": "v", "kernel": "k", "dtype": "bf16", "kv_cache_dtype": "fp8"}
    columns = {key: [value] * 3 for key, value in (same | words).items()}
    write_parquet(tmp_path / "attention_decode.parquet", columns | {"context_len": context, "latency_s": price.time_s})
    row = only_row(tmp_path)

    assert (row.table, row.dtype) == ("attention_decode", "bf16+fp8kv")
    assert row.mape == pytest.approx(0.0, abs=1e-12)


def test_collectives(tmp_path: Path) -> None:
    """Rows with the predicted times have no error; unknown operations are counted."""
    message = np.array([1e4, 1e6, 1e8])
    operation = Collective(
        name="x", op_name="all_reduce", axis="tensor", message_bytes=message, num_ranks=8, ranks_per_node=8
    )
    price = price_collective(operation, H100, load_record("collectives", H100))
    columns = {
        "op_name": ["all_reduce"] * 3 + ["gossip"],
        "num_gpus": [8] * 4,
        "device": ["h100_sxm"] * 4,
        "library": ["nccl"] * 4,
        "message_bytes": [*message, 1e4],
        "latency_s": [*np.asarray(price.time_s), 1.0],
    }
    write_parquet(tmp_path / "collectives.parquet", columns)
    evaluation = evaluate_folder(tmp_path, by=("part",))

    assert [(row.part, row.rows) for row in evaluation.rows] == [("all_reduce x8", 3)]
    assert evaluation.rows[0].mape == pytest.approx(0.0, abs=1e-12)
    assert "unknown op_name 'gossip'" in next(iter(evaluation.skipped["collectives"]))


def test_pointwise_bytes(tmp_path: Path) -> None:
    """A gated activation of f = 1000 over t = 2 reads 2 x 500 and writes 500 elements a token."""
    tokens = 4096
    device = load_device("a100-sxm-80gb")
    operation = Pointwise(
        name="x", operation="activation", read_bytes=2.0 * tokens * 1000, written_bytes=2.0 * tokens * 500
    )
    price = price_pointwise(operation, device, load_record("pointwise", device))
    row = {"device": "a100_sxm", "library": "v", "model": "m", "operation": "mlp_act", "dtype": "fp16", "gated": True}
    row |= {"num_tokens": tokens, "hidden_size": 256, "intermediate_size": 1000, "num_heads": 2, "num_kv_heads": 1}
    row |= {"tensor_parallel": 2, "latency_s": price.time_s}
    write_parquet(tmp_path / "pointwise.parquet", {key: [value] for key, value in row.items()})

    assert only_row(tmp_path).mape == pytest.approx(0.0, abs=1e-12)


def test_experts_under_sharding(tmp_path: Path) -> None:
    """Two tensor shards halve the inner width; four devices share experts and rows, and clear those of the others."""
    shared = {"num_tokens": 512, "hidden_size": 2048, "inter_size": 1024, "topk": 8, "num_experts": 32}
    shared |= {"moe_tp_size": 2, "moe_ep_size": 4}
    alone = {**shared, "num_tokens": 128, "inter_size": 512, "num_experts": 8, "moe_tp_size": 1, "moe_ep_size": 1}
    words = {"device": "h100_sxm", "library": "v", "kernel": "k", "dtype": "bf16", "distribution": "balanced"}
    found_s = []
    for row in (shared, alone):
        assert set(row) == set(MOE_SIZES)
        columns = {key: [value] for key, value in (row | words | {"latency_s": 1e-3}).items()}
        write_parquet(tmp_path / "moe.parquet", columns)
        found_s.append(1e-3 * math.exp(only_row(tmp_path).bias))
    # 512 x 8 rows less a quarter; gate and up (2 x 512), activation (512) and output (2048) of each, in 2 bytes; what
    # products wrote is read again.
    idle_bytes = 3072 * (2 * 2 * 512 + 512 + 2 * 2048) * 2
    idle_s = idle_bytes / H100.memory_bandwidth_bytes_per_s * read_idle_row_share(load_record("moe", H100), "bf16")

    assert found_s[0] - found_s[1] == pytest.approx(idle_s)


def test_experts_of_a_skewed_router(tmp_path: Path) -> None:
    """A power law makes the busiest of eight devices slower than even rows do, for the same shape."""
    row = {"num_tokens": 8192, "hidden_size": 4096, "inter_size": 14336, "topk": 2, "num_experts": 8}
    row |= {"moe_tp_size": 1, "moe_ep_size": 8, "latency_s": 1e-3}
    words = {"device": "h100_sxm", "library": "v", "kernel": "k", "dtype": "bf16"}
    columns = {key: [value] * 2 for key, value in (row | words).items()}
    write_parquet(tmp_path / "moe.parquet", columns | {"distribution": ["balanced", "power_law_1.2"]})
    bias = {found.part: found.bias for found in evaluate_folder(tmp_path, by=["part"]).rows}

    assert bias["power_law_1.2"] > bias["balanced"] + math.log(1.5)


def test_paper_sweeps_add_the_collector_s_cost(tmp_path: Path) -> None:
    """A tiny GEMM of the paper's A100 is priced with the time of one synchronization added, which is noted."""
    device = load_device("a100-sxm-40gb")
    record = load_record("gemm", device)
    plain = price_gemm(Gemm(name="x", dtype="fp16", layout="NN", m=64, n=64, k=64), device, record)
    tflops = 2.0 * 64**3 / plain.time_s / 1e12
    row = {"sweep": "mm", "gpu": "a100", "batch": 1, "m": 64, "n": 64, "k": 64, "tflops": tflops}
    write_csv(tmp_path / "paper_gemm.csv", [row])
    evaluation = evaluate_folder(tmp_path)

    assert evaluation.rows[0].bias > math.log(2.0)
    assert any("synchronization" in note for note in evaluation.notes)


def test_paper_layers(tmp_path: Path) -> None:
    """The paper's own 2.7B layer is within 12 %; placeholders and layers that ran unsharded are skipped."""
    rows = [
        paper_layer(layer_s=0.0104, layer_tflops=140.7, mlp_up_tflops=220.0),
        paper_layer(layer_s=0.0104, layer_tflops=1.0),
        paper_layer(layer_s=0.0104, layer_tflops=70.0, tensor_parallel=2),
    ]
    write_csv(tmp_path / "paper_layers.csv", rows)
    evaluation = evaluate_folder(tmp_path)
    found = {row.table: row for row in evaluation.rows}

    assert {name: row.rows for name, row in found.items()} == {"paper_layers/mlp_up": 1, "paper_layers/layer": 1}
    assert found["paper_layers/layer"].mape < 0.12
    assert sum(evaluation.skipped["paper_layers"].values()) == 2


def test_rows_that_two_logs_hold_are_counted_once(tmp_path: Path) -> None:
    """A copy in another log is skipped; another time of the same layer, and one log's own repetition, are not."""
    measured = {"layer_s": 0.0104, "layer_tflops": 140.7, "qkv_tflops": 230.0}
    rows = [
        paper_layer(log="one", **measured),
        paper_layer(log="one", **measured),
        paper_layer(log="two", **measured),
        paper_layer(log="two", **(measured | {"layer_s": 0.0105})),
    ]
    write_csv(tmp_path / "paper_layers.csv", rows)
    evaluation = evaluate_folder(tmp_path)
    found = {row.table: row.rows for row in evaluation.rows}

    assert found == {"paper_layers/qkv": 3, "paper_layers/layer": 3}
    assert list(evaluation.skipped["paper_layers"].values()) == [1, 1]


def test_published_training(tmp_path: Path) -> None:
    """Tokens per second as predicted have no error; rows without a field, and unknown experts, are counted."""
    prediction = build_scenario(
        "llama-3-8b",
        "h100-sxm-80gb",
        overrides={"fused_qkv": True, "fused_gate_up": True},
        workload={
            "micro_batch_size": 1, "global_batch_size": 32, "seq_len": 4096, "dtype": "bf16", "recompute": "full",
        },
        layout={"tensor_parallel": 2, "data_parallel": 8, "zero_stage": 3},
        software="unnamed",
    ).predict()  # fmt: skip
    full = PUBLISHED_ROW | {"tokens_per_s_per_gpu": prediction.tokens_per_s_per_device}
    tokens = 32 * 4096
    timed = PUBLISHED_ROW | {"tokens_per_s_per_gpu": "", "iter_time_s": prediction.step_time_s}
    write_csv(
        tmp_path / "published_training_throughput.csv", [full, timed, full | {"micro_batch": ""}, full | {"moe": 1}]
    )
    evaluation = evaluate_folder(tmp_path)

    assert tokens == prediction.tokens_per_step
    assert (evaluation.rows[0].rows, evaluation.rows[0].library) == (2, "lab")
    assert evaluation.rows[0].mape == pytest.approx(0.0, abs=1e-3)
    assert evaluation.skipped["published_training_throughput"] == {
        "not stated: micro_batch": 1,
        "mixture of experts without a stated shape or a preset of its name": 1,
    }


def test_published_experts_are_a_separate_table(tmp_path: Path) -> None:
    """A mixture of experts takes the shape and expert axis of the preset it names; a token-dropping one has none."""
    layout = {"data_parallel": 64, "expert_parallel": 8, "zero_stage": 1}
    workload = {"micro_batch_size": 2, "global_batch_size": 256, "seq_len": 4096, "dtype": "fp8"}
    workload |= {"optimizer": "adamw-narrow-gradients"}
    generation = "nemo-moe-2025"
    question = build_scenario("mixtral-8x7b", "b200-sxm-180gb", workload=workload, layout=layout, software=generation)
    prediction = question.predict()
    shapeless = dict.fromkeys(
        ("num_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size"), ""
    )
    row = PUBLISHED_ROW | shapeless | {
        "model": "Mixtral-8x7B", "source": "NVIDIA NeMo 25.02", "gpu": "B200-SXM", "dtype": "fp8", "moe": 1, "tp": 1,
        "micro_batch": 2, "global_batch": 256, "num_gpus": 64, "ep": 8, "fsdp_zero": "", "activation_checkpointing": "",
        "tokens_per_s_per_gpu": prediction.tokens_per_s_per_device,
    }  # fmt: skip
    rows = [row, row | {"model": "Mixtral-8x7B (tokendrop)"}]
    write_csv(tmp_path / "published_training_throughput.csv", rows)
    evaluation = evaluate_folder(tmp_path)

    (judged,) = evaluation.rows
    assert (judged.table, judged.rows, judged.coverage_90) == ("published_training_throughput/moe", 1, 1.0)
    assert judged.mape == pytest.approx(0.0, abs=1e-9)
    assert sum(evaluation.skipped["published_training_throughput"].values()) == 1


def test_gemm_fp32(tmp_path: Path) -> None:
    """Rows timed as the kernel plus the launch of the device's record have no error; unknown operations are counted."""
    t4 = load_device("t4")
    record = load_record(FP32_GEMM, t4)
    sizes = {"m": np.array([64, 500, 4096]), "n": np.array([96, 512, 1000]), "k": np.array([64, 768, 4096])}
    launch_s = record.provenance["sections"]["fp32"]["collector_launch_s"]["linear"]
    time_s = price_gemm(Gemm(name="x", dtype="fp32", layout="NT", **sizes), t4, record).time_s + launch_s
    columns = {name: [*size, 8] for name, size in sizes.items()} | {"batch": [1] * 4, "latency_s": [*time_s, 1.0]}
    words = {"device": ["t4"] * 4, "operation": ["linear"] * 3 + ["einsum"], "dtype": ["fp32"] * 4}
    write_parquet(tmp_path / "gemm_fp32.parquet", columns | words)
    evaluation = evaluate_folder(tmp_path)

    assert evaluation.rows[0].table == "gemm_fp32"
    assert evaluation.rows[0].mape == pytest.approx(0.0, abs=1e-12)
    assert list(evaluation.skipped["gemm_fp32"].values()) == [1]


def test_pointwise_fp32(tmp_path: Path) -> None:
    """Rows timed as kernel and launch of the device's record have no error; a short kernel hides behind its launch."""
    t4 = load_device("t4")
    record = load_record(FP32_POINTWISE, t4)
    height, width = np.array([8, 2000, 60000]), np.array([64, 1000, 3000])
    tensor = 4.0 * height * width
    operation = Pointwise(name="x", dtype="fp32", operation="add", read_bytes=2.0 * tensor, written_bytes=tensor)
    kernel_s = np.asarray(price_pointwise(operation, t4, record).time_s)
    launch = find_pointwise_launch("add", t4)
    time_s = with_launch(kernel_s, launch.launch_s, launch.hidden_s)
    columns = {"rows": [*height, 8], "columns": [*width, 64], "latency_s": [*time_s, 1.0]}
    words = {"device": ["t4"] * 4, "operation": ["add"] * 3 + ["cumsum"]}
    write_parquet(tmp_path / "pointwise_fp32.parquet", columns | words)
    evaluation = evaluate_folder(tmp_path)

    assert evaluation.rows[0].mape == pytest.approx(0.0, abs=1e-12)
    assert list(evaluation.skipped["pointwise_fp32"].values()) == [1]
    assert time_s[0] == pytest.approx(launch.launch_s, rel=1e-3)
    assert time_s[2] - launch.launch_s + launch.hidden_s == pytest.approx(kernel_s[2], rel=1e-3)


def test_gemm_amd(tmp_path: Path) -> None:
    """Rows timed as the section of their scale and weight layout predicts have no error; scales are told apart.

    Outputs in fp32 are skipped.
    """
    chip = load_device("mi355x")
    sizes = {"m": np.array([16, 900, 8192]), "n": np.array([2112, 4096, 7168]), "k": np.array([7168, 512, 4096])}
    record = load_record("gemm", chip)
    operation = Gemm(name="x", dtype="fp8", **sizes)
    name = section_of("blockscale_128", "true")
    time_s = price_gemm(operation, chip, record, library=name).time_s
    words = {"device": "mi355x", "library": "aiter tuned", "kernel": "ck", "dtype": "fp8", "scale": "blockscale_128"}
    columns = {key: [value] * 3 for key, value in words.items()} | {"weights_shuffled": [True] * 3, "batch": [1] * 3}
    columns |= sizes | {"latency_s": time_s}
    write_parquet(tmp_path / "gemm_amd.parquet", columns | {"out_dtype": ["bf16"] * 3})
    row = only_row(tmp_path)

    assert (row.table, row.library) == ("gemm_amd", "aiter tuned, blockscale_128")
    assert row.mape == pytest.approx(0.0, abs=1e-12)
    assert not np.allclose(price_gemm(operation, chip, record).time_s, time_s, rtol=0.01)

    write_parquet(tmp_path / "gemm_amd.parquet", columns | {"out_dtype": ["bf16", "fp32", "bf16"]})
    evaluation = evaluate_folder(tmp_path)
    assert [judged.rows for judged in evaluation.rows] == [2]
    assert list(evaluation.skipped["gemm_amd"].values()) == [1]
