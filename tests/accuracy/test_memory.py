"""Memory against published training: a job that ran fits its device."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from measured import measured_file

from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.published_rows import FORMAT
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs
from shapewright.memory import estimate_memory

# Of each generation of software, the rows that may be refused. torchtitan's Llama-2-70B at 64 A100 says selective
# checkpointing and can only have run with more of it; BigScience's 1.3B says no sharding, and 18 bytes a parameter
# alone are 22 GiB of a V100's 16. NVIDIA's rows with ZeRO-3 on GB200 state no offloading, of which their recipes use
# some (cpu_offloading_num_layers); 405B in 16 stages needs 4 % more than a GB200 has.
REFUSED_AT_MOST = {"fsdp-2024": 1, "megatron-2020": 1, "nemo-2024": 13}
EXPERTS_REFUSED_AT_MOST = 0


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    """Published rows with a full configuration."""
    return list(
        read_runs(read_columns(measured_file("published_training_throughput.csv"), FORMAT, Counter()), Context())
    )


@pytest.fixture(scope="module")
def expert_runs() -> list[PublishedRun]:
    """Published rows of mixtures of experts."""
    columns = read_columns(measured_file("published_training_throughput.csv"), FORMAT, Counter())
    return list(read_runs(columns, Context(), has_experts=True))


def needed_share(run: PublishedRun) -> float:
    """Estimated memory of a run over the memory of its device."""
    return estimate_memory(run.config, run.workload, run.layout).total_bytes / run.device.memory_bytes


def test_published_jobs_fit(runs: list[PublishedRun]) -> None:
    """Published runs that are refused are only those with incomplete recipes."""
    refused = Counter(run.software for run in runs if needed_share(run) > 1.0)

    assert len(runs) > 250
    assert {name: num for name, num in refused.items() if num > REFUSED_AT_MOST.get(name, 0)} == {}


def test_published_expert_jobs_fit(expert_runs: list[PublishedRun]) -> None:
    """Of mixtures of experts too: fused activations, narrow inputs and 16-bit gradients are what their recipes have."""
    assert len(expert_runs) > 70
    assert sum(needed_share(run) > 1.0 for run in expert_runs) <= EXPERTS_REFUSED_AT_MOST


def test_tuned_micro_batches_fill_most_of_the_device(runs: list[PublishedRun]) -> None:
    """Micro-batches of 3, 10 or 18 were tuned to fill the memory; estimates must fill most of it too."""
    shares = [needed_share(run) for run in runs if run.software == "fsdp-2023"]

    assert len(shares) > 100
    assert 0.7 < statistics.median(shares) < 1.0
