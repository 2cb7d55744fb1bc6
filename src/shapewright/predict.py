"""Predict a whole step: lower the model, price every operation, add up, keep the breakdown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.config import ParameterCounts, TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.memory import MemoryEstimate
    from shapewright.operations import Operation
    from shapewright.perf.price import Price
    from shapewright.workload import Workload


@dataclass(frozen=True)
class PricedOperation:
    """An operation with its price; ``operation.repeats`` says how often it runs in a step.

    Attributes:
        operation: What runs.
        price: Time of one execution, and why.
        exposed_fraction: Share of its time that nothing hides (1 for all but overlapped communication).
    """

    operation: Operation
    price: Price
    exposed_fraction: float = 1.0

    @property
    def total_time_s(self) -> float:
        """Exposed time over all its executions in one step. [s]"""
        return float(self.price.time_s) * int(self.operation.repeats) * self.exposed_fraction


@dataclass(frozen=True)
class Prediction:
    """One step of one model on one device, with everything that went into it.

    Attributes:
        config: The model.
        device: The device.
        workload: What is run.
        layout: How it is spread.
        operations: Every distinct operation of the busiest pipeline stage, priced.
        parameters: Parameter counts.
        memory: Memory of one device.
        step_time_s: Time of one step. [s]
        step_time_low_s: Lower end of its 90 % interval. [s]
        step_time_high_s: Upper end of its 90 % interval. [s]
        layer_forward_time_s: Forward time of one average layer. [s]
        tokens_per_step: New tokens that one step processes, over all devices.
        tokens_per_s_per_device: Tokens per second and device.
        model_flops_per_s: Model FLOPs per second and device, recomputation not counted. [flop/s]
        hardware_flops_per_s: The same with recomputed FLOPs. [flop/s]
        mfu: model_flops_per_s over the device's dense peak.
        hfu: hardware_flops_per_s over the device's dense peak.
        calibration: Ids of the calibration records used, by operation kind.
        warnings: What the reader must know: transfers from other devices, missing links, memory that does not fit.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    layout: ParallelLayout
    operations: tuple[PricedOperation, ...]
    parameters: ParameterCounts
    memory: MemoryEstimate
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    layer_forward_time_s: float
    tokens_per_step: int
    tokens_per_s_per_device: float
    model_flops_per_s: float
    hardware_flops_per_s: float
    mfu: float
    hfu: float
    calibration: dict[str, str]
    warnings: tuple[str, ...]


def predict(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout | None = None,
    uncalibrated: bool = False,
) -> Prediction:
    """Predict the time, throughput and memory of one step."""
    raise NotImplementedError
