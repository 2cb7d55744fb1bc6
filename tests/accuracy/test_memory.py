"""Memory against published training: a job that ran fits its device."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from measured import measured_file

from shapewright.accuracy.context import Context
from shapewright.accuracy.read import read_columns
from shapewright.accuracy.training import FORMAT, PublishedRun, read_runs
from shapewright.memory import estimate_memory

# Of each generation of software, the rows that may be refused. torchtitan's Llama-2-70B at 64 A100 says selective
# checkpointing and can only have run with more of it; BigScience's 1.3B says no sharding, and 18 bytes a parameter
# alone are 22 GiB of a V100's 16. NVIDIA's rows state no checkpointing and no offloading, of which their recipes of
# 70B and 405B on GB200 and of 405B on H100 and B200 use some.
REFUSED_AT_MOST = {"fsdp-2024": 1, "megatron-2020": 1, "nemo-2024": 41}


@pytest.fixture(scope="module")
def runs() -> list[PublishedRun]:
    """Published rows with a full configuration."""
    return list(
        read_runs(read_columns(measured_file("published_training_throughput.csv"), FORMAT, Counter()), Context())
    )


def needed_share(run: PublishedRun) -> float:
    """Memory that a run is said to need, over what its device has."""
    return estimate_memory(run.config, run.workload, run.layout).total_bytes / run.device.memory_bytes


def test_jobs_that_ran_fit(runs: list[PublishedRun]) -> None:
    """No more published rows are refused than those whose recipe says too little."""
    refused = Counter(run.software for run in runs if needed_share(run) > 1.0)

    assert len(runs) > 250
    assert {name: num for name, num in refused.items() if num > REFUSED_AT_MOST.get(name, 0)} == {}


def test_micro_batches_that_were_made_large_fill_most_of_the_device(runs: list[PublishedRun]) -> None:
    """Micro-batches of 3, 10 or 18 are those of somebody who filled the memory: estimates say so too."""
    shares = [needed_share(run) for run in runs if run.software == "fsdp-2023"]

    assert len(shares) > 100
    assert 0.7 < statistics.median(shares) < 1.0
