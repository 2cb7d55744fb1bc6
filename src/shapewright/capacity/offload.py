"""Activations kept in the host's memory: what leaves the device, what crosses the host link, and what of it shows.

Each layer's tensors go to the host behind the forward pass and come back behind the backward pass; the device keeps
those of two layers, the one at work and the one under way. The link carries both directions at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import ShapewrightError
from shapewright.lowering import num_microbatches
from shapewright.memory import list_saved_tensors
from shapewright.memory.activations import keep_tensors
from shapewright.memory.estimate import count_microbatches_in_flight
from shapewright.perf.software import TUNED
from shapewright.predict import predict

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.memory import MemoryEstimate
    from shapewright.workload import Workload

LINK_FRACTION = 0.8
"""Share of the host link's rate that copies to pinned memory reach. Assumed: 0.75 to 0.85 of PCIe is what such copies
are usually seen to get."""

_LAYERS_ON_DEVICE = 2


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What keeping activations in the host's memory does.

    Attributes:
        total_bytes: Memory of the device with it. [byte]
        freed_bytes: What it frees. [byte]
        host_bytes: What the host holds for one device. [byte]
        moved_bytes: What crosses the link in one step, both directions together. [byte]
        transfer_s: Time of that in one direction, the half; None where the link's rate is not known. [s]
        exposed_s: What forward and backward pass do not hide; None likewise, or where the step cannot be priced. [s]
        step_time_s: Predicted step with it; None likewise. [s]
    """

    total_bytes: float
    freed_bytes: float
    host_bytes: float
    moved_bytes: float
    transfer_s: float | None
    exposed_s: float | None
    step_time_s: float | None


def estimate_offload(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    stage: MemoryEstimate,
    *,
    uncalibrated: bool = False,
    software: str = TUNED,
) -> Offload | None:
    """Estimate what moving a stage's activations to the host frees and costs; None outside training.

    Args:
        config: The model.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread.
        stage: Memory of the stage.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.
    """
    if not workload.is_training:
        return None
    kept_bytes = min(_LAYERS_ON_DEVICE * _layer_bytes(config, workload, layout), stage.activations_bytes)
    freed_bytes = stage.activations_bytes - kept_bytes
    in_flight = count_microbatches_in_flight(workload, layout, stage.stage)
    one_way_bytes = freed_bytes / in_flight * num_microbatches(workload, layout)
    transfer_s = exposed_s = step_time_s = None
    if device.pcie_bandwidth_bytes_per_s:
        transfer_s = one_way_bytes / (LINK_FRACTION * device.pcie_bandwidth_bytes_per_s)
        try:
            prediction = predict(
                config,
                device=device,
                workload=workload,
                layout=layout,
                uncalibrated=uncalibrated,
                software=software,
            )
        except ShapewrightError:
            prediction = None
        if prediction is not None:
            passes = dict.fromkeys(("forward", "recompute", "backward", "step"), 0.0)
            for entry in prediction.busiest_operations:
                passes[entry.operation.pass_name] += entry.total_time_s
            exposed_s = max(transfer_s - passes["forward"], 0.0)
            exposed_s += max(transfer_s - passes["recompute"] - passes["backward"], 0.0)
            step_time_s = prediction.step_time_s + exposed_s
    return Offload(
        total_bytes=stage.total_bytes - freed_bytes,
        freed_bytes=freed_bytes,
        host_bytes=freed_bytes,
        moved_bytes=2.0 * one_way_bytes,
        transfer_s=transfer_s,
        exposed_s=exposed_s,
        step_time_s=step_time_s,
    )


def _layer_bytes(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> float:
    """What the largest kind of layer keeps of one micro-batch. [byte]"""
    kinds = {group.is_moe for group in config.layer_groups()}
    return max(
        sum(
            tensor.num_bytes
            for tensor in keep_tensors(
                list_saved_tensors(
                    config, workload, layout, has_experts=is_moe, has_cross_attention=config.has_cross_attention
                ),
                workload.recompute,
            )
        )
        for is_moe in kinds
    )
