"""What a reader of plans, best first, must know of the best: what it rests on, and what keeps it from being better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING

from shapewright.integers import divisors
from shapewright.perf.software import TUNED
from shapewright.predict import predict
from shapewright.units import format_seconds

if TYPE_CHECKING:
    from shapewright.predict import Prediction

_SHARDING_SOFTWARE, _SHARDING_WORDS = "fsdp-2024", "PyTorch FSDP of 2024"
"""The newest generation whose published steps sharded weights over replicas, and what a note calls it."""

_SHARDS_GRADIENTS = 2
"""The ZeRO stage from which gradients are kept in shards."""

_MOST_BATCH_CHANGE_FRACTION = 0.25
"""Farther from the batch that was asked, another one is another question."""


def say_software(plans: Sequence[Prediction], software: str, *, uncalibrated: bool) -> Iterator[str]:
    """Which software the steps are of; where the best shards weights, what the software that did so made of it."""
    if software != TUNED:
        return
    best = plans[0]
    if best.layout.zero_stage < 3:
        yield (
            "steps are those of a tuned stack of today; PyTorch FSDP of 2023 and 2024 took 1.1 to 1.7 times as long, "
            "which the interval spans; --software names another"
        )
        return
    measured = predict(
        best.config,
        device=best.device,
        workload=best.workload,
        layout=best.layout,
        uncalibrated=uncalibrated,
        software=_SHARDING_SOFTWARE,
    )
    whole = next((rank for rank, plan in enumerate(plans, 1) if plan.layout.zero_stage < 3), None)
    yield (
        f"steps are those of a tuned stack of today, which gathers the sharded weights of rank 1 beside computation; "
        f"{_SHARDING_WORDS}, which hid none of that, takes {format_seconds(measured.step_time_s)} for rank 1; "
        f"--software {_SHARDING_SOFTWARE} plans for it"
        + ("" if whole is None else f", and rank {whole} gathers no weights")
    )


def say_reduction(plans: Sequence[Prediction]) -> Iterator[str]:
    """That the best plan reduces gradients in each micro-batch of a pipeline, which few stacks do."""
    best = plans[0].layout
    if best.zero_stage != _SHARDS_GRADIENTS or best.pipeline_parallel == 1:
        return
    once = next((rank for rank, plan in enumerate(plans, 1) if plan.layout.zero_stage < _SHARDS_GRADIENTS), None)
    yield (
        "rank 1 shards gradients (ZeRO 2) and so reduces them in each micro-batch, as torchtitan does under a "
        "pipeline; --keep zero=0,1 reduces them once a step, as Megatron-LM does"
        + ("" if once is None else f", and so does rank {once}")
    )


def say_batch(plans: Sequence[Prediction], global_batch_size: int, num_devices: int) -> Iterator[str]:
    """A batch near the one that was asked with which more replicas are possible, where the best has all it can."""
    most = gcd(global_batch_size, num_devices)
    if plans[0].layout.data_parallel < most or most == plans[0].layout.num_devices:
        return
    for replicas in reversed(divisors(num_devices)):
        if replicas <= most:
            return
        below = global_batch_size // replicas * replicas
        nearest = min(
            (batch for batch in (below, below + replicas) if batch), key=lambda batch: abs(batch - global_batch_size)
        )
        if abs(nearest - global_batch_size) <= _MOST_BATCH_CHANGE_FRACTION * global_batch_size:
            yield (
                f"replicas share {global_batch_size} sequences among {num_devices} devices, so there are {most} at "
                f"most, as in rank 1; a batch of {nearest} allows {gcd(nearest, num_devices)}"
            )
            return
