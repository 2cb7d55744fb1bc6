"""Published traffic and bus bandwidths from public functions."""

from __future__ import annotations

import pytest
from vector_models import gpt

from shapewright.core.units import GIB
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.prediction.calculators.training import estimate_budget
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


def bus_fraction(op_name: str, num_ranks: int) -> float:
    """Bytes that a rank sends of each byte of a message: bus over algorithm bandwidth of nccl-tests."""
    made = Collective(
        name=op_name, op_name=op_name, axis="data", message_bytes=1.0, num_ranks=num_ranks, ranks_per_node=8
    )
    return float(made.num_bytes)


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "bus_gb", "milliseconds"), [(4, 32, 377.34, 22.05), (4, 8, 740.64, 10.15)]
)
def test_bus_bandwidth_of_ml_engineering(num_bytes: float, ranks: int, bus_gb: float, milliseconds: float) -> None:
    """4 GiB all_reduce on 4 x 8 and on 8 B200: time from bus bandwidth."""
    time_s = num_bytes * GIB * bus_fraction("all_reduce", ranks) / (bus_gb * 1e9)
    assert time_s * 1e3 == pytest.approx(milliseconds, abs=0.01)


def test_network_rate_of_a_device_in_a_hierarchy() -> None:
    """K nodes of n / k: the card carries busbw (k - 1) / (n - 1), 36.52 GB/s of 377.34; 0.75 of 4 GiB through it."""
    assert pytest.approx(36.52, abs=0.01) == 377.34 * (4 - 1) / (32 - 1)
    assert 4 * bus_fraction("all_reduce", 4) / 8 == 0.75
    assert 4 * bus_fraction("all_reduce", 8) == 7
    assert 4 * bus_fraction("all_reduce", 4) / 8 * GIB / 50e9 * 1e3 == pytest.approx(16.1, abs=0.05)

    # One flat ring through eight cards of a node, 50 GB/s each.
    assert 4 * GIB * bus_fraction("all_reduce", 32) / (8 * 50e9) * 1e3 == pytest.approx(20.8, abs=0.05)


@pytest.mark.parametrize(
    ("device", "bus_gb", "percent"), [("a100-sxm-80gb", 234.89, 78), ("h200-sxm-141gb", 367.61, 82)]
)
def test_share_of_the_links_that_large_rings_reach(device: str, bus_gb: float, percent: float) -> None:
    """Measured bus bandwidth of a 16 GiB all_reduce in a node: 78 % of NVLink 3, 82 % of NVLink 4 by rings."""
    found = load_device(device)
    assert found.intra_node_bandwidth_bytes_per_s is not None
    assert 100 * bus_gb * 1e9 / found.intra_node_bandwidth_bytes_per_s == pytest.approx(percent, abs=0.5)


@pytest.mark.parametrize("op_name", ["all_gather", "reduce_scatter", "alltoall"])
def test_bus_identities(op_name: str) -> None:
    """An all_reduce is a reduce_scatter and an all_gather; every one tends to its whole message."""
    for ranks in (2, 8, 1024):
        assert bus_fraction("all_reduce", ranks) == 2 * bus_fraction(op_name, ranks)
    assert bus_fraction(op_name, 1) == 0
    assert bus_fraction(op_name, 2**20) == pytest.approx(1)


@pytest.mark.parametrize(("zero_stage", "passes"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_between_replicas(zero_stage: int, passes: int) -> None:
    """Collectives move 2 P elements over replicas, in ZeRO stage 3 of 3 P (arXiv 1910.02054, section 7)."""
    config = gpt(4, 1024, 16)
    layout = ParallelLayout(data_parallel=8, zero_stage=zero_stage)
    step = Workload(micro_batch_size=1, global_batch_size=8, seq_len=128)
    operations = lower(config, step, layout)
    weights = 12 * 4 * 1024**2 + (2 * 51200 + 2048) * 1024  # of layers, token and position embeddings, logits
    sent = sum(
        float(one.num_bytes) * int(one.repeats)
        for one in operations
        if isinstance(one, Collective) and one.axis == "data"
    )
    assert sent == pytest.approx(passes * weights * 2 * 7 / 8)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_traffic(sequence_parallel: bool) -> None:
    """8 b s h (t - 1) / t elements a layer and micro-batch (arXiv 2104.04473), also as gathers and scatters.

    Sequence parallelism gathers the two inputs of column-parallel products again for their weight gradients.
    """
    config = gpt(6, 1024, 16)
    layout = ParallelLayout(tensor_parallel=8, sequence_parallel=sequence_parallel)
    step = Workload(micro_batch_size=2, global_batch_size=2, seq_len=512)
    sent = sum(
        float(one.num_bytes) * int(one.repeats) / 2
        for one in lower(config, step, layout)
        if isinstance(one, Collective)
        and one.axis == "tensor"
        and one.stage == "every"
        and not one.name.endswith("gather_again")
    )
    assert sent / 6 == pytest.approx(8 * 2 * 512 * 1024 * 7 / 8)


def test_interleaving_multiplies_stage_traffic() -> None:
    """B s h elements of each micro-batch from stage to stage, v times as many with v chunks; 1/t of them each rank."""

    def sent(chunks: int, tensor_parallel: int) -> float:
        layout = ParallelLayout(pipeline_parallel=4, virtual_pipeline=chunks, tensor_parallel=tensor_parallel)
        step = Workload(micro_batch_size=2, global_batch_size=16, seq_len=512)
        return sum(
            float(one.message_bytes) * int(one.repeats) / 2
            for one in lower(gpt(24, 1024, 16), step, layout)
            if isinstance(one, Collective) and one.axis == "pipeline" and one.pass_name == "forward"
        )

    assert sent(1, 1) == 8 * 2 * 512 * 1024
    assert sent(3, 1) == 3 * sent(1, 1)
    assert sent(1, 8) == sent(1, 1) / 8


def test_idefics_80b() -> None:
    """512 A100, 3584 x 1024 tokens: 18.35 s at 250 TFLOP/s, 50.97 s at 90."""
    for tflops, seconds in ((250, 18.35), (90, 50.97)):
        budget = estimate_budget(
            80e9, 3584 * 1024, num_devices=512, flops_per_s_per_device=tflops * 1e12, recompute="full"
        )
        assert budget.training_s == pytest.approx(seconds, abs=0.01)
