"""Predict a step: lower the model, price every operation, compose the step and keep the breakdown."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from math import exp, hypot, log
from typing import TYPE_CHECKING, Any

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.records import dataclass
from shapewright.lowering.checks import describe_long_sequence
from shapewright.lowering.counts import num_microbatches
from shapewright.lowering.flops import count_step_flops, sum_flops
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.memory.estimate import estimate_memory
from shapewright.models.parameters import count_parameters
from shapewright.prediction.composition.stages import (
    PricedOperation,
    exchange_overlap_fraction,
    overlap_communication,
    rebalance_priced_ends,
)
from shapewright.prediction.composition.step import StepTimes, compose_step, error_correlation
from shapewright.prediction.warnings import (
    warn_if_too_large,
    warn_of_batch,
    warn_of_calibration,
    warn_of_expert_kernel,
    warn_of_host_link,
    warn_of_masked_scores,
    warn_of_scans,
    warn_of_slow_format,
    warn_of_unaligned_cache,
    warn_of_utilization,
)
from shapewright.pricing.calibration.source import CalibrationSource
from shapewright.pricing.operations import price_key, price_operations
from shapewright.pricing.software import TUNED, Software, software_of
from shapewright.workload.images import count_images
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.core.notes import Note
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.memory.estimate import MemoryEstimate
    from shapewright.models.parameters import ParameterCounts
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload

# 5 % and 95 % quantiles of published over predicted training step times, 295 rows of 37 sources (docs/decisions/0002):
# the newest tuned stacks take 0.8 to 1.1 of the prediction, PyTorch FSDP of 2023 and 2024 1.1 to 1.7. Without a given
# software, the interval of a training step covers both.
_TRAINING_SOFTWARE_LOW, _TRAINING_SOFTWARE_HIGH = 0.84, 1.7


@dataclass(frozen=True, repr=False)
class Prediction(NotebookDisplay):
    """A predicted step, with its scenario and the price of every operation.

    Attributes:
        config: The model.
        device: The device.
        workload: The workload, with the fields that the software decides.
        layout: The parallel layout.
        operations: Every distinct operation of the busiest pipeline stage, priced.
        parameters: Parameter counts.
        memory: Memory of one device.
        step_time_s: Time of one step. [s]
        step_time_low_s: Lower end of its 90 % interval. [s]
        step_time_high_s: Upper end of its 90 % interval. [s]
        bubble_time_s: Part of the step in which the busiest pipeline stage waits. [s]
        layer_forward_time_s: Forward time of one average layer. [s]
        tokens_per_step: New tokens that one step processes, over all devices.
        tokens_per_s_per_device: Tokens per second and device.
        model_flops_per_s: Model FLOPs per second and device, recomputation not counted. [flop/s]
        hardware_flops_per_s: The same with recomputed FLOPs. [flop/s]
        mfu: model_flops_per_s over the device's dense peak.
        hfu: hardware_flops_per_s over the device's dense peak.
        software: Generation of the training software.
        calibration: Calibration records used, by operation kind, and that of the software.
        warnings: Limits of the prediction: borrowed calibration, missing links, memory that does not fit.
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
    calibration: dict[str, CalibrationSource]
    warnings: tuple[Note, ...]

    @property
    def mbu(self) -> float:
        """Memory bandwidth utilization: bytes of all operations over step time and data-sheet bandwidth.

        Each operand counts once (weights, KV cache, activations); communication does not count. In decode it shows how
        close the step is to the memory bound.
        """
        moved_bytes = sum(
            float(entry.operation.num_bytes) * int(entry.operation.repeats)
            for entry in self.busiest_operations
            if not isinstance(entry.operation, Collective)
        )
        return moved_bytes / (self.step_time_s * self.device.memory_bandwidth_bytes_per_s)

    @property
    def images_per_step(self) -> int:
        """Images of one step over all replicas; 0 for a model or a step without images."""
        sequences = self.tokens_per_step // self.workload.query_len
        return sequences * count_images(self.config, self.workload)

    @cached_property
    def busiest_operations(self) -> tuple[PricedOperation, ...]:
        """Operations of the busiest stage; their times and the bubble add up to the step.

        Without a pipeline, one device is the first and the last stage. With a pipeline, operations of the faster of
        these two stages are left out, of passes and of what runs once per step. With DualPipe, one device holds both,
        processes half of the micro-batches in each and has half of their optimizer states.
        """
        if self.layout.pipeline_schedule == "dualpipe":
            return tuple(
                replace(entry, exposed_fraction=0.5 * entry.exposed_fraction)
                if entry.operation.stage != "every"
                else entry
                for entry in self.operations
            )
        if self.layout.pipeline_parallel == 1:
            return self.operations
        ends_s = dict.fromkeys(((end, once) for once in (False, True) for end in ("first", "last")), 0.0)
        for entry in self.operations:
            if entry.operation.stage != "every":
                ends_s[entry.operation.stage, entry.operation.pass_name == "step"] += entry.total_time_s
        faster = {(min(("first", "last"), key=lambda end: ends_s[end, once]), once) for once in (False, True)}
        return tuple(
            entry
            for entry in self.operations
            if (entry.operation.stage, entry.operation.pass_name == "step") not in faster
        )

    @cached_property
    def _every_stage_factor(self) -> float:
        """Time of the operations of every stage with the pipeline bubble, over that without; both scale together."""
        every_s = sum(
            entry.total_time_s
            for entry in self.operations
            if entry.operation.stage == "every" and entry.operation.pass_name != "step"
        )
        return 1.0 + self.bubble_time_s / every_s if every_s else 1.0

    def share_of_step(self, entry: PricedOperation) -> float:
        """Share of the step that an operation takes, with the time that the busiest stage waits for it on others."""
        repeats_in_bubble = entry.operation.stage == "every" and entry.operation.pass_name != "step"
        factor = self._every_stage_factor if repeats_in_bubble else 1.0
        return factor * entry.total_time_s / self.step_time_s

    @cached_property
    def log_half_widths(self) -> dict[tuple[Any, ...], tuple[float, float]]:
        """Logarithmic half-width of each distinct operation's interval, and the correlation of its error with others.

        The half-width is weighted by the operation's share of the step.
        """
        widths: dict[tuple[Any, ...], tuple[float, float]] = {}
        times_s = [entry.total_time_s for entry in self.busiest_operations]
        total_s = sum(times_s)
        for entry, time_s in zip(self.busiest_operations, times_s, strict=True):
            if time_s > 0.0:
                price: Any = entry.price
                half = 0.5 * log(price.high_s / max(price.low_s, 1e-6 * price.time_s))
                operation = entry.operation
                # The optimizer step is a key of its own, since training software changes its price.
                key = (operation.pass_name == "step", *price_key(operation))
                before, _ = widths.get(key, (0.0, 0.0))
                widths[key] = before + half * time_s / total_s, error_correlation(price)
        return widths


