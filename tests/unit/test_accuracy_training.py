"""Software of published training rows, filled gaps, and skipped rows."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.published_rows import FORMAT, software_of_experts
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs
from shapewright.memory.estimate import estimate_memory

BRIDGE = "NVIDIA Megatron-Bridge {} NeMo Container"


@pytest.mark.parametrize(
    ("release", "preset", "device", "dtype", "stages", "software"),
    [
        ("25.11", "qwen3-30b-a3b", "b200-sxm-180gb", "fp8-mx", 1, "nemo-moe-2025"),
        ("26.02.01", "qwen3-30b-a3b", "b200-sxm-180gb", "mxfp8", 1, "nemo-moe-2025-graphs"),
        ("26.04", "qwen3-235b-a22b", "b200-sxm-180gb", "mxfp8", 8, "nemo-moe-2025"),
        ("25.11", "deepseek-v3", "gb300", "bf16", 2, "nemo-moe-2025-graphs"),
        ("26.06", "deepseek-v3", "gb300", "mxfp8", 2, "nemo-moe-2026"),
        ("26.06", "deepseek-v3", "b300-sxm-288gb", "mxfp8", 8, "nemo-moe-2025"),
        ("26.06", "qwen3-30b-a3b", "h100-sxm-80gb", "fp8", 1, "nemo-moe-2025"),
        ("26.04", "gpt-oss-120b", "gb200", "bf16", 1, "nemo-moe-2025"),
        ("26.04", "gpt-oss-120b", "gb300", "bf16", 1, "nemo-moe-2025-graphs"),
    ],
)
def test_software_of_experts(release: str, preset: str, device: str, dtype: str, stages: int, software: str) -> None:
    """Release, host and format determine whether kernels were launched, partly captured, or all in one graph."""
    found = software_of_experts(BRIDGE.format(release), preset, load_device(device), dtype, stages)
    assert found == software


def test_unknown_software_is_the_average_of_all() -> None:
    """An unknown source is predicted with the average of all generations."""
    assert (
        software_of_experts("DeepSeek, own report", "deepseek-v3", load_device("h800-sxm-80gb"), "fp8", 16) == "unnamed"
    )


def read(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[PublishedRun], Counter[str]]:
    """Return the runs of a table, and the reasons of skipped rows."""
    path = folder / "published_training_throughput.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*FORMAT.labels, *FORMAT.optional], restval="")
        writer.writeheader()
        writer.writerows(rows)
    context = Context()
    return list(read_runs(read_columns(path, FORMAT, Counter()), context, has_experts=None)), context.skipped


def experts(release: str, tokens_per_s: float) -> dict[str, Any]:
    """A published row of GPT-OSS."""
    return {
        "source": BRIDGE.format(release), "model": "GPT OSS 120B", "gpu": "GB200", "dtype": "mxfp8", "moe": 1,
        "seq_len": 4096, "micro_batch": 4, "global_batch": 1280, "num_gpus": 64, "tp": 1, "pp": 1, "ep": 64,
        "fsdp_zero": "", "activation_checkpointing": "", "tokens_per_s_per_gpu": tokens_per_s,
    }  # fmt: skip


def test_slow_releases_are_evaluated(tmp_path: Path) -> None:
    """No row is skipped for its measured value: a slow release is evaluated like the others."""
    runs, skipped = read(tmp_path, [experts("26.06", 28947), experts("26.06.01", 18304), experts("26.08", 28672)])
    assert [run.tokens_per_s_per_device for run in runs] == [28947, 18304, 28672]
    assert not skipped


def test_published_recipes(tmp_path: Path) -> None:
    """NVIDIA's rows have 16-bit gradients and keep narrow inputs; others do not."""
    (run,), _ = read(tmp_path, [experts("26.06", 28947)])
    assert (run.workload.optimizer, run.workload.narrow_inputs) == ("adamw-narrow-gradients", True)
    (other,), _ = read(tmp_path, [experts("26.06", 28947) | {"source": "somebody"}])
    assert (other.software, other.workload.optimizer, other.workload.narrow_inputs) == ("unnamed", "adamw", False)


@pytest.mark.parametrize(
    ("changes", "pieces"),
    [
        ({"tp": 1}, None),
        ({"tp": 2, "ep": 64}, 1),
        ({"tp": 2, "ep": 8}, 1),
        ({"tp": 2, "ep": 8, "source": "somebody"}, None),
        ({"tp": 2, "ep": 64, "source": "somebody"}, 1),
    ],
)
def test_experts_over_the_tensor_axis(tmp_path: Path, changes: dict[str, Any], pieces: int | None) -> None:
    """NVIDIA's recipes do not shard experts; others shard them as other matrices, unless replicas cannot hold them."""
    (run,), skipped = read(tmp_path, [experts("26.06", 28947) | changes])
    assert run.layout.expert_tensor_parallel == pieces
    assert not skipped


