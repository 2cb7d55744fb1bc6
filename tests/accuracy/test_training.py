"""Predicted steps against published training throughput, by generation of software, on held-out models."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from judging import ALL_LIMITS, mean_error, measured_file, published_runs

from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.statistics import kendall_tau
from shapewright.measure.accuracy.tables.registry import TABLES
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs
from shapewright.measure.refit import software as script
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.predict import predict
from shapewright.pricing.software import load_software
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

LIMITS = ALL_LIMITS["training"]
# arXiv 2205.05198, tables 3 and 5: layers, hidden size, heads, stages, chunks, micro-batch, global batch; a step's
# seconds with full recomputation, and with the selective one and sequence parallelism. 8 ways of tensor parallelism.
MEGATRON_2022 = {
    "22B": (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    "175B": (96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75),
    "530B": (105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83),
    "1T": (128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49),
}


def rates(chosen: list[PublishedRun], software: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Measured and predicted tokens per second and device."""
    found = [
        predict(
            run.config, device=run.device, workload=run.workload, layout=run.layout, software=software or run.software
        ).tokens_per_s_per_device
        for run in chosen
    ]
    return np.array([run.tokens_per_s_per_device for run in chosen]), np.array(found)


@pytest.mark.parametrize("name", LIMITS["held_out"])
def test_models_left_out(name: str) -> None:
    """Fitted without a group of rows, the mean error on that group stays within the limit, over all groups."""
    (generation,) = [each for each in script.GENERATIONS if each.software.name == name]
    own_table = generation.table == script.GEMSTONES_TABLE
    everyone = (
        script.read_measured_steps(measured_file(generation.table).parent).values() if own_table else published_runs()
    )
    chosen = [run for run in everyone if run.software == name]
    groups = np.array([generation.group_of(run) for run in chosen])
    errors = []
    for group in sorted(set(groups)):
        seen = [run for run, other in zip(chosen, groups, strict=True) if other != group]
        held_out = [run for run, other in zip(chosen, groups, strict=True) if other == group]
        # Some 25 rows, evenly picked, tell the numbers as well, and are quicker.
        software = script.apply(generation.software, script.fit(generation, seen[:: 1 + len(seen) // 25]))
        step_s = script.predict_steps(software, held_out)
        errors += list(np.abs(np.array([run.step_s for run in held_out]) / step_s - 1.0))

    assert float(np.mean(errors)) <= LIMITS["held_out"][name]


@pytest.mark.parametrize("name", LIMITS["fine_tuning"])
def test_adapters_and_rows_without_a_fit(name: str) -> None:
    """Rows of MLPerf, and of recipes published later, that nothing was fitted to: mean error by table and kind."""
    table, _, kind = name.partition("/")
    entry = TABLES[table]
    found = read_runs(
        read_columns(measured_file(entry.file_name), entry.columns, Counter()), Context(), has_experts=None
    )
    chosen = [
        run
        for run in found
        if run.workload.has_adapters == (kind == "lora")
        # One row takes ten times the devices that its batch occupies, see decision 0024.
        and not (run.workload.has_adapters and run.layout.num_devices > 256)
    ]
    measured, predicted = rates(chosen)

    assert mean_error(predicted, measured) <= LIMITS["fine_tuning"][name]


@pytest.mark.parametrize("name", LIMITS["kendall_tau"])
def test_order_of_rows(name: str) -> None:
    """Predicted tokens per second put rows of a generation, all dense and all expert ones in about the right order."""
    chosen = [run for run in published_runs() if name in ("experts" if run.config.is_moe else "all", run.software)]
    measured, predicted = rates(chosen)

    assert kendall_tau(measured, predicted) >= LIMITS["kendall_tau"][name]


@pytest.mark.parametrize("dtype", LIMITS["bloom_kendall_tau"])
def test_order_of_bloom_layouts(dtype: str) -> None:
    """Layouts that were tried before BLOOM was trained come in about the measured order, in each element format."""
    chosen = [run for run in published_runs() if run.source.startswith("BLOOM") and run.workload.dtype == dtype]

    assert kendall_tau(*rates(chosen)) >= LIMITS["bloom_kendall_tau"][dtype]


def megatron_step_s(size: str, recompute: str, *, sequence_parallel: bool) -> float:
    """Predicted step of one of the models of arXiv 2205.05198, table 5."""
    num_layers, hidden_size, num_heads, stages, chunks, micro_batch, batch, _, _ = MEGATRON_2022[size]
    config = TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=51200,
        fused_qkv=True,
        qkv_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        norm="layernorm",
        norm_bias=True,
        position_embedding="learned",
        tied_embeddings=True,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    workload = Workload(
        micro_batch_size=micro_batch,
        global_batch_size=batch,
        seq_len=2048,
        dtype="bf16",
        attention="unfused",
        recompute=recompute,
    )
    layout = ParallelLayout(
        tensor_parallel=8,
        pipeline_parallel=stages,
        virtual_pipeline=chunks,
        sequence_parallel=sequence_parallel,
    )
    return predict(config, device=load_device("a100-sxm-80gb"), workload=workload, layout=layout).step_time_s


@pytest.mark.parametrize("size", ["22B", "175B", "530B", "1T"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_selective_against_full_recomputation(size: str, sequence_parallel: bool) -> None:
    """Gain within 4 points of the published one, whether full recomputation had sequence parallelism or not."""
    full_s = megatron_step_s(size, "full", sequence_parallel=sequence_parallel)
    selective_s = megatron_step_s(size, "selective", sequence_parallel=True)
    published_full_s, published_selective_s = MEGATRON_2022[size][-2:]

    assert full_s / selective_s == pytest.approx(published_full_s / published_selective_s, abs=0.04)


@pytest.mark.parametrize("size", ["22B", "175B", "530B", "1T"])
def test_published_steps_of_megatron_2022(size: str) -> None:
    """Steps with full and with selective recomputation are within 8 % of arXiv 2205.05198, table 5."""
    found = (
        megatron_step_s(size, "full", sequence_parallel=False),
        megatron_step_s(size, "selective", sequence_parallel=True),
    )

    assert found == pytest.approx(MEGATRON_2022[size][-2:], rel=0.08)


def test_savings_of_sequence_parallelism() -> None:
    """Of a 22B layer's passes: published 19.6 to 19.0 ms (arXiv 2205.05198, table 4), 3.1 +- 0.7 % as printed."""
    plain_s, split_s = (megatron_step_s("22B", "none", sequence_parallel=splits) for splits in (False, True))

    assert 1.0 - split_s / plain_s == pytest.approx(0.031, abs=0.015)


def test_records_are_better_than_the_default() -> None:
    """With the software given, errors on old stacks are at most half of those of a tuned stack."""
    chosen = [run for run in published_runs() if load_software(run.software).overlap_share == 0.0]
    errors = [mean_error(predicted, measured) for measured, predicted in (rates(chosen), rates(chosen, "tuned"))]

    assert errors[0] <= errors[1] / 2.0