def predict(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout | None = None,
    software: str | Software = TUNED,
) -> Prediction:
    """Predict the time, throughput and memory of one step.

    Args:
        layout: The parallel layout; one device by default.
        software: Generation of the training software, one of ``software_names()``; by default a current tuned stack.
            It has no effect in prefill and decode.

    Returns:
        The prediction, with every operation and its price.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the batch does not divide, or the device has no kernel for this attention.
        UnknownRateError: the device has no rate for the dtype, or no link that the layout needs.
        CalibrationError: the software is unknown.

    Assumes: pipeline stages take equally long; no data loading, no stragglers, no launch-bound host.
    """
    layout = layout or ParallelLayout()
    stack = software_of(software, workload.phase)
    workload = stack.settle(workload)
    operations = lower(config, workload, layout, node_size=device.node_size)
    prices = price_operations(operations, device)
    if stack.changes_prices:
        prices = [stack.adjust(one, price, device) for one, price in zip(operations, prices, strict=True)]
    priced = overlap_communication(
        list(map(PricedOperation, operations, prices)),
        stack,
        float(exchange_overlap_fraction(stack, layout, num_microbatches(workload, layout))),
    )
    priced = rebalance_priced_ends(priced, config, workload, layout)
    times = compose_step(priced, config, workload, layout)
    low_s, high_s = widen_by_software(times, priced, stack, is_training=workload.is_training)
    tokens = count_tokens(workload, layout)
    model_flops, hardware_flops = _count_flops(config, workload, layout, operations)
    peak = device.peak_flops_per_s(workload.dtype)
    per_device_s = times.step_s * layout.num_devices
    memory = estimate_memory(config, workload, layout)
    sources = calibration_sources(priced)
    mfu = model_flops / per_device_s / peak
    warnings = (
        *warn_if_too_large(device, workload, memory),
        *describe_long_sequence(config, workload),
        *warn_of_calibration(device, sources),
        *warn_of_slow_format(device, workload),
        *warn_of_batch(workload, layout, times.bubble_s / times.step_s if times.step_s else 0.0),
        *warn_of_masked_scores(config, workload, mfu),
        *warn_of_host_link(device, priced, times.step_s),
        *warn_of_unaligned_cache(workload, priced),
        *warn_of_expert_kernel(config, device, workload),
        *warn_of_scans(priced),
    )
    prediction = Prediction(
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
        calibration=sources | _software_source(stack),
        warnings=warnings,
    )
    above_one = tuple(warn_of_utilization(prediction.hfu, 0.0 if workload.is_training else prediction.mbu))
    return replace(prediction, warnings=(*warnings, *above_one)) if above_one else prediction