@pytest.mark.parametrize(
    ("changes", "modules"),
    [
        ({"dtype": "bf16"}, "layernorm,moe_act"),
        ({"dtype": "bf16", "gpu": "GB300"}, None),
        ({}, None),
        ({"model": "DeepSeekV3", "gpu": "B300-SXM", "pp": 8, "ep": 8, "global_batch": 1024}, "mla_up_proj"),
        ({"model": "DeepSeekV3", "gpu": "GB300", "global_batch": 1024}, None),
        ({"dtype": "bf16", "source": "somebody"}, None),
    ],
)
def test_parts_that_recipes_compute_again(tmp_path: Path, changes: dict[str, Any], modules: str | None) -> None:
    """Before whole-iteration graphs, recipes short of memory recomputed some modules."""
    (run,), _ = read(tmp_path, [experts("26.06", 28947) | changes])
    expected = ("none", "core_attn") if modules is None else ("selective", modules)
    assert (run.workload.recompute, run.workload.recompute_modules) == expected


def dense(**changes: Any) -> dict[str, Any]:
    """A published row of GPT-3 175B."""
    return {
        "source": "NVIDIA NeMo 24.07 performance summary", "model": "GPT3-175B", "gpu": "H100-SXM-80GB", "dtype": "fp8",
        "moe": 0, "num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "ffn_hidden_size": 49152,
        "gated_mlp": 0, "seq_len": 2048, "micro_batch": 1, "global_batch": 256, "num_gpus": 128, "tp": 4, "pp": 8,
        "vp": 6, "cp": 1, "fsdp_zero": "", "activation_checkpointing": "", "tokens_per_s_per_gpu": 726, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("words", ["selective op", "selective per op"])
def test_selective_checkpointing_by_operation_repeats_every_second_gemm(tmp_path: Path, words: str) -> None:
    """As torchtitan counts them: projections are separate GEMMs."""
    (run,), _ = read(tmp_path, [dense(source="torchtitan", dtype="bf16", activation_checkpointing=words)])
    assert (run.workload.recompute, run.workload.recompute_modules) == ("selective", "alternate_gemms")
    assert not run.config.fused_qkv


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({}, "config.vocab_size", 51_200),
        ({"model": "GPT3-175B", "num_attention_heads": ""}, "config.vocab_size", 50_257),
        ({"vocab_size": 51200, "micro_batch": "", "global_batch": 4}, "workload.micro_batch_size", 1),
        (
            {"source": "torchtitan", "vocab_size": 51200, "global_batch": "", "vp": 1},
            "workload.global_batch_size",
            4,
        ),
    ],
)
def test_gaps_that_follow_from_the_rest(tmp_path: Path, changes: dict[str, Any], field: str, value: int) -> None:
    """GPT-3's vocabulary, the shape of a preset, one sequence per replica, and software without accumulation."""
    (run,), _ = read(tmp_path, [dense(**changes)])
    part, name = field.split(".")
    assert getattr(getattr(run, part), name) == value


def test_times_from_flops_of_a_known_convention(tmp_path: Path) -> None:
    """Equation 3 has 1.434 TFLOP per token of GPT-3 175B: 153 TFLOP/s are 106.7 tokens/s; other sources are skipped."""
    own = dense(source="2104.04473 Table 2", vocab_size=51200, tokens_per_s_per_gpu="", tflops_per_gpu=153, vp="")
    (run,), _ = read(tmp_path, [own])
    assert run.tokens_per_s_per_device == pytest.approx(106.7, abs=0.05)
    unknown = [own | {"source": "somebody"}, own | {"fsdp_zero": "ZeRO-3"}, own | {"source": "torchtitan mxfp8 page"}]
    runs, skipped = read(tmp_path, unknown)
    assert not runs
    assert skipped == {
        "neither tokens/s nor the time of a step is stated": 1,
        "a power limit that is not stated": 1,
        "ZeRO-3 of 2021, whose communication took several times what its links allow": 1,
    }


@pytest.mark.parametrize("missing", ["micro_batch", "tp", "num_gpus"])
def test_unfilled_gaps(tmp_path: Path, missing: str) -> None:
    """An ambiguous micro-batch or layout stays a gap."""
    runs, skipped = read(tmp_path, [dense(vocab_size=51200, **{missing: ""})])
    assert not runs
    assert skipped == {f"not stated: {missing}": 1}


def test_adapters_recompute_the_layers_that_do_not_fit(tmp_path: Path) -> None:
    """A row that states no checkpointing fits: with none on GB300, with some of its layers on H100."""
    lora = {
        "source": "NVIDIA Megatron-Bridge 26.06 LoRA", "model": "llama3-70b", "num_layers": 80, "hidden_size": 8192,
        "num_attention_heads": 64, "num_kv_heads": 8, "ffn_hidden_size": 28672, "gated_mlp": 1, "vocab_size": 32000,
        "dtype": "fp8", "seq_len": 4096, "micro_batch": 1, "global_batch": 8, "num_gpus": 8, "tp": 2, "pp": 1, "moe": 0,
        "fsdp_zero": "", "activation_checkpointing": "", "tokens_per_s_per_gpu": 2600,
    }  # fmt: skip
    runs, _ = read(tmp_path, [lora | {"gpu": gpu} for gpu in ("GB300", "H100")])
    (small, large) = sorted(runs, key=lambda run: run.device.memory_bytes)

    assert large.workload.recompute == "none"
    assert small.workload.recompute == "full"
    assert 0 < (small.workload.recompute_layers or 0) < 80
    for run in runs:
        memory = estimate_memory(run.config, run.workload, run.layout)
        assert memory.total_bytes <= run.device.memory_bytes
    (stated,), _ = read(tmp_path, [lora | {"gpu": "H100", "activation_checkpointing": "none"}])
    assert stated.workload.recompute == "none"
