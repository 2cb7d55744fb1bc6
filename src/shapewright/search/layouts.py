"""Layouts that a search goes through: the splits that a plan would look at, on the devices of the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.errors import ShapewrightError
from shapewright.lowering import num_microbatches, validate_layout

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload


def other_layouts(
    config: TransformerConfig, device: Device, workload: Workload, layout: ParallelLayout
) -> Iterator[ParallelLayout]:
    """Go through the other layouts of as many devices that the model and the batch can run on.

    Degrees are those of ``plan.space``. ZeRO stage, interleaving, schedule and sequence parallelism stay as they are.

    Args:
        config: The baseline.
        device: The device, whose node bounds the tensor axis.
        workload: Batch and sequence length.
        layout: The baseline's layout, which is left out.
    """
    from shapewright.plan import PlanRequest
    from shapewright.plan.space import frames

    # One frame for each split: micro-batches are an axis of the search's own.
    kept = {"micro_batch_size": (1,), "sequence_parallel": (layout.sequence_parallel,)}
    request = PlanRequest(num_devices=layout.num_devices, kept=kept)
    # Outside training every replica has a batch of its own.
    sequences = workload.global_batch_size or layout.num_devices
    found = frames(
        config,
        device,
        num_devices=layout.num_devices,
        global_batch_size=sequences,
        seq_len=workload.query_len,
        request=request,
    )
    for frame in found:
        try:
            other = replace(layout, **frame.degrees)
            validate_layout(config, workload, other)
            num_microbatches(workload, other)
        except ShapewrightError:
            continue
        if other != layout:
            yield other
