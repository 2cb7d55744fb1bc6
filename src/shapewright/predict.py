"""Predict a whole step: lower the model, price every operation, add up, keep the breakdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log, sqrt
from typing import TYPE_CHECKING, Any

from shapewright.config import count_parameters
from shapewright.errors import WorkloadError
from shapewright.layout import ParallelLayout
from shapewright.lowering import (
    count_hardware_flops,
    count_model_flops,
    is_weight_gradient,
    layers_per_stage,
    lower,
    num_microbatches,
    spare_layers,
)
from shapewright.lowering.flops import sum_flops
from shapewright.memory import estimate_memory
from shapewright.operations import Collective
from shapewright.perf.pricing import price_operations
from shapewright.perf.software import OVERLAP_SHARE, TUNED, TUNED_SOFTWARE, Software, load_software
from shapewright.shown import ShownInNotebook
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.config import ParameterCounts, TransformerConfig
    from shapewright.hardware import Device
    from shapewright.memory import MemoryEstimate
    from shapewright.operations import Operation
    from shapewright.operations.base import Count, Numeric
    from shapewright.perf.price import Price
    from shapewright.workload import Workload

# Published training steps over predicted ones, 5 % and 95 % of 295 rows of 37 sources (docs/decisions/0002): the newest
# tuned stacks take 0.8 to 1.1 of the prediction, PyTorch FSDP of 2023 and 2024 1.1 to 1.7. Which one a reader runs is
# not known without --software, so the interval of a training step spans both.
_TRAINING_SOFTWARE_LOW, _TRAINING_SOFTWARE_HIGH = 0.84, 1.7
ERROR_CORRELATION = 0.5
"""Correlation of the errors of one step's operations. Assumed halfway: one device's record errs alike for all of them,
each shape errs on its own."""


WEIGHT_GRADIENTS = "weight_gradients"
"""Key of the part of every stage's time that gradients of its weights take; a part of ``every``, not beside it."""


@dataclass(frozen=True)
class PricedOperation:
    """An operation with its price; ``operation.repeats`` says how often it runs in a step.

    Attributes:
        operation: What runs.
        price: Time of one execution, and why.
        exposed_fraction: Share of its time that nothing hides: 1 for all but overlapped communication, and the ends of
            a model whose stages have fewer layers for them.
    """

    operation: Operation
    price: Price
    exposed_fraction: float = 1.0

    @property
    def total_time_s(self) -> float:
        """Exposed time over all its executions in one step. [s]"""
        return float(self.price.time_s) * int(self.operation.repeats) * self.exposed_fraction


@dataclass(frozen=True)
class StepTimes:
    """Times of a step, added up from its operations. [s]"""

    step_s: float
    step_low_s: float
    step_high_s: float
    bubble_s: float
    layer_forward_s: float