def _software_source(stack: Software) -> dict[str, CalibrationSource]:
    """Return the calibration record of the training software, if it has one."""
    return {"software": CalibrationSource(transfer="exact", record_id=stack.record)} if stack.record else {}


def count_tokens(workload: Workload, layout: ParallelLayout) -> int:
    """Count the new tokens of one step over all replicas; context parallelism splits sequences and adds no tokens."""
    sequences = workload.micro_batch_size * num_microbatches(workload, layout) * layout.data_parallel
    return sequences * workload.query_len


def widen_by_software(
    times: StepTimes, priced: list[PricedOperation], software: Software, *, is_training: bool
) -> tuple[float, float]:
    """Return the ends of the step's interval, with the uncertainty of the training software.

    A known software generation has an interval from measured steps. If a larger share of this step has borrowed
    calibration than the measured steps had, the interval of the operations is added in proportion to the excess.
    Otherwise the uncertainties of operations and of software are taken as independent. In both cases logarithmic
    half-widths add in quadrature.
    """
    if not is_training or times.step_s <= 0.0:
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
    """Return the share of a step's time with borrowed calibration."""
    total_s = borrowed_s = 0.0
    for entry in priced:
        total_s += entry.total_time_s
        borrowed_s += entry.total_time_s if entry.price.calibration.is_uncalibrated else 0.0
    return min(borrowed_s / total_s, 1.0) if total_s > 0.0 else 0.0


def _count_flops(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, operations: tuple[Operation, ...]
) -> tuple[float, float]:
    """Count model and hardware FLOPs of the whole job; on one device the lowered operations are the whole job."""
    if layout.num_devices > 1 or workload.recompute != "none":
        return count_step_flops(config, workload, layout)
    flops = sum_flops(operations, ("forward", "backward"))
    return flops, flops


def calibration_sources(priced: list[PricedOperation]) -> dict[str, CalibrationSource]:
    """Return the calibration records of each kind of operation."""
    found: dict[str, list[CalibrationSource]] = defaultdict(list)
    for entry in priced:
        is_host = isinstance(entry.operation, Collective) and entry.operation.is_host
        found["host" if is_host else entry.operation.kind].append(entry.price.calibration)
    return {kind: CalibrationSource.of_prices(sources) for kind, sources in found.items()}
