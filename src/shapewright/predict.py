"""Predict a whole step: lower the model, price every operation, add up, keep the breakdown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, hypot, log
from typing import TYPE_CHECKING

from shapewright.adding_up import (
    PricedOperation,
    StepTimes,
    add_up,
    hidden_exchange_fraction,
    hide_communication,
    settle_priced_ends,
)
from shapewright.config import count_parameters
from shapewright.layout import ParallelLayout
from shapewright.lowering import count_step_flops, describe_overlong, lower, num_microbatches
from shapewright.lowering.flops import sum_flops
from shapewright.memory import estimate_memory
from shapewright.operations import Collective
from shapewright.perf.calibration import UNCALIBRATED
from shapewright.perf.pricing import price_operations
from shapewright.perf.software import TUNED, Software, software_of
from shapewright.shown import ShownInNotebook
from shapewright.step_warnings import (
    say_host,
    say_idle,
    say_kernel_of_experts,
    say_masked,
    say_too_large,
    say_uncalibrated,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.config import ParameterCounts, TransformerConfig
    from shapewright.hardware import Device
    from shapewright.memory import MemoryEstimate
    from shapewright.operations import Operation
    from shapewright.workload import Workload

# Published training steps over predicted ones, 5 % and 95 % of 295 rows of 37 sources (docs/decisions/0002): the newest
# tuned stacks take 0.8 to 1.1 of the prediction, PyTorch FSDP of 2023 and 2024 1.1 to 1.7. Which one a reader runs is
# not known without --software, so the interval of a training step spans both.
_TRAINING_SOFTWARE_LOW, _TRAINING_SOFTWARE_HIGH = 0.84, 1.7


@dataclass(frozen=True)
class Prediction(ShownInNotebook):
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
        bubble_time_s: Part of it in which the busiest stage of a pipeline waits. [s]
        layer_forward_time_s: Forward time of one average layer. [s]
        tokens_per_step: New tokens that one step processes, over all devices.
        tokens_per_s_per_device: Tokens per second and device.
        model_flops_per_s: Model FLOPs per second and device, recomputation not counted. [flop/s]
        hardware_flops_per_s: The same with recomputed FLOPs. [flop/s]
        mfu: model_flops_per_s over the device's dense peak.
        hfu: hardware_flops_per_s over the device's dense peak.
        software: The training software that it is a prediction of.
        calibration: Ids of the calibration records used, by operation kind, and that of the software.
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
    bubble_time_s: float
    layer_forward_time_s: float
    tokens_per_step: int
    tokens_per_s_per_device: float
    model_flops_per_s: float
    hardware_flops_per_s: float
    mfu: float
    hfu: float
    software: str
    calibration: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def mbu(self) -> float:
        """Share of the memory's bandwidth that the step uses: bytes of its operations over time and data sheet.

        Each operand counts once: weights that tokens reach, the cache, activations; what is sent to other devices does
        not count. In decode it says how far the step is from what memory allows.
        """
        moved_bytes = sum(
            float(entry.operation.num_bytes) * int(entry.operation.repeats)
            for entry in self.busiest_operations
            if not isinstance(entry.operation, Collective)
        )
        return moved_bytes / (self.step_time_s * self.device.memory_bandwidth_bytes_per_s)

    @property
    def busiest_operations(self) -> tuple[PricedOperation, ...]:
        """Operations of the stage that the step waits for; their times and the bubble add up to the step.

        Without a pipeline one device is first and last stage at once; with one, the slower end counts. DualPipe's ends
        are on one device, each for half of the micro-batches.
        """
        if self.layout.pipeline_schedule == "dualpipe":
            return tuple(
                replace(entry, exposed_fraction=0.5 * entry.exposed_fraction)
                if entry.operation.stage != "every" and entry.operation.pass_name != "step"
                else entry
                for entry in self.operations
            )
        left_out = ""
        if self.layout.pipeline_parallel > 1:
            ends_s = {
                end: sum(
                    entry.total_time_s
                    for entry in self.operations
                    if entry.operation.stage == end and entry.operation.pass_name != "step"
                )
                for end in ("first", "last")
            }
            left_out = min(ends_s, key=lambda end: ends_s[end])
        return tuple(
            entry
            for entry in self.operations
            if entry.operation.stage != left_out or entry.operation.pass_name == "step"
        )


def predict(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout | None = None,
    uncalibrated: bool = False,
    software: str | Software = TUNED,
) -> Prediction:
    """Predict the time, throughput and memory of one step.

    Args:
        config: The model.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread; one device if left out.
        uncalibrated: Price as if nobody had measured this device.
        software: Generation of the training software, one of ``shapewright.perf.software.software_names()``; by default
            a tuned stack of today. It has no meaning in prefill and decode.

    Returns:
        The prediction, with every operation and its price.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the batch does not divide, or the device has no kernel for this attention.
        UnknownRateError: the device has no rate for the dtype, or no link that the layout needs.
        CalibrationError: the software is not known.

    Assumes: stages of a pipeline take equally long; no data loading, no stragglers, no host that falls behind the
    device.
    """
    layout = layout or ParallelLayout()
    stack = software_of(software, workload.phase)
    workload = stack.settle(workload)
    operations = lower(config, workload, layout, node_size=device.node_size)
    prices = price_operations(operations, device, uncalibrated=uncalibrated)
    if stack.changes_prices:
        prices = [stack.adjust(one, price, device) for one, price in zip(operations, prices, strict=True)]
    priced = hide_communication(
        list(map(PricedOperation, operations, prices)),
        stack,
        float(hidden_exchange_fraction(stack, layout, num_microbatches(workload, layout))),
    )
    priced = settle_priced_ends(priced, config, workload, layout)
    times = add_up(priced, config, workload, layout)
    low_s, high_s = _widen_by_software(times, priced, workload, stack)
    tokens = count_tokens(workload, layout)
    model_flops, hardware_flops = _count_flops(config, workload, layout, operations)
    peak = device.peak_flops_per_s(workload.dtype)
    per_device_s = times.step_s * layout.num_devices
    memory = estimate_memory(config, workload, layout)
    labels = _label_calibration(priced)
    mfu = model_flops / per_device_s / peak
    warnings = (
        *say_too_large(device, workload, memory),
        *describe_overlong(config, workload),
        *say_uncalibrated(device, labels),
        *say_idle(workload, layout, times.bubble_s / times.step_s if times.step_s else 0.0),
        *say_masked(config, workload, mfu),
        *say_host(device, priced, times.step_s),
        *say_kernel_of_experts(config, device, workload, uncalibrated=uncalibrated),
    )
    return Prediction(
        config=config,
        device=device,
        workload=workload,
        layout=layout,
        operations=tuple(priced),
        parameters=count_parameters(config),
        memory=memory,
        step_time_s=times.step_s,
        step_time_low_s=low_s,
        step_time_high_s=high_s,
        bubble_time_s=times.bubble_s,
        layer_forward_time_s=times.layer_forward_s,
        tokens_per_step=tokens,
        tokens_per_s_per_device=tokens / per_device_s,
        model_flops_per_s=model_flops / per_device_s,
        hardware_flops_per_s=hardware_flops / per_device_s,
        mfu=mfu,
        hfu=hardware_flops / per_device_s / peak,
        software=stack.name,
        calibration=labels | ({"software": stack.record} if stack.record else {}),
        warnings=warnings,
    )


def count_tokens(workload: Workload, layout: ParallelLayout) -> int:
    """New tokens of one step over all replicas; the context axis shares sequences and adds none."""
    sequences = workload.micro_batch_size * num_microbatches(workload, layout) * layout.data_parallel
    return sequences * workload.query_len


def _widen_by_software(
    times: StepTimes, priced: list[PricedOperation], workload: Workload, software: Software
) -> tuple[float, float]:
    """Ends of the step's interval, with what training software makes of the kernels.

    A known generation has residuals of whole steps: what is borrowed adds the spread of operations, by its share of the
    time beyond that of the steps that left the residuals. Otherwise spread of operations and of software are taken as
    independent: logarithmic half-widths add in quadrature.
    """
    if not workload.is_training or times.step_s <= 0.0:
        return times.step_low_s, times.step_high_s
    if software.low is not None and software.high is not None:
        share = max(borrowed_fraction(priced) - software.borrowed_fraction, 0.0)
        below = hypot(log(software.low), share * log(max(times.step_low_s, 1e-3 * times.step_s) / times.step_s))
        above = hypot(log(software.high), share * log(times.step_high_s / times.step_s))
        return times.step_s * exp(-below), times.step_s * exp(above)
    below = hypot(log(times.step_s / max(times.step_low_s, 1e-3 * times.step_s)), log(_TRAINING_SOFTWARE_LOW))
    above = hypot(log(times.step_high_s / times.step_s), log(_TRAINING_SOFTWARE_HIGH))
    return times.step_s * exp(-below), times.step_s * exp(above)


def borrowed_fraction(priced: Iterable[PricedOperation]) -> float:
    """Share of a step's time that other devices' records price."""
    total_s = borrowed_s = 0.0
    for entry in priced:
        total_s += entry.total_time_s
        borrowed_s += entry.total_time_s if entry.price.calibration.startswith(UNCALIBRATED) else 0.0
    return min(borrowed_s / total_s, 1.0) if total_s > 0.0 else 0.0


def _count_flops(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, operations: tuple[Operation, ...]
) -> tuple[float, float]:
    """Model and hardware FLOPs of the whole job; on one device the lowered operations are already the whole job."""
    if layout.num_devices > 1 or workload.recompute != "none":
        return count_step_flops(config, workload, layout)
    flops = sum_flops(operations, ("forward", "backward"))
    return flops, flops


def _label_calibration(priced: list[PricedOperation]) -> dict[str, str]:
    """Which record priced each kind of operation."""
    labels: dict[str, str] = {}
    for entry in priced:
        is_host = isinstance(entry.operation, Collective) and entry.operation.is_host
        labels.setdefault("host" if is_host else entry.operation.kind, entry.price.calibration)
    return labels