def add_up(
    priced: Iterable[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> StepTimes:
    """Add the operations of the busiest stage, the pipeline's bubble and the once-per-step work.

    With m micro-batches, p stages and v chunks each, the busiest stage works m passes and waits (p - 1) / v passes of
    an average stage; so prefill and decode (m = 1) take all p stages one after the other. GPipe waits as long as 1F1B.
    The zero-bubble schedule ZB-H1 waits for (p - 1) (T_F + T_B - T_W), where 1F1B has (p - 1) (T_F + T_B + T_W):
    gradients of weights, W, fill the end.

    Source: arXiv 2104.04473, section 2.2; arXiv 2401.10241, section 2 (ZB-H1).
    """
    spread_alone, spread_together = [0.0, 0.0], [0.0, 0.0]
    layer_forward_s = 0.0
    sums = dict.fromkeys(("every", "first", "last", "step", WEIGHT_GRADIENTS), 0.0)
    for entry in priced:
        operation, price, total_s = entry.operation, entry.price, entry.total_time_s
        sums["step" if operation.pass_name == "step" else operation.stage] += total_s
        if operation.stage == "every" and is_weight_gradient(operation):
            sums[WEIGHT_GRADIENTS] += total_s
        if total_s > 0.0:
            for side, end in enumerate((price.low_s, price.high_s)):
                width = total_s * abs(float(end) / float(price.time_s) - 1.0)
                spread_alone[side] += width**2
                spread_together[side] += width
        if operation.pass_name == "forward" and operation.stage == "every":
            layer_forward_s += total_s
    passes = num_microbatches(workload, layout)
    step_s, bubble_s = join_stages(sums, passes, layout)
    scale = step_s / max(sum(sums[part] for part in sums if part != WEIGHT_GRADIENTS), 1e-30)
    below, above = (
        scale * sqrt((1.0 - ERROR_CORRELATION) * alone + ERROR_CORRELATION * together**2)
        for alone, together in zip(spread_alone, spread_together, strict=True)
    )
    return StepTimes(
        step_s=step_s,
        step_low_s=max(step_s - below, 0.0),
        step_high_s=step_s + above,
        bubble_s=bubble_s,
        layer_forward_s=layer_forward_s / (passes * layers_per_stage(config, layout)),
    )


def add_up_passes(
    passes: Sequence[tuple[Sequence[Operation], Workload, ParallelLayout]],
    config: TransformerConfig,
    device: Device,
    *,
    uncalibrated: bool = False,
) -> list[StepTimes]:
    """Times of many passes of one model, as predict has them, with all their operations priced at once.

    Args:
        passes: Operations of each with the workload and the layout that they were lowered from.
        config: The model.
        device: What they run on.
        uncalibrated: Price as if nobody had measured this device.
    """
    listed = [operation for operations, _, _ in passes for operation in operations]
    prices = iter(price_operations(listed, device, uncalibrated=uncalibrated))
    return [
        add_up(
            _hide_communication([PricedOperation(operation, next(prices)) for operation in operations]),
            config,
            workload,
            layout,
        )
        for operations, workload, layout in passes
    ]


def join_stages(sums: Mapping[str, Numeric], passes: Count, layout: ParallelLayout) -> tuple[Any, Any]:
    """Time of a step and of its bubble, from what each stage adds up to; see add_up.

    Args:
        sums: Times of one step of the operations of ``every`` stage, of the ``first``, of the ``last``, and of those
            that run once per ``step``; where the schedule is zero-bubble also WEIGHT_GRADIENTS, those of ``every``
            stage that compute gradients of weights; numbers, or arrays of one shape. [s]
        passes: Micro-batches of one step.
        layout: How the model is spread.

    Returns:
        Step and bubble. [s]
    """
    first_s, last_s = sums["first"], sums["last"]
    ends_s = larger(first_s, last_s) if layout.pipeline_parallel > 1 else first_s + last_s
    waited_s = sums["every"]
    if layout.pipeline_schedule == "zero-bubble":
        waited_s = larger(0.0, waited_s - 2.0 * sums[WEIGHT_GRADIENTS])
    bubble_s = (layout.pipeline_parallel - 1) / layout.virtual_pipeline * waited_s / passes
    return sums["every"] + ends_s + bubble_s + sums["step"], bubble_s


def settle_ends(
    first_s: Numeric, last_s: Numeric, layer_s: Numeric, num_spare: Count, layers_per_stage: Count
) -> tuple[Any, Any]:
    """Times of the ends of the model that their stages do not make up for with fewer layers.

    Where the layers do not divide over the stages, some stages have fewer. Each such gap is given to the end that is
    slower at that point, as pipelines are cut in practice (Megatron-DeepSpeed counts embeddings as layers, Megatron-LM
    has numbers of layers for the first and the last stage). An even split has no gaps.

    Args:
        first_s: What the first stage has besides its layers. [s]
        last_s: The same of the last stage. [s]
        layer_s: Time of one layer. [s]
        num_spare: Gaps, see spare_layers.
        layers_per_stage: Layers of the busiest stage: an end cannot do with fewer than none. Numbers, or arrays of one
            shape.

    >>> settle_ends(1.0, 6.0, 2.0, 3, 8), settle_ends(1.0, 6.0, 2.0, 3, 2), settle_ends(1.0, 6.0, 2.0, 0, 8)
    ((1.0, 0.0), (1.0, 2.0), (1.0, 6.0))
    """
    if isinstance(first_s, float | int) and isinstance(last_s, float | int) and isinstance(layer_s, float | int):
        given = [0, 0]
        ends_s = [first_s, last_s]
        for _ in range(int(num_spare)):
            slower = 1 if ends_s[1] >= ends_s[0] else 0
            if ends_s[slower] <= 0.0 or given[slower] == layers_per_stage:
                break
            ends_s[slower] -= layer_s
            given[slower] += 1
        return max(ends_s[0], 0.0), max(ends_s[1], 0.0)
    import numpy as np

    first, last, layer, gaps, most = np.broadcast_arrays(first_s, last_s, layer_s, num_spare, layers_per_stage)
    given_first, given_last = np.zeros(first.shape, dtype=int), np.zeros(first.shape, dtype=int)
    is_open = gaps > 0
    while is_open.any():
        is_last = last >= first
        has_room = np.where(is_last, given_last, given_first) < most
        is_open = is_open & has_room & (np.maximum(first, last) > 0.0) & (given_first + given_last < gaps)
        to_last, to_first = is_open & is_last, is_open & ~is_last
        first, last = first - np.where(to_first, layer, 0.0), last - np.where(to_last, layer, 0.0)
        given_first, given_last = given_first + to_first, given_last + to_last
    return np.maximum(first, 0.0), np.maximum(last, 0.0)


def exposed_fraction(cover_s: Numeric, wanted_s: Numeric, overlap_share: float = OVERLAP_SHARE) -> Numeric:
    """Share of overlapping communication that nothing hides.

    Args:
        cover_s: Computation of its pass. [s]
        wanted_s: Overlapping communication of its pass, above zero. [s]
        overlap_share: Share of the computation that it can hide behind.
    """
    return larger(0.0, 1.0 - overlap_share * cover_s / wanted_s)


def larger(one: Numeric, other: Numeric) -> Numeric:
    """The larger of two numbers, or of each pair where one is an array."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)


def _hide_communication(priced: list[PricedOperation], software: Software = TUNED_SOFTWARE) -> list[PricedOperation]:
    """Give overlapping collectives the share of their time that the computation of their pass cannot hide.

    Weights gathered for the forward pass hide behind it, gradients behind the backward pass.
    """
    cover_s, wanted_s = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    for entry in priced:
        side = "forward" if entry.operation.pass_name == "forward" else "backward"
        if not isinstance(entry.operation, Collective):
            cover_s[side] += entry.total_time_s * (entry.operation.pass_name != "step")
        elif entry.operation.overlaps:
            wanted_s[side] += entry.total_time_s
    exposed = {
        side: float(exposed_fraction(cover_s[side], wanted, software.overlap_share)) if wanted > 0.0 else 1.0
        for side, wanted in wanted_s.items()
    }
    return [replace(entry, exposed_fraction=_exposed_of(entry.operation, exposed, software)) for entry in priced]


def _exposed_of(operation: Operation, exposed: Mapping[str, float], software: Software) -> float:
    """Share of an operation's time that nothing hides."""
    if not isinstance(operation, Collective):
        return 1.0
    if operation.overlaps:
        return exposed["forward" if operation.pass_name == "forward" else "backward"]
    return 1.0 - software.tensor_hidden_fraction if operation.axis == "tensor" else 1.0


def _settle_ends(
    priced: list[PricedOperation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[PricedOperation]:
    """Give the ends of a pipelined model the share of their time that fewer layers of their stages do not make up for.

    Training alone: a single pass waits for every stage anyway.
    """
    num_spare = spare_layers(config, layout)
    if not workload.is_training or not num_spare or config.num_encoder_layers:
        return priced
    times_s = dict.fromkeys(("every", "first", "last"), 0.0)
    for entry in priced:
        if entry.operation.pass_name != "step":
            times_s[entry.operation.stage] += entry.total_time_s
    per_stage = layers_per_stage(config, layout)
    left = settle_ends(times_s["first"], times_s["last"], times_s["every"] / per_stage, num_spare, per_stage)
    shares = {
        stage: left_s / max(times_s[stage], 1e-300) for stage, left_s in zip(("first", "last"), left, strict=True)
    }
    return [
        replace(entry, exposed_fraction=entry.exposed_fraction * shares[entry.operation.stage])
        if entry.operation.stage in shares and entry.operation.pass_name != "step"
        else entry
        for entry in priced
    ]


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
    def busiest_operations(self) -> tuple[PricedOperation, ...]:
        """Operations of the stage that the step waits for; their times and the bubble add up to the step.

        Without a pipeline one device is first and last stage at once; with one, the slower end counts.
        """
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
    physics_only: bool = False,
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
        physics_only: Leave aside what was learned beyond the formulas (perf.residual).

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
    stack = software if isinstance(software, Software) else load_software(software)
    if not workload.is_training and stack.name != TUNED:
        raise WorkloadError(
            f"software={stack.name!r} is training software and means nothing in {workload.phase}; leave it out or use "
            f"--phase train"
        )
    operations = lower(config, workload, layout, node_size=device.node_size)
    prices = price_operations(operations, device, uncalibrated=uncalibrated, physics_only=physics_only)
    priced = _hide_communication(
        [
            PricedOperation(operation, stack.adjust(operation, price, device))
            for operation, price in zip(operations, prices, strict=True)
        ],
        stack,
    )
    priced = _settle_ends(priced, config, workload, layout)
    times = add_up(priced, config, workload, layout)
    low_s, high_s = _widen_by_software(times, workload, stack)
    tokens = count_tokens(workload, layout)
    model_flops, hardware_flops = _count_flops(config, workload, layout, operations)
    peak = device.peak_flops_per_s(workload.dtype)
    per_device_s = times.step_s * layout.num_devices
    memory = estimate_memory(config, workload, layout)
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
        mfu=model_flops / per_device_s / peak,
        hfu=hardware_flops / per_device_s / peak,
        software=stack.name,
        calibration=_label_calibration(priced) | ({"software": stack.record} if stack.record else {}),
        warnings=_warn(config, device, workload, priced, memory),
    )


def count_tokens(workload: Workload, layout: ParallelLayout) -> int:
    """New tokens of one step over all replicas; the context axis shares sequences and adds none."""
    sequences = workload.micro_batch_size * num_microbatches(workload, layout) * layout.data_parallel
    return sequences * workload.query_len


def _widen_by_software(times: StepTimes, workload: Workload, software: Software) -> tuple[float, float]:
    """Ends of the step's interval, with what training software makes of the kernels.

    A known generation has residuals of whole steps. Otherwise spread of operations and of software are taken as
    independent: logarithmic half-widths add in quadrature.
    """
    if not workload.is_training or times.step_s <= 0.0:
        return times.step_low_s, times.step_high_s
    if software.low is not None and software.high is not None:
        return times.step_s * software.low, times.step_s * software.high
    below = hypot(log(times.step_s / max(times.step_low_s, 1e-3 * times.step_s)), log(_TRAINING_SOFTWARE_LOW))
    above = hypot(log(times.step_high_s / times.step_s), log(_TRAINING_SOFTWARE_HIGH))
    return times.step_s * exp(-below), times.step_s * exp(above)


def _count_flops(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, operations: tuple[Operation, ...]
) -> tuple[float, float]:
    """Model and hardware FLOPs of the whole job; on one device the lowered operations are already the whole job."""
    if layout.num_devices > 1 or workload.recompute != "none":
        return count_model_flops(config, workload, layout), count_hardware_flops(config, workload, layout)
    flops = sum_flops(operations, ("forward", "backward"))
    return flops, flops


def _label_calibration(priced: list[PricedOperation]) -> dict[str, str]:
    """Which record priced each kind of operation."""
    labels: dict[str, str] = {}
    for entry in priced:
        labels.setdefault(entry.operation.kind, entry.price.calibration)
    return labels


def _warn(
    config: TransformerConfig,
    device: Device,
    workload: Workload,
    priced: list[PricedOperation],
    memory: MemoryEstimate,
) -> tuple[str, ...]:
    """What the reader must know beside the numbers, one line each."""
    warnings = []
    if memory.total_bytes > device.memory_bytes:
        warnings.append(
            f"does not fit: needs {format_bytes(memory.total_bytes)} of {format_bytes(device.memory_bytes)} on "
            f"{device.name}; lower --micro-batch-size, turn on --recompute full, or spread it with --tensor-parallel, "
            f"--pipeline-parallel or --zero-stage"
        )
    if workload.kv_len > config.max_position_embeddings:
        warnings.append(
            f"{workload.kv_len} positions are more than the max_position_embeddings={config.max_position_embeddings} "
            f"that the model is made for"
        )
    for kind, label in _label_calibration(priced).items():
        if label.startswith("uncalibrated"):
            warnings.append(f"{kind} times on {device.name} are {label}; the interval is wider for it")
    return tuple(warnings)
